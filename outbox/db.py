"""Connections and transactions: the only place where either begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg.rows import dict_row, tuple_row
from psycopg_pool import ConnectionPool

Row = dict[str, Any]
Conn = psycopg.Connection[Row]

#: The session is over, or its server is not the one to talk to: reconnect, charge nobody.
LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
)

_OF_THE_STATEMENT = ("54", "55P03")


def is_lost(error: psycopg.Error) -> bool:
    """Whether *error* speaks of the session; a statement beyond the server's limits is an OperationalError too."""
    return isinstance(error, LOST) and not (error.sqlstate or "").startswith(_OF_THE_STATEMENT)


# A silent peer is found within 25 s: keepalives on a quiet socket, the user timeout on a busy one.
_SOCKET = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}

_mark = threading.local()


class NetworkInTransaction(RuntimeError):
    """A network call was about to be made while a transaction of this thread is open."""


class AnyConnection(Protocol):
    """A DB-API connection of the caller: psycopg 3, psycopg2, or SQLAlchemy's raw connection."""

    def cursor(self) -> Any: ...


class Database:
    """The process's pool for actors and the relay; opened at first use, so that it costs nothing before.

    A transaction waits up to *wait_s* seconds for one of *max_size* connections, then psycopg_pool.PoolTimeout.
    """

    def __init__(self, url: str, *, name: str, max_size: int, wait_s: float = 30) -> None:
        self.url = url
        self._pool: ConnectionPool[Conn] = ConnectionPool(
            url,
            connection_class=psycopg.Connection[Row],
            kwargs={"autocommit": True, "row_factory": dict_row, "application_name": name, **_SOCKET},
            min_size=0,
            max_size=max_size,
            check=ConnectionPool.check_connection,
            max_idle=600,
            timeout=wait_s,
            reconnect_timeout=2 * wait_s,
            open=False,
        )
        self._opening = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Conn]:
        """One transaction on a pooled connection: commits on a normal exit, rolls back on any exception."""
        with self._opening:
            self._pool.open()
        with self._pool.connection() as conn, transaction(conn):
            yield conn

    def close(self) -> None:
        self._pool.close(timeout=2)


def connect(url: str, *, name: str) -> Conn:
    """One connection outside any pool, in autocommit, with rows as dicts. Raises psycopg.OperationalError."""
    return psycopg.connect(url, autocommit=True, row_factory=dict_row, application_name=name, **_SOCKET)  # type: ignore[arg-type]


@contextmanager
def transaction(conn: Conn) -> Iterator[Conn]:
    """A transaction on *conn*; while it is open this thread may not use the network (`refuse_in_transaction`)."""
    _mark.depth = getattr(_mark, "depth", 0) + 1
    try:
        with conn.transaction():
            yield conn
    finally:
        _mark.depth -= 1


def limit_statements(conn: Conn, seconds: float) -> None:
    """End each statement of *conn*'s transaction after *seconds*, with psycopg.errors.QueryCanceled."""
    conn.execute(sql(__file__, "limit_statements"), {"limit_ms": str(max(1, int(seconds * 1_000)))})


def in_transaction() -> bool:
    return getattr(_mark, "depth", 0) > 0


def refuse_in_transaction(effect: str) -> None:
    """Raise NetworkInTransaction when this thread has a transaction open: *effect* would hold its locks as it waits."""
    if in_transaction():
        raise NetworkInTransaction(f"{effect} inside a transaction: commit first, then call out")


@lru_cache
def sql(module_file: str, name: str) -> str:
    """The statement `sql/<name>.sql` beside the module *module_file* (its `__file__`)."""
    return (Path(module_file).parent / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def rows(conn: AnyConnection, statement: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Run *statement* on the caller's connection, whatever its driver and row factory; its rows as tuples."""
    cursor = conn.cursor(row_factory=tuple_row) if isinstance(conn, psycopg.Connection) else conn.cursor()
    with closing(cursor):
        cursor.execute(statement, parameters)
        found = cursor.fetchall() if cursor.description else []
    return [tuple(row.values() if isinstance(row, Mapping) else row) for row in found]
