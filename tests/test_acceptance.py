"""The acceptance list on the ledger and the claim loop, where no other file shows it; each test names its lines."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import dramatiq
import dramatiq_pg
import psycopg
import pytest
from dramatiq.middleware import Pipelines
from dramatiq_pg import generate_init_sql

from middleware.capacity import STALLED_S, Lane
from middleware.consumer import ClaimLoop, Held, Work
from middleware.metrics import meter
from outbox import jobs
from outbox.db import Conn, connect
from outbox.jobs import Claim, NewJob, Settlement
from outbox.migrations import migrate, steps
from tests import emptied
from tests.ledger import claim, new, plan_of_a_claim, row, settle, shown
from tests.proxies import Session, proxy

shared_url, database_url = emptied.shared_url, emptied.database_url


# The stock broker.


def stock_broker(url: str) -> dramatiq_pg.PostgresBroker:
    return dramatiq_pg.PostgresBroker(url=url, middleware=[Pipelines()])


def message(*args: Any, queue: str = "tasks", **options: Any) -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name=queue, actor_name="a", args=args, kwargs={}, options=options)


def test_what_the_stock_broker_and_its_worker_left_goes_on_after_the_upgrade(admin: Conn, server_url: str) -> None:
    """Line 8, with rows that dramatiq-pg itself brought to each state."""
    admin.execute("CREATE DATABASE upgraded")
    url = server_url.replace("/postgres?", "/upgraded?")
    with connect(url, name="posthouse test") as conn:
        conn.execute(generate_init_sql().encode())
        stock = stock_broker(url)
        for name in ("taken", "done", "rejected", "queued"):
            stock.enqueue(message(name, mark=[1]))
        delayed = stock.enqueue(message("delayed"), delay=3_600_000)
        worker = stock.consume("tasks", prefetch=3)
        held = {taken.args[0]: taken for taken in (next(worker) for _ in range(3))}
        worker.ack(held["done"])
        stock.backend.store_result(held["done"]._message, {"found": 3}, 3_600_000)
        worker.nack(held["rejected"])
        worker.close()
        stock.pool.closeall()
        migrate(url, steps(generate_init_sql()))

        names = {job["message"]["args"][0]: job["id"] for job in map(shown, [conn] * 9, ids(conn))}
        states = {name: shown(conn, job_id)["state"] for name, job_id in names.items()}
        assert states == {
            "taken": "running", "done": "completed", "rejected": "discarded", "queued": "pending", "delayed": "pending",
        }  # fmt: skip
        assert shown(conn, names["done"])["result"] == {"found": 3}
        assert abs(shown(conn, names["delayed"])["available_at"].timestamp() * 1_000 - delayed.options["eta"]) < 2
        conn.execute("UPDATE dramatiq.queue SET lease_until = now() WHERE state = 'consumed'")
        assert [(job_id, state) for job_id, _, state in jobs.rescue(conn)] == [(names["taken"], "queued")]
        conn.execute("UPDATE dramatiq.queue SET available_at = now() WHERE state = 'queued'")
        again = claim(conn, 9, queue="tasks")
        assert {job.message["args"][0] for job in again} == {"taken", "queued", "delayed"}
        assert [job.message["options"] for job in again if job.id != names["delayed"]] == [{"mark": [1]}] * 2
        jobs.retry(conn, names["rejected"])
        assert jobs.enqueue(conn, NewJob(queue="tasks", actor="a", id=names["done"])).duplicate_of == names["done"]
    admin.execute("DROP DATABASE upgraded WITH (FORCE)")


def ids(conn: Conn) -> list[str]:
    return [str(found["message_id"]) for found in conn.execute("SELECT message_id FROM dramatiq.queue")]


def test_a_cancelled_id_enqueued_again_stays_cancelled(conn: Conn, database_url: str) -> None:
    """Line 5, for the state that is left; by us and by the stock broker."""
    stock = stock_broker(database_url)
    sent = stock.enqueue(message())
    conn.execute("UPDATE dramatiq.queue SET state = 'rejected', stop_cause = 'target_deleted', finished_at = now()")
    before = row(conn, sent.message_id)
    stock.enqueue(sent)
    stock.enqueue(sent, delay=5_000)
    stock.pool.closeall()
    assert jobs.enqueue(conn, new(id=sent.message_id)).duplicate_of == sent.message_id
    assert (row(conn, sent.message_id), shown(conn, sent.message_id)["state"]) == (before, "cancelled")


# Lost answers.


@dataclass
class Mute(Session):
    """Cut as the server answers a COMMIT."""

    cuts: ClassVar[int] = 0

    def lets_through(self, message: bytes) -> bool:
        if type(self).cuts and message.startswith(b"C") and b"COMMIT" in message:
            type(self).cuts -= 1
            raise ConnectionResetError
        return super().lets_through(message)


def test_a_commit_whose_answer_got_lost_is_enqueued_again_and_there_is_one_job(conn: Conn, database_url: str) -> None:
    """F09."""
    job, tries = new(args=["once"]), 0
    Mute.cuts = 2
    with proxy(database_url, Mute) as way:
        answer = None
        while answer is None:
            tries += 1
            with suppress(psycopg.OperationalError), connect(way.url, name="producer") as producer:
                with producer.transaction():
                    answer = None
                    told = jobs.enqueue(producer, job)
                answer = told
    assert (tries, answer.duplicate_of) == (3, job.id)
    (held,) = claim(conn, 9)
    assert settle(conn, held)
    assert jobs.enqueue(conn, job).duplicate_of == job.id
    assert claim(conn, 9) == []


# The claim loop.


@dataclass
class Hands:
    """A claim loop whose jobs are done in its own thread, as soon as it hands them out; what it did, by name."""

    url: str
    lanes: list[Lane[Held]]
    batch_of: Callable[[str | None], int] = lambda actor: 1
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = ClaimLoop(
            connect=lambda: connect(self.url, name="posthouse test", session=jobs.SESSION),
            lanes=self.lanes,
            threads=sum(lane.threads for lane in self.lanes),
            worker_id=str(uuid.uuid4()),
            lease_s=20,
            deliver=self.do,
            on_event=lambda: None,
            meter=meter(),
            listens=False,
            probe_every_s=float("inf"),
            batch_of=self.batch_of,
        )

    def do(self, work: Work | None) -> None:
        while work is not None:
            self.done += [held.message["args"][0] for held in work.claims]
            work = self.loop.finish(work, [Settlement(held.id, held.token, "done") for held in work.claims])

    def step(self) -> None:
        self.loop.step([lane.name for lane in self.lanes])

    def close(self) -> None:
        self.loop._drop()


def named(names: list[str], **given: Any) -> list[NewJob]:
    return [new(args=[name], **given) for name in names]


def test_more_rows_than_were_asked_for_all_run(conn: Conn, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line 23."""
    settle_and_claim = jobs.settle_and_claim

    def generous(conn: Conn, settlements: Any, wanted: dict[str, int], **given: Any) -> jobs.Turn:
        return settle_and_claim(conn, settlements, {name: 5 * n for name, n in wanted.items()}, **given)

    monkeypatch.setattr(jobs, "settle_and_claim", generous)
    names = [f"job {number}" for number in range(20)]
    jobs.enqueue_many(conn, named(names))
    with closing(Hands(database_url, [Lane("q", 1, 1.0)])) as hands:
        hands.step()
        assert hands.done == names[:5]
        for _ in range(9):
            hands.step()
        assert hands.done == names
    assert {job["state"] for job in jobs.listing(conn)} == {"completed"}
    assert {job["attempt"] for job in jobs.listing(conn)} == {1}


