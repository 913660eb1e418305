"""Batch actors: one call for many jobs, a verdict, an attempt and a history for each (lines 19, 21, 22 and 36)."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import MiddlewareError, SkipMessage
from psycopg import sql

import settings
from middleware import lifecycle
from middleware.capacity import Lane
from middleware.consumer import ClaimLoop, Held, Work
from middleware.metrics import meter
from middleware.time_limits import standing
from outbox import jobs
from outbox.db import Conn, connect
from outbox.jobs import NewJob
from testkit import Kit
from tests import emptied
from tests.ledger import fail, shown
from tests.workers import QUEUES, Crew, crew, until

shared_url, database_url = emptied.shared_url, emptied.database_url

ACTORS = "tests.batch_trial"
HASTY = {"LEASE_S": "1", "CONTROL_INTERVAL_S": "0.3", "RESCUE_INTERVAL_S": "0.3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def trial(shared_url: str, folder: Path) -> Iterator[Any]:
    """The actors, as this process has them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "DATABASE_URL": shared_url,
            "QUEUES": json.dumps(QUEUES),
            "DATA_DIR": str(folder),
            "TRIAL_DIR": str(folder),
        }.items():
            patch.setenv(name, value)
        settings.load.cache_clear()
        patch.setattr(dramatiq.broker, "global_broker", None)
        module = importlib.import_module(ACTORS)
        yield module
        module.broker.database.close()
        del sys.modules[ACTORS]


@pytest.fixture(scope="module")
def kit_url(admin: Conn, server_url: str) -> Iterator[str]:
    """The test kit's own database."""
    name = sql.Identifier("batches_test")
    admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(name, sql.Identifier(emptied.TEMPLATE)))
    yield server_url.replace("/postgres?", "/batches_test?")
    admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.fixture
def kit(trial: Any, kit_url: str) -> Iterator[Kit]:
    with Kit(kit_url) as opened:
        yield opened


def add(conn: Conn, actor: str, *names: str, queue: str = "quick", **given: Any) -> dict[str, str]:
    """Jobs that are called something; their ids by name."""
    new = [NewJob(queue=queue, actor=f"batch.{actor}", args=[name], **given) for name in names]
    return dict(zip(names, [job.id for job in jobs.enqueue_many(conn, new)], strict=True))


def call(conn: Conn, trial: Any, *names: str, actor: str = "tell") -> dict[str, dict[str, Any]]:
    """One call with a job for each name: the jobs as they are afterwards."""
    ids = add(conn, actor, *names)
    perform(conn, trial)
    return {name: shown(conn, job_id) for name, job_id in ids.items()}


def perform(conn: Conn, trial: Any) -> None:
    """Everything that is due, in one call, settled."""
    claims = jobs.claim(conn, {"quick": 99}, worker_id=str(uuid.uuid4()), lease_s=20)
    assert len(jobs.settle(conn, trial.broker.perform(claims))) == len(claims)


def brief(job: dict[str, Any]) -> tuple[str, int, list[tuple[int, str, str | None]]]:
    """A job's state, attempts charged, and history."""
    history = [(one["attempt"], one["outcome"], one["error"]) for one in job["attempts"]]
    return job["state"], job["attempt"], history


def lines(folder: Path) -> list[str]:
    """What the actors wrote, in order."""
    file = folder / "calls"
    return file.read_text().splitlines() if file.exists() else []


COMPLETED: tuple[str, int, list[Any]] = ("completed", 1, [])


# Verdicts.


def test_each_job_of_a_call_has_its_own_end_attempt_and_history(conn: Conn, trial: Any) -> None:
    ended = call(conn, trial, "complete", "silent", "fail", "raise", "discard", "snooze")
    assert {name: brief(job) for name, job in ended.items()} == {
        "complete": COMPLETED,
        "silent": COMPLETED,
        "fail": ("retryable", 1, [(1, "failed", "ItemFailed: no good")]),
        "raise": ("retryable", 1, [(1, "failed", "LookupError: not there")]),
        "discard": ("discarded", 1, [(1, "discarded", "never")]),
        "snooze": ("pending", 0, []),
    }
    assert {name: job["result"] for name, job in ended.items() if job["state"] == "completed"} == {
        "complete": {"together": 6, "attempt": 1},
        "silent": None,
    }
    assert [job["attempts"][0]["error_class"] for job in (ended["fail"], ended["raise"])] == [
        "middleware.batches.ItemFailed",
        "LookupError",
    ]
    snoozed = ended["snooze"]
    assert 59 < (snoozed["available_at"] - snoozed["claimed_at"]).total_seconds() < 75


