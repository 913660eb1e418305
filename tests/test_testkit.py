"""The test kit, and that what runs by it ends as what runs in worker processes (specs/queue.md 8)."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import dramatiq
import pytest
from dramatiq import group
from psycopg import sql

import settings
import testkit
from outbox import backlog, catalogue, events, jobs
from outbox.db import Conn
from outbox.jobs import NewJob
from testkit import Endless, JobFailed, Kit, NotATestDatabase
from tests import emptied
from tests.workers import HOUSE, QUEUES, Crew, crew, until

shared_url, database_url = emptied.shared_url, emptied.database_url


@pytest.fixture(scope="module")
def kit_url(admin: Conn, server_url: str) -> Iterator[str]:
    """The kit's own database."""
    name = sql.Identifier("kit_test")
    admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(name, sql.Identifier(emptied.TEMPLATE)))
    yield server_url.replace("/postgres?", "/kit_test?")
    admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kit")


@pytest.fixture(scope="module")
def trial(shared_url: str, folder: Path) -> Iterator[Any]:
    """The actors, as this process has them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "DATABASE_URL": shared_url,
            "QUEUES": json.dumps(QUEUES),
            "DATA_DIR": str(folder),
            "LEASE_S": "2",
            "CONTROL_INTERVAL_S": "0.5",
        }.items():
            patch.setenv(name, value)
        settings.load.cache_clear()
        patch.setattr(dramatiq.broker, "global_broker", None)
        # Its event type is declared again when the tests of this module are shared out twice to one process.
        patch.setattr(catalogue, "_types", dict(catalogue._types))
        module = importlib.import_module("tests.kit_trial")
        yield module
        module.broker.database.close()
        del sys.modules["tests.kit_trial"]


@pytest.fixture
def kit(trial: Any, kit_url: str) -> Iterator[Kit]:
    with Kit(kit_url) as opened:
        yield opened


# The same scenarios by the kit and by worker processes.


class Runner(Protocol):
    """Where a scenario takes place."""

    conn: Conn

    def finish(self) -> None:
        """Run everything to its end."""

    def crash(self) -> Any:
        """In this block the first attempt takes its process with it."""


class OnKit:
    def __init__(self, kit: Kit) -> None:
        self.conn = kit.conn
        self.kit = kit

    def finish(self) -> None:
        for _ in range(100):
            self.kit.drain()
            if not backlog.unfinished(self.conn, "quick"):
                return
            self.kit.clock.advance(0.5)
        raise AssertionError("it never ends")

    def crash(self) -> Any:
        return self.kit.crash_before_settle()


class OnWorkers:
    def __init__(self, conn: Conn, crew: Crew) -> None:
        self.conn = conn
        self.crew = crew

    def finish(self) -> None:
        until(self._finished, 30)

    def _finished(self) -> bool:
        self._hire()
        return events.backlog(self.conn)["waiting"] == 0 and not backlog.unfinished(self.conn, "quick")

    def crash(self) -> Any:
        self._hire()
        return nullcontext()

    def _hire(self) -> None:
        # Before there is work: a child that dies while its master boots is missed only after 30 seconds.
        if not self.crew.workers or self.crew.workers[-1].process.poll() is not None:
            self.crew.start("quick", actors="tests.kit_trial", told={"TRIAL_PERISH": "1"})


@pytest.fixture(scope="module")
def hired(shared_url: str, folder: Path, trial: Any) -> Iterator[Crew]:
    with crew(shared_url, folder) as workers:
        yield workers


@pytest.fixture(params=["kit", "workers"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Each place in turn."""
    if request.param == "kit":
        yield OnKit(request.getfixturevalue("kit"))
        return
    conn, workers = request.getfixturevalue("conn"), request.getfixturevalue("hired")
    yield OnWorkers(conn, workers)


@dataclass(frozen=True)
class End:
    """How a job ended: shown state, attempts, crashes, result, last error, and its history."""

    state: str = "completed"
    attempt: int = 1
    crashes: int = 0
    result: Any = None
    error: str | None = None
    history: tuple[tuple[int, str, str | None, str | None], ...] = ()