def test_what_a_thread_has_started_meanwhile_is_not_given_back(conn: Conn, database_url: str) -> None:
    """F08: claimed for a whole batch, other kinds came, and threads take them while the rest is being given back."""
    names = [f"job {number}" for number in range(10)]
    jobs.enqueue_many(conn, named(names))
    lane: Lane[Held] = Lane("q", 1, 1.0, batch=10)
    with closing(Hands(database_url, [lane], batch_of=lambda actor: 1 if actor == "a" else 10)) as hands:
        for _ in range(30):
            hands.step()
        assert sorted(hands.done) == sorted(names)
    assert {job["state"] for job in jobs.listing(conn)} == {"completed"}


def test_ends_that_are_too_many_for_one_statement_are_written_one_by_one(
    conn: Conn, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F01: a write that takes its time must not come back for ever."""
    conn.execute(
        """
        CREATE FUNCTION drag() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_sleep(0.05);
            RETURN NEW;
        END $$;
        CREATE TRIGGER drag BEFORE UPDATE ON dramatiq.queue
        FOR EACH ROW WHEN (NEW.state = 'done') EXECUTE FUNCTION drag();
        """
    )
    monkeypatch.setattr(jobs, "SESSION", {**jobs.SESSION, "statement_timeout": "200ms"})
    jobs.enqueue_many(conn, named([str(number) for number in range(12)]))
    with closing(Hands(database_url, [Lane("q", 12, 1.0)])) as hands:
        hands.step()
        hands.step()
    conn.execute("DROP FUNCTION drag CASCADE")
    assert [job["state"] for job in jobs.listing(conn)] == ["completed"] * 12


def test_a_stock_that_waits_behind_a_long_job_is_no_stock_for_long() -> None:
    """Line 19; F68."""
    lane: Lane[int] = Lane("q", 4, 1.0, mean_s=0.001, claimed_at=10, started_at=10)
    assert not lane.stalled(10 + 2 * STALLED_S)
    lane.stock.append(1)
    assert not lane.stalled(10 + STALLED_S / 2)
    assert lane.stock_target > 0
    assert lane.stalled(10 + STALLED_S)
    assert (lane.mean_s, lane.stock_target) == (STALLED_S, 0)
    lane.started_at = 10 + STALLED_S
    assert not lane.stalled(10 + STALLED_S)


# Rescue.


def test_no_job_that_finishes_around_the_end_of_its_lease_leaves_its_end(conn: Conn, database_url: str) -> None:
    """F02: rescues that take their time, beside settles that come at any moment of them."""
    conn.execute(
        """
        CREATE TABLE moves (job uuid, was text, became text);
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF OLD.state = 'consumed' AND NEW.crashes > OLD.crashes THEN
                PERFORM pg_sleep(0.004);
            END IF;
            INSERT INTO moves VALUES (OLD.message_id, OLD.state, NEW.state);
            RETURN NEW;
        END $$;
        CREATE TRIGGER audit BEFORE UPDATE OF state ON dramatiq.queue FOR EACH ROW EXECUTE FUNCTION audit();
        """
    )
    jobs.enqueue_many(conn, named([str(number) for number in range(200)]))
    held = claim(conn, 200, lease_s=0.3)
    barrier, settled = threading.Barrier(6), list[str]()

    def finish(part: list[Claim]) -> None:
        with connect(database_url, name="settler") as own:
            barrier.wait()
            for job in part:
                time.sleep(random.uniform(0, 0.02))
                settled.extend(jobs.settle(own, [Settlement(job.id, job.token, "done")]))

    def rescue(_: int) -> int:
        with connect(database_url, name="rescuer") as own:
            barrier.wait()
            found = 0
            for _ in range(40):
                time.sleep(0.01)
                found += len(jobs.rescue(own, limit=10))
            return found

    with ThreadPoolExecutor(6) as pool:
        finishing = [pool.submit(finish, held[part::4]) for part in range(4)]
        rescued = sum(pool.map(rescue, range(2)))
        for part in finishing:
            part.result()
    rescued += len(jobs.rescue(conn, limit=200))
    moves = conn.execute("SELECT was, became, count(*) AS n FROM moves GROUP BY 1, 2").fetchall()
    conn.execute("DROP TABLE moves; DROP FUNCTION audit CASCADE")
    found = {(move["was"], move["became"]): move["n"] for move in moves}
    assert found == {
        ("queued", "consumed"): 200,
        ("consumed", "done"): len(settled),
        ("consumed", "queued"): rescued,
    }
    assert len(settled) + rescued == 200
    assert min(len(settled), rescued) > 0, "all on one side: nothing was shown"


# A long transaction elsewhere.


def test_what_a_long_transaction_costs_the_claims_ends_with_it(conn: Conn, database_url: str) -> None:
    """F79: no vacuum is needed, nor waited for."""
    jobs.tune(conn)

    def churn(times: int) -> None:
        for _ in range(times):
            jobs.enqueue_many(conn, [new() for _ in range(100)])
            held = claim(conn, 100)
            assert len(held) == 100
            assert len(jobs.settle(conn, [Settlement(job.id, job.token, "done") for job in held])) == 100

    def blocks() -> int:
        plan = plan_of_a_claim(conn)
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    before = blocks()
    with connect(database_url, name="report") as report, report.transaction():
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM dramatiq.queue")
        churn(20)
        during = blocks()
    churn(2)
    after = blocks()
    assert during > 4 * before, "the transaction costs nothing: nothing was shown"
    assert 4 * after < during
