"""The connections of a worker: how many, how quiet, and what becomes of them when they are cut or fall silent.

Lines 57 and 58; F36, F37, F39, F42, F43, F47, F49, F50, F54, F56. One worker serves all tests that leave it as it was.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from middleware.watchdog import EXIT_STUCK
from outbox import jobs
from outbox.db import Conn, Database, connect
from outbox.jobs import NewJob
from tests import emptied
from tests.conftest import DATA_DIR
from tests.proxies import Proxy, proxy
from tests.workers import Crew, Worker, crew, until

shared_url = emptied.shared_url

#: A bell that is not heard costs a minute.
BY_BELL = {"POLL_INTERVAL_S": "60", "AWAITED_POLL_INTERVAL_S": "60", "RELAY_SWEEP_S": "60"}
THREADS = 4


@pytest.fixture(scope="module")
def conn(shared_url: str) -> Iterator[Conn]:
    with connect(shared_url, name="posthouse test") as connection:
        yield connection


@pytest.fixture(scope="module")
def hired(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew(shared_url, tmp_path_factory.mktemp("connections")) as workers:
        yield workers


@pytest.fixture(scope="module")
def rung(hired: Crew) -> Worker:
    """A worker that hears of its jobs by the bell alone."""
    return hired.start("quick", "single", threads=THREADS, told=BY_BELL)


def add(conn: Conn, actor: str, *args: Any, **given: Any) -> str:
    return jobs.enqueue(conn, NewJob(queue="quick", actor=f"trial.{actor}", args=args, **given)).id


def ring(conn: Conn, payload: str = "") -> None:
    """By hand: a producer's own bell may be silent for a moment."""
    conn.execute("SELECT pg_notify('posthouse_q_quick', %s)", [payload])


def sessions(conn: Conn, name: str = "posthouse%") -> list[dict[str, Any]]:
    """The sessions of workers on this database, by application name."""
    query = """
        SELECT * FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE %s AND application_name NOT LIKE 'posthouse test%%'
    """
    return conn.execute(query, [name]).fetchall()


def unfinished(conn: Conn) -> int:
    return len(conn.execute("SELECT FROM dramatiq.queue WHERE finished_at IS NULL").fetchall())


def states(conn: Conn, ids: list[str]) -> set[str]:
    return {(jobs.load(conn, job_id) or {})["state"] for job_id in ids}


def test_a_listener_that_was_cut_listens_again(rung: Worker, hired: Crew, conn: Conn) -> None:
    listened = len(rung.says("consumer.listening"))
    (before,) = sessions(conn, "posthouse queue")
    conn.execute("SELECT pg_terminate_backend(%s)", [before["pid"]])
    until(lambda: [one for one in sessions(conn, "posthouse queue") if one["pid"] != before["pid"]])
    until(lambda: len(rung.says("consumer.listening")) > listened)
    add(conn, "run", "after-the-cut")
    time.sleep(0.1)
    ring(conn)
    until(lambda: hired.ends("after-the-cut"), 10, "the bell")


def test_bursts_of_jobs_between_claims_and_settles_all_ring(rung: Worker, hired: Crew, conn: Conn) -> None:
    """A notification that comes while the connection is busy is not lost (F39)."""
    total = 0
    for burst in range(40):
        for _ in range(random.randint(1, 3)):
            add(conn, "run", "bursts")
            total += 1
        ring(conn)
        time.sleep(random.uniform(0, 0.02) * (burst % 3))
    until(lambda: len(hired.ends("bursts")) == total, 10, "the bells")


def test_with_all_threads_busy_notifications_are_drained(rung: Worker, hired: Crew, conn: Conn) -> None:
    """Neither does the queue of notifications fill up (F42) nor is the vacuum horizon held (F43)."""
    for _ in range(THREADS):
        add(conn, "run", "occupied", 2)
    until(lambda: len(hired.starts("occupied")) == THREADS)
    conn.execute("SELECT pg_notify('posthouse_q_quick', n::text) FROM generate_series(1, 20000) n")

    def drained() -> bool:
        (listener,) = sessions(conn, "posthouse queue")
        usage = conn.execute("SELECT pg_notification_queue_usage() AS share").fetchone()
        resting = (listener["state"], listener["wait_event"], listener["backend_xmin"]) == ("idle", "ClientRead", None)
        return resting and usage == {"share": 0.0}

    until(drained, 5)
    assert hired.ends("occupied") == []
    until(lambda: len(hired.ends("occupied")) == THREADS)


