"""Bring a database to this version's schema: ordered, forward only, and kind to whoever is using it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from outbox.db import Conn, connect, sql, transaction

FOLDER = Path(__file__).parent.parent / "migrations"

#: A migrator waits so long for another one that is at work.
WAIT_S = 300
#: Everybody queues behind a waiting ALTER: it waits this long, then steps back for a moment.
LOCK_TIMEOUT = "1s"
LOCK_TRIES = 30


class MigrationError(Exception):
    """The schema could not be brought up to date; the text says what to do."""


@dataclass(frozen=True)
class Step:
    name: str
    script: str

    @property
    def concurrent(self) -> bool:
        return self.name.endswith(".concurrently")


def steps(stock_schema: str, folder: Path = FOLDER) -> list[Step]:
    """All steps in order: dramatiq-pg's own DDL first (*stock_schema*), then our files."""
    files = sorted(folder.glob("*.sql"))
    return [Step("0001_dramatiq_pg", stock_schema), *(Step(file.stem, file.read_text("utf-8")) for file in files)]


def pending(conn: Conn, wanted: list[Step]) -> list[str]:
    """Names of the steps *conn*'s database has not seen; reads only."""
    if not _exists(conn, "posthouse.migrations"):
        return [step.name for step in wanted]
    done = _applied(conn)
    return [step.name for step in wanted if step.name not in done]


def _applied(conn: Conn) -> set[str]:
    return {row["name"] for row in conn.execute(sql(__file__, "applied"))}


def migrate(url: str, wanted: list[Step], tell: Callable[[str], None] = lambda _: None) -> list[str]:
    """Apply what is missing and return its names; run twice, the second changes nothing.

    Several at once end well: one works, the others wait for it. A kill leaves a step wholly done or not at all; a
    failed concurrent index is dropped and built again. Raises MigrationError, psycopg.OperationalError.
    """
    with _alone(url), connect(url, name="posthouse migrate") as conn:
        _create_migrations(conn)
        applied = pending(conn, wanted)
        for step in (step for step in wanted if step.name in applied):
            tell(step.name)
            if step.concurrent:
                _build_indexes(conn, step)
            else:
                _apply(conn, step)
    return applied


@contextmanager
def _alone(url: str) -> Iterator[None]:
    # The lock belongs to a transaction, not to a session: behind a pooler, or after a kill, it cannot be left behind.
    with connect(url, name="posthouse migrate lock") as conn, transaction(conn):
        conn.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        give_up = time.monotonic() + WAIT_S
        while not _lock_migrations(conn):
            if time.monotonic() > give_up:
                raise MigrationError(f"another migration has been running for {WAIT_S} s; wait for it or end it")
            time.sleep(0.2)
        yield


def _lock_migrations(conn: Conn) -> bool:
    row = conn.execute(sql(__file__, "lock_migrations")).fetchone()
    return bool(row and row["locked"])


def _create_migrations(conn: Conn) -> None:
    with transaction(conn):
        _create_schema(conn)
        conn.execute(sql(__file__, "create_migrations"))


def _create_schema(conn: Conn) -> None:
    conn.execute(sql(__file__, "create_schema"))


def _apply(conn: Conn, step: Step) -> None:
    for turn in range(LOCK_TRIES):
        try:
            with transaction(conn):
                conn.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")
                if not (step.name == "0001_dramatiq_pg" and _exists(conn, "dramatiq.queue")):
                    conn.execute(step.script)
                _mark_applied(conn, step)
            return
        except psycopg.errors.LockNotAvailable:
            time.sleep(random.uniform(0.5, 1.5) * min(1 + turn / 5, 3))
    raise MigrationError(
        f"{step.name}: a table it changes stayed locked through {LOCK_TRIES} tries; find the long transaction in "
        "pg_stat_activity, end it, and run migrate again"
    )


def _build_indexes(conn: Conn, step: Step) -> None:
    for statement in filter(None, (part.strip() for part in step.script.split(";\n"))):
        index = re.search(r"CONCURRENTLY IF NOT EXISTS (\w+)\s+ON (\w+)\.", statement)
        if index is None:
            raise MigrationError(f"{step.name}: only CREATE INDEX CONCURRENTLY IF NOT EXISTS belongs here")
        name = f"{index[2]}.{index[1]}"
        if _invalid_index(conn, name):
            conn.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
        conn.execute(statement)
        if _invalid_index(conn, name):
            raise MigrationError(f"{step.name}: index {name} was left invalid; run migrate again")
    with transaction(conn):
        _mark_applied(conn, step)


def _mark_applied(conn: Conn, step: Step) -> None:
    conn.execute(sql(__file__, "mark_applied"), {"name": step.name})


def _invalid_index(conn: Conn, name: str) -> bool:
    return conn.execute(sql(__file__, "invalid_index"), {"name": name}).fetchone() is not None


def _exists(conn: Conn, table: str) -> bool:
    row = conn.execute(sql(__file__, "exists"), {"table": table}).fetchone()
    return bool(row and row["found"])
