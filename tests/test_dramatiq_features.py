"""Dramatiq's own features, by its documented examples, on real worker processes; and the parts of them that can be had
without."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq import group, pipeline
from dramatiq.errors import QueueJoinTimeout, QueueNotFound, RateLimitExceeded
from dramatiq.rate_limits import Barrier, BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter
from dramatiq.results import ResultFailure, ResultMissing, ResultTimeout

import settings
from middleware.rate_limits import RateLimits, arrive, prune
from outbox import jobs
from outbox.db import Conn, Database
from outbox.jobs import Settlement
from tests import emptied
from tests.workers import QUEUES, Crew, crew, until

shared_url, database_url = emptied.shared_url, emptied.database_url

WORKER = "4dd4ab31-3d9b-4b9c-9b9c-5f6e2f0d7e55"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the actors say what they did."""
    return tmp_path_factory.mktemp("dramatiq")


@pytest.fixture(scope="module")
def trial(shared_url: str, folder: Path) -> Iterator[Any]:
    """The actors, as the process that sends has them."""
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
        module = importlib.import_module("tests.dramatiq_trial")
        yield module
        module.broker.database.close()
        del sys.modules["tests.dramatiq_trial"]


@pytest.fixture(scope="module")
def worked(shared_url: str, folder: Path, trial: Any) -> Iterator[Crew]:
    """A worker process for all tests that want one."""
    with crew(shared_url, folder) as workers:
        workers.start("quick", "single", actors="tests.dramatiq_trial")
        yield workers


def told(folder: Path, name: str) -> list[list[Any]]:
    """The lines of the file called *name*."""
    file = folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def told_of(folder: Path, name: str, message: dramatiq.Message[Any]) -> list[Any]:
    """What the file called *name* says of *message*."""
    return [said for message_id, said in told(folder, name) if message_id == message.message_id]


SOON_MS = 10_000


# Results.


def test_a_message_gets_its_result(worked: Crew, trial: Any) -> None:
    assert trial.add.send(1, 2).get_result(block=True, timeout=SOON_MS) == 3
    assert trial.identity.send({"a": [1, None]}).get_result(block=True, timeout=SOON_MS) == {"a": [1, None]}


def test_a_job_that_failed_for_good_raises_what_it_raised(worked: Crew, trial: Any) -> None:
    sent = trial.fail.send()
    with pytest.raises(ResultFailure, match=r"^actor raised Exception: failed$") as raised:
        sent.get_result(block=True, timeout=SOON_MS)
    assert (raised.value.orig_exc_type, raised.value.orig_exc_msg) == ("Exception", "failed")
    tried_twice = trial.identity.send("no number")
    with pytest.raises(ResultFailure, match=r"^actor raised ValueError: no number$"):
        tried_twice.get_result(block=True, timeout=SOON_MS)


def test_a_result_that_is_none_is_not_one_that_is_missing(trial: Any, conn: Conn) -> None:
    sent = trial.aside.send(1, 2)
    with pytest.raises(ResultMissing):
        sent.get_result()
    held = claim(conn, sent)
    with pytest.raises(ResultMissing):
        sent.get_result()
    jobs.settle(conn, [Settlement(held.id, held.token, "done")])
    assert sent.get_result() is None


def test_a_failed_attempt_that_is_tried_again_is_no_result_yet(trial: Any, conn: Conn) -> None:
    sent = trial.aside.send(1, 2)
    held = claim(conn, sent)
    jobs.settle(conn, [Settlement(held.id, held.token, "queued", outcome="failed", error="no", error_class="E")])
    with pytest.raises(ResultMissing):
        sent.get_result()


def test_who_waits_for_what_does_not_come_is_told_without_the_arguments(trial: Any, conn: Conn) -> None:
    sent = trial.aside.send("secret", 2)
    with pytest.raises(ResultTimeout) as raised:
        sent.get_result(block=True, timeout=30)
    assert str(raised.value) == f"{sent.message_id} of aside: no end within 30 ms"
    with pytest.raises(ResultTimeout):
        trial.aside.message(1, 2).get_result(block=True, timeout=0)


def test_a_job_that_lost_its_workers_or_was_cancelled_is_a_failure_too(trial: Any, conn: Conn) -> None:
    lost, cancelled = trial.aside.send(1, 2), trial.aside.send(1, 2)
    conn.execute(
        "UPDATE dramatiq.queue SET state = 'rejected', finished_at = now(), last_error = 'worker lost' "
        "WHERE message_id = %s",
        [lost.message_id],
    )
    conn.execute(
        "UPDATE dramatiq.queue SET state = 'rejected', finished_at = now(), stop_cause = 'deadline_exceeded' "
        "WHERE message_id = %s",
        [cancelled.message_id],
    )
    with pytest.raises(ResultFailure, match=r"^job was discarded: worker lost$"):
        lost.get_result()
    with pytest.raises(ResultFailure, match=r"^job was cancelled: deadline_exceeded$"):
        cancelled.get_result()