def test_what_is_said_last_of_a_job_holds(conn: Conn, trial: Any) -> None:
    ended = call(conn, trial, "mend", "spoil")
    assert (brief(ended["mend"]), ended["mend"]["result"]) == (COMPLETED, "good after all")
    assert (brief(ended["spoil"]), ended["spoil"]["result"]) == (
        ("retryable", 1, [(1, "failed", "ItemFailed: no good after all")]),
        None,
    )


def test_a_result_that_cannot_be_stored_spoils_no_neighbour(conn: Conn, trial: Any) -> None:
    ended = call(conn, trial, "complete", "unsayable", "silent")
    assert [brief(job) for job in ended.values()] == [COMPLETED] * 3
    assert "could not be stored" in ended["unsayable"]["result"]["error"]
    assert ended["complete"]["result"] == {"together": 3, "attempt": 1}


@pytest.mark.parametrize(("how", "error"), [("break", "ValueError: broken"), ("exit", "SystemExit: 3")])
def test_a_call_that_raises_fails_those_of_which_nothing_was_said(conn: Conn, trial: Any, how: str, error: str) -> None:
    ended = call(conn, trial, "complete", "silent", how, "discard", "fail")
    failed = ("retryable", 1, [(1, "failed", error)])
    assert {name: brief(job) for name, job in ended.items()} == {
        "complete": COMPLETED,
        "silent": failed,
        how: failed,
        "discard": ("discarded", 1, [(1, "discarded", "never")]),
        "fail": ("retryable", 1, [(1, "failed", "ItemFailed: no good")]),
    }


def test_a_call_that_runs_out_of_time_times_out_those_of_which_nothing_was_said(conn: Conn, trial: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call, conn, trial, "complete", "silent", "spin")
        (guard,) = until(standing)
        until(lambda: guard.expire(time.monotonic()))
        ended = running.result(10)
    late = ("retryable", 1, [(1, "timed out", "ran longer than its limit of 0.5 s")])
    assert [brief(job) for job in ended.values()] == [COMPLETED, late, late]


def test_a_call_that_is_stopped_puts_back_those_of_which_nothing_was_said(conn: Conn, trial: Any) -> None:
    ended = call(conn, trial, "complete", "fail", "silent", "stop")
    assert [brief(job) for job in ended.values()] == [
        COMPLETED,
        ("retryable", 1, [(1, "failed", "ItemFailed: no good")]),
        ("pending", 0, []),
        ("pending", 0, []),
    ]


