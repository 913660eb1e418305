"""`jobs list|show|retry` and `status`: what they print, and the code they end with."""

import json
import uuid
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

import cli
from outbox import jobs, workers
from outbox.db import Conn
from outbox.jobs import NewJob, Settlement
from settings import QUEUES

Run = Callable[..., Result]


@pytest.fixture
def run(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`cli.py` with these words, on the test's database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    return lambda *words: CliRunner().invoke(cli.app, words)


def discard(conn: Conn, error: str = "no such document", **told: object) -> str:
    job = NewJob(queue="index", actor="corpus.index", args=["doc_1"], unique_key="doc_1", max_attempts=8)
    jobs.enqueue(conn, job)
    [claimed] = jobs.claim(conn, {"index": 1}, worker_id=str(uuid.uuid4()), lease_s=60)
    ended = Settlement(
        claimed.id, claimed.token, "rejected", outcome="discarded", error_class="ValueError", error=error
    )
    jobs.settle(conn, [ended])
    return job.id


def test_list_shows_whole_ids_states_and_errors(run: Run, conn: Conn) -> None:
    job_id = discard(conn)
    done = run("jobs", "list")
    assert done.exit_code == 0
    [heading, line] = done.stdout.splitlines()
    assert heading.split()[:2] == ["job", "state"]
    assert line.split()[:5] == [job_id, "discarded", "corpus.index", "1", "of"]
    assert "no such document" in line


def test_list_can_be_narrowed(run: Run, conn: Conn) -> None:
    discard(conn)
    pending = jobs.enqueue(conn, NewJob(queue="notify", actor="owner.notify")).id
    for words in (
        ["--state", "pending"],
        ["--queue", "notify"],
        ["--actor", "owner.notify"],
        ["--limit", "1"],
    ):
        found = json.loads(run("jobs", "list", "--json", *words).stdout)
        assert [job["id"] for job in found] == [pending]


def test_list_of_nothing_says_so(run: Run) -> None:
    assert run("jobs", "list").stdout == "no such jobs\n"
    assert json.loads(run("jobs", "list", "--json").stdout) == []


def test_an_unknown_state_is_wrong_usage(run: Run) -> None:
    assert run("jobs", "list", "--state", "done").exit_code == 2


def test_show_tells_everything(run: Run, conn: Conn) -> None:
    shown = run("jobs", "show", discard(conn)).stdout
    for words in (
        "Was given up after 1 attempt.",
        "ValueError: no such document",
        '"args": ["doc_1"]',
        "1 of 8",
    ):
        assert words in shown


def test_show_as_json_is_what_the_api_answers(run: Run, conn: Conn) -> None:
    job_id = discard(conn)
    job = json.loads(run("jobs", "show", job_id, "--json").stdout)
    assert (job["id"], job["state"], job["message"]["args"]) == (job_id, "discarded", ["doc_1"])
    assert [attempt["error"] for attempt in job["attempts"]] == ["no such document"]
    assert "lease_token" not in job


def test_an_error_text_cannot_command_the_terminal(run: Run, conn: Conn) -> None:
    job_id = discard(conn, "[red]bad[/red] \x1b[2J\u202e\nsecond line")
    for words in (["jobs", "list"], ["jobs", "show", job_id]):
        shown = run(*words).stdout
        assert "[red]bad[/red]" in shown
        assert "\x1b" not in shown
        assert "\u202e" not in shown


def test_retry_makes_a_discarded_job_due(run: Run, conn: Conn) -> None:
    job_id = discard(conn)
    done = run("jobs", "retry", job_id)
    assert (done.exit_code, done.stdout) == (0, f"job {job_id} is due now\n")
    job = jobs.load(conn, job_id)
    assert job is not None
    assert (job["state"], job["attempt"], len(job["attempts"])) == ("pending", 0, 1)


def test_only_a_discarded_job_is_retried(run: Run, conn: Conn) -> None:
    job_id = jobs.enqueue(conn, NewJob(queue="index", actor="corpus.index")).id
    refused = run("jobs", "retry", job_id)
    assert refused.exit_code == 1
    assert refused.stderr == f"posthouse: job {job_id} is pending: only a discarded job can be retried\n"


def test_a_retry_does_not_break_a_unique_key(run: Run, conn: Conn) -> None:
    job_id = discard(conn)
    jobs.enqueue(conn, NewJob(queue="index", actor="corpus.index", unique_key="doc_1"))
    refused = run("jobs", "retry", job_id)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (1, 1)
    assert "another unfinished job has its unique key" in refused.stderr


def test_an_unknown_job_is_one_line(run: Run) -> None:
    some = str(uuid.uuid4())
    for command in ("show", "retry"):
        for job_id in ("x", some, f"urn:uuid:{some}"):
            refused = run("jobs", command, job_id)
            assert refused.exit_code == 1
            assert refused.stderr == f"posthouse: there is no job {job_id}, or its time here is over\n"


def test_status_has_the_verdict_and_a_line_a_queue(run: Run, conn: Conn) -> None:
    discard(conn)
    workers.register(conn, workers.Worker(tuple(QUEUES), threads=2), running=0)
    done = run("status")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "1 job discarded in the last hour."
    assert {line.split()[0] for line in done.stdout.splitlines() if line} >= {*QUEUES}


def test_status_as_json(run: Run, conn: Conn) -> None:
    told = json.loads(run("status", "--json").stdout)
    assert told["verdict"]["level"] == "bad"
    assert [queue["name"] for queue in told["queues"]] == [*QUEUES]
    assert told["events"] == {"waiting": 0, "oldest_s": 0.0, "poisoned": 0}


@pytest.mark.parametrize("words", [["status"], ["jobs", "list"], ["jobs", "show", "x"], ["jobs", "retry", "x"]])
def test_no_database_is_one_line_and_69(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:secret@127.0.0.1:1/none")
    done = CliRunner().invoke(cli.app, words)
    assert (done.exit_code, len(done.stderr.splitlines())) == (69, 1)
    assert "secret" not in done.output


def test_an_older_schema_is_named(run: Run, conn: Conn) -> None:
    conn.execute("DELETE FROM posthouse.migrations WHERE name = '0004_events'")
    done = run("status")
    assert (done.exit_code, "run `python cli.py migrate`" in done.stderr) == (78, True)
