"""The acceptance list with whole worker processes, where no other file shows it; each test names its lines."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from middleware.capacity import STOCK_PER_THREAD
from outbox import controls, jobs
from outbox.db import Conn, connect
from outbox.jobs import NewJob
from tests import emptied
from tests.ledger import expire
from tests.proxies import Session, proxy
from tests.workers import HASTE, HOUSE, Crew, Worker, crew, until
from web.metrics import from_files

shared_url = emptied.shared_url

TRIAL = "tests.acceptance_trial"
THREADS = 4
#: Seconds of slack where a line of the list gives a time.
SLACK_S = 5
#: A dead worker's job has started again by then (FAILURES.md: RERUN).
RERUN_S = float(HASTE["LEASE_S"]) + float(HASTE["RESCUE_INTERVAL_S"]) + SLACK_S


@pytest.fixture(scope="module")
def conn(shared_url: str) -> Iterator[Conn]:
    with connect(shared_url, name="posthouse test") as connection:
        yield connection


@pytest.fixture(scope="module")
def settled(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """One worker, for all tests that leave it as it was."""
    with crew(shared_url, tmp_path_factory.mktemp("acceptance")) as workers:
        workers.start("quick", "single", threads=THREADS, actors=TRIAL)
        yield workers


@pytest.fixture(autouse=True)
def _nothing_waits(request: pytest.FixtureRequest, conn: Conn) -> Iterator[None]:
    """What a test leaves to do is not the next one's."""
    yield
    if "settled" in request.fixturenames:
        conn.execute("DELETE FROM dramatiq.queue WHERE state = 'queued'")


@pytest.fixture
def process(settled: Crew) -> psutil.Process:
    """That worker's process."""
    (child,) = settled.workers[0].children()
    return child


@pytest.fixture
def own(admin: Conn, database_url: str) -> Iterator[Conn]:
    """A connection to a database of the test's own."""
    with connect(database_url, name="posthouse test") as connection:
        yield connection


@pytest.fixture
def hired(database_url: str, tmp_path: Path) -> Iterator[Crew]:
    """Workers of the test's own, on its own database."""
    with crew(database_url, tmp_path) as workers:
        yield workers


def new(actor: str, *args: Any, **given: Any) -> NewJob:
    queue = "single" if actor in ("slow", "order") else "quick"
    return NewJob(**{"queue": queue, "actor": f"trial.{actor}", "args": args, **given})


def add(conn: Conn, actor: str, *args: Any, **given: Any) -> str:
    return jobs.enqueue(conn, new(actor, *args, **given)).id


def add_many(conn: Conn, *wanted: NewJob) -> list[str]:
    with conn.transaction():
        return [answer.id for answer in jobs.enqueue_many(conn, wanted)]


def shown(conn: Conn, job_id: str) -> dict[str, Any]:
    return jobs.load(conn, job_id) or {}


def state(conn: Conn, job_id: str) -> str:
    return str(shown(conn, job_id)["state"])


def ended(conn: Conn, job_id: str, seconds: float = 20) -> dict[str, Any]:
    until(lambda: state(conn, job_id) in ("completed", "discarded"), seconds, f"the end of {job_id}")
    return shown(conn, job_id)


def count(conn: Conn, where: str) -> int:
    found = conn.execute(f"SELECT count(*) AS n FROM dramatiq.queue WHERE {where}".encode()).fetchone()
    return int(found["n"]) if found else 0


def idle(conn: Conn) -> None:
    """Wait until nothing is left to do."""
    until(lambda: count(conn, "finished_at IS NULL") == 0, 40, "the last job's end")


def counted(workers: Crew, name: str) -> float:
    """What the processes' metric of that name adds up to."""
    families = from_files(workers.folder / "metrics")
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


