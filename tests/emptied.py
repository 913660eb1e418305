"""One migrated database for a whole test module, emptied before each test: a tenth of the price of a new one.

For tests that change rows and leave the schema as it was. A module says `shared_url = emptied.shared_url` and
`database_url = emptied.database_url`; the fixtures that build on `database_url` follow.
"""

import itertools
from collections.abc import Iterator

import pytest
from psycopg import sql

from outbox.db import Conn, connect
from outbox.events import publish_types

TEMPLATE = "posthouse_template"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared_url(admin: Conn, server_url: str) -> Iterator[str]:
    """The URL of the module's database."""
    name = f"shared_{next(_numbers)}"
    admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*map(sql.Identifier, (name, TEMPLATE))))
    yield server_url.replace("/postgres?", f"/{name}?")
    admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def database_url(shared_url: str) -> str:
    """The same, with no row in it."""
    with connect(shared_url, name="posthouse tests") as conn:
        conn.execute("SET lock_timeout = '5s'")
        found = conn.execute(
            """
            SELECT schemaname, tablename FROM pg_tables
            WHERE schemaname IN ('dramatiq', 'posthouse')
              AND tablename NOT IN ('migrations', 'event_types', 'search_state')
            """
        )
        tables = [sql.Identifier(row["schemaname"], row["tablename"]) for row in found]
        conn.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE").format(sql.SQL(", ").join(tables)))
        conn.execute("UPDATE posthouse.search_state SET live_generation = 1")
        publish_types(conn)
    return shared_url
