"""The page's way to the database: few connections, short waits, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import psycopg
from fastapi import Depends, Request
from psycopg import errors

from middleware.connection_budget import WEB
from outbox.db import Conn, Database, sql

#: A page without an answer says less than one that says the database is away.
WAIT_S = 1.5
STATEMENT_S = 2.0

_NOT_MIGRATED = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedFunction,
    errors.InvalidSchemaName,
)


def open_database(url: str) -> Database:
    """A pool whose callers wait at most WAIT_S for a connection; one that failed is tried again soon."""
    return Database(url, name="posthouse page", max_size=WEB, wait_s=WAIT_S)


@contextmanager
def read(database: Database, *, statement_s: float = STATEMENT_S) -> Iterator[Conn]:
    """A read-only transaction, *statement_s* at most a statement. Raises psycopg.Error (see `explain`)."""
    with database.transaction() as conn:
        conn.execute(sql(__file__, "read"), {"limit_ms": str(int(statement_s * 1000))})
        yield conn


def explain(error: psycopg.Error) -> str:
    """What *error* means for whoever looks at the page; never an address, a statement or a credential."""
    if isinstance(error, errors.QueryCanceled):
        return "The database took too long to answer."
    if isinstance(error, _NOT_MIGRATED):
        return "The database has not been brought up to this version: run `python cli.py migrate`."
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return "The database does not answer."
    return "The database refused the question; the log says why."


async def _of_app(request: Request) -> Database:
    return request.app.state.database  # type: ignore[no-any-return]


#: For endpoints, which begin transactions themselves: a dependency would end one in another thread.
AppDatabase = Annotated[Database, Depends(_of_app)]