def end(job: dict[str, Any]) -> End:
    history = tuple((one["attempt"], one["outcome"], one["error_class"], one["error"]) for one in job["attempts"])
    return End(job["state"], job["attempt"], job["crashes"], job["result"], job["last_error"], history)


def failed(attempt: int, text: str, of: int, name: str = "ValueError", home: str = "") -> tuple[int, str, str, str]:
    """One line of a history."""
    said = f"{name}: {text}"
    return attempt, "failed", home + name, f"attempts exhausted ({attempt}): {said}" if attempt == of else said


def exhausted(text: str, attempts: int, name: str = "ValueError", home: str = "") -> End:
    """Failed each time."""
    history = tuple(failed(n, text, attempts, name, home) for n in range(1, attempts + 1))
    return End("discarded", attempts, error=history[-1][3], history=history)


def gave_up(error_class: str, reason: str) -> End:
    return End("discarded", error=reason, history=((1, "discarded", error_class, reason),))


LIMIT = "ran longer than its limit of 0.3 s"
NO_SET = {"error": "the result could not be stored: result: set has no form in JSON"}
FLAKY = End(attempt=3, result=3, history=(failed(1, "failure 1", 5), failed(2, "failure 2", 5)))

ALONE: dict[str, tuple[Callable[[Any], NewJob], End]] = {
    "completed": (lambda trial: trial.give.job({"a": [1, "é", None]}), End(result={"a": [1, "é", None]})),
    "completed with nothing": (lambda trial: trial.give.job(), End()),
    "completed with what cannot be stored": (lambda trial: trial.odd.job(), End(result=NO_SET)),
    "completed at the third attempt": (lambda trial: trial.flaky.job(2), FLAKY),
    "failed each time": (lambda trial: trial.fail.job("no"), exhausted("no", 3)),
    "SystemExit": (lambda trial: trial.raise_.job("SystemExit"), exhausted("3", 1, "SystemExit")),
    "KeyboardInterrupt": (lambda trial: trial.raise_.job("KeyboardInterrupt"), exhausted("", 1, "KeyboardInterrupt")),
    "NUL in the text": (lambda trial: trial.raise_.job("NUL"), exhausted("a�b", 1)),
    "discarded": (lambda trial: trial.discard.job("why"), gave_up("middleware.failures.Discard", "why")),
    "final at once": (lambda trial: trial.throw.job(), gave_up("KeyError", "KeyError: 'k'")),
    "retried on demand": (
        lambda trial: trial.retry.job(100),
        End(attempt=2, result="retried", history=((1, "failed", "dramatiq.errors.Retry", "Retry: later"),)),
    ),
    "snoozed": (lambda trial: trial.snooze.job(0.2), End(result="woken")),
    "timed out": (
        lambda trial: trial.spin.job(),
        End(
            "discarded",
            error=f"attempts exhausted (1): {LIMIT}",
            history=((1, "timed out", "middleware.failures.TimeLimitExceeded", f"attempts exhausted (1): {LIMIT}"),),
        ),
    ),
}


def test_every_way_to_end_is_the_same(runner: Runner, trial: Any) -> None:
    asked = {name: jobs.enqueue(runner.conn, job(trial)).id for name, (job, _) in ALONE.items()}
    runner.finish()
    found = {name: end(jobs.load(runner.conn, job_id) or {}) for name, job_id in asked.items()}
    assert found == {name: expected for name, (_, expected) in ALONE.items()}


def test_a_row_that_cannot_be_read_ends_the_same(runner: Runner, trial: Any) -> None:
    rows = {"{}": "actor_name is missing or not a str", '"x"': "a JSON object is wanted, not str"}
    asked = {}
    for text in rows:
        job_id = str(uuid.uuid4())
        runner.conn.execute(
            "INSERT INTO dramatiq.queue (message_id, queue_name, state, message) VALUES (%s, 'quick', 'queued', %s)",
            [job_id, text],
        )
        asked[job_id] = f"undecodable: {rows[text]}"
    runner.finish()
    found = {job_id: end(jobs.load(runner.conn, job_id) or {}) for job_id in asked}
    assert found == {
        job_id: End("discarded", error=reason, history=((1, "discarded", "", reason),))
        for job_id, reason in asked.items()
    }