def test_a_call_that_has_not_begun_when_the_process_stops_does_not_begin(
    conn: Conn, trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr(lifecycle.process, "_stop", stopped)
    assert [brief(job) for job in call(conn, trial, "complete", "discard").values()] == [("pending", 0, [])] * 2


def test_a_job_that_nobody_can_read_is_left_out_of_its_batch(conn: Conn, trial: Any) -> None:
    ids = add(conn, "tell", "complete", "unreadable", "silent")
    conn.execute(
        "UPDATE dramatiq.queue SET message = message - 'args', available_at = now() WHERE message_id = %s",
        [ids["unreadable"]],
    )
    perform(conn, trial)
    ended = {name: shown(conn, job_id) for name, job_id in ids.items()}
    assert [brief(ended[name]) for name in ("complete", "silent")] == [COMPLETED] * 2
    assert ended["complete"]["result"] == {"together": 2, "attempt": 1}
    reason = "undecodable: args is missing or not a list"
    assert brief(ended["unreadable"]) == ("discarded", 1, [(1, "discarded", reason)])


def test_a_job_fails_no_neighbour_twice(kit: Kit, trial: Any) -> None:
    ids = add(kit.conn, "tell", "silent", "break", "complete")
    ran = [(one.args[0], one.attempt, one.outcome) for one in kit.drain()]
    assert ran[:3] == [("silent", 1, "retryable"), ("break", 1, "retryable"), ("complete", 1, "completed")]
    assert sorted(ran[3:]) == [("break", 2, "discarded"), ("silent", 2, "completed")]
    broken = [(1, "failed", "ValueError: broken"), (2, "failed", "attempts exhausted (2): ValueError: broken")]
    assert [brief(kit.job(job_id)) for job_id in ids.values()] == [
        ("completed", 2, broken[:1]),
        ("discarded", 2, broken),
        COMPLETED,
    ]


def test_a_batch_whose_lease_was_lost_is_refused_as_a_whole_and_comes_one_by_one(kit: Kit, trial: Any) -> None:
    ids = add(kit.conn, "tell", "complete", "discard", "silent")
    with kit.lost_lease():
        ran = [(one.args[0], one.attempt, one.outcome) for one in kit.drain()]
    assert ran[:3] == [(name, 1, "lost") for name in ids]
    assert sorted(ran[3:]) == [("complete", 2, "completed"), ("discard", 2, "discarded"), ("silent", 2, "completed")]
    assert kit.job(ids["complete"])["result"] == {"together": 1, "attempt": 2}
    assert [kit.job(job_id)["crashes"] for job_id in ids.values()] == [1, 1, 1]


# Middleware.


class Listener(dramatiq.Middleware):
    """Writes down every signal of a message, and refuses those that are called so."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, Any]] = []

    def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
        self._hear("before", message)
        match message.args[0]:
            case "skipped":
                raise SkipMessage("not this one")
            case "stale":
                message.fail()
                raise SkipMessage("too old")
            case "failed":
                message.fail()
            case "refused":
                raise MiddlewareError("no")

    def after_process_message(
        self, broker: dramatiq.Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self._hear("after", message, result if exception is None else type(exception).__name__)

    def after_skip_message(self, broker: dramatiq.Broker, message: Any) -> None:
        self._hear("skip", message)

    def after_ack(self, broker: dramatiq.Broker, message: Any) -> None:
        self._hear("ack", message)

    def after_nack(self, broker: dramatiq.Broker, message: Any) -> None:
        self._hear("nack", message)

    def _hear(self, signal: str, message: Any, what: Any = None) -> None:
        self.heard.append((message.args[0], signal, what))

    def of(self, name: str) -> list[tuple[str, Any]]:
        return [(signal, what) for known, signal, what in self.heard if known == name]


@pytest.fixture
def listener(trial: Any) -> Iterator[Listener]:
    listening = Listener()
    with trial.broker.working_with(trial.broker.database, listening):
        yield listening


def test_middleware_hears_of_each_message_of_a_batch(conn: Conn, trial: Any, listener: Listener) -> None:
    names = ("complete", "silent", "fail", "discard")
    call(conn, trial, *names)
    assert listener.heard[:4] == [(name, "before", None) for name in names]
    assert {name: listener.of(name)[1:] for name in names} == {
        "complete": [("after", {"together": 4, "attempt": 1}), ("ack", None)],
        "silent": [("after", None), ("ack", None)],
        "fail": [("after", "ItemFailed"), ("ack", None)],
        "discard": [("after", "Discard"), ("nack", None)],
    }


def test_what_middleware_keeps_from_its_actor_ends_as_with_dramatiq(
    conn: Conn, trial: Any, listener: Listener, folder: Path
) -> None:
    """What was skipped is done, what was failed is dead, and its actor never sees it."""
    names = ("skipped", "stale", "failed", "refused")
    single = {name: call(conn, trial, name, actor="alone")[name] for name in names}
    conn.execute("DELETE FROM dramatiq.queue")
    ended = call(conn, trial, *names, "break")
    assert brief(ended.pop("break")) == ("retryable", 1, [(1, "failed", "ValueError: broken")])
    dead = ("discarded", 1, [(1, "discarded", "failed by middleware before it ran")])
    for found in (ended, single):
        assert {name: brief(job) for name, job in found.items()} == {
            "skipped": COMPLETED,
            "stale": dead,
            "failed": dead,
            "refused": ("retryable", 1, [(1, "failed", "MiddlewareError: no")]),
        }
    assert {name: listener.of(name) for name in names} == {
        "skipped": [("before", None), ("skip", None), ("ack", None)] * 2,
        "stale": [("before", None), ("skip", None), ("nack", None)] * 2,
        "failed": [("before", None), ("after", None), ("nack", None)] * 2,
        "refused": [("before", None), ("after", "MiddlewareError"), ("ack", None)] * 2,
    }
    assert {f"alone {name}" for name in names} & set(lines(folder)) == set()


# Which jobs come together.


class Slow(Lane[Held]):
    """Jobs of such a length that none is taken in stock."""

    @property
    def stock_target(self) -> int:
        return 0


class Hand:
    """A process's claim loop without its threads: what it would hand to them, and what it holds."""

    def __init__(self, url: str, trial: Any, threads: int = 2) -> None:
        self.worker_id = str(uuid.uuid4())
        self.given: list[Work] = []
        lane = Slow("quick", threads, 0, batch=trial.broker.batches()["quick"])
        self.loop = ClaimLoop(
            connect=lambda: self._opened(url),
            lanes=[lane],
            threads=threads,
            worker_id=self.worker_id,
            lease_s=20,
            batch_of=trial.broker.batch_of,
            deliver=self.given.append,
            on_event=lambda: None,
            meter=meter(),
            listens=False,
            probe_every_s=float("inf"),
        )
        self._trial = trial

    def _opened(self, url: str) -> Conn:
        self.conn = connect(url, name="posthouse test", session=jobs.SESSION)
        return self.conn

    def close(self) -> None:
        self.conn.close()

    def claim(self) -> list[list[str]]:
        """One turn: the names of the jobs in each call that it started."""
        begun = len(self.given)
        self.loop.step(["quick"])
        return [[claim.message["args"][0] for claim in work.claims] for work in self.given[begun:]]

    def work(self) -> list[list[str]]:
        """Every call that a thread makes from here on, until there is nothing to do; the names in each."""
        calls = []
        while self.given or self.claim():
            work: Work | None = self.given.pop(0)
            while work is not None:
                calls.append([claim.message["args"][0] for claim in work.claims])
                work = self.loop.finish(work, self._trial.broker.perform(work.claims))
        self.loop.step([])
        return calls


@pytest.fixture
def hand(database_url: str, trial: Any) -> Iterator[Hand]:
    with closing(Hand(database_url, trial)) as worker:
        yield worker


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}{number}" for number in range(count)]


