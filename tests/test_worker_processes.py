"""Whole worker processes: the `dramatiq` command on a real database, with signals, kills and lost sessions."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outbox import events, jobs
from outbox.db import Conn, connect
from outbox.jobs import NewJob
from tests import emptied
from tests.workers import Crew, Worker, alive, crew, until

shared_url = emptied.shared_url


@pytest.fixture
def hired(database_url: str, tmp_path: Path) -> Iterator[Crew]:
    """Workers for one test."""
    with crew(database_url, tmp_path) as workers:
        yield workers


@pytest.fixture(scope="module")
def busy(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Busy]:
    """One worker for all tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("busy")
    with crew(shared_url, folder) as workers, connect(shared_url, name="posthouse test") as conn:
        yield Busy(conn, workers, workers.start())


class Busy:
    """A worker that does it all, and the way to ask it."""

    def __init__(self, conn: Conn, workers: Crew, worker: Worker) -> None:
        self.conn = conn
        self.crew = workers
        self.worker = worker

    def does(self, actor: str, *args: Any, queue: str = "quick", seconds: float = 15) -> dict[str, Any]:
        """A job as it is once it has ended."""
        return ended(self.conn, add(self.conn, actor, *args, queue=queue), seconds)


def add(conn: Conn, actor: str, *args: Any, queue: str = "quick", **given: Any) -> str:
    return jobs.enqueue(conn, NewJob(queue=queue, actor=f"trial.{actor}", args=args, **given)).id


def state(conn: Conn, job_id: str) -> str:
    return str((jobs.load(conn, job_id) or {})["state"])


def ended(conn: Conn, job_id: str, seconds: float = 15) -> dict[str, Any]:
    until(lambda: state(conn, job_id) in ("completed", "discarded"), seconds, f"the end of {job_id}")
    return jobs.load(conn, job_id) or {}


def insert(conn: Conn, message: Any, queue: str = "quick") -> str:
    """A row written by somebody's hand."""
    return insert_text(conn, json.dumps(message), queue)


def insert_text(conn: Conn, message: str, queue: str = "quick") -> str:
    job_id = str(uuid.uuid4())
    conn.execute(
        "INSERT INTO dramatiq.queue (message_id, queue_name, state, message) VALUES (%s, %s, 'queued', %s)",
        [job_id, queue, message],
    )
    return job_id


def sessions(conn: Conn, name: str = "posthouse%") -> int:
    """Sessions of workers on this database."""
    query = """
        SELECT count(*) AS n FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE %s AND application_name <> 'posthouse test'
    """
    found = conn.execute(query, [name]).fetchone()
    return int(found["n"]) if found else 0


def end_sessions(conn: Conn) -> None:
    conn.execute(
        """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'posthouse%'
          AND application_name <> 'posthouse test'
        """
    )


# What one worker does with good and bad jobs.


def test_a_job_runs_once_and_completes(busy: Busy) -> None:
    job = busy.does("run", "once")
    assert (job["state"], job["attempt"], job["attempts"]) == ("completed", 1, [])
    assert len(busy.crew.starts("once")) == len(busy.crew.ends("once")) == 1


def test_an_event_reaches_its_actor(busy: Busy) -> None:
    busy.conn.execute(
        "INSERT INTO posthouse.event_types VALUES ('trial.happened', '', 'internal') ON CONFLICT DO NOTHING"
    )
    busy.conn.execute("SELECT posthouse.record_event('trial.happened', 'gossip')")
    until(lambda: busy.crew.lines("gossip"))
    assert events.backlog(busy.conn)["waiting"] == 0