def claim(conn: Conn, message: dramatiq.Message[Any]) -> jobs.Claim:
    (held,) = jobs.claim(conn, {message.queue_name: 9}, worker_id=WORKER, lease_s=20)
    return held


# Composition.


def test_a_pipeline_hands_each_result_to_the_next(worked: Crew, trial: Any) -> None:
    pipe = (trial.add.message(1, 2) | trial.add.message(3) | trial.add.message(4)).run()
    assert pipe.get_result(block=True, timeout=SOON_MS) == 10
    assert list(pipe.get_results()) == [3, 6, 10]
    assert (pipe.completed, pipe.completed_count) == (True, 3)


def test_a_pipeline_may_be_made_of_a_list_and_of_pipelines(worked: Crew, trial: Any) -> None:
    pipe = pipeline([trial.add.message(1, 1) | trial.add.message(1), trial.identity.message()]).run(delay=50)
    assert pipe.get_result(block=True, timeout=SOON_MS) == 3


def test_a_step_may_ignore_what_came_before_it(worked: Crew, trial: Any) -> None:
    alone = trial.add.message_with_options(args=(5, 5), pipe_ignore=True)
    pipe = (trial.add.message(1, 2) | alone).run()
    assert pipe.get_result(block=True, timeout=SOON_MS) == 10


def test_a_step_that_failed_for_good_ends_its_pipeline(worked: Crew, trial: Any, folder: Path) -> None:
    pipe = (trial.fail.message() | trial.write.message("after-failure")).run()
    with pytest.raises(ResultFailure):
        pipe.messages[0].get_result(block=True, timeout=SOON_MS)
    assert told(folder, "after-failure") == []


def test_a_group_gathers_its_results(worked: Crew, trial: Any) -> None:
    many = group([trial.add.message(1, 2), trial.add.message(2, 3) | trial.add.message(10), trial.add.message(3, 4)])
    many.run()
    assert list(many.get_results(block=True, timeout=SOON_MS)) == [3, 15, 7]
    assert (many.completed, many.completed_count) == (True, 3)
    many.wait(timeout=SOON_MS)


def test_a_groups_callbacks_run_once_when_all_have_completed(worked: Crew, trial: Any, folder: Path) -> None:
    members = [trial.add.message(n, n) for n in range(8)]
    members.append(trial.add.message(1, 2) | trial.add.message(3))
    many = group(members)
    for name in ("all-done", "all-done-too"):
        many.add_completion_callback(trial.write.message(name, "done"))
    many.run()
    until(lambda: told(folder, "all-done") and told(folder, "all-done-too"))
    assert (many.completed, told(folder, "all-done"), told(folder, "all-done-too")) == (True, [["done"]], [["done"]])


def test_a_group_stays_open_while_a_member_has_not_completed(
    worked: Crew, trial: Any, folder: Path, conn: Conn
) -> None:
    fails = trial.fail.message()
    many = group([trial.add.message(1, 2), fails])
    many.add_completion_callback(trial.write.message("never-all-done"))
    many.run()
    trial.broker.join("quick", timeout=SOON_MS)
    with pytest.raises(ResultFailure):
        fails.get_result()
    assert told(folder, "never-all-done") == []


def test_callbacks_hear_how_it_ended(worked: Crew, trial: Any, folder: Path) -> None:
    options = {"on_success": trial.print_result, "on_failure": trial.print_error}
    well = trial.identity.send_with_options(args=(42,), **options)
    badly = trial.identity.send_with_options(args=("no",), **options)
    own = trial.watched.send(1), trial.watched.send("bad")
    trial.broker.join("quick", timeout=SOON_MS)
    assert told_of(folder, "results", well) == [42]
    assert told_of(folder, "errors", badly) == [{"type": "ValueError", "message": "no"}] * 2
    assert told_of(folder, "results", own[0]) == [1]
    assert told_of(folder, "errors", own[1]) == [{"type": "ValueError", "message": "bad"}]