def in_hand(conn: Conn) -> int:
    """Jobs that some process holds."""
    return int(sum(depth["running"] for depth in jobs.depths(conn)))


def test_a_batch_takes_so_many_at_most_and_never_mixes_actors(conn: Conn, hand: Hand) -> None:
    for number in range(8):
        add(conn, "tell", f"t{number}")
        add(conn, "other", f"o{number}")
    assert hand.claim() == [numbered("t", 8), numbered("o", 8)]
    add(conn, "tell", *numbered("more", 25))
    assert sorted(len(names) for names in hand.work()) == [5, 8, 8, 10, 10]


def test_the_more_urgent_kind_goes_first(conn: Conn, hand: Hand) -> None:
    add(conn, "tell", "usual")
    add(conn, "other", "urgent", priority=-1)
    add(conn, "tell", "soon", priority=-1)
    assert hand.claim() == [["urgent"], ["soon", "usual"]]


@pytest.mark.parametrize(("first", "expected"), [(True, [["again"], ["a", "b"]]), (False, [["a", "b"], ["again"]])])
def test_a_second_attempt_comes_alone(conn: Conn, hand: Hand, first: bool, expected: list[list[str]]) -> None:
    add(conn, "tell", "again", priority=-1 if first else 1)
    (held,) = jobs.claim(conn, {"quick": 1}, worker_id=hand.worker_id, lease_s=20)
    fail(conn, held)
    add(conn, "tell", "a", "b")
    assert hand.claim() == expected


def test_a_limit_holds_within_batches_and_over_processes(conn: Conn, database_url: str, trial: Any, hand: Hand) -> None:
    add(conn, "tell", *numbered("n", 9), limit_key="printer", limit=4)
    with closing(Hand(database_url, trial)) as beside:
        assert [hand.claim(), beside.claim()] == [[numbered("n", 4)], []]
        assert in_hand(conn) == 4
    assert sorted(len(names) for names in hand.work()) == [1, 4, 4]


def test_what_no_thread_is_free_for_goes_back_at_once_uncharged(conn: Conn, hand: Hand) -> None:
    """Whole batches are claimed for, but jobs of another kind come: they are not kept from other processes (F68)."""
    add(conn, "alone", *numbered("a", 12))
    add(conn, "tell", *numbered("t", 12))
    assert hand.claim() == [["a0"], ["a1"]]
    assert in_hand(conn) == 2
    assert {(job["state"], job["attempt"], job["crashes"]) for job in jobs.listing(conn)} == {
        ("running", 1, 0),
        ("pending", 0, 0),
    }
    assert hand.claim() == []
    assert in_hand(conn) == 2


def test_jobs_that_come_alone_for_their_failures_are_not_hoarded(conn: Conn, hand: Hand) -> None:
    add(conn, "tell", *numbered("n", 12))
    for held in jobs.claim(conn, {"quick": 12}, worker_id=str(uuid.uuid4()), lease_s=20):
        fail(conn, held)
    assert hand.claim() == [["n0"], ["n1"]]
    assert in_hand(conn) == 2