def test_compositions_end_the_same(runner: Runner, trial: Any) -> None:
    (trial.add.message(1, 2) | trial.add.message(3)).run()
    many = group([trial.add.message(n, n) for n in range(3)])
    many.add_completion_callback(trial.give.message("all done"))
    many.run()
    trial.give.send_with_options(args=("well",), on_success="kit.after")
    trial.raise_.send_with_options(args=("SystemExit",), on_failure="kit.after")
    runner.finish()
    assert sorted(
        (job["actor"], job["state"], json.dumps((jobs.load(runner.conn, job["id"]) or {})["result"]))
        for job in jobs.listing(runner.conn)
    ) == [
        ("kit.add", "completed", "0"),
        ("kit.add", "completed", "2"),
        ("kit.add", "completed", "3"),
        ("kit.add", "completed", "4"),
        ("kit.add", "completed", "6"),
        ("kit.after", "completed", '["kit.give", "well"]'),
        ("kit.after", "completed", '["kit.raise", {"type": "SystemExit", "message": "3"}]'),
        ("kit.give", "completed", '"all done"'),
        ("kit.give", "completed", '"well"'),
        ("kit.raise", "discarded", "null"),
    ]


def test_the_jobs_of_a_batch_end_the_same(runner: Runner, trial: Any) -> None:
    kinds = ("good", "bad", "silent", "never")
    new = [trial.sort.job(kind) for kind in kinds]
    jobs.enqueue_many(runner.conn, new)
    runner.finish()
    found = {job.args[0]: end(jobs.load(runner.conn, job.id) or {}) for job in new}
    assert found == {
        "good": End(result=1),
        "bad": exhausted("bad", 2, "ItemFailed", "middleware.batches."),
        "silent": End(),
        "never": gave_up("middleware.failures.Discard", "never"),
    }


def test_batches_follow_one_another_to_the_last(kit: Kit, trial: Any) -> None:
    for number in range(5):
        trial.pair.send(number)
    assert [(one.args, one.result) for one in kit.drain()] == [([0], 2), ([1], 2), ([2], 2), ([3], 2), ([4], 1)]


def test_an_event_becomes_the_same_job(runner: Runner, trial: Any) -> None:
    event_id = events.record(runner.conn, "kit.happened", "gossip")
    runner.finish()
    (job,) = jobs.listing(runner.conn, event_id=event_id)
    assert end(jobs.load(runner.conn, job["id"]) or {}) == End(result="gossip")


def test_a_process_that_dies_leaves_the_same_behind(runner: Runner, trial: Any) -> None:
    with runner.crash():
        job_id = jobs.enqueue(runner.conn, trial.perish.job()).id
        runner.finish()
    lost = (1, "worker lost", None, "the lease ran out without an answer")
    found = end(jobs.load(runner.conn, job_id) or {})
    assert found == End(attempt=2, crashes=1, result="survived", error=None, history=(lost,))


# The kit.


def test_drain_tells_what_ran_in_order(kit: Kit, trial: Any) -> None:
    trial.give.send_with_options(args=("second",), priority=1)
    trial.give.send("first")
    first, second = kit.drain()
    assert (first.outcome, first.args, first.result, first.attempt) == ("completed", ["first"], "first", 1)
    assert (second.args, second.error) == (["second"], None)
    assert kit.drain() == []
    trial.flaky.send(9)
    (third,) = kit.drain()
    assert (third.outcome, third.error) == ("retryable", "ValueError: failure 1")
    assert 0.2 <= third.due_in_s <= 0.22
    assert str(third) == "kit.flaky(9) retryable: ValueError: failure 1"


def test_drain_of_a_queue_leaves_the_others_alone(kit: Kit, trial: Any) -> None:
    trial.give.send()
    trial.elsewhere.send()
    assert [one.actor for one in kit.drain("tasks")] == ["kit.elsewhere"]
    assert [one.actor for one in kit.drain()] == ["kit.give"]


