"""Where peers keep their jobs: rows of a database of their own, or keys of a Redis."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import LiteralString
from urllib.parse import parse_qs, urlsplit

from psycopg.sql import SQL, Composable, Identifier

from bench.peers.peer import Keys, Peer, Table
from bench.processes import Command, environment, running, until
from outbox.db import Conn, connect

#: A row as the peer's own library wrote it, kept aside to be copied.
PATTERN = "bench_pattern"
START_S = 10
QUIET_S = 10


@dataclass
class Rows:
    """A database; *admin* is the URL of another one on the same server, for what must not be seen in this one."""

    table: Table
    url: str
    admin: str
    told: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self._name = parts.path.lstrip("/")
        # Node's driver knows libpq's variables, but no folder of a socket in a URL.
        self.told = {
            "DATABASE_URL": self.url,
            "PGHOST": parse_qs(parts.query)["host"][0],
            "PGUSER": parts.username or "",
            "PGDATABASE": self._name,
        }

    def prepare(self, peer: Peer) -> None:
        peer.run("schema")
        peer.run("one", peer.entry.job, "0")
        with connect(self.url, name="bench") as conn:
            conn.execute(SQL("CREATE TABLE {} AS TABLE {}").format(Identifier(PATTERN), SQL(self.table.name)))

    def ready(self, peer: Peer, count: int, later: int) -> None:
        with connect(self.url, name="bench") as conn:
            conn.execute(self.table.empty)
            # Those of later came first in life, too.
            self._copy(conn, later, {**self.table.fresh, **self.table.later})
            self._copy(conn, count, self.table.fresh)
            conn.execute("VACUUM (ANALYZE)")
            conn.execute("CHECKPOINT")

    def _copy(self, conn: Conn, count: int, changed: Mapping[str, LiteralString]) -> None:
        columns = [row["column_name"] for row in conn.execute(COLUMNS, [self.table.name])]
        values: list[Composable] = [
            SQL(changed[name]) if name in changed else SQL("pattern.{}").format(Identifier(name)) for name in columns
        ]
        conn.execute(
            SQL(
                """
                INSERT INTO {table} ({columns})
                SELECT {values}
                FROM {pattern} AS pattern,
                     (SELECT {id} AS id FROM generate_series(1, %s) AS number) AS new
                """
            ).format(
                id=SQL(self.table.id),
                table=SQL(self.table.name),
                columns=SQL(", ").join(map(Identifier, columns)),
                values=SQL(", ").join(values),
                pattern=Identifier(PATTERN),
            ),
            [count],
        )

    def unfinished(self) -> int:
        with connect(self.url, name="bench") as conn:
            row = conn.execute(self.table.unfinished).fetchone()
        return int(row["n"]) if row else 0

    def connections(self) -> int:
        with connect(self.admin, name="bench") as conn:
            row = conn.execute(SESSIONS, [self._name]).fetchone()
        return int(row["n"]) if row else 0

    def commits(self) -> int:
        """Of sessions that have ended; those of the running ones come late. Waits for them to end."""
        until(lambda: self.connections() == 0, QUIET_S)
        with connect(self.admin, name="bench") as conn:
            row = conn.execute(COMMITS, [self._name]).fetchone()
        return int(row["n"]) if row else 0

    @contextmanager
    def counted(self) -> Iterator[Callable[[], int]]:
        """By the server's log, which the sessions that begin from now on write each of their statements to."""
        statement = re.compile(rf" {re.escape(self._name)} LOG:  (statement|execute )")
        name = Identifier(self._name)
        with connect(self.admin, name="bench") as conn:
            conn.execute("ALTER SYSTEM SET log_line_prefix = '%m [%p] %a %d '")
            conn.execute("SELECT pg_reload_conf()")
            conn.execute(SQL("ALTER DATABASE {} SET log_statement = 'all'").format(name))
            row = conn.execute("SELECT current_setting('data_directory') AS folder").fetchone()
            assert row is not None
            log = Path(row["folder"]) / "server.log"
            try:
                yield lambda: sum(map(bool, map(statement.search, log.read_text(errors="replace").splitlines())))
            finally:
                conn.execute(SQL("ALTER DATABASE {} RESET log_statement").format(name))


# Numbers and what is computed come by themselves.
COLUMNS = """
SELECT column_name
FROM information_schema.columns
WHERE format('%%I.%%I', table_schema, table_name)::regclass = %s::regclass
  AND is_identity = 'NO'
  AND is_generated = 'NEVER'
  AND coalesce(column_default, '') NOT LIKE 'nextval%%'
ORDER BY ordinal_position
"""
SESSIONS = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"
COMMITS = "SELECT xact_commit AS n FROM pg_stat_database WHERE datname = %s"


@dataclass
class Redis:
    """A Redis that keeps nothing on disk, all of it one peer's at a time."""

    keys: Keys
    port: int
    told: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.told = {"REDIS_URL": f"redis://127.0.0.1:{self.port}/0"}

    def prepare(self, peer: Peer) -> None:
        """Nothing: its keys come by themselves."""

    def ready(self, peer: Peer, count: int, later: int) -> None:
        assert not (later and self.keys.mixed), "not told apart from due ones"
        self._ask("FLUSHALL")
        if count or later:
            peer.run("fill", str(count), str(later))

    def unfinished(self) -> int:
        lengths = [("LLEN", key) for key in self.keys.lists] + [("HLEN", key) for key in self.keys.hashes]
        return sum(int(self._ask(*words)) for words in lengths)

    def connections(self) -> int:
        return len(self._ask("CLIENT", "LIST").splitlines()) - 1

    def commits(self) -> None:
        """There is no such thing."""

    @contextmanager
    def counted(self) -> Iterator[Callable[[], int]]:
        yield lambda: int(re.findall(r"total_commands_processed:(\d+)", self._ask("INFO", "stats"))[0])

    def _ask(self, *words: str) -> str:
        command = ["redis-cli", "-p", str(self.port), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S).stdout.strip()


@contextmanager
def redis(folder: Path) -> Iterator[int]:
    """A Redis of our own on a free port, which is yielded."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command = Command([*words, "--save", "", "--appendonly", "no"], environment())
    with running(command, folder / f"redis-{port}.log") as server:
        assert until(lambda: server.says("Ready to accept connections"), START_S)
        yield port
