"""Postgres goes away and comes back, or turns read-only: nothing is lost, nothing ends twice, nobody is charged.

Lines 26 and 62; F38, F52, F53, F55. On a server of the module's own, since it is stopped.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from dramatiq_pg import generate_init_sql

from outbox import embedded, events, jobs
from outbox.db import Conn, connect
from outbox.jobs import NewJob
from outbox.migrations import migrate, steps
from tests.conftest import DATA_DIR
from tests.workers import Crew, Worker, crew, until


@dataclass
class Server:
    """A Postgres that tests may stop, and one connection to ask it."""

    folder: Path
    url: str = ""
    _conn: Conn | None = None

    def start(self) -> None:
        self.url = embedded.start(self.folder)

    def stop(self) -> None:
        """As `pg_ctl stop -m fast` does: sessions are ended."""
        self.hang_up()
        embedded.stop(self.folder)

    def abort(self) -> None:
        """As `pg_ctl stop -m immediate` does: it recovers at its next start."""
        self.hang_up()
        pid = int((self.folder / "postgres" / "postmaster.pid").read_text().split()[0])
        server = psutil.Process(pid)
        os.kill(pid, signal.SIGQUIT)
        server.wait(10)

    @property
    def conn(self) -> Conn:
        if self._conn is None:
            self._conn = connect(self.url, name="posthouse test")
        return self._conn

    def hang_up(self) -> None:
        if self._conn is not None:
            self._conn.close()
        self._conn = None

    def count(self, rows: str) -> int:
        found = self.conn.execute(f"SELECT count(*) AS n FROM {rows}".encode()).fetchone()
        return int(found["n"]) if found else 0


@pytest.fixture(scope="module")
def started() -> Iterator[Server]:
    server = Server(Path(tempfile.mkdtemp(dir=DATA_DIR)))
    server.start()
    server.conn.execute("ALTER SYSTEM SET fsync = off")
    server.conn.execute("SELECT pg_reload_conf()")
    migrate(server.url, steps(generate_init_sql()))
    server.conn.execute("INSERT INTO posthouse.event_types VALUES ('trial.happened', '', 'internal')")
    yield server
    server.stop()


@pytest.fixture
def server(started: Server) -> Server:
    """It runs, and its queue is empty."""
    started.start()
    started.conn.execute("TRUNCATE dramatiq.queue, posthouse.events CASCADE")
    return started


@pytest.fixture
def hired(server: Server, tmp_path: Path) -> Iterator[Crew]:
    with crew(server.url, tmp_path) as workers:
        yield workers


UNFINISHED = "dramatiq.queue WHERE finished_at IS NULL"
#: Longer than any outage here.
LEASED = {"LEASE_S": "60", "CONTROL_INTERVAL_S": "1"}


def add(server: Server, actor: str, *args: Any, times: int = 1, **given: Any) -> list[str]:
    new = [NewJob(queue="quick", actor=f"trial.{actor}", args=args, **given) for _ in range(times)]
    with server.conn.transaction():
        jobs.enqueue_many(server.conn, new)
    return [job.id for job in new]


def outcomes(server: Server, ids: list[str]) -> set[tuple[str, int, int]]:
    """State, attempts and crashes of each."""
    query = "SELECT state::text, attempt, crashes FROM dramatiq.queue WHERE message_id = ANY (%s::uuid[])"
    return {(row["state"], row["attempt"], row["crashes"]) for row in server.conn.execute(query, [ids])}


ONCE = {("done", 1, 0)}


def cpu_s(worker: Worker) -> float:
    family = [psutil.Process(worker.process.pid), *worker.children()]
    return sum(sum(process.cpu_times()[:2]) for process in family)


def test_jobs_that_finish_while_the_database_is_away_are_settled_once_when_it_is_back(
    server: Server, hired: Crew
) -> None:
    """And the wait is no busy loop (F38): a process takes under a tenth of a processor, and says little."""
    worker = hired.start("quick", threads=4, processes=2, told=LEASED)
    ids = add(server, "run", "away", 1, times=8)
    waiting = add(server, "run", "behind", times=8)
    until(lambda: len(hired.starts("away")) == 8)
    pids = {child.pid for child in worker.children()}
    server.stop()
    lines, used, began = len(worker.said()), cpu_s(worker), time.monotonic()
    until(lambda: len(hired.ends("away")) == 8)
    time.sleep(3)
    assert cpu_s(worker) - used < 2 * 0.1 * (time.monotonic() - began)
    assert len(worker.said()) - lines < 2 * (3 * (time.monotonic() - began) + 8)
    server.start()
    until(lambda: outcomes(server, ids + waiting) == ONCE, 15)
    assert (len(hired.starts("away")), len(hired.starts("behind"))) == (8, 8)
    assert {child.pid for child in worker.children()} == pids


def test_a_worker_that_starts_during_an_outage_waits_for_its_end(server: Server, hired: Crew) -> None:
    server.stop()
    worker = hired.start("quick", wait=False)
    time.sleep(3)
    assert worker.process.poll() is None
    server.start()
    worker.up()
    ids = add(server, "run", "booted")
    until(lambda: outcomes(server, ids) == ONCE)


def test_through_restarts_under_load_every_job_and_event_has_one_end(server: Server, hired: Crew) -> None:
    """Claims and settles whose answers got lost included; fast and immediate by turns."""
    pair = [hired.start("quick", threads=4, wait=False, told=LEASED) for _ in range(2)]
    for worker in pair:
        worker.up()
    warm = add(server, "ask", 0.05, times=16)
    until(lambda: outcomes(server, warm) == ONCE)
    ids = add(server, "run", "through", 0.02, times=1_500)
    for turn in range(5):
        for number in range(20):
            server.conn.execute("SELECT posthouse.record_event('trial.happened', %s)", [f"turn-{turn}-{number}"])
        seen = len(hired.starts("through"))
        until(lambda seen=seen: len(hired.starts("through")) > seen + 20)  # type: ignore[misc]
        (server.stop if turn % 2 else server.abort)()
        time.sleep(0.3)
        server.start()
    asking = add(server, "ask", 0, times=50)
    until(lambda: server.count(UNFINISHED) == 0, 60)
    assert outcomes(server, ids) == ONCE
    assert outcomes(server, asking) == ONCE, "the pool handed out a dead connection"
    assert (len(hired.starts("through")), len(hired.ends("through"))) == (1_500, 1_500)
    until(lambda: events.backlog(server.conn)["waiting"] == 0)
    until(lambda: server.count(UNFINISHED) == 0)
    heard = [len(hired.lines(f"turn-{turn}-{number}")) for turn in range(5) for number in range(20)]
    assert set(heard) == {1}
    assert server.count("posthouse.attempts") == 0
    assert [worker.stop() for worker in pair] == [0, 0]


def test_on_a_server_that_turned_read_only_nobody_is_charged(server: Server, hired: Crew) -> None:
    """A failover seen from a session that outlived it: connections are opened anew until one can write."""
    worker = hired.start("quick", threads=2, told=LEASED)
    ids = add(server, "run", "failover", 1, times=2)
    waiting = add(server, "run", "behind", times=2)
    until(lambda: len(hired.starts("failover")) == 2)
    server.conn.execute("SET default_transaction_read_only = off")
    server.conn.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    server.conn.execute("SELECT pg_reload_conf()")
    try:
        said = ("consumer.disconnected", "control.disconnected", "ReadOnlySqlTransaction")
        until(lambda: len(hired.ends("failover")) == 2)
        until(lambda: all(words in worker.log.read_text() for words in said))
        assert hired.starts("behind") == []
    finally:
        server.conn.execute("ALTER SYSTEM RESET default_transaction_read_only")
        server.conn.execute("SELECT pg_reload_conf()")
    until(lambda: outcomes(server, ids + waiting) == ONCE, 15)
    assert (len(hired.starts("failover")), len(hired.starts("behind"))) == (2, 2)
    assert worker.says("settle.refused") == []


def test_a_stop_with_the_database_away_keeps_its_budget(server: Server, hired: Crew) -> None:
    worker = hired.start("quick", told={**LEASED, "SHUTDOWN_GRACE_S": "1", "SHUTDOWN_TOTAL_S": "6"})
    server.stop()
    worker.signal(signal.SIGTERM)
    began = time.monotonic()
    assert worker.ends(15) == 0
    assert time.monotonic() - began < 8
