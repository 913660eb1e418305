"""The broker as a producer, and the stock one beside it on the same table."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dramatiq
import dramatiq_pg
import psycopg2
import pytest
from dramatiq.middleware import Pipelines
from dramatiq_pg.broker import QUERIES
from periodiq import CronSpec

import settings
from broker import PostgresBroker, actor, install
from middleware.periodic import cron
from outbox import jobs
from outbox.db import Conn, connect
from outbox.jobs import BadJob, Claim, Settlement
from tests import emptied
from tests.workers import until

shared_url, database_url = emptied.shared_url, emptied.database_url

WORKER = str(uuid.uuid4())


@pytest.fixture
def ours(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresBroker]:
    """Our broker, installed."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    settings.load.cache_clear()
    monkeypatch.setattr(dramatiq.broker, "global_broker", None)
    broker = install(settings.load())
    yield broker
    broker.database.close()


@pytest.fixture
def stock(database_url: str) -> Iterator[dramatiq_pg.PostgresBroker]:
    """dramatiq-pg's own broker, as another application has it."""
    broker = dramatiq_pg.PostgresBroker(url=database_url, results=False, middleware=[Pipelines()])
    yield broker
    broker.pool.closeall()


def message(queue: str = "tasks", **given: Any) -> dramatiq.Message[Any]:
    told = {"actor_name": "a", "args": (1, "é"), "kwargs": {"k": 2}, "options": {}, **given}
    return dramatiq.Message(queue_name=queue, **told)


def claim(conn: Conn, queue: str = "tasks") -> list[Claim]:
    return jobs.claim(conn, {queue: 9}, worker_id=WORKER, lease_s=20)


def row(conn: Conn, job_id: str) -> dict[str, Any]:
    found = conn.execute("SELECT * FROM dramatiq.queue WHERE message_id = %s", [job_id]).fetchone()
    assert found is not None
    return found


# The stock broker.


def test_a_job_of_the_stock_broker_is_claimed_as_it_was_sent(stock: dramatiq_pg.PostgresBroker, conn: Conn) -> None:
    sent = stock.enqueue(message(options={"max_retries": 3}))
    (held,) = claim(conn)
    assert (held.id, held.attempt, held.max_attempts, held.priority) == (sent.message_id, 1, None, 0)
    assert held.message == {**sent.asdict(), "args": [1, "é"]}


def test_a_delayed_job_of_the_stock_broker_waits_in_its_own_queue(
    stock: dramatiq_pg.PostgresBroker, conn: Conn
) -> None:
    sent = stock.enqueue(message(options={"max_retries": 3}), delay=60_000)
    assert sent.queue_name == "tasks.DQ"
    assert claim(conn) == []
    job = row(conn, sent.message_id)
    assert (job["queue_name"], job["message"]["queue_name"]) == ("tasks", "tasks")
    assert job["message"]["options"] == {"max_retries": 3}
    assert abs(job["available_at"].timestamp() * 1_000 - sent.options["eta"]) < 2


def test_the_stock_broker_rings_our_bell(stock: dramatiq_pg.PostgresBroker, conn: Conn) -> None:
    conn.execute("LISTEN posthouse_q_tasks")
    stock.enqueue(message())
    assert [notice.payload for notice in conn.notifies(timeout=5, stop_after=1)] == [""]


def blocked(conn: Conn) -> bool:
    """Whether somebody waits for a lock."""
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return conn.execute(query).fetchone() is not None


def in_state(stock: dramatiq_pg.PostgresBroker, conn: Conn, state: str) -> dramatiq.Message[Any]:
    """A stock broker's job that has come to *state*."""
    sent = message(queue=state)
    stock.enqueue(sent, delay=60_000 if state == "delayed" else None)
    if state not in ("pending", "delayed"):
        (held,) = claim(conn, state)
        end = {"completed": "done", "discarded": "rejected", "retryable": "queued"}.get(state)
        if end:
            jobs.settle(conn, [Settlement(held.id, held.token, end, delay_s=60)])
    return sent


