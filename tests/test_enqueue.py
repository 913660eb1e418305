"""Putting jobs in: what is written, what is refused by name, who was first, and who hears of it.

Acceptance lines 1 to 5, 9 and 10; F09, F11, F40, F41, F74 to F78.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import dramatiq
import psycopg
import psycopg2
import psycopg2.extras
import pytest
import sqlalchemy
from sqlalchemy.pool import NullPool

import settings
from broker import PostgresBroker, actor, install
from outbox import catalogue, enqueue, events, jobs
from outbox.catalogue import EventType
from outbox.db import Conn, Database, connect
from outbox.enqueue import unique_by_args
from outbox.jobs import BadJob, Claim
from outbox.newjob import new_id
from outbox.relay import relay
from tests import emptied
from tests.ledger import add, claim, claimed, count, fail, in_state, lose, new, row, settle
from tests.workers import HOUSE, until

shared_url, database_url = emptied.shared_url, emptied.database_url


# What is written.


@pytest.fixture(params=["psycopg", "psycopg with tuples", "psycopg2", "psycopg2 with dicts", "sqlalchemy"])
def application(request: pytest.FixtureRequest, database_url: str) -> Iterator[Any]:
    """The connection of a caller, who has begun a transaction."""
    match request.param:
        case "psycopg":
            opened: Any = psycopg.connect(database_url, row_factory=psycopg.rows.dict_row)
        case "psycopg with tuples":
            opened = psycopg.connect(database_url)
        case "psycopg2 with dicts":
            opened = psycopg2.connect(database_url, cursor_factory=psycopg2.extras.RealDictCursor)
        case "sqlalchemy":
            engine = sqlalchemy.create_engine(
                database_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool
            )
            opened = engine.raw_connection()
        case _:
            opened = psycopg2.connect(database_url)
    with closing(opened):
        yield opened


def test_a_commit_makes_the_job_visible_and_not_before(application: Any, conn: Conn) -> None:
    job_id = jobs.enqueue(application, new(args=["é", 1], kwargs={"k": None}, priority=5)).id
    assert claim(conn) == []
    application.commit()
    assert [(job.id, job.message["args"], job.priority) for job in claim(conn)] == [(job_id, ["é", 1], 5)]


def test_a_rollback_leaves_nothing(application: Any, conn: Conn) -> None:
    jobs.enqueue_many(application, [new(), new(delay_s=5)])
    application.rollback()
    assert count(conn) == 0


def test_a_duplicate_is_told_on_every_driver(application: Any) -> None:
    first = jobs.enqueue(application, new(unique_key="k"))
    second = jobs.enqueue(application, new(unique_key="k"))
    assert (first.inserted, second.duplicate_of) == (True, first.id)


def test_ten_thousand_jobs_go_in_at_once_and_again_without_a_change(conn: Conn) -> None:
    many = [new(args=[number], unique_key=f"k{number}") for number in range(10_000)]
    began = time.process_time()
    assert all(answer.inserted for answer in jobs.enqueue_many(conn, many))
    again = jobs.enqueue_many(conn, many)
    assert time.process_time() - began < 10
    assert [answer.duplicate_of for answer in again] == [job.id for job in many]
    assert count(conn) == 10_000
    first = claim(conn)[0]
    assert first.message["args"] == [0]


LIMITS = ("limit_key", "limit_running", "rate_per_s", "rate_burst")
COLUMNS = ("priority", "max_attempts", "unique_key", "event_id", *LIMITS)


def test_many_with_one_that_is_there_already_leave_the_callers_transaction_as_it_was(
    application: Any, conn: Conn
) -> None:
    first, many = new(), [new() for _ in range(enqueue.MANY)]
    jobs.enqueue(conn, many[7])
    jobs.enqueue(application, first)
    told = jobs.enqueue_many(application, many)
    assert [answer.id for answer in told if not answer.inserted] == [many[7].id]
    assert count(conn) == 1
    application.commit()
    assert count(conn) == 1 + len(many)
    assert row(conn, first.id)["state"] == "queued"


@pytest.mark.parametrize("begun", [True, False])
def test_many_are_one_statement_or_nothing_where_each_statement_is_a_transaction(conn: Conn, begun: bool) -> None:
    many = [new() for _ in range(enqueue.MANY)]
    with conn.transaction() if begun else nullcontext():
        assert all(answer.inserted for answer in jobs.enqueue_many(conn, many))
        assert [answer.inserted for answer in jobs.enqueue_many(conn, [*many[1:], new()])].count(True) == 1
    assert count(conn) == len(many) + 1


def test_many_in_a_pipeline_go_in_too(conn: Conn) -> None:
    with conn.pipeline():
        assert all(answer.inserted for answer in jobs.enqueue_many(conn, [new() for _ in range(enqueue.MANY)]))
    assert count(conn) == enqueue.MANY


def test_what_a_job_says_is_in_its_columns_alone_or_among_others(application: Any, conn: Conn) -> None:
    event_id = uuid.uuid4()
    wanted: dict[str, tuple[object, ...]] = {
        new_id(): (0, None, None, None, None, None, None, None),
        new_id(): (-3, 7, "u'\\\"\U0001f600", event_id, "k'\\", 4, 0.5, 1),
        new_id(): (2, None, None, None, "k", None, 2.1, 3),
        new_id(): (0, 1, None, None, "k", 1, 1e9, 10**9),
        new_id(): (0, None, None, None, "k", None, 1, 9),
    }
    said = [
        new(id=job_id, priority=priority, max_attempts=attempts, unique_key=key, event_id=event and str(event),
            limit_key=limit_key, limit=limit, rate_per_s=rate, rate_burst=burst if burst == 9 else None)
        for job_id, (priority, attempts, key, event, limit_key, limit, rate, burst) in wanted.items()
    ]  # fmt: skip
    jobs.enqueue_many(application, said)
    application.commit()
    assert {job_id: tuple(row(conn, job_id)[name] for name in COLUMNS) for job_id in wanted} == wanted
    conn.execute("DELETE FROM dramatiq.queue")
    for job in said:
        jobs.enqueue(application, job)
    application.commit()
    assert {job_id: tuple(row(conn, job_id)[name] for name in COLUMNS) for job_id in wanted} == wanted


def test_each_of_many_is_due_after_its_own_delay(conn: Conn) -> None:
    delays = [0, 60, 0.5, 365 * 86_400]
    made = [row(conn, answer.id) for answer in jobs.enqueue_many(conn, [new(delay_s=delay) for delay in delays])]
    assert [round((job["available_at"] - job["created_at"]).total_seconds(), 1) for job in made] == delays


def test_what_only_python_takes_for_the_same_number_is_stored_as_one(conn: Conn) -> None:
    alike: list[dict[str, Any]] = [{"priority": True, "max_attempts": 1.0}, {"priority": 1, "max_attempts": 1}]
    for said in (alike, [*alike, {"priority": 2}]):
        answers = jobs.enqueue_many(conn, [new(**given) for given in said])
        made = [row(conn, answer.id) for answer in answers[:2]]
        assert [(job["priority"], job["max_attempts"]) for job in made] == [(1, 1), (1, 1)]


def test_a_message_is_one_that_dramatiq_reads(conn: Conn) -> None:
    held = claimed(conn, args=[1], kwargs={"k": 2}, options={"o": 3})
    message = held.message
    stamp = message.pop("message_timestamp")
    assert abs(stamp / 1_000 - time.time()) < 60
    assert message == {
        "queue_name": "q", "actor_name": "a", "args": [1], "kwargs": {"k": 2}, "options": {"o": 3},
        "message_id": held.id,
    }  # fmt: skip


def test_no_jobs_are_no_statement(conn: Conn) -> None:
    assert jobs.enqueue_many(conn, []) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"args": [{"price": Decimal(1)}]}, "args[0].price"),
    ({"kwargs": {"at": {"x": b"1"}}}, "kwargs.at.x"),
    ({"args": ["a\0b"]}, "args[0]"),
    ({"args": [float("nan")]}, "args[0]"),
    ({"args": [1, [float("-inf")]]}, "args[1][0]"),
    ({"kwargs": {"at": datetime(2026, 1, 1, tzinfo=UTC)}}, "kwargs.at: datetime"),
    ({"kwargs": {"on": [date(2026, 1, 1)]}}, "kwargs.on[0]: date"),
    ({"args": ["\ud800"]}, "args[0]"),
    ({"options": {"o": {1}}}, "options.o"),
    ({"args": ["x" * 1_048_576]}, "args"),
    ({"queue": ""}, "queue"),
    ({"queue": "x" * 41}, "queue"),
    ({"queue": "é" * 20}, "queue"),
    ({"queue": "q\n"}, "queue"),
    ({"queue": 'q"}'}, "queue"),
    ({"delay_s": -1}, "delay"),
    ({"delay_s": 365 * 86_400 + 1}, "delay"),
    ({"delay_s": float("nan")}, "delay"),
    ({"delay_s": float("inf")}, "delay"),
    ({"max_attempts": 0}, "max_attempts"),
    ({"unique_key": ""}, "unique_key"),
    ({"unique_key": "x" * 513}, "unique_key"),
    ({"actor": "a\0"}, "actor"),
    ({"actor": ""}, "actor"),
    ({"priority": 2**31}, "priority"),
    ({"max_attempts": 2**31}, "max_attempts"),
    ({"unique_key": "a\0"}, "unique_key"),
    ({"unique_key": "\ud800"}, "unique_key"),
    ({"id": '","queue_name":"x'}, "id"),
    ({"event_id": "e"}, "event_id"),
    ({"args": "abc"}, "args"),
    ({"kwargs": [1]}, "kwargs"),
    ({"args": ["x" * 900_000], "kwargs": {"k": "x" * 900_000}}, "args and kwargs: 1,800,012 bytes"),
    ({"args": ["x" * 20_000_000]}, "args"),
    ({"options": {"o": "x" * 1_048_576}}, "options"),
    ({"kwargs": {1: 2}}, "kwargs"),
    ({"kwargs": []}, "kwargs is not a dict"),
    ({"options": [1]}, "options is not a dict"),
    ({"options": None}, "options is not a dict"),
    ({"args": None}, "args is not a list"),
    ({"queue": []}, "queue"),
    ({"id": f"{uuid.UUID(int=0)},{uuid.UUID(int=1)}"}, "id"),
    ({"id": 5}, "id"),
    ({"limit": 1}, "need a limit_key"),
    ({"rate_per_s": 1}, "need a limit_key"),
    ({"limit_key": "k"}, "limit_key needs"),
    ({"limit_key": "", "limit": 1}, "limit_key ''"),
    ({"limit_key": "x" * 513, "limit": 1}, "limit_key"),
    ({"limit_key": "k\0", "limit": 1}, "limit_key"),
    ({"limit_key": ["k"], "limit": 1}, "limit_key"),
    ({"limit_key": "k", "limit": 0}, "limit 0"),
    ({"limit_key": "k", "limit": 1.0}, "limit 1.0"),
    ({"limit_key": "k", "limit": True}, "limit True"),
    ({"limit_key": "k", "rate_per_s": 0}, "rate_per_s 0"),
    ({"limit_key": "k", "rate_per_s": float("nan")}, "rate_per_s nan"),
    ({"limit_key": "k", "rate_per_s": float("inf")}, "rate_per_s inf"),
    ({"limit_key": "k", "rate_per_s": 10**400}, "rate_per_s 1000"),
    ({"limit_key": "k", "rate_per_s": 1, "rate_burst": 0}, "rate_burst 0"),
    ({"limit_key": "k", "limit": 1, "rate_burst": 2}, "rate_burst needs"),
]


def test_a_bad_job_is_refused_by_name_and_its_transaction_goes_on(application: Any, conn: Conn) -> None:
    for given, said in REFUSED:
        began = time.process_time()
        with pytest.raises(BadJob) as refusal:
            jobs.enqueue_many(application, [new(), new(**given), new()])
        assert time.process_time() - began < 1
        assert said in str(refusal.value)
    kept = jobs.enqueue(application, new()).id
    application.commit()
    assert [job.id for job in claim(conn, 9)] == [kept]


def test_a_queue_name_is_refused_or_works_with_its_delay_and_its_bell(conn: Conn) -> None:
    for name in [*("x" * size for size in (41, 43, 44, 46, 47, 63, 64, 100)), "é" * 32]:
        with pytest.raises(BadJob, match="queue"):
            jobs.enqueue(conn, new(queue=name))
    longest = "x" * 40
    conn.execute(f"LISTEN posthouse_q_{longest}")
    assert jobs.enqueue(conn, new(queue=longest, delay_s=0.05)).inserted
    assert bells(conn) == [f"posthouse_q_{longest}"]
    time.sleep(0.05)
    assert [job.queue for job in claim(conn, queue=longest)] == [longest]


def test_a_call_beyond_the_limit_of_a_document_is_refused(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "MAX_CALL_BYTES", 100_000)
    many = [new(args=["é" * 20_000]) for _ in range(3)]
    with pytest.raises(BadJob, match=r"3 jobs of 120,\d+ bytes in one call, at most 100,000 are allowed"):
        jobs.enqueue_many(conn, many)
    assert len(jobs.enqueue_many(conn, many[:2])) == count(conn) == 2


def test_an_id_begins_with_its_time_and_is_never_handed_out_twice() -> None:
    first, *more = ids = [new_id() for _ in range(1_000)]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", first)
    assert abs(int(more[-1].replace("-", "")[:12], 16) / 1_000 - time.time()) < 60
    assert len(set(ids)) == 1_000


FORKED = """
import os
from outbox.newjob import new_id
new_id()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, new_id().encode())
    os._exit(0)