def test_an_attempt_that_is_put_back_without_blame_calls_nobody(worked: Crew, trial: Any, folder: Path) -> None:
    sent = trial.snooze_once.send_with_options(args=("snoozed",), on_failure="print_error", on_success="print_result")
    until(lambda: told_of(folder, "results", sent))
    assert told_of(folder, "errors", sent) == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pipe_target": {"queue_name": "no such/queue", "actor_name": "add", "args": [], "kwargs": {}, "options": {}}},
         "what follows cannot be enqueued: add: queue 'no such/queue'"),
        ({"pipe_target": {"nonsense": 1}}, "attempts exhausted (2): TypeError"),
        ({"on_success": "nobody"}, "attempts exhausted (2): ActorNotFound: nobody"),
        ({"group_completion_uuid": "none"}, None),
    ],
)  # fmt: skip
def test_a_job_whose_follower_cannot_be_enqueued_has_failed(
    worked: Crew, trial: Any, conn: Conn, options: dict[str, Any], error: str | None
) -> None:
    """Dramatiq logs it and goes on: the chain would end without a word."""
    sent = trial.identity.send_with_options(args=(1,), **options)
    trial.broker.join("quick", timeout=SOON_MS)
    job = jobs.load(conn, sent.message_id) or {}
    assert (job["state"], (job["last_error"] or "")[: len(error or "")] or None) == (
        "discarded" if error else "completed",
        error,
    )


def test_priority_and_delay_go_with_the_message(trial: Any, conn: Conn) -> None:
    trial.aside.send_with_options(args=(1, 2), priority=7)
    trial.aside.send_with_options(args=(3, 4), priority=-1)
    trial.aside.send_with_options(args=(5, 6), priority=-9, delay=60_000)
    claimed = jobs.claim(conn, {"tasks": 9}, worker_id=WORKER, lease_s=20)
    assert [(held.priority, held.message["args"]) for held in claimed] == [(-1, [3, 4]), (7, [1, 2])]


def test_an_actor_knows_its_message(worked: Crew, trial: Any) -> None:
    sent = trial.who_am_i.send()
    assert sent.get_result(block=True, timeout=SOON_MS) == sent.message_id


def test_a_pipeline_that_is_run_again_changes_nothing(trial: Any, conn: Conn) -> None:
    pipe = trial.aside.message(1, 2) | trial.aside.message(3)
    pipe.run()
    held = claim(conn, pipe.messages[0])
    jobs.settle(conn, [Settlement(held.id, held.token, "done")])
    pipe.run()
    assert [job["state"] for job in jobs.listing(conn)] == ["completed"]


# Join and flush.


def test_join_waits_for_delayed_and_running_jobs(worked: Crew, trial: Any, folder: Path) -> None:
    trial.write.send_with_options(args=("joined",), delay=300)
    trial.broker.join("quick", timeout=SOON_MS)
    assert told(folder, "joined") == [[]]
    trial.hold.send("held")
    until(lambda: told(folder, "held"))
    with pytest.raises(QueueJoinTimeout):
        trial.broker.join("single", timeout=50)
    (folder / "held").unlink()
    trial.broker.join("single", timeout=SOON_MS)


def test_flush_takes_what_waits_and_leaves_what_runs_and_what_has_ended(trial: Any, conn: Conn) -> None:
    sent = [trial.aside.send(n, n) for n in range(3)]
    held = jobs.claim(conn, {"tasks": 2}, worker_id=WORKER, lease_s=20)
    jobs.settle(conn, [Settlement(held[0].id, held[0].token, "done")])
    trial.aside.send_with_options(args=(1, 2), delay=60_000)
    other = trial.write.send_with_options(args=("elsewhere",), delay=60_000)
    trial.broker.flush("tasks")
    assert {job["id"]: job["state"] for job in jobs.listing(conn)} == {
        sent[0].message_id: "completed",
        sent[1].message_id: "running",
        other.message_id: "pending",
    }
    trial.broker.flush_all()
    assert {job["state"] for job in jobs.listing(conn)} == {"completed", "running"}


def test_a_queue_nobody_declared_can_be_neither_joined_nor_flushed(trial: Any) -> None:
    for call in (trial.broker.join, trial.broker.flush):
        with pytest.raises(QueueNotFound):
            call("nowhere")