def test_a_repeated_enqueue_of_the_stock_broker_changes_nothing_in_any_state(
    stock: dramatiq_pg.PostgresBroker, conn: Conn
) -> None:
    for state in ("pending", "delayed", "running", "retryable", "completed", "discarded"):
        sent = in_state(stock, conn, state)
        before = row(conn, sent.message_id)
        for delay in (None, 5_000):
            stock.enqueue(sent.copy(args=["other"], queue_name="other"), delay=delay)
        assert row(conn, sent.message_id) == before


def test_of_two_stock_upserts_of_one_id_at_once_the_second_changes_nothing(
    stock: dramatiq_pg.PostgresBroker, conn: Conn, database_url: str
) -> None:
    first, second = message(args=("first",)), message(args=("second",), queue="index")
    second = second.copy(message_id=first.message_id)
    upsert = [
        (QUERIES.ENQUEUE, (sent.queue_name, first.message_id, sent.encode().decode(), first.message_id))
        for sent in (first, second)
    ]
    with ThreadPoolExecutor(1) as pool:
        one, two = psycopg2.connect(database_url), psycopg2.connect(database_url)
        one.cursor().execute(*upsert[0])
        waiting = pool.submit(two.cursor().execute, *upsert[1])
        until(lambda: blocked(conn))
        one.commit()
        waiting.result(5)
        two.commit()
        one.close()
        two.close()
    assert [(job.id, job.message["args"]) for job in claim(conn)] == [(first.message_id, ["first"])]
    assert claim(conn, "index") == []


def test_a_stock_upsert_beside_a_claim_and_a_settle_waits_for_nobody_and_changes_nothing(
    stock: dramatiq_pg.PostgresBroker, conn: Conn, database_url: str
) -> None:
    sent = stock.enqueue(message())
    with ThreadPoolExecutor(1) as pool, connect(database_url, name="claimer") as other, other.transaction():
        (held,) = claim(other)
        waiting = pool.submit(stock.enqueue, sent)
        waiting.result(5)
        jobs.settle(other, [Settlement(held.id, held.token, "done")])
    assert row(conn, sent.message_id)["state"] == "done"


def test_a_requeue_of_a_stock_worker_that_stops_leaves_our_rows_alone(
    stock: dramatiq_pg.PostgresBroker, conn: Conn
) -> None:
    sent = {state: in_state(stock, conn, state) for state in ("running", "completed", "discarded")}
    consumer = stock.consume("tasks")
    consumer.requeue(sent.values())
    consumer.close()
    states = {state: (jobs.load(conn, one.message_id) or {})["state"] for state, one in sent.items()}
    assert states == {state: state for state in sent}


def test_a_message_for_a_queue_that_is_not_declared_is_refused(ours: PostgresBroker, conn: Conn) -> None:
    with pytest.raises(BadJob, match="nowhere"):
        ours.enqueue(message(queue="nowhere"))
    assert jobs.listing(conn) == []


def test_dramatiq_pg_counts_and_purges_our_table(
    stock: dramatiq_pg.PostgresBroker, conn: Conn, database_url: str
) -> None:
    for state in ("pending", "running", "completed", "discarded", "retryable"):
        in_state(stock, conn, state)
    conn.execute("UPDATE dramatiq.queue SET mtime = now() - interval '40 d' WHERE state IN ('done', 'rejected')")
    assert command(database_url, "stats") == ["queued: 2", "consumed: 1", "done: 1", "rejected: 1"]
    command(database_url, "purge", "--maxage", "30 days")
    assert {job["state"] for job in jobs.listing(conn)} == {"pending", "running", "retryable"}