@contextmanager
def moves(conn: Conn) -> Iterator[Callable[[], list[str]]]:
    """Audits every change of state; ends with what moved although it had ended."""
    conn.execute(
        """
        CREATE TABLE moves (move text);
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO moves VALUES (OLD.state || ' to ' || NEW.state);
            RETURN NULL;
        END $$;
        CREATE TRIGGER audit AFTER UPDATE ON dramatiq.queue
        FOR EACH ROW WHEN (OLD.state IN ('done', 'rejected')) EXECUTE FUNCTION audit();
        """
    )
    yield lambda: [row["move"] for row in conn.execute("SELECT move FROM moves")]
    conn.execute("DROP TABLE moves; DROP FUNCTION audit CASCADE")


# One worker: who produces, and in which order it starts.

PRODUCER = """
import json, sys
import dramatiq
from dramatiq_pg import PostgresBroker

dramatiq.set_broker(PostgresBroker(url=sys.argv[1]))

@dramatiq.actor(queue_name="quick", actor_name="trial.give")
def give(value=None, megabytes=0): ...

sent = [
    give.send("plain"),
    give.send(value={"keyword": [1, None]}),
    give.send_with_options(args=("options",), max_retries=3, time_limit=5_000, mark="kept", priority=7),
    give.send_with_options(args=("delayed",), delay=600),
    give.send_with_options(kwargs={"value": "both"}, delay=600, max_retries=1, mark=[1]),
    give.send("\\U0001f600" * 50_000),
]
print(json.dumps([message.message_id for message in sent]))
"""


def test_what_a_process_with_the_stock_broker_sends_runs_as_it_was_sent(
    settled: Crew, conn: Conn, shared_url: str
) -> None:
    """Line 6; F40 for the stock producer: 200 kB of four-byte characters."""
    command = [sys.executable, "-c", PRODUCER, shared_url]
    done = subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    found = [ended(conn, job_id) for job_id in json.loads(done.stdout)]
    results = ["plain", {"keyword": [1, None]}, "options", "delayed", "both", "\U0001f600" * 50_000]
    assert [job["result"] for job in found] == results
    assert {(job["state"], job["queue"], job["attempt"]) for job in found} == {("completed", "quick", 1)}
    assert [job["message"]["options"].get("mark") for job in found] == [None, None, "kept", None, [1], None]
    for delayed in found[3:5]:
        assert delayed["created_at"] < delayed["available_at"] <= delayed["claimed_at"]
        assert "eta" not in delayed["message"]["options"]


def test_jobs_start_by_priority_then_due_time(settled: Crew, conn: Conn) -> None:
    """Lines 11 and 12, as seen by the actors."""
    places = [(priority, late) for priority in (-2, 0, 5) for late in range(15)]
    controls.pause(conn, "single", by="test", reason="until all are there")
    for priority, late in random.sample(places, len(places)):
        job_id = add(conn, "order", "in-order", f"{priority}/{late}", priority=priority)
        due = "UPDATE dramatiq.queue SET available_at = now() - %s * interval '1 second' WHERE message_id = %s"
        conn.execute(due, [60 - late, job_id])
    controls.resume(conn, "single")
    until(lambda: len(settled.lines("in-order")) == len(places))
    names = [line.split()[0] for line in settled.lines("in-order")]
    assert names == [f"{priority}/{late}" for priority, late in places]


def test_an_urgent_job_is_among_the_next_to_start_though_two_thousand_wait(settled: Crew, conn: Conn) -> None:
    """Line 11: before it come at most those that this process has in hand."""
    add_many(conn, *(new("order", "urgency", "waiting", 0.004) for _ in range(2_000)))
    until(lambda: len(settled.lines("urgency")) > 40)
    add(conn, "order", "urgency", "urgent", priority=-1)
    before = len(settled.lines("urgency"))
    until(lambda: any(line.startswith("urgent") for line in settled.lines("urgency")))
    place = [line.split()[0] for line in settled.lines("urgency")].index("urgent")
    assert place - before <= STOCK_PER_THREAD + 1