def test_a_failing_job_shows_each_attempt_and_ends_discarded(busy: Busy) -> None:
    job = busy.does("fail", "failing", "no such thing")
    assert (job["state"], job["attempt"]) == ("discarded", 3)
    assert job["last_error"] == "attempts exhausted (3): ValueError: no such thing"
    assert [(one["attempt"], one["outcome"], one["error_class"]) for one in job["attempts"]] == [
        (1, "failed", "ValueError"),
        (2, "failed", "ValueError"),
        (3, "failed", "ValueError"),
    ]
    assert "trial_actors.py" in job["attempts"][0]["traceback"]
    assert len(busy.crew.starts("failing")) == 3


def test_a_result_is_stored_as_it_was_returned(busy: Busy) -> None:
    values = [{"found": [1, "é", None]}, "text", 0, False, [], None]
    given = [add(busy.conn, "give", value) for value in values]
    assert [ended(busy.conn, job_id)["result"] for job_id in given] == values


def test_a_result_of_twenty_megabytes_completes_with_a_note_in_its_place(busy: Busy) -> None:
    job = busy.does("give", None, 20)
    assert job["state"] == "completed"
    assert "20,000,002 bytes" in job["result"]["error"]


RAISED = {
    "SystemExit": ("SystemExit", "SystemExit: 3"),
    "KeyboardInterrupt": ("KeyboardInterrupt", "KeyboardInterrupt: "),
    "MemoryError": ("MemoryError", "MemoryError: "),
    "RecursionError": ("RecursionError", "RecursionError: "),
    "unprintable": ("tests.trial_actors.Unprintable", "Unprintable"),
    "huge": ("ValueError", "ValueError: xxx"),
    "NUL": ("ValueError", "ValueError: a�b?c"),
}


def test_whatever_an_actor_raises_is_a_failed_attempt_and_the_threads_live_on(busy: Busy) -> None:
    failed = {add(busy.conn, "raise", kind): kind for kind in RAISED for _ in range(4)}
    for job_id, kind in failed.items():
        error_class, said = RAISED[kind]
        job = ended(busy.conn, job_id)
        assert job["state"] == "discarded"
        assert job["last_error"].startswith(f"attempts exhausted (1): {said}")
        assert len(job["last_error"].encode()) <= 8_192
        assert [(one["outcome"], one["error_class"]) for one in job["attempts"]] == [("failed", error_class)]
    together = [add(busy.conn, "run", "after-them", 0.5) for _ in range(4)]
    until(lambda: len(busy.crew.starts("after-them")) == 4)
    assert busy.crew.ends("after-them") == [], "fewer than four threads are left"
    assert {ended(busy.conn, job_id)["state"] for job_id in together} == {"completed"}


def test_a_discard_ends_with_its_reason(busy: Busy) -> None:
    job = busy.does("discard", "no such address")
    assert (job["state"], job["last_error"]) == ("discarded", "no such address")
    assert [one["outcome"] for one in job["attempts"]] == ["discarded"]


def test_an_outcome_that_cannot_be_judged_or_stored_ends_its_job_all_the_same(busy: Busy) -> None:
    odd = busy.does("retry", "soon")
    assert odd["state"] == "discarded"
    assert odd["last_error"].startswith("the outcome could not be judged: TypeError")
    kept = busy.does("evil")
    assert kept["state"] == "completed"
    assert "could not be stored" in kept["result"]["error"]
    assert busy.does("discard", {"code": 5})["last_error"] == "{'code': 5}"


def test_a_snooze_is_due_later_and_not_charged(busy: Busy) -> None:
    job_id = add(busy.conn, "snooze", 3_600)
    until(lambda: (jobs.load(busy.conn, job_id) or {})["started_at"] and state(busy.conn, job_id) == "pending")
    job = jobs.load(busy.conn, job_id) or {}
    assert (job["attempt"], job["attempts"]) == (0, [])
    assert 3_590 < (job["available_at"] - job["claimed_at"]).total_seconds() < 3_610