def test_junk_at_a_hundred_a_second_starts_nothing_twice(rung: Worker, hired: Crew, conn: Conn) -> None:
    before = len(rung.says("consumer.disconnected"))
    running = [add(conn, "run", "pestered", 0.5) for _ in range(8)]
    for payload in ("", "x" * 7_999, "{not json", '{"message_id": "00000000-0000-0000-0000-000000000000"}') * 25:
        ring(conn, payload)
        time.sleep(0.01)
    until(lambda: states(conn, running) == {"completed"})
    assert len(hired.starts("pestered")) == 8
    assert len(rung.says("consumer.disconnected")) == before


def test_jobs_that_use_the_database_and_jobs_that_fail_in_it_leak_no_connection(rung: Worker, conn: Conn) -> None:
    def work(count: int) -> None:
        with conn.transaction():
            for number in range(count):
                add(conn, "ask", "no number" if number % 2 else 0)
        ring(conn)
        until(lambda: unfinished(conn) == 0, 30)

    work(20)
    before = len(sessions(conn))
    work(400)
    assert abs(len(sessions(conn)) - before) <= 1


def test_reconnects_leak_no_file(rung: Worker, hired: Crew, conn: Conn) -> None:
    (process,) = rung.children()
    baseline = process.num_fds()
    for _ in range(6):
        pids = {one["pid"] for one in sessions(conn)}
        conn.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::integer[]) AS t (pid)", [list(pids)])
        until(lambda pids=pids: {one["pid"] for one in sessions(conn, "posthouse queue")} - pids, 10)  # type: ignore[misc]
        add(conn, "ask", 0)
        ring(conn)
        until(lambda: unfinished(conn) == 0)
    assert abs(process.num_fds() - baseline) <= 3


def test_after_many_errors_in_a_row_every_thread_works_again(rung: Worker, hired: Crew, conn: Conn) -> None:
    """There is no number of errors after which anything retires (F56)."""
    before = len(rung.says("consumer.disconnected"))
    conn.execute("ALTER TABLE dramatiq.queue RENAME TO hidden")
    try:
        ring(conn)
        until(lambda: len(rung.says("consumer.disconnected")) >= before + 5, 20)
    finally:
        conn.execute("ALTER TABLE dramatiq.hidden RENAME TO queue")
    for _ in range(THREADS):
        add(conn, "run", "recovered", 0.7)
    until(lambda: len(hired.starts("recovered")) == THREADS)
    assert hired.ends("recovered") == [], "fewer threads than before"
    until(lambda: len(hired.ends("recovered")) == THREADS)


def test_a_lock_that_a_person_holds_on_the_queue_is_not_waited_for_for_ever(
    rung: Worker, hired: Crew, conn: Conn, shared_url: str
) -> None:
    with connect(shared_url, name="posthouse tests") as person, person.transaction():
        person.execute("LOCK dramatiq.queue IN ACCESS EXCLUSIVE MODE")
        before = len(rung.says("consumer.disconnected"))
        ring(conn)
        until(lambda: len(rung.says("consumer.disconnected")) > before)
    add(conn, "run", "unlocked")
    until(lambda: hired.ends("unlocked"), 15)


# Workers of their own.


@pytest.fixture
def other(database_url: str, tmp_path: Path) -> Iterator[Crew]:
    with crew(database_url, tmp_path) as workers:
        yield workers


@pytest.fixture
def told_of(database_url: str) -> Iterator[Conn]:
    with connect(database_url, name="posthouse test") as connection:
        yield connection


@pytest.mark.parametrize("queues", [("quick",), ()], ids=["one queue", "all queues"])
def test_a_worker_uses_its_threads_and_three_connections_idle_and_busy(
    other: Crew, told_of: Conn, queues: tuple[str, ...]
) -> None:
    other.start(*queues, threads=THREADS)
    seen = [len(sessions(told_of))]
    for _ in range(4 * THREADS):
        add(told_of, "ask", 0.3)
    while unfinished(told_of):
        seen.append(len(sessions(told_of)))
    assert seen[0] <= 3
    assert THREADS < max(seen) <= THREADS + 3


#: What README.md says, not the haste of the other tests.
AT_LEISURE = {"LEASE_S": "20", "CONTROL_INTERVAL_S": "5", "RESCUE_INTERVAL_S": "5", "POLL_INTERVAL_S": "1"}