def test_a_delayed_job_starts_between_its_due_time_and_the_next_poll(settled: Crew, conn: Conn) -> None:
    """Line 13."""
    ids = add_many(
        conn, *(new(actor, "delayed", delay_s=0.2 + number / 7) for number in range(8) for actor in ("run", "slow"))
    )
    found = [ended(conn, job_id) for job_id in ids]
    late_s = [(job["claimed_at"] - job["available_at"]).total_seconds() for job in found]
    assert min(late_s) >= 0
    assert max(late_s) < float(HASTE["POLL_INTERVAL_S"]) + SLACK_S


# One worker: how much it takes.


@contextmanager
def in_hand(conn: Conn) -> Iterator[Callable[[], int]]:
    """The most jobs of queue `quick` that were leased after any statement."""
    conn.execute(
        """
        CREATE TABLE leased (n bigint);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO leased SELECT count(*) FROM dramatiq.queue WHERE state = 'consumed' AND queue_name = 'quick';
            RETURN NULL;
        END $$;
        CREATE TRIGGER look AFTER UPDATE ON dramatiq.queue FOR EACH STATEMENT EXECUTE FUNCTION look();
        """
    )
    yield lambda: int(conn.execute("SELECT max(n) AS n FROM leased").fetchone()["n"])  # type: ignore[index]
    conn.execute("DROP FUNCTION look CASCADE; DROP TABLE leased")


def test_of_slow_jobs_a_process_takes_its_threads_and_of_short_ones_a_stock(settled: Crew, conn: Conn) -> None:
    """Lines 20 to 22: the backlog of slow jobs stays queued in the table, though short ones came before them."""
    add_many(conn, *(new("run", "warm", 0.3) for _ in range(8)))
    until(lambda: len(settled.ends("warm")) == 8)
    with in_hand(conn) as most:
        add_many(conn, *(new("run", "slow", 0.3) for _ in range(12)))
        until(lambda: len(settled.starts("slow")) == THREADS)
        assert count(conn, "state = 'queued'") >= 12 - THREADS - len(settled.ends("slow"))
        idle(conn)
        assert most() == THREADS
    with in_hand(conn) as most:
        add_many(conn, *(new("give") for _ in range(2_000)))
        idle(conn)
        assert THREADS < most() <= THREADS + STOCK_PER_THREAD * THREADS


def test_many_outcomes_share_a_commit_under_load(settled: Crew, conn: Conn) -> None:
    """Line 25, by the server's own count."""

    def commits() -> int:
        conn.execute("SELECT pg_stat_clear_snapshot()")
        query = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        return int(conn.execute(query).fetchone()["xact_commit"])  # type: ignore[index]

    add_many(conn, *(new("give") for _ in range(300)))
    idle(conn)
    # A session tells what it has done within a second of being idle.
    time.sleep(1.2)
    before = commits()
    add_many(conn, *(new("give") for _ in range(5_000)))
    until(lambda: len(conn.execute("SELECT FROM dramatiq.queue WHERE finished_at IS NULL LIMIT 1").fetchall()) == 0, 60)
    time.sleep(1.2)
    assert (commits() - before) / 5_000 < 0.2


# One worker: its memory.


def test_jobs_due_next_year_stay_in_the_table(settled: Crew, conn: Conn, process: psutil.Process) -> None:
    """F33, with a tenth of its rows."""
    add(conn, "give")
    idle(conn)
    before = process.memory_info().rss
    conn.execute(
        """
        INSERT INTO dramatiq.queue (message_id, queue_name, message, available_at, created_at)
        SELECT id, 'quick', jsonb_build_object('message_id', id, 'queue_name', 'quick', 'actor_name', 'trial.give',
               'args', '[]'::jsonb, 'kwargs', '{}'::jsonb, 'options', '{}'::jsonb), now() + interval '1 year', now()
        FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, 50000)) AS ids
        """
    )
    for _ in range(20):
        assert ended(conn, add(conn, "give"))["state"] == "completed"
        time.sleep(0.05)
    assert process.memory_info().rss - before < 10_000_000
    assert count(conn, "state = 'queued' AND attempt = 0") == 50_000