def test_kinds_of_small_batches_are_not_hoarded_beside_one_of_large_ones(conn: Conn, hand: Hand) -> None:
    add(conn, "narrow", *numbered("n", 30))
    assert hand.claim() == [["n0", "n1"], ["n2", "n3"]]
    assert in_hand(conn) == 4
    assert hand.claim() == []
    assert [len(names) for names in hand.work()] == [2] * 15


def test_what_was_once_given_back_is_not_claimed_again_before_its_turn(conn: Conn, hand: Hand, folder: Path) -> None:
    """What is given back rings the bell: once for what came instead of batches, not at every claim from there on."""
    conn.execute("LISTEN posthouse_q_quick")
    add(conn, "alone", *numbered("a", 12))
    (folder / "go").touch()
    assert len(hand.work()) == 12
    (folder / "go").unlink()
    assert len(list(conn.notifies(timeout=0.1))) == 2


# Whole worker processes.


@pytest.fixture
def hired(database_url: str, tmp_path: Path) -> Iterator[Crew]:
    with crew(database_url, tmp_path) as workers:
        yield workers


def test_slow_jobs_beside_batches_are_never_hoarded(hired: Crew, conn: Conn) -> None:
    """One kind of the queue comes in batches; the other's jobs stay in the table until a thread is free (line 19)."""
    add(conn, "alone", *numbered("a", 12))
    add(conn, "tell", *numbered("t", 40), priority=1)
    for threads in (3, 6):
        hired.start("quick", threads=3, actors=ACTORS)
        settles_at(threads, conn, hired)
        for _ in range(10):
            time.sleep(0.05)
            conn.execute("SELECT pg_notify('posthouse_q_quick', '')")
        settles_at(threads, conn, hired)
    (hired.folder / "go").touch()
    until(lambda: jobs.depths(conn) == [])
    assert {(job["state"], job["attempt"], job["crashes"]) for job in jobs.listing(conn)} == {("completed", 1, 0)}


def settles_at(count: int, conn: Conn, hired: Crew) -> None:
    """So many jobs are held, and all of them run."""
    until(lambda: len(lines(hired.folder)) >= count and in_hand(conn) <= count, 15, f"{count} jobs in hand")
    assert len(lines(hired.folder)) == in_hand(conn) == count


def test_a_stopped_process_settles_what_was_said_and_gives_the_rest_back_uncharged(hired: Crew, conn: Conn) -> None:
    worker = hired.start("quick", threads=1, actors=ACTORS, told={"SHUTDOWN_GRACE_S": "1", "SHUTDOWN_TOTAL_S": "8"})
    ids = add(conn, "hold", *numbered("h", 25))
    until(lambda: lines(hired.folder))
    assert worker.stop() == 0
    assert lines(hired.folder) == ["hold 10"]
    assert [brief(shown(conn, job_id)) for job_id in ids.values()] == [COMPLETED] + [("pending", 0, [])] * 24
    (hired.folder / "go").touch()
    hired.start("quick", actors=ACTORS)
    until(lambda: jobs.depths(conn) == [])
    assert {brief(shown(conn, job_id))[:2] for job_id in ids.values()} == {("completed", 1)}


def test_a_killed_process_is_charged_to_each_of_its_batch_once_and_the_poison_ends(hired: Crew, conn: Conn) -> None:
    """One poisons all of its first batch; alone it can only kill itself (line 36)."""
    names = ["before", "poison", "behind"]
    ids = add(conn, "poison", *names, queue="single")
    hired.start("single", threads=1, actors=ACTORS, wait=False, told=HASTY).ends(20)
    assert lines(hired.folder) == [" ".join(names)]
    until(lambda: jobs.rescue(conn))
    lost = (1, "worker lost", "the lease ran out without an answer")
    assert [brief(shown(conn, job_id)) for job_id in ids.values()] == [("retryable", 1, [lost])] * 3
    for _ in range(2):
        hired.start("single", threads=1, actors=ACTORS, wait=False, told=HASTY).ends(20)
    hired.start("single", threads=1, actors=ACTORS, told=HASTY)
    until(lambda: jobs.depths(conn) == [])
    ended = {name: shown(conn, job_id) for name, job_id in ids.items()}
    assert (ended["poison"]["state"], ended["poison"]["crashes"], ended["poison"]["last_error"]) == (
        "discarded", 3, "worker lost",
    )  # fmt: skip
    assert {job["state"] for name, job in ended.items() if name != "poison"} == {"completed"}
    assert [line for line in lines(hired.folder)[1:] if " " in line] == []
    assert lines(hired.folder).count("poison") == 2
    for job in ended.values():
        assert len(job["attempts"]) == job["crashes"] <= 3