@pytest.mark.parametrize("actor", ["spin", "swallow", "query"])
def test_a_loop_and_a_statement_are_timed_out_at_their_limit(busy: Busy, actor: str) -> None:
    began = time.monotonic()
    job = busy.does(actor)
    assert 1 <= time.monotonic() - began < 5
    assert job["state"] == "discarded"
    assert job["last_error"].endswith("ran longer than its limit of 1 s")
    assert [one["outcome"] for one in job["attempts"]] == ["timed out"]


def test_a_row_that_somebody_has_locked_holds_up_nobody_else(busy: Busy) -> None:
    locked = add(busy.conn, "run", "locked", 0.5)
    until(lambda: busy.crew.starts("locked"))
    with busy.conn.transaction():
        busy.conn.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [locked])
        until(lambda: busy.crew.ends("locked"))
        with connect(busy.conn.info.dsn, name="posthouse tests") as other:
            assert ended(other, add(other, "run", "beside"))["state"] == "completed"
    assert ended(busy.conn, locked)["state"] == "completed"


def test_a_lock_on_the_register_of_workers_costs_no_lease(hired: Crew, conn: Conn) -> None:
    for _ in range(2):
        hired.start("quick", told=HASTY)
    job_id = add(conn, "run", "long", 5, max_attempts=1)
    until(lambda: hired.starts("long"))
    with conn.transaction():
        conn.execute("LOCK posthouse.workers IN ACCESS EXCLUSIVE MODE")
        until(lambda: hired.ends("long"))
    assert ended(conn, job_id)["state"] == "completed"
    assert len(hired.starts("long")) == 1


def test_rows_that_are_no_messages_are_discarded_and_the_good_ones_between_them_run(busy: Busy) -> None:
    whole = {"queue_name": "quick", "actor_name": "trial.run", "args": ["good"], "kwargs": {}, "options": {}}
    strange: list[Any] = [
        {}, [], "x", 5, None, "x" * 1_000_000,
        *({name: value for name, value in whole.items() if name != left} for left in whole if left != "queue_name"),
        {**whole, "args": {"a": 1}}, {**whole, "kwargs": []}, {**whole, "actor_name": 7},
    ]  # fmt: skip
    bad = [
        insert_text(busy.conn, json.dumps(whole).replace('["good"]', args))
        for args in ("[1e5000]", "[" * 6_000 + "]" * 6_000)
    ]
    for junk in strange:
        add(busy.conn, "run", "good")
        bad.append(insert(busy.conn, junk))
    for job in (ended(busy.conn, job_id) for job_id in bad):
        assert job["state"] == "discarded"
        assert job["last_error"].startswith("undecodable: ")
    until(lambda: len(busy.crew.ends("good")) == len(strange))


def test_options_that_dramatiq_takes_for_classes_cost_no_thread(busy: Busy) -> None:
    odd = {"actor_name": "trial.raise", "args": ["MemoryError"], "kwargs": {}, "options": {"throws": ["x"]}}
    for job_id in [insert(busy.conn, odd) for _ in range(8)]:
        assert ended(busy.conn, job_id)["state"] == "discarded"


def test_arguments_that_do_not_fit_the_actor_are_a_failed_attempt(busy: Busy) -> None:
    job = busy.does("snooze")
    assert "TypeError" in job["last_error"]


def test_a_job_for_an_unknown_actor_goes_back_uncharged_and_the_queue_goes_on(busy: Busy) -> None:
    unknown = [add(busy.conn, "later", "unknown", priority=-5) for _ in range(6)]
    assert busy.does("run", "beside-unknown")["state"] == "completed"
    for job in (jobs.load(busy.conn, job_id) or {} for job_id in unknown):
        assert (job["state"], job["attempt"], job["attempts"]) == ("pending", 0, [])
        assert (job["available_at"] - job["claimed_at"]).total_seconds() > 9
    assert 1 <= len(busy.worker.says("job.actor_unknown")) <= 6


