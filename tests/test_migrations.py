"""The schema: from nothing, over dramatiq-pg's own table, by several at once, and against a table in use."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from dramatiq_pg import generate_init_sql
from psycopg import sql

from outbox import jobs, migrations
from outbox.db import Conn, connect
from outbox.db import sql as statement
from outbox.migrations import MigrationError, Step, migrate, pending, steps
from tests.workers import HOUSE, until

WANTED = steps(generate_init_sql())
MIGRATE = """
import sys
from dramatiq_pg import generate_init_sql
from outbox.migrations import migrate, steps
print(len(migrate(sys.argv[1], steps(generate_init_sql()), lambda name: print(name, flush=True))))
"""
_numbers = itertools.count(1)


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    name = f"bare_{next(_numbers)}"
    with connect(server_url, name="posthouse tests") as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield server_url.replace("/postgres?", f"/{name}?")
        admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def stock(empty_url: str) -> Iterator[Conn]:
    """A connection to a database that dramatiq-pg made."""
    with connect(empty_url, name="posthouse tests") as conn:
        conn.execute(generate_init_sql().encode())
        yield conn


def add(conn: Conn, state: str | None, message: Any, queue: str = "default") -> str:
    """A row as dramatiq-pg, or a careless hand, writes it."""
    job_id = str(uuid.uuid4())
    conn.execute(
        "INSERT INTO dramatiq.queue (message_id, queue_name, state, message) VALUES (%s, %s, %s, %s::jsonb)",
        [job_id, queue, state, None if message is None else json.dumps(message)],
    )
    return job_id


def message(queue: str = "default", **options: Any) -> dict[str, Any]:
    return {"queue_name": queue, "actor_name": "a", "args": [1], "kwargs": {"k": 2}, "options": options}


def schema(conn: Conn) -> list[dict[str, Any]]:
    """Everything the migrations make, as text."""
    return conn.execute(
        """
        SELECT c.oid::regclass::text AS name, c.relkind::text, a.attname, a.atttypid::regtype::text,
               pg_get_expr(d.adbin, d.adrelid), CASE WHEN c.relkind = 'i' THEN pg_get_indexdef(c.oid) END
        FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace::regnamespace::text IN ('dramatiq', 'posthouse')
        ORDER BY 1, a.attnum
        """
    ).fetchall()


def test_an_empty_database_gets_every_step_in_order_and_the_second_run_does_nothing(empty_url: str) -> None:
    told: list[str] = []
    names = [step.name for step in WANTED]
    assert names == ["0001_dramatiq_pg", *sorted(names[1:])]
    assert migrate(empty_url, WANTED, told.append) == names == told
    with connect(empty_url, name="posthouse tests") as conn:
        before = schema(conn)
        assert migrate(empty_url, WANTED, told.append) == []
        assert schema(conn) == before
        assert pending(conn, WANTED) == []


def test_what_is_pending_is_told_without_writing_anything(stock: Conn) -> None:
    assert pending(stock, WANTED) == [step.name for step in WANTED]
    assert stock.execute("SELECT to_regnamespace('posthouse') AS made").fetchone() == {"made": None}


def test_a_stock_table_with_rows_in_every_state_becomes_the_ledger(stock: Conn, empty_url: str) -> None:
    in_an_hour_ms = int((time.time() + 3_600) * 1_000)
    queued = add(stock, "queued", message(max_retries=3))
    running = add(stock, "consumed", message())
    done = add(stock, "done", message())
    rejected = add(stock, "rejected", message())
    stateless = add(stock, None, message())
    delayed = add(stock, "queued", message("default.DQ", eta=in_an_hour_ms), "default.DQ")
    odd_eta = add(stock, "queued", message("default.DQ", eta="soon"), "default.DQ")
    junk: list[Any] = [{}, [], "x", 5, None, {"options": 1}, {"options": None}, {"options": [1]}]
    strange = [add(stock, "queued", one) for one in junk]
    migrate(empty_url, WANTED)

    states = {job_id: (jobs.load(stock, job_id) or {})["state"] for job_id in (queued, running, done, rejected)}
    assert states == {queued: "pending", running: "running", done: "completed", rejected: "discarded"}
    assert (jobs.load(stock, rejected) or {})["last_error"] == "rejected before the upgrade"
    assert (jobs.load(stock, stateless) or {})["state"] == "pending"
    assert (jobs.load(stock, queued) or {})["message"] == message(max_retries=3)
    assert (jobs.load(stock, queued) or {})["actor"] == "a"

    waiting = jobs.load(stock, delayed) or {}
    assert waiting["queue"] == "default"
    assert waiting["message"] == message()
    assert abs(waiting["available_at"].timestamp() * 1_000 - in_an_hour_ms) < 2
    assert (jobs.load(stock, odd_eta) or {})["queue"] == "default"

    claimed = {claim.id for claim in jobs.claim(stock, {"default": 100}, worker_id=str(uuid.uuid4()), lease_s=9)}
    assert claimed == {queued, stateless, odd_eta, *strange}
    stock.execute("UPDATE dramatiq.queue SET lease_until = now() WHERE message_id = %s", [running])
    assert (running, "default", "queued") in jobs.rescue(stock)


def test_a_stock_row_on_a_queue_with_a_name_too_long_for_a_bell_does_not_stop_the_rescue(
    stock: Conn, empty_url: str
) -> None:
    for queue in ("q" * 60, "default"):
        add(stock, "consumed", message(), queue)
    migrate(empty_url, WANTED)
    stock.execute("UPDATE dramatiq.queue SET lease_until = now()")
    assert {queue for _, queue, _ in jobs.rescue(stock)} == {"q" * 60, "default"}
    add(stock, "queued", message(), "é" * 40)


def test_five_migrators_at_once_end_well(empty_url: str) -> None:
    crowd = [_migrator(empty_url) for _ in range(5)]
    said = [process.communicate(timeout=90)[0].splitlines() for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 5
    assert sorted(lines[-1] for lines in said) == ["0"] * 4 + [str(len(WANTED))]


def test_a_migrator_killed_in_the_middle_leaves_whole_steps_and_no_lock(empty_url: str) -> None:
    for lines in (1, 2, 3):
        process = _migrator(empty_url)
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.kill()
        process.communicate()
    with connect(empty_url, name="posthouse tests") as conn:
        migrate(empty_url, WANTED)
        assert pending(conn, WANTED) == []
        assert _invalid(conn) == []
        assert until(lambda: _advisory_locks(conn) == 0)


def test_a_table_in_use_is_waited_for_in_short_steps_while_others_use_it(
    stock: Conn, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT", "200ms")
    add(stock, "queued", message())
    with connect(empty_url, name="posthouse tests") as holder, holder.transaction():
        holder.execute("SELECT count(*) FROM dramatiq.queue")
        process = _thread(lambda: migrate(empty_url, WANTED))
        until(lambda: _waits_for_a_lock(stock), what="the migrator to wait")
        longest = 0.0
        for _ in range(30):
            began = time.monotonic()
            add(stock, "queued", message())
            stock.execute("SELECT count(*) FROM dramatiq.queue")
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.02)
        assert longest < 1
    process.join(20)
    assert pending(stock, WANTED) == []
    assert len(jobs.listing(stock)) == 31


def test_a_table_that_stays_locked_is_given_up_with_what_to_do(
    stock: Conn, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT", "20ms")
    monkeypatch.setattr(migrations, "LOCK_TRIES", 1)
    with connect(empty_url, name="posthouse tests") as holder, holder.transaction():
        holder.execute("LOCK TABLE dramatiq.queue IN ACCESS SHARE MODE")
        with pytest.raises(MigrationError, match=r"0002_ledger: .*pg_stat_activity"):
            migrate(empty_url, WANTED)
    assert pending(stock, WANTED)[0].startswith("0002")


def test_a_second_migrator_gives_up_on_one_that_does_not_end(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "WAIT_S", 0.1)
    with connect(empty_url, name="posthouse tests") as conn, conn.transaction():
        conn.execute(statement(migrations.__file__, "lock_migrations"))
        with pytest.raises(MigrationError, match="another migration"):
            migrate(empty_url, WANTED)


def test_an_index_whose_build_failed_is_built_again(conn: Conn, database_url: str) -> None:
    conn.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'dramatiq.queue_limited'::regclass")
    conn.execute("DROP INDEX dramatiq.queue_holders")
    conn.execute("DELETE FROM posthouse.migrations WHERE name LIKE '0032%'")
    assert migrate(database_url, WANTED) == ["0032_controls_indexes.concurrently"]
    assert _invalid(conn) == []
    assert conn.execute("SELECT to_regclass('dramatiq.queue_holders') IS NOT NULL AS made").fetchone() == {"made": True}


def test_a_build_that_is_cancelled_is_repaired_by_the_next_run(conn: Conn, database_url: str) -> None:
    conn.execute("DROP INDEX dramatiq.queue_limited")
    conn.execute("DELETE FROM posthouse.migrations WHERE name LIKE '0032%'")
    failed: list[BaseException] = []
    with connect(database_url, name="posthouse tests") as writer, writer.transaction():
        writer.execute("LOCK TABLE dramatiq.queue IN ROW EXCLUSIVE MODE")
        builder = _thread(lambda: migrate(database_url, WANTED), failed)
        until(lambda: _waits_for_a_lock(conn), what="the build to wait")
        conn.execute(
            "SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        builder.join(10)
    assert [type(error) for error in failed] == [psycopg.errors.QueryCanceled]
    assert _invalid(conn) == ["dramatiq.queue_limited"]
    migrate(database_url, WANTED)
    assert _invalid(conn) == []


def test_a_step_that_fails_leaves_nothing_of_itself(empty_url: str) -> None:
    broken = Step("0001_broken", "CREATE TABLE half (a int); SELECT 1/0;")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty_url, [broken])
    with connect(empty_url, name="posthouse tests") as conn:
        assert conn.execute("SELECT to_regclass('half') AS half").fetchone() == {"half": None}
        assert pending(conn, [broken]) == ["0001_broken"]


def test_the_database_refuses_a_row_no_job_can_be_in(conn: Conn) -> None:
    jobs.enqueue(conn, jobs.NewJob(queue="q", actor="a"))
    for change in (
        "state = 'consumed'",
        "state = 'done'",
        "lease_token = gen_random_uuid()",
        "finished_at = now()",
        "attempt = -1",
        "max_attempts = 0",
        "cancel_reason = 'because'",
        "stop_cause = 'cancel_requested'",
    ):
        with pytest.raises(psycopg.errors.CheckViolation):
            conn.execute(f"UPDATE dramatiq.queue SET {change}".encode())


def _migrator(url: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(HOUSE)}
    command = [sys.executable, "-c", MIGRATE, url]
    return subprocess.Popen(command, cwd=HOUSE, env=environment, stdout=subprocess.PIPE, text=True)


def _thread(run: Callable[[], object], failed: list[BaseException] | None = None) -> threading.Thread:
    def kept() -> None:
        try:
            run()
        except psycopg.Error as error:
            assert failed is not None
            failed.append(error)

    thread = threading.Thread(target=kept)
    thread.start()
    return thread


def _invalid(conn: Conn) -> list[str]:
    rows = conn.execute("SELECT indexrelid::regclass::text AS name FROM pg_index WHERE NOT indisvalid")
    return [row["name"] for row in rows]


def _advisory_locks(conn: Conn) -> int:
    query = "SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM "
    row = conn.execute(query + "pg_database WHERE datname = current_database())").fetchone()
    return row["n"] if row else 0


def _waits_for_a_lock(conn: Conn) -> bool:
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return conn.execute(query).fetchone() is not None
