"""Pause, limits and rates with whole worker processes, seen from outside: lines 14 to 17."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox import controls, jobs
from outbox.db import Conn
from outbox.jobs import NewJob
from tests import emptied
from tests.workers import Crew, crew, until

shared_url, database_url = emptied.shared_url, emptied.database_url


@pytest.fixture
def hired(database_url: str, tmp_path: Path) -> Iterator[Crew]:
    with crew(database_url, tmp_path) as workers:
        yield workers


def add(conn: Conn, actor: str, *args: Any, queue: str = "quick", **given: Any) -> str:
    return jobs.enqueue(conn, NewJob(queue=queue, actor=f"trial.{actor}", args=args, **given)).id


def state(conn: Conn, job_id: str) -> str:
    return str((jobs.load(conn, job_id) or {})["state"])


def at_once(lines: list[str]) -> int:
    """How many ran at the same time at most."""
    return max(itertools.accumulate(1 if line.startswith("start") else -1 for line in lines))


def test_a_paused_queue_waits_others_go_on_and_its_resume_is_heard(hired: Crew, conn: Conn) -> None:
    """Line 14. Polls are an hour away, so that only the bell can start what waited."""
    hired.start("quick", "single", told={"AWAITED_POLL_INTERVAL_S": "60", "POLL_INTERVAL_S": "60"})
    running = add(conn, "run", "running", 1)
    until(lambda: hired.starts("running"))
    controls.pause(conn, "quick", by="ana", reason="for a moment")
    waiting = [add(conn, "run", "waiting"), add(conn, "run", "waiting", limit_key="k", limit=1)]
    other = add(conn, "slow", "other", queue="single")
    until(lambda: (state(conn, running), state(conn, other)) == ("completed", "completed"))
    assert [state(conn, job_id) for job_id in waiting] == ["pending", "pending"]
    controls.resume(conn, "quick")
    until(lambda: [state(conn, job_id) for job_id in waiting] == ["completed", "completed"])


def test_the_end_of_a_job_and_the_next_token_start_what_waits_for_them(hired: Crew, conn: Conn) -> None:
    """Polls are an hour away, as above."""
    hired.start("quick", told={"AWAITED_POLL_INTERVAL_S": "60", "POLL_INTERVAL_S": "60"})
    keyed = [add(conn, "run", "keyed", 0.05, limit_key="k", limit=1) for _ in range(8)]
    until(lambda: {state(conn, job_id) for job_id in keyed} == {"completed"})
    assert at_once(hired.lines("keyed")) == 1
    rated = [add(conn, "run", "rated", limit_key="r", rate_per_s=8, rate_burst=1) for _ in range(8)]
    until(lambda: {state(conn, job_id) for job_id in rated} == {"completed"})


def test_a_backlog_flows_past_a_key_whose_next_token_is_a_minute_away(hired: Crew, conn: Conn) -> None:
    """Polls are an hour away, as above."""
    held_back = [add(conn, "run", "rated", limit_key="r", rate_per_s=0.01, rate_burst=1) for _ in range(3)]
    jobs.enqueue_many(conn, [NewJob(queue="quick", actor="trial.run", args=["free", 0.02]) for _ in range(100)])
    hired.start("quick", told={"AWAITED_POLL_INTERVAL_S": "60", "POLL_INTERVAL_S": "60"})
    until(lambda: len(hired.ends("free")) == 100)
    assert sorted(state(conn, job_id) for job_id in held_back) == ["completed", "pending", "pending"]


def test_three_processes_never_run_more_of_a_key_than_its_limit_and_others_pass(hired: Crew, conn: Conn) -> None:
    """Line 15; and 13, that none starts before it is due."""
    jobs.enqueue_many(
        conn,
        [
            NewJob(queue="quick", actor="trial.run", args=["keyed", 0.05], limit_key="k", limit=2, priority=-1)
            for _ in range(30)
        ],
    )
    others = [add(conn, "run", "other", 0.01) for _ in range(10)]
    delayed = [add(conn, "run", "delayed", delay_s=3), add(conn, "run", "delayed", delay_s=3, limit_key="d", limit=1)]
    hired.start("quick", processes=3)
    until(lambda: len(hired.ends("other")) == len(others))
    assert len(hired.ends("keyed")) < 30
    until(lambda: len(hired.ends("keyed")) == 30)
    assert len(hired.starts("keyed")) == 30
    assert at_once(hired.lines("keyed")) == 2
    until(lambda: [state(conn, job_id) for job_id in delayed] == ["completed", "completed"])
    assert conn.execute("SELECT FROM dramatiq.queue WHERE started_at < available_at").fetchall() == []


def test_what_a_killed_worker_held_is_free_after_its_rescue(hired: Crew, conn: Conn) -> None:
    """Line 16; F13, F15, F77: with attempts left and without, limit and unique keys are free again, never both held."""
    first = hired.start("quick")
    again = add(conn, "linger", "again", 30, limit_key="a", limit=1, unique_key="ua")
    given_up = add(conn, "linger", "given up", 30, limit_key="g", limit=1, unique_key="ug", max_attempts=1)
    until(lambda: hired.starts("again") and hired.starts("given up"))
    behind = [add(conn, "run", "behind", limit_key=key, limit=1) for key in ("a", "g")]
    second = hired.start("quick")
    assert [state(conn, job_id) for job_id in behind] == ["pending", "pending"]
    first.kill()
    until(lambda: [state(conn, job_id) for job_id in [*behind, again]] == ["completed"] * 3)
    assert state(conn, given_up) == "discarded"
    assert len(second.children()) == 1
    assert [len(hired.starts("again")), len(hired.starts("given up"))] == [2, 1]
    assert all(add(conn, "run", "new", unique_key=key) for key in ("ua", "ug"))
    until(lambda: len(hired.ends("new")) == 2)


def test_two_processes_share_one_bucket(hired: Crew, conn: Conn) -> None:
    """Line 17: in no stretch of time did more start than its burst and its rate allow."""
    rate_per_s, burst = 8, 2
    for _ in range(14):
        add(conn, "run", "rated", limit_key="r", rate_per_s=rate_per_s, rate_burst=burst)
    hired.start("quick", processes=2)
    until(lambda: len(hired.ends("rated")) == 14)
    rows = conn.execute("SELECT started_at, attempt FROM dramatiq.queue ORDER BY started_at").fetchall()
    starts = [row["started_at"].timestamp() for row in rows]
    for first, last in itertools.combinations(range(14), 2):
        assert last - first + 1 <= burst + rate_per_s * (starts[last] - starts[first]) + 0.01
    assert {row["attempt"] for row in rows} == {1}


def test_a_queue_under_endless_load_leaves_its_turn_to_another(hired: Crew, conn: Conn) -> None:
    """F67: priorities order one queue strictly; work that must not wait for it has a queue of its own, and its turn."""
    urgent = [NewJob(queue="quick", actor="trial.run", args=["urgent", 0.02], priority=-5) for _ in range(600)]
    jobs.enqueue_many(conn, urgent)
    for _ in range(10):
        add(conn, "slow", "patient", queue="single", priority=9)
    hired.start("quick", "single", threads=1)
    until(lambda: len(hired.ends("patient")) == 10)
    (found,) = conn.execute(
        """
        SELECT count(*) FROM dramatiq.queue
        WHERE queue_name = 'quick'
          AND started_at < (SELECT max(started_at) FROM dramatiq.queue WHERE queue_name = 'single')
        """
    ).fetchall()
    assert found["count"] <= 50