def test_a_queue_never_has_more_in_flight_than_its_threads_in_a_process_for_all_queues(busy: Busy) -> None:
    together = [add(busy.conn, "slow", "one-by-one", 0.2, queue="single") for _ in range(4)]
    beside = [add(busy.conn, "run", "beside", 0.2) for _ in range(4)]
    assert [ended(busy.conn, job_id)["state"] for job_id in together + beside] == ["completed"] * 8
    lines = [line.split()[0] for line in busy.crew.lines("one-by-one")]
    assert lines == ["start", "end"] * 4


def test_a_process_uses_at_most_its_threads_and_three_connections(busy: Busy) -> None:
    asked = [add(busy.conn, "ask", 0.5) for _ in range(8)]
    most = 0
    while not all(state(busy.conn, job_id) == "completed" for job_id in asked):
        most = max(most, sessions(busy.conn))
    assert 4 < most <= 4 + 3


def test_a_session_of_a_worker_is_never_idle_in_a_transaction(busy: Busy) -> None:
    add(busy.conn, "run", "holds-nothing", 0.5)
    until(lambda: busy.crew.starts("holds-nothing"))
    query = """
        SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'posthouse%%'
          AND (state = 'idle in transaction' OR backend_xmin IS NOT NULL) AND pid <> pg_backend_pid()
    """
    assert busy.conn.execute(query).fetchall() == []


def test_junk_on_every_bell_disturbs_nobody(busy: Busy) -> None:
    job_id = add(busy.conn, "run", "undisturbed", 0.5)
    for payload in ("", "x" * 7_999, "{not json", '{"message_id": "x"}') * 20:
        for channel in ("posthouse_q_quick", "posthouse_events", "posthouse_q_nowhere"):
            busy.conn.execute("SELECT pg_notify(%s, %s)", [channel, payload])
    assert ended(busy.conn, job_id)["attempt"] == 1
    assert len(busy.crew.starts("undisturbed")) == 1
    assert busy.worker.says("consumer.disconnected") == []


def test_two_hundred_short_jobs_run_once_each_in_order_of_priority(busy: Busy) -> None:
    with busy.conn.transaction():
        short = [NewJob(queue="single", actor="trial.slow", args=["order"], priority=n % 2) for n in range(200)]
        jobs.enqueue_many(busy.conn, short)
    assert {ended(busy.conn, job.id)["state"] for job in short} == {"completed"}
    assert len(busy.crew.starts("order")) == 200


# Kills, and lost sessions.

HASTY = {"LEASE_S": "1", "CONTROL_INTERVAL_S": "0.3", "RESCUE_INTERVAL_S": "0.3"}


def test_a_long_job_among_brief_ones_holds_up_none_of_them(busy: Busy) -> None:
    brief = [NewJob(queue="quick", actor="trial.brief") for _ in range(1_000)]
    long = [NewJob(queue="quick", actor="trial.brief", args=("brief-ones-are-done",)) for _ in range(3)]
    with busy.conn.transaction():
        jobs.enqueue_many(busy.conn, [*brief[:600], *long, *brief[600:]])
    unfinished = "SELECT count(*) AS n FROM dramatiq.queue WHERE actor = 'trial.brief' AND finished_at IS NULL"
    until(lambda: busy.conn.execute(unfinished).fetchone() == {"n": len(long)})
    assert {state(busy.conn, job.id) for job in long} == {"running"}
    (busy.crew.folder / "brief-ones-are-done").touch()
    assert {ended(busy.conn, job.id)["state"] for job in long} == {"completed"}


def test_a_bell_is_heard_in_the_middle_of_another_queues_backlog(hired: Crew, conn: Conn) -> None:
    hired.start("quick", "single", told={"POLL_INTERVAL_S": "60", "AWAITED_POLL_INTERVAL_S": "60"})
    add(conn, "slow", "before", queue="single")
    until(lambda: hired.ends("before"))
    jobs.enqueue_many(conn, [NewJob(queue="quick", actor="trial.brief") for _ in range(20_000)])
    add(conn, "slow", "rung-for", queue="single")
    until(lambda: hired.ends("rung-for"))
    found = conn.execute("SELECT FROM dramatiq.queue WHERE queue_name = 'quick' AND state = 'queued' LIMIT 1")
    assert found.rowcount == 1, "the backlog was over before"