os.wait()
print(len({new_id(), os.read(read, 36).decode()}))
"""


def test_two_processes_of_one_fork_make_different_ids() -> None:
    assert subprocess.check_output([sys.executable, "-c", FORKED], cwd=HOUSE, text=True, timeout=30) == "2\n"


PRODUCER = """
import os, signal, sys
from outbox import jobs
from outbox.db import connect
with connect(sys.argv[1], name="producer") as conn:
    with conn.transaction():
        jobs.enqueue(conn, jobs.NewJob(queue="q", actor="a", args=[2]))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_producer_killed_right_after_its_commit_leaves_its_job(conn: Conn, database_url: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRODUCER, database_url], cwd=HOUSE, timeout=30, check=False)
    assert done.returncode == -9
    assert [job.message["args"] for job in claim(conn, 9)] == [[2]]


def test_odd_text_in_the_arguments_comes_back_as_it_was(conn: Conn) -> None:
    odd = ["\"'\\%s{}", "\\u0000", "\U0001f600" * 50_000, "", {"": ""}]
    assert claimed(conn, args=odd).message["args"] == odd


# Who was first.


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_the_second_of_two_inserts_of_a_key_waits_for_the_first(conn: Conn, database_url: str, end: str) -> None:
    with connect(database_url, name="first") as first, ThreadPoolExecutor(1) as pool:
        first.execute("BEGIN")
        winner = jobs.enqueue(first, new(unique_key="k")).id
        waiting = pool.submit(jobs.enqueue, conn, new(unique_key="k"))
        until(lambda: blocked(first))
        first.execute(end.encode())
        assert waiting.result(5).duplicate_of == (winner if end == "commit" else None)
    assert count(conn) == 1