@pytest.mark.parametrize("actor", ["hog", "hogs"])
def test_what_a_failed_job_had_in_hand_is_let_go(
    settled: Crew, conn: Conn, process: psutil.Process, actor: str
) -> None:
    """F34: kept, it would be 2 GB; each is large enough for the allocator to give it back at once."""

    def fail(times: int) -> int:
        ids = add_many(conn, *(new(actor, 33) for _ in range(times)))
        idle(conn)
        assert {job["state"] for job in map(shown, [conn] * times, ids)} == {"discarded"}
        return int(process.memory_info().rss)

    before = fail(8)
    assert fail(60) - before < 50_000_000


# One worker: failures and retries.


def test_a_retry_is_never_before_its_first_delay_nor_long_after(settled: Crew, conn: Conn) -> None:
    """F69: a first delay of 1 s, at most 5 s, for 200 jobs; as their second attempts started."""
    ids = add_many(conn, *(new("within") for _ in range(200)))
    idle(conn)
    waits = conn.execute(
        """
        SELECT extract(epoch FROM second.started_at - first.ended_at)::double precision AS seconds
        FROM posthouse.attempts first
        JOIN posthouse.attempts second ON second.job_id = first.job_id AND second.attempt = 2
        WHERE first.attempt = 1 AND first.job_id = ANY (%s::uuid[])
        """,
        [ids],
    ).fetchall()
    assert len(waits) == 200
    # The history is written a moment after the due time was.
    assert min(wait["seconds"] for wait in waits) >= 0.99
    assert max(wait["seconds"] for wait in waits) <= 5


def test_jobs_that_fail_together_come_back_spread_over_a_tenth_of_their_delay(settled: Crew, conn: Conn) -> None:
    """F70: of 500 with a delay of minutes no second gets more than 15 %.

    A tenth of a delay of 1 s spreads nothing: there the queue's threads are what keeps them apart.
    """
    ids = add_many(conn, *(new("later-on") for _ in range(500)))
    until(lambda: count(conn, "actor = 'trial.later-on' AND last_error IS NOT NULL") == 500)
    query = "SELECT available_at FROM dramatiq.queue WHERE message_id = ANY (%s::uuid[])"
    seconds = [int(found["available_at"].timestamp()) for found in conn.execute(query, [ids])]
    assert max(seconds.count(second) for second in set(seconds)) <= 75


def test_a_rescue_that_could_not_write_goes_on_once_it_can(settled: Crew, conn: Conn) -> None:
    """F17: nobody leads, so whoever fails at it has nothing to give back."""
    lost = add(conn, "give", queue="nobody")
    jobs.claim(conn, {"nobody": 1}, worker_id=lost, lease_s=9_999)
    conn.execute("ALTER TABLE posthouse.attempts RENAME TO hidden")
    try:
        expire(conn, lost)
        until(lambda: settled.workers[0].says("control.disconnected"))
        assert count(conn, "state = 'consumed'") == 1
    finally:
        conn.execute("ALTER TABLE posthouse.hidden RENAME TO attempts")
    until(lambda: state(conn, lost) == "retryable", RERUN_S)


def test_two_hundred_jobs_of_an_actor_that_one_of_two_workers_knows_all_run_on_that_one(
    settled: Crew, conn: Conn
) -> None:
    """Line 40; F73, F81."""
    ids = add_many(conn, *(new("later", "known") for _ in range(200)))
    until(lambda: counted(settled, "posthouse_unknown_actor_total") >= THREADS)
    waiting = [shown(conn, job_id) for job_id in ids]
    assert {(job["state"], job["attempt"]) for job in waiting} <= {("pending", 0), ("running", 1)}
    knowing = settled.start("quick", told={"TRIAL_LATER": "1"})
    try:
        # What was put back is due in ten seconds; it need not be waited for.
        again = "UPDATE dramatiq.queue SET available_at = now() WHERE state = 'queued'"
        until(lambda: conn.execute(again).rowcount == 0 and len(settled.starts("known")) == 200)
        assert set(settled.starts("known")) == {str(child.pid) for child in knowing.children()}
        idle(conn)
        found = [shown(conn, job_id) for job_id in ids]
        assert {(job["state"], job["attempt"], len(job["attempts"])) for job in found} == {("completed", 1, 0)}
    finally:
        knowing.kill()
    for worker in settled.workers:
        assert len(worker.says("job.actor_unknown")) <= 2