def test_drain_goes_on_with_what_jobs_enqueue(kit: Kit, trial: Any) -> None:
    trial.more.send(3)
    assert [one.args for one in kit.drain()] == [[3], [2], [1]]


def test_drain_that_raises_has_what_the_actor_raised_as_its_cause(kit: Kit, trial: Any) -> None:
    trial.discard.send("why")
    with pytest.raises(JobFailed, match=r"^kit.discard\('why'\) discarded: why$"):
        kit.drain("quick", raising=True)
    trial.give.send()
    trial.fail.send("no")
    with pytest.raises(JobFailed, match=r"^kit.fail\('no'\) retryable: ValueError: no$") as raised:
        kit.drain(raising=True)
    assert repr(raised.value.__cause__) == "ValueError('no')"


def test_drain_without_an_end_says_so(kit: Kit, trial: Any) -> None:
    trial.endless.send()
    with pytest.raises(Endless, match=r"^5 attempts ran, and more are due; the last one: kit.endless\(\) completed$"):
        kit.drain(at_most=5)


def test_a_job_of_an_unknown_actor_is_put_back(kit: Kit) -> None:
    asked = jobs.enqueue(kit.conn, NewJob(queue="quick", actor="kit.unknown"))
    assert [(one.outcome, one.due_in_s) for one in kit.drain()] == [("released", 10)]
    assert kit.job(asked.id)["state"] == "pending"


def test_inline_runs_jobs_once_their_transaction_has_committed(kit: Kit, trial: Any) -> None:
    with kit.inline():
        sent = trial.more.send(2)
        assert sent.get_result() is None
        assert [one.state for one in kit.enqueued(trial.more)] == ["completed", "completed"]
        with trial.broker.database.transaction() as conn:
            asked = jobs.enqueue(conn, trial.give.job("x"))
            events.record(conn, "kit.happened", "inline")
            assert kit.enqueued(trial.give) == []
        assert kit.job(asked.id)["result"] == "x"
        assert [one.state for one in kit.enqueued(trial.heard)] == ["completed"]
    trial.give.send("after")
    assert kit.assert_enqueued(trial.give, "after").state == "pending"


def test_inline_may_raise_where_the_job_was_enqueued(kit: Kit, trial: Any) -> None:
    with kit.inline(raising=True), pytest.raises(JobFailed, match="ValueError: no"):
        trial.fail.send("no")


def test_inline_runs_nothing_of_what_was_rolled_back(kit: Kit, trial: Any) -> None:
    def think_better_of_it() -> None:
        with trial.broker.database.transaction() as conn:
            jobs.enqueue(conn, trial.give.job())
            raise KeyError

    with kit.inline(), pytest.raises(KeyError):
        think_better_of_it()
    assert kit.enqueued() == []


def test_what_was_enqueued_is_listed_with_all_that_was_asked(kit: Kit, trial: Any) -> None:
    trial.give.send_with_options(args=((1, 2),), kwargs={"value": 3}, delay=60_000, priority=4, unique_key="k")
    (asked,) = kit.enqueued("kit.give")
    assert (asked.args, asked.kwargs, asked.priority, asked.unique_key) == ([[1, 2]], {"value": 3}, 4, "k")
    assert (asked.queue, asked.state, 58 < asked.due_in_s <= 60) == ("quick", "pending", True)
    assert str(asked) == "kit.give([1, 2], value=3) pending, due in 60 s"
    assert kit.assert_enqueued(trial.give, (1, 2), value=3).id == asked.id


def test_what_was_not_enqueued_is_told_with_what_was(kit: Kit, trial: Any) -> None:
    with pytest.raises(AssertionError) as nothing:
        kit.assert_enqueued(trial.give, 1)
    assert str(nothing.value) == "not enqueued: kit.give(1)\nwhat was enqueued:\n  nothing at all"
    trial.give.send(2)
    trial.add.send(1, y=2)
    with pytest.raises(AssertionError) as other:
        kit.assert_enqueued(trial.give, 1)
    assert str(other.value) == "not enqueued: kit.give(1)\nwhat was enqueued:\n  kit.give(2) pending"
    with pytest.raises(AssertionError, match=r"(?s)not enqueued: kit.fail\(\).*kit.give\(2\).*kit.add\(1, y=2\)"):
        kit.assert_enqueued(trial.fail)