def test_of_64_threads_with_one_key_one_inserts_and_63_hear_of_it(database_url: str, conn: Conn) -> None:
    barrier = threading.Barrier(16)

    def race(turn: int) -> jobs.Enqueued:
        with connect(database_url, name="racer") as own:
            barrier.wait()
            return jobs.enqueue(own, new(unique_key="k", args=[turn]))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(race, range(64)))
    (first,) = (answer.id for answer in answers if answer.inserted)
    assert [answer.duplicate_of for answer in answers if not answer.inserted] == [first] * 63
    assert count(conn) == 1


def test_bulk_inserts_obey_unique_keys_too(database_url: str, conn: Conn) -> None:
    def bulk(turn: int) -> int:
        keys = range(50) if turn % 2 else reversed(range(50))
        with connect(database_url, name="racer") as own:
            answers = jobs.enqueue_many(own, [new(unique_key=f"k{number}") for number in keys])
            return sum(answer.inserted for answer in answers)

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(bulk, range(100))) == 50
    assert count(conn) == 50


def test_a_call_takes_its_keys_in_one_order_so_that_two_never_wait_for_each_other(
    conn: Conn, database_url: str
) -> None:
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        first, second, third = (stack.enter_context(connect(database_url, name="racer")) for _ in range(3))
        first.execute("BEGIN")
        jobs.enqueue(first, new(unique_key="a"))
        waiting = pool.submit(jobs.enqueue_many, second, [new(unique_key="b"), new(unique_key="a")])
        until(lambda: blocked(conn))
        third.execute("SET lock_timeout = '2s'")
        try:
            assert jobs.enqueue(third, new(unique_key="b")).inserted
        finally:
            first.execute("COMMIT")
        assert [answer.inserted for answer in waiting.result(5)] == [False, False]


