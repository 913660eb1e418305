"""Connections and transactions: the only place where either begins."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeGuard

import psycopg
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import dict_row, tuple_row
from psycopg_pool import ConnectionPool, PoolTimeout

Row = dict[str, Any]
Conn = psycopg.Connection[Row]

#: The session is over, or its server is not the one to talk to: reconnect, charge nobody.
LOST = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
)

_OF_THE_STATEMENT = ("40", "54", "55P03")


def is_lost(error: Exception) -> bool:
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

#: So long after the database is back the pool has a connection at the latest.
RECONNECT_S = 3.0

_PARAMETER = re.compile(r"%\((\w+)\)s")

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
            configure=_set_up,
            check=ConnectionPool.check_connection,
            max_idle=600,
            reconnect_timeout=RECONNECT_S,
            open=False,
        )
        self._wait_s = wait_s
        self._opening = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Conn]:
        """One transaction on a pooled connection: commits on a normal exit, rolls back on any exception."""
        with self._opening:
            self._pool.open()
        conn = self._connection()
        try:
            with transaction(conn):
                yield conn
        except psycopg.errors.ReadOnlySqlTransaction:
            # After a failover the sessions with the old server live on, and are of no use.
            self._pool.drain()
            raise
        finally:
            self._pool.putconn(conn)

    def _connection(self) -> Conn:
        # Asked for anew each time: the pool's own attempts come further and further apart while the database is away.
        give_up = time.monotonic() + self._wait_s
        while True:
            try:
                return self._pool.getconn(min(RECONNECT_S, max(0.0, give_up - time.monotonic())))
            except PoolTimeout:
                if time.monotonic() >= give_up:
                    raise

    def close(self) -> None:
        self._pool.close(timeout=2)


def connect(url: str, *, name: str, session: Mapping[str, str] = MappingProxyType({})) -> Conn:
    """One connection outside any pool, in autocommit, with rows as dicts. Raises psycopg.OperationalError.

    *session*: server settings its statements rely on. Behind a pooler, where the next transaction may find another
    server process, each statement gets a transaction of its own that begins with them.
    """
    conn = _Session.connect(url, autocommit=True, row_factory=dict_row, application_name=name, **_SOCKET)  # type: ignore[arg-type]
    try:
        _set_up(conn)
        if conn.prepare_threshold is None:
            conn.brought, conn.cursor_factory = session, _Brief
        elif session:
            configure(conn, session)
    except BaseException:
        conn.close()
        raise
    return conn


class _Session(psycopg.Connection[Row]):
    """A connection that knows what each of its transactions has to begin with: nothing where a session is its own.

    *prepared*: by statement, the name that `at_once` gave it and its parameters in their order.
    """

    brought: Mapping[str, str] = MappingProxyType({})

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.prepared: dict[str, tuple[bytes, list[str]]] = {}


class _Brief(psycopg.Cursor[Row]):
    """A cursor behind a pooler: a statement outside a transaction gets one of its own."""

    def execute(self, *given: Any, **options: Any) -> Self:
        with _brought_along(self.connection):
            return super().execute(*given, **options)


@contextmanager
def _brought_along(conn: Conn) -> Iterator[None]:
    """What runs inside finds the settings its session relies on, behind a pooler by way of a transaction."""
    begun = conn.info.transaction_status is not TransactionStatus.IDLE
    if begun or not isinstance(conn, _Session) or not conn.brought:
        yield
        return
    with transaction(conn):
        configure(conn, conn.brought, local=True)
        yield


def configure(conn: Conn, session: Mapping[str, str], *, local: bool = False) -> None:
    """Change server settings of *conn*'s session; *local*: until its transaction ends."""
    given = {"names": list(session), "settings": list(session.values()), "local": local}
    conn.execute(sql(__file__, "configure"), given)


def behind_pooler(conn: Conn) -> bool:
    """Whether *conn* leads to a pooler: another process answers than the one libpq was told of as it connected."""
    return _backend(conn) != conn.info.backend_pid


def _backend(conn: Conn) -> int:
    row = conn.execute(sql(__file__, "backend")).fetchone()
    return int(row["pid"]) if row else 0


def _set_up(conn: Conn) -> None:
    if behind_pooler(conn):
        # What one server process has prepared is unknown to the next, or there already.
        conn.prepare_threshold = None


def sever(conn: Conn) -> None:
    """From another thread: end whatever *conn* waits for, with psycopg.OperationalError, however deaf its peer is."""
    with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(conn.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


@contextmanager
def transaction(conn: Conn) -> Iterator[Conn]:
    """A transaction on *conn*; while it is open this thread may not use the network (`refuse_in_transaction`)."""
    _mark.depth = getattr(_mark, "depth", 0) + 1
    try:
        with conn.transaction():
            yield conn
    finally:
        _mark.depth -= 1


def can_retract(conn: AnyConnection) -> TypeGuard[psycopg.Connection[Any]]:
    """Whether `retractable` knows how: of other drivers, and in a pipeline, it does not know what the caller began."""
    return isinstance(conn, psycopg.Connection) and not _in_pipeline(conn)


def _in_pipeline(conn: AnyConnection) -> bool:
    return isinstance(conn, psycopg.Connection) and conn.pgconn.pipeline_status != PipelineStatus.OFF


@contextmanager
def retractable(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """What fails inside leaves no trace in the caller's transaction, which goes on; nothing is committed."""
    if conn.autocommit and conn.info.transaction_status is TransactionStatus.IDLE:
        yield
        return
    if conn.info.transaction_status is TransactionStatus.IDLE:
        # Any statement begins the caller's transaction; a block would begin its own, and commit it.
        conn.execute(sql(__file__, "backend"))
    with conn.transaction():
        yield


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
        found = cursor.fetchall() if cursor.description or _in_pipeline(conn) else []
    return [tuple(row.values() if isinstance(row, Mapping) else row) for row in found]


def at_once(conn: Conn, statement: str, parameters: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """As `rows`, prepared, and waited for in one piece: psycopg's own waits come back to Python for each packet, and
    there they line up behind every busy thread of the process. *parameters* are texts; the statement casts them.

    Only `sever` ends it before the server does.
    """
    if not isinstance(conn, _Session) or conn.prepare_threshold is None:
        return rows(conn, statement, parameters)
    if statement not in conn.prepared:
        conn.prepared[statement] = _prepare(conn, f"posthouse_{len(conn.prepared)}", statement)
    name, names = conn.prepared[statement]
    result = conn.pgconn.exec_prepared(name, [parameters[each].encode() for each in names], result_format=1)
    if result.status != ExecStatus.TUPLES_OK:
        raise _error(conn, result)
    reader = Transformer(conn)
    reader.set_pgresult(result)
    return reader.load_rows(0, result.ntuples, tuple)


def _prepare(conn: Conn, name: str, statement: str) -> tuple[bytes, list[str]]:
    names = list(dict.fromkeys(_PARAMETER.findall(statement)))
    numbered = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", statement)
    result = conn.pgconn.prepare(name.encode(), numbered.encode())
    if result.status != ExecStatus.COMMAND_OK:
        raise _error(conn, result)
    return name.encode(), names


def _error(conn: Conn, result: PGresult) -> psycopg.Error:
    # Of a session that broke the server could not say so: libpq does, without a code.
    if conn.closed:
        return psycopg.OperationalError(result.get_error_message())
    return error_from_result(result, conn.info.encoding)