def test_the_job_of_a_killed_worker_runs_again_beside_it_and_completes_once(hired: Crew, conn: Conn) -> None:
    pair = hired.start_all(["quick"], ["quick"])
    job_id = add(conn, "run", "killed", 1.5)
    (pid,) = until(lambda: hired.starts("killed"))
    conn.execute("DELETE FROM posthouse.workers")
    (owner,) = (worker for worker in pair if int(pid) in {child.pid for child in worker.children()})
    owner.kill()
    job = ended(conn, job_id, 12)
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
    assert [one["outcome"] for one in job["attempts"]] == ["worker lost"]
    assert (len(hired.starts("killed")), len(hired.ends("killed"))) == (2, 1)


def test_a_process_without_a_free_thread_does_not_spin(hired: Crew, conn: Conn) -> None:
    worker = hired.start("quick", "single", threads=1)
    add(conn, "slow", "spinning", 2.5, queue="single")
    until(lambda: hired.starts("spinning"))
    (child,) = worker.children()
    before = sum(child.cpu_times()[:2])
    time.sleep(1.5)
    assert sum(child.cpu_times()[:2]) - before < 0.5


def test_two_processes_of_one_thread_share_two_long_jobs(hired: Crew, conn: Conn) -> None:
    hired.start("single", threads=1, processes=2)
    long = [add(conn, "slow", "shared", 1, queue="single") for _ in range(2)]
    until(lambda: len(hired.starts("shared")) == 2, 3)
    assert len(set(hired.starts("shared"))) == 2
    assert [ended(conn, job_id)["state"] for job_id in long] == ["completed"] * 2


def test_a_job_whose_workers_sessions_are_all_ended_twice_runs_once(hired: Crew, conn: Conn) -> None:
    pair = hired.start_all(["quick"], ["quick"])
    job_id = add(conn, "run", "cut", 4)
    until(lambda: hired.starts("cut"))
    for _ in range(2):
        end_sessions(conn)
        time.sleep(1.2)
    job = ended(conn, job_id)
    assert (job["state"], job["attempt"], job["crashes"], job["attempts"]) == ("completed", 1, 0, [])
    assert len(hired.starts("cut")) == 1
    assert all(worker.says("consumer.disconnected") for worker in pair)
    assert ended(conn, add(conn, "ask", 0.1))["state"] == "completed"


def test_a_job_longer_than_its_lease_runs_once(hired: Crew, conn: Conn) -> None:
    hired.start_all(["quick"], ["quick"])
    job_id = add(conn, "run", "long", 4.5)
    job = ended(conn, job_id)
    assert (job["attempt"], len(hired.starts("long"))) == (1, 1)


# Stops.