def blocked(conn: Conn) -> bool:
    """Whether somebody waits for a lock."""
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return conn.execute(query).fetchone() is not None


def test_one_call_with_the_same_key_twice_inserts_once(conn: Conn) -> None:
    first, second = jobs.enqueue_many(conn, [new(unique_key="k"), new(unique_key="k")])
    assert {first.duplicate_of, second.duplicate_of} == {None, first.id if first.inserted else second.id}
    assert count(conn) == 1


def test_a_job_that_ended_frees_its_key(conn: Conn) -> None:
    ends: list[Callable[[Claim], object]] = [
        lambda held: settle(conn, held),
        lambda held: fail(conn, held, "rejected"),
        lambda held: lose(conn, held),
        lambda held: cancel(conn, held.id),
    ]
    add(conn, unique_key="k", max_attempts=1)
    for end in ends:
        assert not jobs.enqueue(conn, new(unique_key="k")).inserted
        end(claim(conn)[0])
        assert jobs.enqueue(conn, new(unique_key="k", max_attempts=1)).inserted


def cancel(conn: Conn, job_id: str) -> None:
    """The job is stopped on request."""
    conn.execute(
        """
        UPDATE dramatiq.queue
        SET state = 'rejected', stop_cause = 'cancel_requested', finished_at = now(),
            lease_token = NULL, lease_until = NULL
        WHERE message_id = %s
        """,
        [job_id],
    )


