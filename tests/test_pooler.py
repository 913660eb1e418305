"""Behind a transaction pooler nothing may rest on a session: no setting, no prepared statement, no lock, no LISTEN.

specs/queue.md 4, line 59; F45, F46. With a real PgBouncer in transaction mode.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from dramatiq_pg import generate_init_sql

from middleware.capacity import Lane
from outbox import jobs, pooler
from outbox.db import Conn, Database, behind_pooler, connect, transaction
from outbox.jobs import NewJob
from outbox.migrations import migrate, steps
from tests import emptied, pgbouncer
from tests.workers import crew, until

pytestmark = pgbouncer.needed
shared_url = emptied.shared_url
database_url = emptied.database_url


@pytest.fixture(scope="module")
def pooled_by_all(shared_url: str) -> Iterator[str]:
    with pgbouncer.pgbouncer(shared_url) as url:
        yield url


@pytest.fixture
def pooled(pooled_by_all: str, database_url: str) -> str:
    """The way to the test's database that everybody shares, over four server connections."""
    return pooled_by_all


@pytest.fixture
def narrow(database_url: str) -> Iterator[str]:
    """The same with one server connection: whatever a session leaves behind, the next one finds."""
    with pgbouncer.pgbouncer(database_url, servers=1) as url:
        yield url


def hears(url: str) -> bool:
    with connect(url, name="posthouse tests") as conn:
        return pooler.hears(conn, lambda: connect(url, name="posthouse tests"))


def settings_of(conn: Conn) -> dict[str, str]:
    found = conn.execute("SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", [list(jobs.SESSION)])
    return {row["name"]: row["setting"] for row in found}


def count(conn: Conn, query: str) -> int:
    return len(conn.execute(query.encode()).fetchall())


def test_a_pooler_is_told_from_a_server(pooled: str, database_url: str) -> None:
    told = []
    for url in (pooled, database_url):
        with connect(url, name="posthouse tests") as conn:
            told.append((behind_pooler(conn), conn.prepare_threshold is None))
    assert told == [(True, True), (False, False)]


def test_a_transaction_pooler_is_deaf_and_a_session_pooler_is_not(pooled: str, database_url: str) -> None:
    with pgbouncer.pgbouncer(database_url, mode="session") as by_session:
        assert [hears(url) for url in (pooled, by_session, database_url)] == [False, True, True]


def test_what_the_ledger_relies_on_holds_for_each_statement_and_reaches_nobody_else(narrow: str) -> None:
    with connect(narrow, name="posthouse tests") as stranger, connect(narrow, name="x", session=jobs.SESSION) as ours:
        before = settings_of(stranger)
        tuned = settings_of(ours)
        assert (tuned["enable_seqscan"], tuned["jit"], tuned["lock_timeout"]) == ("off", "off", "200")
        assert settings_of(stranger) == before
        with transaction(ours):
            assert ours.execute("SELECT 1 AS one").fetchall() == [{"one": 1}]


def test_on_a_session_of_its_own_the_settings_stay(database_url: str) -> None:
    with connect(database_url, name="posthouse tests", session=jobs.SESSION) as conn:
        assert settings_of(conn)["statement_timeout"] == "15000"


def test_the_pool_prepares_nothing_behind_a_pooler(narrow: str, database_url: str) -> None:
    prepared = []
    for url in (narrow, database_url):
        database = Database(url, name="posthouse tests", max_size=1)
        for _ in range(8):
            with database.transaction() as conn:
                conn.execute("SELECT count(*) FROM dramatiq.queue")
                prepared.append(count(conn, "SELECT FROM pg_prepared_statements"))
        database.close()
    assert (set(prepared[:8]), prepared[-1] > 0) == ({0}, True)


def test_the_schema_is_made_through_a_pooler(admin: Conn, server_url: str) -> None:
    admin.execute("CREATE DATABASE unmade")
    try:
        with pgbouncer.pgbouncer(urlsplit(server_url)._replace(path="/unmade").geturl()) as url:
            wanted = steps(generate_init_sql())
            assert migrate(url, wanted) == [step.name for step in wanted]
            assert migrate(url, wanted) == []
    finally:
        admin.execute("DROP DATABASE unmade WITH (FORCE)")