def command(database_url: str, *words: str) -> list[str]:
    """What the `dramatiq-pg` command says."""
    call = [str(Path(sys.executable).parent / "dramatiq-pg"), "--connstring", database_url, *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# Ours.


def test_an_actor_sends_with_its_own_limits(ours: PostgresBroker, conn: Conn) -> None:
    @actor(name="t.send", queue="tasks", attempts=4, priority=7)
    def send(name: str) -> None: ...

    sent = send.send("x")
    (held,) = claim(conn)
    assert (held.id, held.max_attempts, held.priority, held.message["args"]) == (sent.message_id, 4, 7, ["x"])


def test_a_delay_stays_in_the_table(ours: PostgresBroker, conn: Conn) -> None:
    @actor(name="t.later", queue="tasks")
    def later() -> None: ...

    sent = later.send_with_options(delay=60_000)
    job = row(conn, sent.message_id)
    assert 55 < (job["available_at"] - job["created_at"]).total_seconds() < 61
    assert job["message"]["options"] == {}


def test_sending_the_same_message_again_changes_nothing(ours: PostgresBroker, conn: Conn) -> None:
    sent = ours.enqueue(message())
    (held,) = claim(conn)
    jobs.settle(conn, [Settlement(held.id, held.token, "done")])
    ours.enqueue(sent)
    assert claim(conn) == []


def test_a_job_for_an_actor_is_enqueued_in_the_callers_transaction(ours: PostgresBroker, conn: Conn) -> None:
    @actor(name="t.job", queue="index", attempts=2)
    def job(name: str, *, loud: bool) -> None: ...

    with conn.transaction(force_rollback=True):
        jobs.enqueue(conn, job.job("x", loud=True))
    assert claim(conn, "index") == []
    jobs.enqueue(conn, job.job("x", loud=True))
    (held,) = claim(conn, "index")
    assert (held.message["args"], held.message["kwargs"], held.max_attempts) == (["x"], {"loud": True}, 2)


def test_what_json_cannot_hold_is_refused_when_it_is_sent(ours: PostgresBroker, conn: Conn) -> None:
    @actor(name="t.bad", queue="tasks")
    def bad(value: object) -> None: ...

    for value in (float("nan"), b"x", {1}, "\0"):
        with pytest.raises(BadJob, match=r"t\.bad: args\[0\]"):
            bad.send(value)
    assert claim(conn) == []


def test_an_actor_on_a_queue_that_is_not_declared_ends_the_process(
    ours: PostgresBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:

        @actor(name="t.lost", queue="nowhere")
        def lost() -> None: ...

    assert end.value.code == 78
    assert capsys.readouterr().err == ("posthouse: actor t.lost is on queue 'nowhere', which QUEUES does not declare\n")


def test_an_actor_called_outside_a_worker_is_a_plain_function(ours: PostgresBroker) -> None:
    @actor(name="t.plain", queue="tasks")
    def plain(a: int) -> int:
        return a + 1

    assert plain(1) == 2


def ticking(spec: CronSpec) -> Any:
    @actor(name="t.tick", queue="maintenance", periodic=spec, attempts=1)
    def tick() -> None: ...

    return tick


def test_a_tick_exists_once_however_many_schedulers_send_it(ours: PostgresBroker, conn: Conn) -> None:
    tick = ticking(cron("* * * * *"))
    sent = [tick.send_with_options(scheduled_at="2026-01-01T00:01:00+00:00") for _ in range(3)]
    (held,) = claim(conn, "maintenance")
    assert {one.message_id for one in sent} == {held.id}
    jobs.settle(conn, [Settlement(held.id, held.token, "done")])
    tick.send_with_options(scheduled_at="2026-01-01T00:01:00+00:00")
    assert claim(conn, "maintenance") == []


def test_a_tick_is_skipped_while_the_one_before_it_has_not_ended(ours: PostgresBroker, conn: Conn) -> None:
    tick = ticking(cron("* * * * *"))
    tick.send_with_options(scheduled_at="2026-01-01T00:01:00+00:00")
    tick.send_with_options(scheduled_at="2026-01-01T00:02:00+00:00")
    (held,) = claim(conn, "maintenance")
    jobs.settle(conn, [Settlement(held.id, held.token, "rejected")])
    tick.send_with_options(scheduled_at="2026-01-01T00:03:00+00:00")
    assert len(claim(conn, "maintenance")) == 1


def test_the_broker_shows_no_delay_queues(ours: PostgresBroker) -> None:
    ours.declare_queue("tasks")
    assert ours.get_declared_queues() == {"tasks"}
    assert ours.get_declared_delay_queues() == set()
