"""Explain says the true reasons why a job is not running, the decisive one first: line 18."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

import cli
from outbox import controls, explain, jobs, workers
from outbox.controls import claim_limited
from outbox.db import Conn
from outbox.explain import Code, Reason
from outbox.jobs import Claim, NewJob, Settlement
from outbox.workers import Worker
from settings import Settings
from tests import emptied
from web.app import create_app

shared_url, database_url = emptied.shared_url, emptied.database_url

Run = Callable[..., Result]
UNKNOWN = "5f2b8f4e-1c1d-4a3e-9b70-0d6a5c3e2f11"


@pytest.fixture
def worker(conn: Conn) -> Worker:
    """A process that works the queue and knows its actor."""
    found = Worker(("index",), 4, ("corpus.index",), host="post", pid=77)
    workers.register(conn, found, running=0)
    return found


@pytest.fixture
def run(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`cli.py` with these words, on the test's database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    return lambda *words: CliRunner().invoke(cli.app, words)


@pytest.fixture
def client(database_url: str) -> Iterator[TestClient]:
    with TestClient(create_app(Settings(database_url=database_url)), base_url="http://127.0.0.1") as browser:
        yield browser


def add(conn: Conn, **given: Any) -> str:
    return jobs.enqueue(conn, NewJob(**{"queue": "index", "actor": "corpus.index", **given})).id


def claim(conn: Conn, worker: Worker, count: int = 1) -> list[Claim]:
    return claim_limited(conn, {"index": count}, worker_id=worker.id, lease_s=20).claims


def settle(conn: Conn, held: Claim, state: str, **told: Any) -> None:
    assert jobs.settle(conn, [Settlement(held.id, held.token, state, **told)]) == {held.id}


def fail(conn: Conn, worker: Worker, state: str = "queued", **given: Any) -> str:
    """A job that has failed once, and is due again in a minute when it is not discarded."""
    job_id = add(conn, **given)
    (held,) = claim(conn, worker)
    settle(conn, held, state, delay_s=60, outcome="failed", error_class="ValueError", error="no such\ndocument")
    return job_id


def reasons(conn: Conn, job_id: str) -> list[Reason]:
    found = explain.explain(conn, job_id)
    assert found is not None
    assert found.id == job_id
    return list(found.reasons)


def codes(conn: Conn, job_id: str) -> list[Code]:
    return [reason.code for reason in reasons(conn, job_id)]


def only(conn: Conn, job_id: str) -> Reason:
    (reason,) = reasons(conn, job_id)
    return reason


def seconds_until(reason: Reason) -> float:
    assert reason.until is not None
    return (reason.until - datetime.now(UTC)).total_seconds()


def test_a_job_that_is_not_due(conn: Conn, worker: Worker) -> None:
    reason = only(conn, add(conn, delay_s=3_600))
    assert reason.code == Code.NOT_DUE
    assert reason.sentence.startswith("It is not due until 2")
    assert 3_590 < seconds_until(reason) <= 3_600


def test_a_job_of_a_paused_queue(conn: Conn, worker: Worker) -> None:
    job_id = add(conn)
    controls.pause(conn, "index", by="ana", reason="the index is rebuilt")
    reason = only(conn, job_id)
    assert (reason.code, reason.until) == (Code.PAUSED, None)
    assert reason.sentence == "Queue index is paused by ana until it is resumed: the index is rebuilt"
    assert (reason.details["by"], reason.details["reason"]) == ("ana", "the index is rebuilt")
    controls.pause(conn, "index", by="ben", reason="lunch", until_s=60)
    reason = only(conn, job_id)
    assert 50 < seconds_until(reason) <= 60
    assert reason.sentence.startswith("Queue index is paused by ben until 2")


def test_a_job_whose_queue_nobody_works(conn: Conn, worker: Worker) -> None:
    elsewhere = add(conn, queue="mine")
    assert only(conn, elsewhere).code == Code.NO_WORKER
    job_id = add(conn)
    conn.execute("UPDATE posthouse.workers SET seen_at = seen_at - interval '1 minute'")
    assert only(conn, job_id) == Reason(Code.NO_WORKER, "No process that works queue index has been heard of lately.")


def test_a_job_whose_actor_no_worker_of_its_queue_knows(conn: Conn, worker: Worker) -> None:
    job_id = add(conn, actor="corpus.new")
    workers.register(conn, Worker(("tasks",), 1, ("corpus.new",)), running=0)
    assert only(conn, job_id) == Reason(
        Code.UNKNOWN_ACTOR,
        "No process that works queue index knows actor corpus.new.",
        details={"actor": "corpus.new", "processes": 1},
    )
    workers.register(conn, Worker(("index", "tasks"), 1, ("corpus.new",)), running=0)
    assert only(conn, job_id).code == Code.WAITS_ITS_TURN


def test_an_older_worker_that_does_not_say_what_it_knows_may_know_it(conn: Conn, worker: Worker) -> None:
    job_id = add(conn, actor="corpus.new")
    conn.execute("UPDATE posthouse.workers SET actors = NULL")
    assert only(conn, job_id).code == Code.WAITS_ITS_TURN


def test_a_job_whose_key_is_full(conn: Conn, worker: Worker) -> None:
    for _ in range(2):
        add(conn, limit_key="shop", limit=2)
    first, second = claim(conn, worker, 2)
    reason = only(conn, add(conn, limit_key="shop", limit=2))
    assert reason.code == Code.LIMIT_REACHED
    assert reason.sentence == (
        "Of key shop at most 2 run at once, and 2 do: "
        f"job {first.id} on worker {worker.id} (post, process 77), "
        f"job {second.id} on worker {worker.id} (post, process 77)."
    )
    assert (reason.details["key"], reason.details["limit"], reason.details["running"]) == ("shop", 2, 2)
    assert [holder["id"] for holder in reason.details["holders"]] == [first.id, second.id]


def test_a_job_whose_bucket_is_empty(conn: Conn, worker: Worker) -> None:
    waiting = [add(conn, limit_key="shop", rate_per_s=0.1, rate_burst=1) for _ in range(2)][1]
    claim(conn, worker)
    reason = only(conn, waiting)
    assert reason.code == Code.RATE_REACHED
    assert reason.sentence.startswith("Of key shop 0.1 start a second: the next may at 2")
    assert 9 < seconds_until(reason) <= 10


def test_a_running_job_and_who_holds_its_lease(conn: Conn, worker: Worker) -> None:
    job_id = add(conn)
    claim(conn, worker)
    reason = only(conn, job_id)
    assert reason.code == Code.RUNNING
    assert reason.sentence.startswith(f"It runs on worker {worker.id} (post, process 77), which leases it until 2")
    assert (reason.details["worker_id"], reason.details["host"], reason.details["pid"]) == (worker.id, "post", 77)
    workers.leave(conn, worker)
    assert "(which has signed off)" in only(conn, job_id).sentence


def test_a_job_whose_lease_has_run_out(conn: Conn, worker: Worker) -> None:
    job_id = add(conn)
    claim(conn, worker)
    conn.execute("UPDATE dramatiq.queue SET lease_until = clock_timestamp()")
    reason = only(conn, job_id)
    assert reason.code == Code.LEASE_EXPIRED
    assert reason.sentence.endswith("the next rescue puts it back or gives it up.")


def test_a_job_that_backs_off_after_a_failure(conn: Conn, worker: Worker) -> None:
    reason = only(conn, fail(conn, worker, max_attempts=8))
    assert reason.code == Code.BACKING_OFF
    assert reason.sentence.startswith("Attempt 1 did not succeed (no such document); the next one is due at 2")
    assert (reason.details["attempt"], reason.details["max_attempts"]) == (1, 8)
    assert 50 < seconds_until(reason) <= 60


def test_a_webhook_that_was_put_back_because_its_endpoint_was_busy(conn: Conn, worker: Worker) -> None:
    job_id = add(conn, delay_s=60)
    (endpoint,) = conn.execute(
        """
        WITH endpoint AS (
            INSERT INTO posthouse.endpoints (url, event_types, secret_sealed)
            VALUES ('https://example.org/', '{*}', 'x')
            RETURNING id
        ),
        event AS (
            INSERT INTO posthouse.events (type, subject)
            VALUES ('parcel.sent', 'p-1')
            RETURNING id
        )
        INSERT INTO posthouse.deliveries (id, endpoint_id, event_id, job_id, parked_at)
        SELECT gen_random_uuid(), endpoint.id, event.id, %s, clock_timestamp()
        FROM endpoint, event
        RETURNING endpoint_id::text AS id
        """,
        [job_id],
    ).fetchall()
    busy, not_due = reasons(conn, job_id)
    assert (busy.code, not_due.code) == (Code.TARGET_BUSY, Code.NOT_DUE)
    assert busy.details == {"waits_for": f"endpoint {endpoint['id']}"}
    conn.execute("UPDATE posthouse.deliveries SET parked_at = NULL")
    assert codes(conn, job_id) == [Code.NOT_DUE]


def test_a_job_that_only_waits_its_turn(conn: Conn, worker: Worker) -> None:
    add(conn, priority=5)
    add(conn, queue="tasks")
    add(conn, delay_s=60)
    first = add(conn)
    second = add(conn, limit_key="shop", limit=1)
    third = add(conn)
    said = [only(conn, job_id) for job_id in (first, second, third)]
    assert {reason.code for reason in said} == {Code.WAITS_ITS_TURN}
    assert [reason.details["ahead"] for reason in said] == [0, 1, 2]
    assert [reason.sentence.partition("; ")[2] for reason in said] == [
        "no due job comes before it in queue index.",
        "one due job comes before it in queue index.",
        "2 due jobs come before it in queue index.",
    ]


def test_a_backlog_is_counted_up_to_a_number(conn: Conn, worker: Worker) -> None:
    jobs.enqueue_many(conn, [NewJob(queue="index", actor="corpus.index") for _ in range(explain.COUNT_TO + 9)])
    assert "1,000 or more due jobs come before it" in only(conn, add(conn)).sentence


def test_a_job_whose_deadline_has_passed_does_not_start(conn: Conn, worker: Worker) -> None:
    job_id = add(conn)
    conn.execute("UPDATE dramatiq.queue SET deadline_at = clock_timestamp()")
    assert (only(conn, job_id).code, claim(conn, worker)) == (Code.DEADLINE_PASSED, [])


@pytest.mark.parametrize(("state", "code"), [("done", Code.COMPLETED), ("rejected", Code.DISCARDED)])
def test_a_job_that_has_ended(conn: Conn, worker: Worker, state: str, code: Code) -> None:
    reason = only(conn, fail(conn, worker, state))
    assert reason.code == code
    assert ("no such document" in reason.sentence) == (code == Code.DISCARDED)


def test_a_cancelled_job(conn: Conn, worker: Worker) -> None:
    job_id = fail(conn, worker, "rejected")
    conn.execute("UPDATE dramatiq.queue SET stop_cause = 'deadline_exceeded'")
    reason = only(conn, job_id)
    assert reason.code == Code.CANCELLED
    assert reason.sentence.endswith(": deadline exceeded.")


def test_a_discarded_job_whose_unique_key_another_has_taken(conn: Conn, worker: Worker) -> None:
    job_id = fail(conn, worker, "rejected", unique_key="doc_1")
    rival = add(conn, unique_key="doc_1")
    assert codes(conn, job_id) == [Code.DISCARDED, Code.UNIQUE_KEY_TAKEN]
    assert reasons(conn, job_id)[1].details == {"job_id": rival}
    assert jobs.enqueue(conn, NewJob(queue="index", actor="corpus.index", unique_key="doc_1")).duplicate_of == rival


def test_every_true_reason_is_told_the_decisive_first(conn: Conn, worker: Worker) -> None:
    add(conn, limit_key="shop", limit=1, rate_per_s=0.1, rate_burst=1)
    claim(conn, worker)
    job_id = add(conn, limit_key="shop", limit=1, rate_per_s=0.1, rate_burst=1, delay_s=60, actor="corpus.new")
    keyed = [Code.LIMIT_REACHED, Code.RATE_REACHED]
    assert codes(conn, job_id) == [Code.UNKNOWN_ACTOR, Code.NOT_DUE, *keyed]
    # What lasts longer is the more decisive: a pause that ends before the job is due is not what it waits for.
    controls.pause(conn, "index", by="ana", reason="why", until_s=30)
    assert codes(conn, job_id) == [Code.UNKNOWN_ACTOR, Code.NOT_DUE, Code.PAUSED, *keyed]
    controls.pause(conn, "index", by="ana", reason="why", until_s=90)
    assert codes(conn, job_id) == [Code.UNKNOWN_ACTOR, Code.PAUSED, Code.NOT_DUE, *keyed]
    controls.pause(conn, "index", by="ana", reason="why")
    workers.leave(conn, worker)
    assert codes(conn, job_id) == [Code.PAUSED, Code.NO_WORKER, Code.NOT_DUE, *keyed]


def test_a_row_that_is_no_message_waits_its_turn(conn: Conn, worker: Worker) -> None:
    conn.execute(
        "INSERT INTO dramatiq.queue (message_id, queue_name, state, message) VALUES (%s, 'index', 'queued', '[]')",
        [UNKNOWN],
    )
    assert only(conn, UNKNOWN).code == Code.WAITS_ITS_TURN


@pytest.mark.parametrize("job_id", [UNKNOWN, "7", "", "x" * 36])
def test_there_is_nothing_to_say_of_a_job_that_is_none(conn: Conn, job_id: str) -> None:
    assert explain.explain(conn, job_id) is None


# Where people see it.


def test_the_command_line_explains(run: Run, conn: Conn, worker: Worker) -> None:
    job_id = add(conn)
    controls.pause(conn, "index", by="ana \x1b[31m", reason="the index is rebuilt")
    said = run("jobs", "explain", job_id)
    assert said.exit_code == 0
    assert said.stdout.split() == f"paused Queue index is paused by ana �[31m {UNTIL} the index is rebuilt".split()
    (told,) = json.loads(run("jobs", "explain", job_id, "--json").stdout)["reasons"]
    assert (told["code"], told["details"]["by"]) == ("paused", "ana \x1b[31m")
    assert run("jobs", "explain", UNKNOWN).exit_code == 1


UNTIL = "until it is resumed:"


def test_the_api_and_the_page_explain(client: TestClient, conn: Conn, worker: Worker) -> None:
    job_id = add(conn, delay_s=60)
    controls.pause(conn, "index", by="ana", reason="<b>rebuilt</b>")
    answer = client.get(f"/api/jobs/{job_id}/explain").json()
    assert (answer["id"], answer["state"]) == (job_id, "pending")
    assert [reason["code"] for reason in answer["reasons"]] == ["paused", "not_due"]
    page = client.get(f"/jobs/{job_id}").text
    assert f"Queue index is paused by ana {UNTIL} &lt;b&gt;rebuilt&lt;/b&gt;" in page
    for job_id in (UNKNOWN, "7"):
        assert client.get(f"/api/jobs/{job_id}/explain").status_code == 404
    assert "/api/jobs/{job_id}/explain" in client.get("/openapi.json").json()["paths"]


def test_queues_are_paused_and_resumed_from_the_command_line(run: Run, conn: Conn) -> None:
    assert run("queues", "pause", "index", "--reason", "rebuilt", "--for", "2h", "--by", "ana").exit_code == 0
    (pause,) = controls.pauses(conn).values()
    assert pause.until_at is not None
    assert (pause.queue, pause.paused_by, pause.reason) == ("index", "ana", "rebuilt")
    assert timedelta(hours=1.9) < pause.until_at - pause.paused_at < timedelta(hours=2.1)
    (line,) = [line for line in run("queues", "list").stdout.splitlines() if line.startswith("index")]
    assert line.split()[1:5] == ["0", "paused", "by", "ana"]
    assert [queue["name"] for queue in json.loads(run("queues", "list", "--json").stdout) if queue["paused"]] == [
        "index"
    ]
    assert run("queues", "resume", "index").stdout == "queue index goes on\n"
    assert run("queues", "resume", "index").stdout == "queue index was not paused\n"
    assert controls.pauses(conn) == {}


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        (["pause", "indxe", "--reason", "x"], 1, "there is no queue indxe; there are index, notify, webhook"),
        (["resume", "indxe"], 1, "there is no queue indxe"),
        (["pause", "index", "--reason", " "], 2, "reason must have 1 to 512 characters"),
        (["pause", "index", "--reason", "x", "--for", "soon"], 2, "soon is not a time such as 90s, 30m, 2h or 1d"),
        (["pause", "index", "--reason", "x", "--for", "400d"], 2, "at most 365 days"),
    ],
)
def test_a_pause_that_makes_no_sense_is_one_line(run: Run, conn: Conn, words: list[str], code: int, fault: str) -> None:
    said = run("queues", *words)
    assert said.exit_code == code
    assert fault in said.stderr
    assert controls.pauses(conn) == {}


def test_a_paused_queue_is_shown_everywhere(run: Run, client: TestClient, conn: Conn) -> None:
    controls.pause(conn, "index", by="ana", reason="the index is rebuilt")
    controls.pause(conn, "old", by="ben", reason="it is gone")
    word = f"by ana {UNTIL} the index is rebuilt"
    queues = {queue["name"]: queue["paused"] for queue in client.get("/api/queues").json()["queues"]}
    assert (queues["index"]["paused_by"], queues["index"]["reason"]) == ("ana", "the index is rebuilt")
    assert (queues["notify"], queues["old"]["paused_by"]) == (None, "ben")
    status = run("status").stdout
    assert f"index is paused {word}" in status
    assert "index (paused)" in status
    assert "old (not declared, paused)" in status
    page = client.get("/").text
    assert f"index is paused {word}" in page
    assert f'title="{word}"' in page