def test_a_stop_asked_for_twice_in_a_second_lets_a_running_job_end_and_gives_the_others_back(
    hired: Crew, conn: Conn
) -> None:
    worker = hired.start("single", threads=1)
    running = add(conn, "slow", "running", 2, queue="single")
    until(lambda: hired.starts("running"))
    waiting = [add(conn, "slow", "waiting", queue="single") for _ in range(20)]
    began = time.monotonic()
    os.killpg(worker.process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert worker.stop() == 0
    assert time.monotonic() - began < 6
    assert state(conn, running) == "completed"
    assert {state(conn, job_id) for job_id in waiting} == {"pending"}
    assert {(jobs.load(conn, job_id) or {})["attempt"] for job_id in waiting} == {0}
    assert hired.starts("waiting") == []
    assert worker.says("shutdown.complete")
    assert sessions(conn) == 0
    assert conn.execute("SELECT count(*) AS n FROM posthouse.workers").fetchone() == {"n": 0}


BRIEF = {"SHUTDOWN_GRACE_S": "1", "SHUTDOWN_TOTAL_S": "5"}


def test_a_stop_with_a_stuck_job_ends_in_its_budget_with_75_and_the_job_is_rescued(hired: Crew, conn: Conn) -> None:
    worker = hired.start("quick", told=BRIEF)
    job_id = add(conn, "run", "stuck", 25)
    until(lambda: hired.starts("stuck"))
    began = time.monotonic()
    assert worker.stop() == 75
    assert time.monotonic() - began < 7
    assert [line["job_id"] for line in worker.says("job.left_running")] == [job_id]
    assert state(conn, job_id) == "running"
    hired.start("quick")
    until(lambda: len(hired.starts("stuck")) == 2, 10)


def test_a_signal_a_while_later_ends_it_without_losing_the_job(hired: Crew, conn: Conn) -> None:
    worker = hired.start("quick")
    job_id = add(conn, "run", "hurried", 20)
    until(lambda: hired.starts("hurried"))
    worker.signal(signal.SIGTERM)
    time.sleep(1.3)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.ends() == 75
    assert time.monotonic() - began < 5
    assert state(conn, job_id) == "running"


def test_nothing_is_claimed_after_the_signal(hired: Crew, conn: Conn) -> None:
    jobs.enqueue_many(conn, [NewJob(queue="quick", actor="trial.run", args=["late", 0.01]) for _ in range(2_000)])
    worker = hired.start("quick")
    until(lambda: len(hired.starts("late")) > 20)
    worker.signal(signal.SIGTERM)
    (told,) = conn.execute("SELECT clock_timestamp() + interval '0.2 s' AS at").fetchall()
    assert worker.ends() == 0
    query = "SELECT count(*) AS n FROM dramatiq.queue WHERE claimed_at > %s"
    assert conn.execute(query, [told["at"]]).fetchone() == {"n": 0}
    assert jobs.depths(conn)[0]["running"] == 0


def test_a_child_whose_master_died_while_it_booted_does_not_stay(hired: Crew) -> None:
    worker = hired.start("quick", wait=False, told={"TRIAL_IMPORT_S": "1.5", **BRIEF})
    (child,) = until(worker.children)
    worker.process.kill()
    until(lambda: not alive(child), 15, "the orphan to go")


def test_children_whose_master_was_killed_stop_in_good_order(hired: Crew, conn: Conn) -> None:
    worker = hired.start("quick", processes=2)
    children = worker.children()
    assert len(children) == 2
    job_id = add(conn, "run", "orphan", 2)
    until(lambda: hired.starts("orphan"))
    worker.process.kill()
    until(lambda: not any(alive(child) for child in children), 10, "the children to stop")
    assert state(conn, job_id) == "completed"
    assert sessions(conn) == 0


def test_a_child_that_is_killed_takes_the_set_down_in_good_order(hired: Crew, conn: Conn) -> None:
    worker = hired.start("quick", processes=2)
    killed, sibling = worker.children()
    graceful = [add(conn, "run", "sibling", 2) for _ in range(8)]
    until(lambda: len(hired.starts("sibling")) == 8)
    killed.kill()
    assert worker.ends(15) != 0
    assert not alive(sibling)
    assert hired.ends("sibling") == [str(sibling.pid)] * 4
    assert [state(conn, job_id) for job_id in graceful].count("completed") == 4


def test_a_job_that_kills_its_process_three_times_is_discarded(hired: Crew, conn: Conn) -> None:
    fatal = add(conn, "die", "fatal")
    for starts in (1, 2, 3):
        hired.start("quick", wait=False, told=HASTY).ends(20)
        assert len(hired.starts("fatal")) == starts
    hired.start("quick", told=HASTY)
    job = ended(conn, fatal)
    assert (job["state"], job["last_error"], job["crashes"]) == ("discarded", "worker lost", 3)
    assert len(hired.starts("fatal")) == 3


# Boot.


@pytest.fixture(scope="module")
def refusals(
    admin: Conn, server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[int, str, str]]]:
    """Commands that must not come up, started together: exit code, the one line of our own, everything said."""
    there = server_url.replace("/postgres?", "/posthouse_template?")
    admin.execute("CREATE ROLE nobody_much LOGIN")
    cases: dict[str, tuple[str, dict[str, str]]] = {
        "bad setting": (there, {"LEASE_S": "soon"}),
        "budget": (there, {"MAX_CONNECTIONS": "50"}),
        "nobody answers": ("postgresql://me:hunter2@127.0.0.1:1/none", {"DB_START_WAIT_S": "1"}),
        "no database": ("", {}),
        "not migrated": (server_url, {}),
        "no URL": ("postgresql://[bad", {}),
        "no rights": (there.replace("postgres@", "nobody_much@"), {}),
        "no such database": (server_url.replace("/postgres?", "/nowhere?"), {}),
        "subscription": (there, {"TRIAL_BAD_SUBSCRIPTION": "1"}),
        "unknown queue": (there, {}),
    }
    with ExitStack() as stack:
        started = {}
        for name, (url, told) in cases.items():
            workers = stack.enter_context(crew(url, tmp_path_factory.mktemp("refused")))
            queue = "nowhere" if name == "unknown queue" else "quick"
            started[name] = workers.start(queue, wait=False, told=told)
        yield {name: refused(worker) for name, worker in started.items()}
    admin.execute("DROP ROLE nobody_much")