def test_a_retryable_job_keeps_its_key(conn: Conn) -> None:
    held = claimed(conn, unique_key="k")
    assert fail(conn, held)
    assert jobs.enqueue(conn, new(unique_key="k")).duplicate_of == held.id


def test_an_id_that_is_there_already_changes_nothing_in_any_state(conn: Conn) -> None:
    for state in ("pending", "running", "retryable", "completed", "discarded"):
        job_id = in_state(conn, state)
        before = row(conn, job_id)
        assert jobs.enqueue(conn, new(id=job_id, args=["second"], priority=-9)).duplicate_of == job_id
        assert row(conn, job_id) == before


def test_an_id_in_capitals_is_the_same_id(conn: Conn) -> None:
    first, second = add(conn), new_id()
    answers = jobs.enqueue_many(conn, [new(id=first.upper()), new(id=second.upper()), new(id=second)])
    assert [answer.duplicate_of for answer in answers] == [first, None, second]


def test_one_job_twice_in_one_call_is_inserted_once(conn: Conn) -> None:
    job = new()
    assert [answer.duplicate_of for answer in jobs.enqueue_many(conn, [job, new(), job])] == [None, None, job.id]
    assert count(conn) == 2


def test_a_producer_that_never_heard_of_its_commit_enqueues_again_and_nothing_runs_twice(conn: Conn) -> None:
    many = [new(args=[number]) for number in range(3)]
    jobs.enqueue_many(conn, many)
    held = claim(conn, 2)
    settle(conn, held[0])
    late = [*many, new(args=["late"])]
    assert [answer.duplicate_of for answer in jobs.enqueue_many(conn, late)] == [*(job.id for job in many), None]
    assert [job.message["args"] for job in claim(conn, 9)] == [[2], ["late"]]


# Who hears of it.


def bells(conn: Conn) -> list[str]:
    """The channels whose notifications have come; none of them carries anything."""
    conn.execute("SELECT")
    notices = list(conn.notifies(timeout=0))
    assert {notice.payload for notice in notices} <= {""}
    return [notice.channel for notice in notices]


def test_each_transaction_rings_each_of_its_queues_once_whatever_it_carries(conn: Conn, database_url: str) -> None:
    conn.execute("LISTEN posthouse_q_q")
    conn.execute("LISTEN posthouse_q_r")
    with connect(database_url, name="producer") as producer:
        with producer.transaction():
            large = [new(args=["\U0001f600" * 50_000], queue=queue) for queue in "qrq" for _ in range(10)]
            jobs.enqueue_many(producer, large)
            jobs.enqueue(producer, new())
        assert sorted(bells(conn)) == ["posthouse_q_q", "posthouse_q_r"]
        jobs.enqueue(producer, new())
        assert bells(conn) == ["posthouse_q_q"]


def test_a_rollback_does_not_silence_the_next_one(conn: Conn, database_url: str) -> None:
    conn.execute("LISTEN posthouse_q_q")
    with connect(database_url, name="producer") as producer:
        with producer.transaction(force_rollback=True):
            jobs.enqueue(producer, new())
        assert bells(conn) == []
        jobs.enqueue(producer, new())
    assert bells(conn) == ["posthouse_q_q"]