def test_without_a_bell_a_quiet_queue_is_looked_at_as_often_as_ever() -> None:
    polls = []
    for belled in (True, False):
        lane: Lane[None] = Lane("quick", 1, 0.1, awaited=True, belled=belled)
        lane.looked(1_000.0, found=0, asked=1)
        polls.append(lane.poll_at)
    assert polls == [1_001.0, 1_000.1]


TOLD = {"RELAY_SWEEP_S": "60"}


def test_without_listen_everything_works_by_polling(pooled: str, shared_url: str, tmp_path: Path) -> None:
    """20 clients on 4 server connections: two processes of 8 threads."""
    with crew(pooled, tmp_path) as workers, connect(shared_url, name="posthouse test") as conn:
        pair = [workers.start("quick", threads=8, wait=False, told=TOLD) for _ in range(2)]
        for worker in pair:
            worker.up()
            assert [line["mode"] for line in worker.says("pooler.detected")] == ["poll-only"]
        short = [NewJob(queue="quick", actor="trial.run", args=["polled"]) for _ in range(800)]
        asking = [NewJob(queue="quick", actor="trial.ask", args=[0.005]) for _ in range(200)]
        with transaction(conn):
            jobs.enqueue_many(conn, short + asking)
        failing = jobs.enqueue(conn, NewJob(queue="quick", actor="trial.fail", args=["failing", "no"]))
        delayed = jobs.enqueue(conn, NewJob(queue="quick", actor="trial.run", args=["delayed"], delay_s=0.5))
        conn.execute(
            "INSERT INTO posthouse.event_types VALUES ('trial.happened', '', 'internal') ON CONFLICT DO NOTHING"
        )
        conn.execute("SELECT posthouse.record_event('trial.happened', 'gossip')")
        until(lambda: workers.lines("gossip"), 10, "the relay's poll")
        until(lambda: count(conn, "SELECT FROM dramatiq.queue WHERE finished_at IS NULL") == 0, 40)
        assert {job["state"] for job in jobs.listing(conn, actor="trial.ask", limit=1_000)} == {"completed"}
        assert (len(workers.starts("polled")), len(workers.ends("polled"))) == (800, 800)
        assert (jobs.load(conn, failing.id) or {})["attempt"] == len(workers.starts("failing")) == 3
        assert (jobs.load(conn, delayed.id) or {})["state"] == "completed"
        assert [worker.stop() for worker in pair] == [0, 0]
        assert count(conn, "SELECT FROM pg_locks WHERE locktype = 'advisory'") == 0
        for worker in pair:
            said = worker.log.read_text()
            assert "prepared statement" not in said
            assert "disconnected" not in said
            assert "PoolTimeout" not in said


def test_a_job_of_a_killed_worker_is_rescued_behind_a_pooler(pooled: str, shared_url: str, tmp_path: Path) -> None:
    with crew(pooled, tmp_path) as workers, connect(shared_url, name="posthouse test") as conn:
        worker = workers.start("quick")
        job = jobs.enqueue(conn, NewJob(queue="quick", actor="trial.run", args=["killed", 2]))
        until(lambda: workers.starts("killed"))
        worker.kill()
        workers.start("quick")
        until(lambda: (jobs.load(conn, job.id) or {})["state"] == "completed")
        assert (len(workers.starts("killed")), len(workers.ends("killed"))) == (2, 1)


def test_a_direct_url_beside_the_pooler_listens(pooled: str, shared_url: str, tmp_path: Path) -> None:
    told = {"DATABASE_LISTEN_URL": shared_url, "POLL_INTERVAL_S": "60", "AWAITED_POLL_INTERVAL_S": "60", **TOLD}
    with crew(pooled, tmp_path) as workers, connect(shared_url, name="posthouse test") as conn:
        worker = workers.start("quick", told=told)
        assert [line["mode"] for line in worker.says("pooler.detected")] == ["listen"]
        for runs in (1, 2):
            jobs.enqueue(conn, NewJob(queue="quick", actor="trial.run", args=["rung"]))
            until(lambda runs=runs: len(workers.ends("rung")) == runs, 10, "the bell")  # type: ignore[misc]
            time.sleep(0.1)
        assert worker.stop() == 0