def test_a_queue_that_nobody_awaits_costs_less_than_two_queries_a_second(other: Crew, told_of: Conn) -> None:
    """Counted by the server, which logs each statement (line 58)."""
    database = told_of.info.dbname
    told_of.execute(f"ALTER DATABASE {database} SET log_statement = 'all'".encode())
    other.start("tasks", threads=1, told=AT_LEISURE)
    log = DATA_DIR / "postgres" / "server.log"
    time.sleep(1)
    said_before, began = log.stat().st_size, time.monotonic()
    time.sleep(4)
    seconds = time.monotonic() - began
    with log.open("rb") as file:
        file.seek(said_before)
        said = file.read().decode(errors="replace")
    statements = re.findall(r"\] posthouse [a-z]+ LOG:  (?:statement|execute)", said)
    assert len(statements) > 3, "the server logs nothing"
    assert len(statements) / seconds < 2


def test_the_kernel_is_asked_to_miss_a_peer_that_is_gone(database_url: str) -> None:
    """F37: without a packet for 10 s it asks three times; what it sent waits for 20 s."""
    with connect(database_url, name="posthouse tests") as conn:
        told = conn.info.get_parameters()
    wanted = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3", "tcp_user_timeout": "20000"}
    assert {name: told[name] for name in wanted} == wanted


def test_a_session_with_a_server_that_turned_read_only_goes_with_its_pool(database_url: str) -> None:
    database = Database(database_url, name="posthouse tests", max_size=2)
    with database.transaction() as conn:
        conn.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
    refused = 0
    for _ in range(3):
        try:
            with database.transaction() as conn:
                conn.execute("CREATE TABLE mine ()")
                conn.execute("DROP TABLE mine")
        except psycopg.errors.ReadOnlySqlTransaction:
            refused += 1
    database.close()
    assert refused == 1


def test_a_process_whose_claim_loop_stands_still_ends_for_its_supervisor(other: Crew, told_of: Conn) -> None:
    worker = other.start("quick", told={"WATCHDOG_S": "5"})
    add(told_of, "seize")
    assert worker.ends(20) == EXIT_STUCK
    assert [line["thread"] for line in worker.says("watchdog.ended")] in (["consumer"], ["control"])


# Sessions that fall silent.


@pytest.fixture
def way(database_url: str) -> Iterator[Proxy]:
    with proxy(database_url) as through:
        yield through


def hears(through: Proxy) -> Callable[[], bool]:
    known = list(through.sessions)
    return lambda: any(one not in known for one in through.named("posthouse queue"))


def metric(folder: Path, name: str) -> float | None:
    """What the workers of *folder* count, as /metrics adds it up."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder / "metrics"))  # type: ignore[no-untyped-call]
    return registry.get_sample_value(name)


def test_a_session_that_swallows_everything_is_given_up_and_its_job_runs_once(
    way: Proxy, told_of: Conn, tmp_path: Path
) -> None:
    """F37, and worse: the peer still acknowledges what it forgets, so that the kernel sees nothing amiss."""
    with crew(way.url, tmp_path) as workers:
        worker = workers.start("quick", told={"LEASE_S": "20", "CONTROL_INTERVAL_S": "1", "WATCHDOG_S": "9"})
        job_id = add(told_of, "run", "through", 5)
        until(lambda: workers.starts("through"))
        again = hears(way)
        for session in way.sessions:
            session.swallowed = True
        until(again, 15, "a new session for the queue")
        until(lambda: (jobs.load(told_of, job_id) or {})["state"] == "completed", 20)
        assert (jobs.load(told_of, job_id) or {})["attempt"] == len(workers.starts("through")) == 1
        assert {line["thread"] for line in worker.says("watchdog.severed")} >= {"consumer"}
        assert worker.process.poll() is None


def test_a_listener_that_hears_nothing_is_opened_anew_and_counted(way: Proxy, told_of: Conn, tmp_path: Path) -> None:
    with crew(way.url, tmp_path) as workers:
        counted = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics")}
        worker = workers.start("quick", told={**BY_BELL, **counted, "LISTEN_PROBE_INTERVAL_S": "0.5"})
        until(lambda: way.named("posthouse queue"))
        again = hears(way)
        for session in way.named("posthouse queue"):
            session.unheard = True
        until(again, 15, "a new session for the queue")
        assert [line["error"] for line in worker.says("consumer.disconnected")] == ["Deaf"]
        until(lambda: len(worker.says("consumer.listening")) == 2)
        add(told_of, "run", "heard-again")
        time.sleep(0.1)
        ring(told_of)
        until(lambda: workers.ends("heard-again"), 10, "the bell")
        assert metric(tmp_path, "posthouse_listen_probe_failures_total") == 1
        assert metric(tmp_path, "posthouse_listener_up") == 1