def test_a_duplicate_rings_nothing(conn: Conn, database_url: str) -> None:
    jobs.enqueue(conn, new(unique_key="k"))
    conn.execute("LISTEN posthouse_q_q")
    with connect(database_url, name="producer") as producer:
        jobs.enqueue(producer, new(unique_key="k"))
    assert bells(conn) == []


def test_eight_open_transactions_ring_and_the_ninth_leaves_it_to_them(conn: Conn, database_url: str) -> None:
    conn.execute("LISTEN posthouse_q_q")
    conn.execute("LISTEN posthouse_q_r")
    with ExitStack() as stack:
        crowd = [stack.enter_context(connect(database_url, name="producer")) for _ in range(9)]
        for producer in crowd:
            producer.execute("BEGIN")
            jobs.enqueue(producer, new())
            jobs.enqueue(producer, new())
        crowd[8].execute("COMMIT")
        assert bells(conn) == []
        jobs.enqueue(crowd[8], new(queue="r"))
        assert bells(conn) == ["posthouse_q_r"]
        crowd[3].execute("COMMIT")
        assert bells(conn) == ["posthouse_q_q"]
        jobs.enqueue(crowd[8], new())
        assert bells(conn) == ["posthouse_q_q"]
    assert conn.execute("SELECT FROM pg_locks WHERE locktype = 'advisory'").fetchall() == []


# The jobs of an actor.


