"""A real Postgres: one embedded server a session, one migrated database a test, nothing left afterwards."""

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString
from urllib.parse import urlsplit

import psutil
import pytest
from psycopg import sql

import settings

DATA_DIR = Path(tempfile.mkdtemp(prefix="posthouse-tests-"))

# What a developer's shell says must not reach a test; done before any module that looks is imported.
for name in [*map(str.upper, settings.Settings.model_fields), "PROMETHEUS_MULTIPROC_DIR"]:
    os.environ.pop(name, None)
for name in [name for name in os.environ if name.startswith("PG")]:
    del os.environ[name]
os.environ["DATA_DIR"] = str(DATA_DIR)

from dramatiq_pg import generate_init_sql  # noqa: E402 - after the environment was cleared, as all below

import actors  # noqa: E402, F401 - the event types are declared there
from outbox import embedded  # noqa: E402
from outbox.db import Conn, Database, connect  # noqa: E402
from outbox.events import publish_types  # noqa: E402
from outbox.migrations import migrate, steps  # noqa: E402

TEMPLATE = "posthouse_template"
_numbers = itertools.count(1)


def pytest_configure() -> None:
    # Ended by a time limit from outside, a session tidies up as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure() -> None:
    shutil.rmtree(DATA_DIR, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No child, and no server: those leave the family at their start, so they are found by their folder."""
    yield
    ours = (str(DATA_DIR), str(tmp_path_factory.getbasetemp()))
    running = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    servers = [line for line in running if "postgres -D" in line and any(folder in line for folder in ours)]
    assert psutil.Process().children(recursive=True) == []
    assert servers == []


@pytest.fixture(autouse=True)
def _fresh_settings() -> Iterator[None]:
    """A test that changes the environment reads its own settings, and so does the next one."""
    settings.load.cache_clear()
    yield
    settings.load.cache_clear()


@pytest.fixture(scope="session")
def server_url(_nothing_is_left: None) -> Iterator[str]:
    """The session's server."""
    yield embedded.start(DATA_DIR)
    embedded.stop(DATA_DIR)


@pytest.fixture(scope="session")
def admin(server_url: str) -> Iterator[Conn]:
    """A connection that makes databases, once the migrated template is there."""
    with connect(server_url, name="posthouse tests") as connection:
        _hurry(connection)
        _on(connection, "CREATE DATABASE {}", TEMPLATE)
        migrate(_at(server_url, TEMPLATE), steps(generate_init_sql()))
        with connect(_at(server_url, TEMPLATE), name="posthouse tests") as template:
            publish_types(template)
        yield connection


@pytest.fixture
def database_url(admin: Conn, server_url: str) -> Iterator[str]:
    """The URL of a migrated, empty database of the test's own."""
    database = f"test_{next(_numbers)}"
    _on(admin, "CREATE DATABASE {} TEMPLATE {}", database, TEMPLATE)
    yield _at(server_url, database)
    _on(admin, "DROP DATABASE {} WITH (FORCE)", database)


@pytest.fixture
def conn(database_url: str) -> Iterator[Conn]:
    """One connection to the test's database, in autocommit, rows as dicts."""
    with connect(database_url, name="posthouse test") as connection:
        yield connection


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """The pool of a process, on the test's database."""
    database = Database(database_url, name="posthouse test", max_size=5)
    yield database
    database.close()


def _hurry(conn: Conn) -> None:
    """This server's data is worth nothing after a power cut."""
    conn.execute("ALTER SYSTEM SET fsync = off")
    conn.execute("ALTER SYSTEM SET full_page_writes = off")
    conn.execute("SELECT pg_reload_conf()")


def _on(conn: Conn, statement: LiteralString, *databases: str) -> None:
    conn.execute(sql.SQL(statement).format(*map(sql.Identifier, databases)))


def _at(url: str, database: str) -> str:
    return urlsplit(url)._replace(path=f"/{database}").geturl()