# Two workers: leases.

#: Six of these leases are nine seconds.
BRIEF = {"LEASE_S": "1.5", "CONTROL_INTERVAL_S": "0.3", "RESCUE_INTERVAL_S": "0.3"}
BRIEF_RERUN_S = 1.5 + 0.3 + SLACK_S


@dataclass
class Pair:
    """Two workers, and the way to tell them apart."""

    crew: Crew
    conn: Conn

    @property
    def workers(self) -> list[Worker]:
        return [worker for worker in self.crew.workers if worker.process.poll() is None]

    def owner(self, name: str) -> Worker:
        """The worker that started the job called *name* last."""
        pid = int(until(lambda: self.crew.starts(name))[-1])
        return next(worker for worker in self.workers if pid in {child.pid for child in worker.children()})


@pytest.fixture(scope="module")
def twins(admin: Conn, server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A database of their own, and as many workers as are left of them."""
    admin.execute("CREATE DATABASE twins TEMPLATE posthouse_template")
    url = server_url.replace("/postgres?", "/twins?")
    with crew(url, tmp_path_factory.mktemp("twins")) as workers, connect(url, name="posthouse test") as conn:
        yield Pair(workers, conn)
    admin.execute("DROP DATABASE twins WITH (FORCE)")


@pytest.fixture
def pair(twins: Pair) -> Pair:
    """Both of them."""
    missing = [twins.crew.start("quick", actors=TRIAL, told=BRIEF, wait=False) for _ in range(2 - len(twins.workers))]
    for worker in missing:
        worker.up()
    return twins


def test_a_job_of_six_leases_runs_once_though_its_worker_is_told_to_stop_at_the_third(pair: Pair) -> None:
    """Line 30; F03, F05, F07: renewals reach the row in time and go on to the end of the last job."""
    began = time.monotonic()
    job_id = add(pair.conn, "run", "six", 9)
    owner, left_s = pair.owner("six"), []
    query = """
        SELECT extract(epoch FROM lease_until - clock_timestamp())::double precision AS s FROM dramatiq.queue
        WHERE message_id = %s AND state = 'consumed'
    """
    while found := pair.conn.execute(query, [job_id]).fetchone():
        left_s.append(found["s"])
        if time.monotonic() - began > 4.5 and not owner.says("shutdown.started"):
            owner.signal(signal.SIGTERM)
            until(lambda: owner.says("shutdown.started"))
        time.sleep(0.05)
    assert owner.ends() == 0
    job = shown(pair.conn, job_id)
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 1, 0)
    assert len(pair.crew.starts("six")) == len(pair.crew.ends("six")) == 1
    assert min(left_s) > 0
    # A busy machine may be late once.
    assert sorted(left_s)[len(left_s) // 20] > 1.5 / 3


def test_what_a_killed_worker_had_in_hand_starts_beside_it_with_the_register_emptied(pair: Pair) -> None:
    """Lines 31 and 33; F10, F12, F14."""
    names = [f"killed-{number}" for number in range(4)]
    ids = {name: add(pair.conn, "patient", name) for name in names}
    until(lambda: all(pair.crew.starts(name) for name in names))
    owner = pair.owner(names[0])
    lost = [name for name in names if pair.owner(name) is owner]
    pair.conn.execute("DELETE FROM posthouse.workers")
    owner.kill()
    pair.conn.execute("DELETE FROM posthouse.workers")
    until(lambda: all(len(pair.crew.starts(name)) == 2 for name in lost), BRIEF_RERUN_S)
    for name in names:
        (pair.crew.folder / f"{name}.done").touch()
    found = {name: ended(pair.conn, job_id) for name, job_id in ids.items()}
    assert {job["state"] for job in found.values()} == {"completed"}
    assert [name for name in names if found[name]["crashes"] == 1] == lost
    assert all(len(pair.crew.ends(name)) == 1 for name in names)


def test_a_job_that_ended_and_whose_worker_was_killed_before_it_was_written_runs_again(pair: Pair) -> None:
    """Line 27: at least once."""
    job_id = add(pair.conn, "run", "unwritten", 0.3)
    owner = pair.owner("unwritten")
    with pair.conn.transaction():
        pair.conn.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [job_id])
        until(lambda: pair.crew.ends("unwritten"))
        owner.kill()
        nobody_waits(pair.conn)
    job = ended(pair.conn, job_id)
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
    assert len(pair.crew.ends("unwritten")) == 2


def test_a_worker_that_was_stopped_past_its_lease_ends_nothing_that_another_has_ended(pair: Pair) -> None:
    """Lines 28 and 32; F06: stopped between finish and settle; one end, the late result refused and counted."""
    job_id = add(pair.conn, "run", "frozen", 0.3)
    (frozen,) = pair.owner("frozen").children()
    try:
        with pair.conn.transaction():
            pair.conn.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [job_id])
            until(lambda: pair.crew.ends("frozen"))
            frozen.suspend()
            nobody_waits(pair.conn)
        first = ended(pair.conn, job_id)
        before = counted(pair.crew, "posthouse_lease_lost_total")
    finally:
        frozen.resume()
    until(lambda: counted(pair.crew, "posthouse_lease_lost_total") == before + 1)
    job = shown(pair.conn, job_id)
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
    assert (job["finished_at"], [one["outcome"] for one in job["attempts"]]) == (first["finished_at"], ["worker lost"])


def nobody_waits(conn: Conn) -> None:
    """Wait for sessions that wait for a lock: they outlive their process, and would write what they were told to."""
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    until(lambda: not conn.execute(query).fetchall())


# Workers of their own.


def test_two_long_jobs_are_shared_though_short_ones_came_before_them(hired: Crew, own: Conn) -> None:
    """Line 19; F68: what a process has in stock behind a long job goes to whoever has a free thread."""
    pair = [hired.start("single", threads=1, actors=TRIAL, wait=False) for _ in range(2)]
    for worker in pair:
        worker.up()
    add_many(own, *(new("order", "warm", "short") for _ in range(400)))
    idle(own)
    add_many(own, *(new("slow", "long", 30) for _ in range(2)))
    until(lambda: len(set(hired.starts("long"))) == 2, 1 + SLACK_S)


def test_the_neighbours_of_a_job_that_kills_its_process_three_times_complete(hired: Crew, own: Conn) -> None:
    """Line 36."""
    neighbours = [new("run", "neighbour", 0.2) for _ in range(2)]
    fatal, *beside = add_many(own, new("die", "fatal"), *neighbours)
    while state(own, fatal) != "discarded":
        worker = hired.start("quick", threads=THREADS, wait=False, told=BRIEF)
        until(lambda worker=worker: worker.process.poll() is not None or state(own, fatal) == "discarded", 40)  # type: ignore[misc]
    assert (shown(own, fatal)["last_error"], len(hired.starts("fatal"))) == ("worker lost", 3)
    assert [ended(own, job_id)["state"] for job_id in beside] == ["completed"] * 2


def test_five_deploys_charge_nobody(hired: Crew, own: Conn) -> None:
    """Line 37: neither what ends in its grace, nor what is asked to stop, nor what was waiting."""
    told = {"SHUTDOWN_GRACE_S": "0.5", "SHUTDOWN_TOTAL_S": "10"}
    patient = add(own, "patient", "patient", priority=-1)
    worker = hired.start("quick", actors=TRIAL, told=told)
    ids = []
    for deploy in range(1, 6):
        ids += add_many(own, *(new("run", "short", 0.02) for _ in range(40)))
        until(lambda deploy=deploy: len(hired.starts("patient")) == deploy)  # type: ignore[misc]
        successor = hired.start("quick", actors=TRIAL, told=told, wait=False)
        if deploy == 3:
            successor.up()
        assert worker.stop() == 0
        worker = successor
    worker.up()
    (hired.folder / "patient.done").touch()
    assert ended(own, patient)["state"] == "completed"
    idle(own)
    found = [shown(own, job_id) for job_id in [patient, *ids]]
    assert {(job["state"], job["attempt"], job["crashes"], len(job["attempts"])) for job in found} == {
        ("completed", 1, 0, 0)
    }
    assert (len(hired.starts("short")), len(hired.starts("patient"))) == (200, 6)


def test_slow_writes_of_the_ends_and_a_restart_among_them_run_nothing_twice(hired: Crew, own: Conn) -> None:
    """F01."""
    own.execute(
        """
        CREATE FUNCTION drag() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF coalesce(current_setting('drag.done', true), '') = '' THEN
                PERFORM pg_sleep(0.15), set_config('drag.done', 'yes', true);
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER drag BEFORE UPDATE ON dramatiq.queue
        FOR EACH ROW WHEN (NEW.state IN ('done', 'rejected')) EXECUTE FUNCTION drag();
        """
    )
    with moves(own) as moved:
        add_many(own, *(new("run", "short", 0.05) for _ in range(150)))
        first = hired.start("quick", threads=8, processes=2)
        until(lambda: len(hired.starts("short")) >= 60)
        assert first.stop(25) == 0
        assert count(own, "state = 'consumed'") == 0
        hired.start("quick", threads=8)
        idle(own)
        assert moved() == []
    assert (len(hired.starts("short")), len(hired.ends("short"))) == (150, 150)
    assert own.execute("SELECT FROM posthouse.attempts").fetchall() == []


def test_a_purge_goes_by_small_batches_and_stops_between_them(hired: Crew, own: Conn) -> None:
    """F35, by the shipped actor."""
    own.execute(
        """
        INSERT INTO dramatiq.queue (message_id, queue_name, state, message, available_at, created_at, finished_at)
        SELECT gen_random_uuid(), 'quick', 'done', '{}', now(), now(), now() - interval '2 days'
        FROM generate_series(1, 60000);
        CREATE TABLE batches (n bigint);
        CREATE FUNCTION batch() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO batches SELECT count(*) FROM gone;
            PERFORM pg_sleep(0.1);
            RETURN NULL;
        END $$;
        CREATE TRIGGER batch AFTER DELETE ON dramatiq.queue
        REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION batch();
        """
    )

    def batches() -> list[int]:
        return [row["n"] for row in own.execute("SELECT n FROM batches")]

    worker = hired.start("maintenance", threads=1, actors="actors", told={"LOG_FORMAT": "json"})
    purge = jobs.enqueue(own, NewJob(queue="maintenance", actor="maintenance.jobs_retention")).id
    (child,) = worker.children()
    until(lambda: len(batches()) >= 2)
    before = child.memory_info().rss
    until(lambda: len(batches()) >= 10)
    assert child.memory_info().rss - before < 20_000_000
    assert worker.stop(SLACK_S) == 0
    assert set(batches()) == {1_000}
    assert len(batches()) < 60
    assert state(own, purge) == "completed"


# Behind a proxy.


@dataclass
class Unlucky(Session):
    """Every other answer to a claim is the last thing that its session would have heard, as often as *cuts* says."""

    cuts: ClassVar[int] = 0
    spared: ClassVar[bool] = False
    claims: bool = False

    def lets_through(self, message: bytes) -> bool:
        kind = type(self)
        if not self.claims and kind.cuts and message.startswith(b"D") and b"actor_name" in message:
            self.claims, kind.spared = True, not kind.spared
        doomed = self.claims and not kind.spared
        if message.startswith(b"Z"):
            self.claims = False
            if doomed:
                kind.cuts -= 1
                raise ConnectionResetError
        return not doomed and super().lets_through(message)


def test_of_fifty_claims_that_were_never_heard_of_every_job_runs_once(
    database_url: str, own: Conn, tmp_path: Path
) -> None:
    """F08: committed, answered, and cut before the answer came."""
    Unlucky.cuts = 50
    with proxy(database_url, Unlucky) as way, crew(way.url, tmp_path) as workers:
        add_many(own, *(new("run", "unheard", 0.06) for _ in range(400)))
        worker = workers.start("quick", threads=THREADS, told={"LEASE_S": "20", "CONTROL_INTERVAL_S": "1"})
        until(lambda: Unlucky.cuts == 0, 60)
        idle(own)
        assert (len(workers.starts("unheard")), len(workers.ends("unheard"))) == (400, 400)
        assert count(own, "state = 'done' AND attempt = 1 AND crashes = 0") == 400
        assert sum(line["count"] for line in worker.says("jobs.released")) >= 50


@dataclass
class Held(Session):
    """Passes nothing on while *held*, not even a new session's first word."""

    held: ClassVar[bool] = False

    def lets_through(self, message: bytes) -> bool:
        while type(self).held:
            time.sleep(0.02)
        return super().lets_through(message)


def test_a_process_that_was_cut_off_for_three_leases_works_again_by_itself(
    database_url: str, own: Conn, tmp_path: Path
) -> None:
    """F16: what it had in hand meanwhile is nobody's; it loses that, and nothing else."""
    with proxy(database_url, Held) as way, crew(way.url, tmp_path) as workers, moves(own) as moved:
        worker = workers.start("quick", told=BRIEF)
        (child,) = worker.children()
        job_id = add(own, "run", "alone", 1)
        until(lambda: workers.starts("alone"))
        Held.held = True
        try:
            time.sleep(3 * 1.5)
            assert workers.ends("alone")
            assert state(own, job_id) == "running"
        finally:
            Held.held = False
        job = ended(own, job_id)
        assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
        assert ended(own, add(own, "run", "after"))["state"] == "completed"
        fresh = "SELECT FROM posthouse.workers WHERE pid = %s AND seen_at > now() - interval '1 second'"
        until(lambda: own.execute(fresh, [child.pid]).fetchall())
        assert moved() == []


# The storm.


def test_after_random_kills_stops_and_freezes_nothing_is_left_running(hired: Crew, own: Conn) -> None:
    """F18; F71: nor is anything overdue."""
    seed = random.randrange(1_000_000)
    dice = random.Random(seed)
    ids: dict[str, str] = {}
    with moves(own) as moved:
        workers = [hired.start("quick", threads=2, told=BRIEF, wait=False) for _ in range(2)]
        for turn in range(6):
            names = [f"storm-{turn}-{number}" for number in range(8)]
            ids |= zip(names, add_many(own, *(new("linger", name, 0.4) for name in names)), strict=True)
            time.sleep(0.7)
            place = dice.randrange(2)
            match dice.choice(["kill", "stop", "freeze"]):
                case "kill":
                    workers[place].kill()
                case "stop":
                    workers[place].stop(25)
                case _:
                    with frozen(workers[place]):
                        time.sleep(1.8)
            if workers[place].process.poll() is not None:
                workers[place] = hired.start("quick", threads=2, told=BRIEF, wait=False)
        workers[place].up()
        until(
            lambda: count(own, "state = 'consumed' AND lease_until < clock_timestamp()") == 0, BRIEF_RERUN_S, str(seed)
        )
        idle(own)
        assert moved() == [], seed
    found = {name: shown(own, job_id) for name, job_id in ids.items()}
    assert {job["state"] for job in found.values() if job["crashes"] < 3} == {"completed"}, seed
    assert all(len(hired.starts(name)) <= job["attempt"] for name, job in found.items()), seed


@contextmanager
def frozen(worker: Worker) -> Iterator[None]:
    children = worker.children()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.suspend()
    yield
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.resume()