def test_an_actor_of_dramatiqs_own_decorator_is_refused(trial: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It would have no time limit."""
    with pytest.raises(SystemExit) as end:
        dramatiq.actor(lambda: None, actor_name="plain", queue_name="quick")
    assert end.value.code == 78
    assert "declare it by broker.actor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        importlib.import_module("broker").actor(name="odd", queue="quick", max_age=1)(lambda: None)


# Rate limiters.


@pytest.fixture
def limits(db: Database) -> RateLimits:
    return RateLimits(db.transaction)


def expire(conn: Conn) -> None:
    """All that counts is over."""
    conn.execute("UPDATE posthouse.rate_limits SET expires_at = now()")


def at_once(times: int, call: Any) -> list[Any]:
    with ThreadPoolExecutor(times) as pool:
        return [one.result(10) for one in [pool.submit(call) for _ in range(times)]]


def test_a_key_is_added_once_until_it_expires(limits: RateLimits, conn: Conn) -> None:
    assert [limits.add("k", 1, 60_000), limits.add("k", 2, 60_000)] == [True, False]
    expire(conn)
    assert limits.add("k", 5, 60_000) is True
    assert limits.decr("k", 1, 4, 60_000) is True
    assert limits.decr("k", 1, 4, 60_000) is False


def test_a_counter_keeps_its_bounds_and_starts_anew_once_expired(limits: RateLimits, conn: Conn) -> None:
    assert limits.decr("k", 1, 0, 60_000) is False
    assert [limits.incr("k", 2, 3, 60_000), limits.incr("k", 2, 3, 60_000), limits.incr("k", 1, 3, 60_000)] == [
        True, False, True,
    ]  # fmt: skip
    assert limits.incr("other", 4, 3, 60_000) is False
    expire(conn)
    assert limits.decr("k", 1, 0, 60_000) is False
    assert limits.incr("k", 3, 3, 60_000) is True


def test_of_many_at_once_as_many_get_in_as_may(limits: RateLimits) -> None:
    concurrent = ConcurrentRateLimiter(limits, "door", limit=3)
    assert sum(at_once(12, concurrent._acquire)) == 3
    bucket = BucketRateLimiter(limits, "bucket", limit=3, bucket=3_600_000)
    assert sum(at_once(12, bucket._acquire)) == 3


def test_a_window_counts_what_another_second_has_taken_at_the_same_time(
    limits: RateLimits, db: Database, conn: Conn
) -> None:
    def enter(second: int, by: RateLimits) -> bool:
        return by.incr_and_sum(f"window@{second}", lambda: [f"window@{second}", f"window@{second - 1}"], 1, 1, 60_000)

    with ThreadPoolExecutor(1) as pool:
        with db.transaction() as first:
            assert enter(1, RateLimits(lambda: nullcontext(first))) is True
            second = pool.submit(enter, 2, limits)
            until(lambda: second.done() or waits_for_a_lock(conn))
        assert second.result(10) is False
    assert enter(3, limits) is True


def waits_for_a_lock(conn: Conn) -> bool:
    query = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return conn.execute(query).fetchone() is not None


def test_a_window_lets_in_as_many_as_may(limits: RateLimits) -> None:
    window = WindowRateLimiter(limits, "slow", limit=2, window=60)
    with window.acquire(), window.acquire(), pytest.raises(RateLimitExceeded), window.acquire():
        pass


def test_a_concurrent_limiter_lets_the_next_in_when_one_has_left(limits: RateLimits) -> None:
    mutex = ConcurrentRateLimiter(limits, "mutex", limit=1)
    with mutex.acquire(), mutex.acquire(raise_on_failure=False) as second:
        assert second is False
    with mutex.acquire(raise_on_failure=False) as third:
        assert third is True


def test_a_barrier_opens_for_the_last_party_and_for_all_who_wait(limits: RateLimits) -> None:
    barrier = Barrier(limits, "gate", ttl=60_000)
    assert barrier.create(3) is True
    assert barrier.create(3) is False
    assert barrier.wait(block=False) is False
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(barrier.wait, timeout=10_000)
        time.sleep(0.05)
        assert barrier.wait(block=False) is True
        assert waiting.result(10) is True
    assert limits.wait("nothing@events", 20) is False


def test_a_member_of_a_group_counts_once_and_the_last_is_told_so_each_time(limits: RateLimits, conn: Conn) -> None:
    Barrier(limits, "group").create(2)
    assert [arrive(conn, "group", member, ttl_s=60) for member in ("a", "a", "b", "b", "a")] == [1, 1, 0, 0, 0]
    assert arrive(conn, "no such group", "a", ttl_s=60) is None


def test_only_one_of_the_last_two_members_at_once_is_the_last(limits: RateLimits, db: Database) -> None:
    def come(member: str) -> int | None:
        with db.transaction() as conn:
            return arrive(conn, "crowd", member, ttl_s=60)

    Barrier(limits, "crowd").create(12)
    names = iter("abcdefghijkl")
    assert sorted(at_once(12, lambda: come(next(names)))) == list(range(12))


def test_pruning_takes_what_is_over(limits: RateLimits, conn: Conn) -> None:
    limits.add("old", 1, 60_000)
    expire(conn)
    limits.add("new", 1, 60_000)
    assert [prune(conn), prune(conn)] == [1, 0]
    assert [row["key"] for row in conn.execute("SELECT key FROM posthouse.rate_limits")] == ["new"]


def test_a_distributed_mutex_lets_one_job_in_at_a_time(worked: Crew, trial: Any, folder: Path) -> None:
    sent = [trial.one_at_a_time.send("mutex") for _ in range(6)]
    for message in sent:
        assert message.get_result(block=True, timeout=2 * SOON_MS) is None
    assert [what for (what,) in told(folder, "mutex")] == ["in", "out"] * 6
