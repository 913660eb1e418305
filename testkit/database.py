"""The database a test works in: made, migrated and emptied; and a pool that says when something has been committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import cast
from urllib.parse import unquote, urlsplit

import psycopg
from psycopg import sql as identifiers
from psycopg.errors import DuplicateDatabase

from broker import database_url, migration_steps
from outbox.db import Conn, Database, connect, in_transaction, sql
from outbox.events import publish_types
from outbox.migrations import migrate
from settings import Settings

NAME = "posthouse testkit"


class NotATestDatabase(ValueError):
    """The kit empties its database, so that has "test" in its name."""


class TellingDatabase(Database):
    """A pool that calls *committed* when a transaction of the test's own thread has been committed."""

    def __init__(self, url: str, *, name: str, max_size: int) -> None:
        super().__init__(url, name=name, max_size=max_size)
        self.committed: Callable[[], None] | None = None
        self._thread = threading.get_ident()

    @contextmanager
    def transaction(self) -> Iterator[Conn]:
        database = cast(Database, super())
        with database.transaction() as conn:
            yield conn
        if self.committed and not in_transaction() and threading.get_ident() == self._thread:
            self.committed()


def url_for_tests(settings: Settings) -> str:
    """The application's database's URL with `_test` behind the name."""
    parts = urlsplit(database_url(settings))
    return parts._replace(path=f"{parts.path or '/postgres'}_test").geturl()


@cache
def prepare(url: str) -> None:
    """Make the database when it is missing, and its schema up to date; once a process. Raises NotATestDatabase."""
    name = unquote(urlsplit(url).path.lstrip("/"))
    if "test" not in name:
        raise NotATestDatabase(f"the kit empties its database, so its name must have 'test' in it: {name!r}")
    try:
        connect(url, name=NAME).close()
    except psycopg.OperationalError:
        _create_database(url, name)
    migrate(url, migration_steps())


def _create_database(url: str, name: str) -> None:
    statement = identifiers.SQL(sql(__file__, "create_database")).format(name=identifiers.Identifier(name))
    with connect(urlsplit(url)._replace(path="/postgres").geturl(), name=NAME) as conn, suppress(DuplicateDatabase):
        conn.execute(statement)


def empty(conn: Conn) -> None:
    """No job, event or document is left; the types that are declared now are published."""
    conn.execute(sql(__file__, "empty"))
    publish_types(conn)