@pytest.fixture
def ours(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresBroker]:
    """Our broker, installed."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    settings.load.cache_clear()
    monkeypatch.setattr(dramatiq.broker, "global_broker", None)
    broker = install(settings.load())
    yield broker
    broker.database.close()


def some_actor(**given: Any) -> Any:
    @actor(**{"name": "t.some", "queue": "tasks", **given})
    def some(*args: object, **kwargs: object) -> None: ...

    return some


def test_a_unique_actor_has_one_unfinished_job_for_the_same_arguments(ours: PostgresBroker, conn: Conn) -> None:
    some = some_actor(unique="args")
    first = some.send("a", [1], big=True, small=None)
    again = some.send("a", (1,), small=None, big=True)
    assert (again.message_id, again.options["duplicate_of"]) == (first.message_id, first.message_id)
    assert "duplicate_of" not in first.options
    assert jobs.enqueue(conn, some.job("a", [1], big=True, small=None)).duplicate_of == first.message_id
    others: list[Any] = [some.send("a"), some.send("a", [1.0], big=True, small=None), some.send(a=1)]
    assert [other.options for other in others] == [{}] * 3
    held = claim(conn, queue="tasks")[0]
    assert (held.id, held.message["options"]) == (first.message_id, {})
    settle(conn, held)
    assert some.send("a", [1], big=True, small=None).message_id not in (first.message_id, again.message_id)


def test_another_actor_with_the_same_arguments_has_a_key_of_its_own(ours: PostgresBroker) -> None:
    keys = {unique_by_args(name, args, {}) for name in ("a", "b") for args in ([1], [True], ["1"], [[1]])}
    assert len(keys) == 8
    assert unique_by_args("a", ({1: "x", "k": None},), {}) == unique_by_args("a", [{"k": None, "1": "x"}], {})
    with pytest.raises(BadJob, match=r"a: args\[0\]: bytes"):
        unique_by_args("a", [b"x"], {})


def test_a_message_with_a_key_of_its_own_is_unique_by_that(ours: PostgresBroker, conn: Conn) -> None:
    some = some_actor(unique="args")
    first = some.send_with_options(args=(1,), unique_key="mine")
    assert some.send_with_options(args=(2,), unique_key="mine").message_id == first.message_id
    assert "duplicate_of" not in some.send(1).options
    assert {job["unique_key"] for job in jobs_there(conn)} == {"mine", unique_by_args("t.some", [1], {})}


def test_a_message_sent_once_more_is_told_as_the_first_one(ours: PostgresBroker, conn: Conn) -> None:
    some = some_actor()
    sent = some.send(1)
    again = ours.enqueue(ours.enqueue(sent))
    assert (again.message_id, again.options) == (sent.message_id, {"duplicate_of": sent.message_id})
    other = ours.enqueue(again.copy(message_id=new_id()))
    assert row(conn, other.message_id)["message"]["options"] == {}


def jobs_there(conn: Conn) -> list[dict[str, Any]]:
    return conn.execute("SELECT * FROM dramatiq.queue ORDER BY created_at").fetchall()


def test_every_option_of_a_message_reaches_its_job_and_none_stays_in_it(ours: PostgresBroker, conn: Conn) -> None:
    some = some_actor(priority=7, attempts=3, limit=4)
    some.send_with_options(
        args=(1,), kwargs={"k": 2}, delay=timedelta(minutes=1), priority=-2, unique_key="u", limit_key="tenant",
        limit=2, rate_per_s=1.5, rate_burst=6, mark="kept",
    )  # fmt: skip
    (job,) = jobs_there(conn)
    message = job["message"]
    assert (message["args"], message["kwargs"], message["options"]) == ([1], {"k": 2}, {"mark": "kept"})
    assert [job[name] for name in COLUMNS] == [-2, 3, "u", None, "tenant", 2, 1.5, 6]
    assert 59 < (job["available_at"] - job["created_at"]).total_seconds() < 61


@pytest.mark.parametrize(
    ("declared", "asked", "expected"),
    [
        ({}, {}, (None, None, None, None)),
        ({"limit": 2}, {}, ("t.some", 2, None, None)),
        ({"rate_per_s": 5}, {}, ("t.some", None, 5, 5)),
        ({"rate_per_s": 0.2, "limit": 1, "limit_key": "k"}, {}, ("k", 1, 0.2, 1)),
        ({"limit": 2}, {"limit_key": "tenant"}, ("tenant", 2, None, None)),
        ({"limit": 2}, {"rate_per_s": 1, "rate_burst": 3}, ("t.some", 2, 1, 3)),
        ({"limit": 2}, {"limit": None}, (None, None, None, None)),
        ({}, {"limit": 1}, ("t.some", 1, None, None)),
    ],
)
def test_an_actor_limits_its_jobs_and_a_message_is_stronger(
    ours: PostgresBroker, conn: Conn, declared: dict[str, Any], asked: dict[str, Any], expected: tuple[object, ...]
) -> None:
    some = some_actor(**declared)
    sent = some.send_with_options(**asked)
    assert tuple(row(conn, sent.message_id)[name] for name in LIMITS) == expected
    if not asked:
        job_id = jobs.enqueue(conn, some.job()).id
        assert tuple(row(conn, job_id)[name] for name in LIMITS) == expected


def test_a_message_that_asks_for_a_limit_in_vain_is_refused(ours: PostgresBroker, conn: Conn) -> None:
    some = some_actor(limit=2)
    for asked in ({"limit_key": None}, {"limit": 0}, {"limit": None, "limit_key": "k"}, {"rate_burst": 2}):
        with pytest.raises(BadJob, match=r"t\.some: "):
            some.send_with_options(**asked)
    assert jobs_there(conn) == []


def test_the_limits_of_an_actor_hold_for_what_events_ask_of_it(
    ours: PostgresBroker, conn: Conn, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_types", {})
    catalogue.declare(EventType("t.happened", "", ""))
    some_actor(on="t.happened", limit=3, rate_per_s=10)
    events.record(conn, "t.happened", "s")
    assert relay(db.transaction, ours.subscriptions()) == 1
    assert [tuple(job[name] for name in LIMITS) for job in jobs_there(conn)] == [("t.some", 3, 10, 10)]


def test_a_delay_lies_between_0_and_365_days(ours: PostgresBroker, conn: Conn) -> None:
    some = some_actor()
    some.send_with_options(delay=timedelta(days=365))
    for delay in (timedelta(days=365, seconds=1), -1):
        with pytest.raises(BadJob, match="365 days"):
            some.send_with_options(delay=delay)
    (job,) = jobs_there(conn)
    assert round((job["available_at"] - job["created_at"]).total_seconds()) == 365 * 86_400


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"limit": 0}, "limit 0"),
        ({"limit_key": "k"}, "limit_key needs"),
        ({"limit": 1, "rate_burst": 2}, "rate_burst needs"),
        ({"rate_per_s": -1}, "rate_per_s -1"),
        ({"unique": "args", "on": "corpus.changed"}, "unique and has on="),
    ],
)
def test_an_actor_that_cannot_be_ends_the_process(
    ours: PostgresBroker, capsys: pytest.CaptureFixture[str], declared: dict[str, Any], said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        some_actor(**declared)
    assert end.value.code == 78
    assert "posthouse: actor t.some" in (told := capsys.readouterr().err)
    assert said in told
