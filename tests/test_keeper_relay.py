"""The keeper at work: `cli.py relay` beside workers that are killed, stopped and hung (queue.md 9, lines 64, 65)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from outbox import jobs
from outbox.db import Conn, connect
from outbox.jobs import NewJob
from tests import emptied
from tests.workers import QUEUES, Crew, Worker, crew, until

shared_url = emptied.shared_url

#: Jobs of queue `quick` are overdue after 3 s.
BRIEF = {
    "QUEUES": json.dumps({**QUEUES, "quick": {**QUEUES["quick"], "time_limit_s": 2}}),
    "LEASE_S": "4",
    "KEEPER_PATIENCE_S": "1",
}
#: Leases that no test waits for: what is rescued from them, the keeper has rescued.
LONG_LEASES = {**BRIEF, "LEASE_S": "300"}


@pytest.fixture(scope="module")
def relay(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A relay for all tests that have a keeper."""
    with crew(shared_url, tmp_path_factory.mktemp("relay")) as relays:
        yield relays.start_relay(told=BRIEF)


@pytest.fixture
def kept(relay: Worker, shared_url: str, tmp_path: Path) -> Iterator[Crew]:
    """Workers beside the relay."""
    with crew(shared_url, tmp_path) as workers:
        yield workers


@pytest.fixture
def conn(shared_url: str) -> Iterator[Conn]:
    with connect(shared_url, name="posthouse test") as connection:
        yield connection


def add(conn: Conn, actor: str, *args: Any, queue: str = "quick", **given: Any) -> str:
    return jobs.enqueue(conn, NewJob(queue=queue, actor=f"trial.{actor}", args=args, **given)).id


def ended(conn: Conn, job_id: str, seconds: float = 20) -> dict[str, Any]:
    def end() -> dict[str, Any] | None:
        job = jobs.load(conn, job_id) or {}
        return job if job["state"] in ("completed", "discarded") else None

    return dict(until(end, seconds, f"the end of {job_id}"))


def owner(workers: Crew, name: str) -> psutil.Process:
    """The process that started the job called *name* last."""
    return psutil.Process(int(until(lambda: workers.starts(name))[-1]))


@contextmanager
def slow_register(conn: Conn) -> Iterator[None]:
    """Who does not wait until it is on the register claims before that."""
    conn.execute("""
        CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep(0.5);
            NEW.started_at := clock_timestamp();
            RETURN NEW;
        END $$;
        CREATE TRIGGER dawdle BEFORE INSERT ON posthouse.workers FOR EACH ROW EXECUTE FUNCTION dawdle();
    """)
    yield
    conn.execute("DROP FUNCTION dawdle CASCADE")


def test_the_relay_with_the_keeper_in_it_uses_three_connections(relay: Worker, conn: Conn) -> None:
    query = """
        SELECT count(*) AS n FROM pg_stat_activity
        WHERE datname = current_database() AND application_name <> 'posthouse test'
    """
    until(lambda: conn.execute(f"{query} AND query LIKE '%%posthouse.workers%%'").fetchone() != {"n": 0})
    assert (conn.execute(query).fetchone() or {})["n"] <= 3


def test_the_job_of_a_killed_process_runs_again_long_before_its_lease_ends(kept: Crew, conn: Conn) -> None:
    """The keeper's session ends as the process does; and the process was on the register before it claimed at all."""
    job_id = add(conn, "run", "killed", 1)
    with slow_register(conn):
        kept.start("quick", told=LONG_LEASES)
        killed = owner(kept, "killed")
    registered = "SELECT FROM posthouse.workers w JOIN dramatiq.queue q ON q.worker_id = w.id"
    assert conn.execute(f"{registered} WHERE q.message_id = %s AND w.started_at < q.claimed_at", [job_id]).rowcount == 1
    killed.kill()
    conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'posthouse control'")
    kept.start("quick", told=LONG_LEASES)
    job = ended(conn, job_id)
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
    assert len(set(kept.starts("killed"))) == 2
    assert conn.execute("SELECT FROM posthouse.workers WHERE pid = %s", [killed.pid]).fetchall() == []


def test_a_job_that_holds_the_interpreter_lock_for_several_leases_stays_with_its_worker(
    kept: Crew, conn: Conn, relay: Worker
) -> None:
    kept.start("single", threads=1, processes=2, told=BRIEF)
    job_id = add(conn, "hold", "held", 9, queue="single")
    job = ended(conn, job_id)
    assert (job["state"], job["attempt"], job["attempts"]) == ("completed", 1, [])
    assert len(kept.starts("held")) == 1
    assert {tuple(line["job_ids"]) for line in relay.says("keeper.renewed")} == {(job_id,)}


def test_without_a_keeper_the_same_job_is_taken_away(database_url: str, tmp_path: Path) -> None:
    """And the leases alone see to it: so the test above can fail."""
    with crew(database_url, tmp_path) as workers, connect(database_url, name="posthouse test") as conn:
        workers.start("single", threads=1, processes=2, told=BRIEF)
        job_id = add(conn, "hold", "taken", 9, queue="single")
        until(lambda: len(set(workers.starts("taken"))) == 2)
        assert (jobs.load(conn, job_id) or {})["attempts"][0]["error"] == "the lease ran out without an answer"


def test_a_stopped_process_loses_its_job_to_another_and_its_late_result_is_refused(kept: Crew, conn: Conn) -> None:
    """Line 32."""
    first = kept.start("single", threads=1, told=BRIEF)
    job_id = add(conn, "slow", "stopped", 1, queue="single")
    stopped = owner(kept, "stopped")
    stopped.suspend()
    second = kept.start("single", threads=1, told=BRIEF)
    job = ended(conn, job_id)
    stopped.resume()
    until(lambda: first.says("lease.lost") or first.says("settle.refused"))
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
    assert (jobs.load(conn, job_id) or {})["finished_at"] == job["finished_at"]
    assert second.says("settle.refused") == []


def test_a_job_that_holds_the_lock_far_past_its_limit_costs_the_process_and_times_out_beside_two_keepers(
    kept: Crew, conn: Conn, relay: Worker
) -> None:
    """Line 65."""
    other = kept.start_relay(told=BRIEF)
    first = kept.start("quick", "single", told=LONG_LEASES)
    beside = add(conn, "slow", "beside", 2, queue="single")
    owner(kept, "beside")
    overdue = add(conn, "hold", "overdue", 600, max_attempts=1)
    assert ended(conn, overdue)["state"] == "discarded"
    assert first.ends(15) != 0
    kept.start("single", told=LONG_LEASES)
    assert [one["outcome"] for one in ended(conn, overdue)["attempts"]] == ["timed out"]
    job = ended(conn, beside)
    assert (job["state"], job["attempt"], job["crashes"], job["attempts"]) == ("completed", 1, 0, [])
    killed = [line for keeper in (relay, other) for line in keeper.says("keeper.killed")]
    assert [(line["timed_out"], line["put_back"]) for line in killed] == [([overdue], [beside])]
    assert str(killed[0]["pid"]) == kept.starts("overdue")[0]