# Its clock.


def test_due_times_follow_the_clock(kit: Kit, trial: Any) -> None:
    trial.give.send_with_options(delay=3_600_000)
    assert kit.drain() == []
    kit.clock.advance(3_590)
    assert kit.drain() == []
    kit.clock.advance(11)
    assert [one.outcome for one in kit.drain()] == ["completed"]


def test_the_clock_is_moved_to_a_moment_and_never_back(kit: Kit) -> None:
    moment = datetime.now(UTC) + timedelta(days=30)
    kit.clock.move_to(moment)
    assert abs(kit.clock.now() - moment) < timedelta(seconds=5)
    with pytest.raises(ValueError, match="time does not go back"):
        kit.clock.move_to(datetime.now(UTC))
    with pytest.raises(ValueError, match="time zone"):
        kit.clock.move_to(datetime(2099, 1, 1))  # noqa: DTZ001 - that is the point


UNMOVED = {
    # What an application's documents say of themselves, and what was done to the schema.
    ("posthouse.documents", "created_at"),
    ("posthouse.documents", "updated_at"),
    ("posthouse.search_entries", "updated_at"),
    ("posthouse.migrations", "applied_at"),
    # dramatiq-pg's own results, which we never write.
    ("dramatiq.queue", "result_ttl"),
}
KEPT = {"posthouse.migrations", "posthouse.event_types", "posthouse.search_state"}


def test_the_clock_moves_every_time_that_is_stored_and_emptying_takes_every_table(kit: Kit) -> None:
    columns = {
        (f"{row['table_schema']}.{row['table_name']}", row["column_name"])
        for row in kit.conn.execute(
            "SELECT table_schema, table_name, column_name FROM information_schema.columns "
            "WHERE table_schema IN ('dramatiq', 'posthouse') AND data_type LIKE 'timestamp%'"
        )
    }
    folder = Path(testkit.__file__).parent / "sql"
    said = (folder / "advance_clock.sql").read_text()
    moved = {
        (table, column)
        for table, assignments in re.findall(r"UPDATE (\S+)\s+SET (.*?)FROM shift", said, re.S)
        for column in re.findall(r"(\w+) = \1 - span", assignments)
    }
    assert moved == columns - UNMOVED
    tables = {
        f"{row['table_schema']}.{row['table_name']}"
        for row in kit.conn.execute(
            "SELECT table_schema, table_name FROM information_schema.tables "
            "WHERE table_schema IN ('dramatiq', 'posthouse') AND table_type = 'BASE TABLE'"
        )
    }
    emptied = set(re.findall(r"(?:dramatiq|posthouse)\.\w+", (folder / "empty.sql").read_text()))
    assert emptied == tables - KEPT


# Its faults.


def test_a_lost_lease_refuses_the_end_and_the_job_runs_again(kit: Kit, trial: Any) -> None:
    sent = trial.give.send("x")
    with kit.lost_lease():
        ran = kit.drain()
    assert [(one.outcome, one.attempt) for one in ran] == [("lost", 1), ("completed", 2)]
    assert end(kit.job(sent.message_id)).history == ((1, "worker lost", None, "the lease ran out without an answer"),)


def test_a_lost_connection_repeats_nothing(kit: Kit, trial: Any) -> None:
    kit.drain()
    before = sessions(kit)
    sent = [trial.give.send(n) for n in range(2)]
    with kit.lost_connection():
        ran = kit.drain()
    assert before.isdisjoint(sessions(kit))
    assert [(one.outcome, one.result) for one in ran] == [("completed", 0), ("completed", 1)]
    assert [end(kit.job(one.message_id)) for one in sent] == [End(result=0), End(result=1)]


def sessions(kit: Kit) -> set[int]:
    """The server processes of the kit's worker."""
    query = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'posthouse testkit %'"
    return {row["pid"] for row in kit.conn.execute(query)}


def test_a_running_attempt_keeps_its_lease(kit: Kit, trial: Any) -> None:
    trial.outlive.send()
    assert [(one.outcome, one.result) for one in kit.drain()] == [("completed", True)]