def refused(worker: Worker) -> tuple[int, str, str]:
    code = worker.ends(30)
    text = worker.log.read_text()
    assert "Traceback" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("posthouse: ")]
    return code, line, text


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        ("bad setting", 78, "LEASE_S: "),
        ("budget", 78, "half of MAX_CONNECTIONS=50 is 25"),
        ("nobody answers", 69, "the database does not answer: "),
        ("no database", 69, "make run"),
        ("not migrated", 78, "from 0001_dramatiq_pg on: run `python cli.py migrate`"),
        ("no such database", 69, "does not exist"),
        ("no URL", 78, "DATABASE_URL"),
        ("no rights", 78, "rights of the role"),
        ("subscription", 78, "actor trial.deaf subscribes to nobody.says"),
        ("unknown queue", 78, "queue 'nowhere' is not declared in QUEUES; declared: index, "),
    ],
)
def test_a_worker_that_cannot_work_says_why_in_one_line_and_by_its_exit_code(
    refusals: dict[str, tuple[int, str, str]], case: str, code: int, said: str
) -> None:
    actual, line, text = refusals[case]
    assert (actual, said in line) == (code, True), text
    assert "hunter2" not in text


def test_a_budget_refusal_shows_its_table(refusals: dict[str, tuple[int, str, str]]) -> None:
    _, _, text = refusals["budget"]
    assert "  sum" in text


def test_a_job_put_back_by_one_process_runs_on_one_that_knows_it(hired: Crew, conn: Conn) -> None:
    hired.start("quick")
    job_id = add(conn, "later", "known")
    until(lambda: (jobs.load(conn, job_id) or {})["claimed_at"])
    until(lambda: state(conn, job_id) == "pending")
    hired.workers[0].kill()
    hired.start("quick", told={"TRIAL_LATER": "1"})
    conn.execute("UPDATE dramatiq.queue SET available_at = now()")
    job = ended(conn, job_id)
    assert (job["state"], job["attempt"], len(hired.starts("known"))) == ("completed", 1, 1)


def test_a_signal_while_booting_leaves_no_process(hired: Crew) -> None:
    workers = [hired.start("quick", wait=False) for _ in range(6)]
    for worker in workers:
        time.sleep(0.25)
        worker.children()
        worker.signal(signal.SIGTERM)
    for worker in workers:
        worker.ends(15)
        assert worker.children() == []