def test_a_crash_leaves_the_job_running_until_its_lease_is_over(kit: Kit, trial: Any) -> None:
    sent = trial.give.send("x")
    with kit.crash_before_settle():
        assert [one.outcome for one in kit.drain()] == ["crashed"]
    assert (kit.job(sent.message_id)["state"], kit.drain()) == ("running", [])
    kit.clock.advance(2)
    assert [(one.outcome, one.attempt) for one in kit.drain()] == [("completed", 2)]
    assert kit.job(sent.message_id)["crashes"] == 1


def test_a_fault_that_met_nothing_is_told(kit: Kit) -> None:
    with pytest.raises(AssertionError, match="no attempt ended in this block"), kit.lost_lease():
        kit.drain()


def results(kit: Kit, actor: str) -> list[Any]:
    """What the jobs of *actor* returned, in the order in which they were asked for."""
    return [kit.job(one.id)["result"] for one in kit.enqueued(actor)]


def test_a_pipeline_whose_step_runs_twice_goes_on_once(kit: Kit, trial: Any) -> None:
    """The next step is enqueued before the end is written."""
    (trial.add.message(1, 2) | trial.add.message(3)).run()
    with kit.crash_before_settle():
        assert [(one.args, one.outcome) for one in kit.drain()] == [([1, 2], "crashed"), ([3, 3], "completed")]
    kit.clock.advance(2)
    assert [(one.args, one.outcome) for one in kit.drain()] == [([1, 2], "completed")]
    assert results(kit, "kit.add") == [3, 6]


def test_a_success_that_runs_twice_calls_back_once(kit: Kit, trial: Any) -> None:
    trial.give.send_with_options(args=("x",), on_success=trial.after)
    with kit.crash_before_settle():
        kit.drain()
    kit.clock.advance(2)
    assert [(one.actor, one.attempt) for one in kit.drain()] == [("kit.give", 2)]
    assert results(kit, "kit.after") == [["kit.give", "x"]]


def test_a_group_whose_member_runs_twice_ends_once_and_not_early(kit: Kit, trial: Any) -> None:
    many = group([trial.add.message(1, 1), trial.add.message(2, 2)])
    many.add_completion_callback(trial.give.message("all done"))
    many.run(delay=1_000)
    first, _ = kit.enqueued(trial.add)
    kit.conn.execute("UPDATE dramatiq.queue SET available_at = now() WHERE message_id = %s", [first.id])
    with kit.crash_before_settle():
        kit.drain()
    kit.conn.execute("UPDATE dramatiq.queue SET lease_until = now() WHERE message_id = %s", [first.id])
    assert [(one.args, one.attempt) for one in kit.drain()] == [([1, 1], 2)]
    kit.clock.advance(1)
    assert [one.args for one in kit.drain()] == [[2, 2], ["all done"]]


# Its database.


def test_only_a_database_for_tests_is_emptied(trial: Any, server_url: str) -> None:
    with pytest.raises(NotATestDatabase, match="'postgres'"):
        Kit(server_url).__enter__()


def test_a_database_that_is_missing_is_made(trial: Any, server_url: str, admin: Conn) -> None:
    url = server_url.replace("/postgres?", "/fresh_test?")
    with Kit(url) as kit:
        trial.give.send(1)
        assert [one.result for one in kit.drain()] == [1]
    with Kit(url) as again:
        assert again.enqueued() == []
    admin.execute("DROP DATABASE fresh_test WITH (FORCE)")
    assert trial.broker.database.url != url


def test_a_kit_without_actors_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dramatiq.broker, "global_broker", None)
    with pytest.raises(RuntimeError, match="import your actors"):
        Kit("postgresql:///x_test")


def test_the_page_in_the_docstring_runs_as_it_stands(kit_url: str, tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", testkit.__doc__ or "", re.S)
    assert example is not None
    (tmp_path / "test_example.py").write_text(example[1])
    told = {"DATABASE_URL": kit_url.replace("/kit_test?", "/kit?"), "DATA_DIR": str(tmp_path), "PYTHONPATH": str(HOUSE)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path, env={**os.environ, **told}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
