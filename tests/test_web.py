"""The page, the API and the probes: what they show, how soon, and to whom; and without the database."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient
from psycopg import sql
from pydantic import SecretStr

from outbox import catalogue, events, jobs, workers
from outbox.db import Conn, connect
from outbox.jobs import NewJob, Settlement
from settings import QUEUES, Settings
from tests.workers import until
from web import ages, metrics, overview
from web.app import create_app
from web.models import Backlog, Overview, Queue

HOUSE = Path(__file__).parent.parent
SCRIPT = "<script>alert('x')</script>"
TRACEBACK = f"Traceback (most recent call last):\n  {SCRIPT}\nValueError: {SCRIPT}"
NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"
CHANGED = "webtest.changed"


@contextmanager
def serving(url: str, **told: Any) -> Iterator[TestClient]:
    app = create_app(Settings(database_url=SecretStr(url), **told))
    with TestClient(app, base_url="http://127.0.0.1:8400") as client:
        yield client


@pytest.fixture(scope="module")
def away() -> Iterator[TestClient]:
    """A page whose database does not answer."""
    with serving(NOBODY) as client:
        yield client


@pytest.fixture
def client(database_url: str) -> Iterator[TestClient]:
    with serving(database_url) as client:
        yield client


def enqueue(conn: Conn, actor: str = "corpus.index", queue: str = "index", **told: Any) -> str:
    return jobs.enqueue(conn, NewJob(queue=queue, actor=actor, **told)).id


def claim(conn: Conn, queue: str = "index") -> jobs.Claim:
    [claimed] = jobs.claim(conn, {queue: 1}, worker_id=str(uuid.uuid4()), lease_s=60)
    return claimed


def settle(conn: Conn, claimed: jobs.Claim, state: str, **told: Any) -> None:
    assert jobs.settle(conn, [Settlement(claimed.id, claimed.token, state, **told)]) == {claimed.id}


def fail(conn: Conn, state: str = "queued", **told: Any) -> str:
    """A job whose first attempt failed with a text that is not kind to browsers."""
    enqueue(conn, **told)
    claimed = claim(conn)
    outcome = "failed" if state == "queued" else "discarded"
    settle(
        conn,
        claimed,
        state,
        delay_s=300 if state == "queued" else 0,
        outcome=outcome,
        error_class="ValueError",
        error=f"no {SCRIPT}",
        traceback=TRACEBACK,
    )
    return claimed.id


def one_of_each(conn: Conn) -> dict[str, str]:
    """A job in each of the six states; its id by its state."""
    made = {"discarded": fail(conn, "rejected"), "retryable": fail(conn)}
    made["completed"] = enqueue(conn)
    settle(conn, claim(conn), "done", result='{"indexed": true}')
    made["cancelled"] = enqueue(conn)
    settle(conn, claim(conn), "rejected", outcome="cancelled")
    conn.execute(
        "UPDATE dramatiq.queue SET stop_cause = 'cancel_requested', cancel_requested_at = now() WHERE message_id = %s",
        [made["cancelled"]],
    )
    made["running"] = enqueue(conn)
    claim(conn)
    return made | {"pending": enqueue(conn)}


def record(conn: Conn, subject: str = "doc_1") -> str:
    if CHANGED not in {event_type.name for event_type in catalogue.declared()}:
        catalogue.declare(catalogue.EventType(CHANGED, "a document changed", "document"))
    return events.record(conn, CHANGED, subject, {"path": "a.md"})


def work(conn: Conn, *queues: str) -> None:
    """Say that a process works *queues*."""
    workers.register(conn, workers.Worker(queues, threads=3), running=0)


# --- health


def test_live_needs_no_database(away: TestClient) -> None:
    assert away.get("/healthz").json() == {"status": "ok", "pid": os.getpid()}


def test_ready_when_every_declared_queue_is_worked(client: TestClient, conn: Conn) -> None:
    work(conn, *QUEUES)
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": []})


def test_not_ready_names_the_queues_without_a_process(client: TestClient, conn: Conn) -> None:
    work(conn, *(QUEUES.keys() - {"fetch", "tasks"}))
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["No process works fetch and tasks."])


def test_a_process_unheard_of_for_three_signs_of_life_does_not_count(client: TestClient, conn: Conn) -> None:
    work(conn, *QUEUES)
    conn.execute("UPDATE posthouse.workers SET seen_at = seen_at - interval '16 s'")
    assert client.get("/readyz").status_code == 503


def test_not_ready_before_the_migrations(client: TestClient, conn: Conn) -> None:
    conn.execute("DELETE FROM posthouse.migrations WHERE name = '0004_events'")
    [reason] = client.get("/readyz").json()["reasons"]
    assert reason == "The database lacks 1 migrations, from 0004_events on."


def test_not_ready_without_a_database(away: TestClient) -> None:
    answer = away.get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["The database does not answer."])
    assert answer.elapsed < timedelta(seconds=2)


def test_a_frozen_server_does_not_freeze_the_probes(client: TestClient, conn: Conn) -> None:
    client.get("/readyz")
    with frozen(conn):
        ready, measured = client.get("/readyz"), client.get("/metrics")
    assert ready.json()["reasons"] == ["The database did not answer in time."]
    assert ready.elapsed < timedelta(seconds=2.2)
    assert measured.status_code == 200
    assert measured.elapsed < timedelta(seconds=1.2)


@contextmanager
def frozen(conn: Conn) -> Iterator[None]:
    """The page's connections lead to servers that do not run."""
    found = conn.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'posthouse page'")
    pids = [row["pid"] for row in found]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


# --- metrics

WORKER = """
import sys
from prometheus_client import Counter, Gauge, Histogram
Counter("posthouse_done", "Done", ["queue"]).labels("index").inc(2)
Gauge("posthouse_running", "Running", multiprocess_mode="livesum").set(3)
Histogram("posthouse_seconds", "Time", buckets=(1, 5)).observe(2)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def counting(folder: Path) -> Iterator[None]:
    """A process that has counted, alive within the context."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield


def test_the_dead_are_still_counted_but_do_nothing(tmp_path: Path) -> None:
    with counting(tmp_path):
        pass
    with counting(tmp_path):
        samples = samples_of(tmp_path)
    assert samples["posthouse_done_total"] == 4
    assert samples["posthouse_running"] == 3
    assert samples["posthouse_seconds_count"] == 2


def test_half_a_metrics_file_costs_only_itself(tmp_path: Path) -> None:
    with counting(tmp_path):
        (tmp_path / "counter_1.db").touch()
        (tmp_path / "histogram_1.db").write_bytes(b"\xff" * 64)
        assert samples_of(tmp_path)["posthouse_done_total"] == 2


def samples_of(folder: Path) -> dict[str, float]:
    return {sample.name: sample.value for family in metrics.from_files(folder) for sample in family.samples}


def test_metrics_hold_depths_and_backlog(
    client: TestClient, conn: Conn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    enqueue(conn)
    enqueue(conn, delay_s=60)
    record(conn)
    work(conn, "index")
    with counting(tmp_path):
        told = client.get("/metrics").text
    for line in (
        'posthouse_done_total{queue="index"} 2.0',
        "posthouse_database_up 1.0",
        'posthouse_queue_jobs{queue="index",state="due"} 1.0',
        'posthouse_queue_jobs{queue="index",state="later"} 1.0',
        'posthouse_queue_jobs{queue="tasks",state="due"} 0.0',
        'posthouse_queue_capacity{queue="index"} 3.0',
        "posthouse_events_waiting 1.0",
        "posthouse_events_poisoned 0.0",
    ):
        assert line in told.splitlines()


def test_metrics_answer_without_a_database(away: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with counting(tmp_path):
        answer = away.get("/metrics")
    assert answer.status_code == 200
    assert 'posthouse_done_total{queue="index"} 2.0' in answer.text
    assert "posthouse_database_up 0.0" in answer.text
    assert answer.elapsed < timedelta(seconds=1.2)


# --- the API


def test_every_state_is_shown_as_people_know_it(client: TestClient, conn: Conn) -> None:
    for state, job_id in one_of_each(conn).items():
        assert client.get(f"/api/jobs/{job_id}").json()["state"] == state
        assert [job["id"] for job in client.get("/api/jobs", params={"state": state}).json()["jobs"]] == [job_id]


def test_a_job_has_its_times_arguments_attempts_and_result(client: TestClient, conn: Conn) -> None:
    event_id = record(conn)
    job_id = fail(conn, args=["doc_1"], kwargs={"deep": [1, None]}, event_id=event_id, max_attempts=8)
    job = client.get(f"/api/jobs/{job_id}").json()
    assert (job["actor"], job["queue"], job["attempt"], job["max_attempts"]) == (
        "corpus.index",
        "index",
        1,
        8,
    )
    assert (job["message"]["args"], job["message"]["kwargs"]) == (["doc_1"], {"deep": [1, None]})
    assert job["event_id"] == event_id
    assert datetime.fromisoformat(job["available_at"]) > datetime.now(UTC) + timedelta(seconds=200)
    [attempt] = job["attempts"]
    assert attempt["error_class"] == "ValueError"
    assert (attempt["error"], attempt["traceback"]) == (f"no {SCRIPT}", TRACEBACK)


def test_a_lease_token_never_leaves_the_house(client: TestClient, conn: Conn) -> None:
    enqueue(conn)
    claimed = claim(conn)
    for path in (f"/api/jobs/{claimed.id}", "/api/jobs", f"/jobs/{claimed.id}", "/"):
        assert claimed.token not in client.get(path).text


def test_an_unknown_job_is_a_problem_document_and_a_page(client: TestClient) -> None:
    some = str(uuid.uuid4())
    for job_id in ("x", some, f"urn:uuid:{some}", f"{some[0]}-{some[1:]}", "%00", "a" * 5000):
        answer = client.get(f"/api/jobs/{job_id}")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
        assert answer.json()["status"] == 404
        page = client.get(f"/jobs/{job_id}")
        assert (page.status_code, "There is no such job" in page.text) == (404, True)


@pytest.mark.parametrize(
    "query",
    ["state=done", "limit=0", "limit=501", "limit=x", "queue=a%00b", "actor=%00", "event=x", "queue=%C3%A9"],
)
def test_a_question_that_makes_no_sense_is_refused(away: TestClient, query: str) -> None:
    answer = away.get(f"/api/jobs?{query}")
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert query.split("=")[0] in answer.json()["detail"]


def test_jobs_can_be_narrowed(client: TestClient, conn: Conn) -> None:
    event_id = record(conn)
    enqueue(conn)
    wanted = enqueue(conn, "owner.notify", "notify", event_id=event_id)
    for query in ("queue=notify", "actor=owner.notify", f"event={event_id}", "limit=1"):
        assert [job["id"] for job in client.get(f"/api/jobs?{query}").json()["jobs"]] == [wanted]


def test_a_row_that_is_no_message_is_shown(client: TestClient, conn: Conn) -> None:
    job_id = str(uuid.uuid4())
    conn.execute(
        "INSERT INTO dramatiq.queue (message_id, queue_name, state, message) VALUES (%s, 'index', 'queued', '[1]')",
        [job_id],
    )
    assert client.get(f"/api/jobs/{job_id}").json()["message"] == [1]
    assert "The row holds no message" in client.get(f"/jobs/{job_id}").text
    assert "no message" in client.get("/").text


def test_events_and_queues_are_listed(client: TestClient, conn: Conn) -> None:
    record(conn, "doc_1")
    record(conn, "doc_2")
    enqueue(conn, queue="strange")
    assert [event["subject"] for event in client.get("/api/events?limit=1").json()["events"]] == ["doc_2"]
    told = client.get("/api/queues").json()
    assert [(queue["name"], queue["declared"]) for queue in told["queues"]] == [
        *((name, True) for name in QUEUES),
        ("strange", False),
    ]
    assert told["events"]["waiting"] == 2


# --- the pages


def test_an_empty_house_has_a_page(client: TestClient) -> None:
    page = client.get("/").text
    assert "No worker process has been heard of lately." in page
    assert "No jobs yet." in page


def test_the_first_page_shows_jobs_events_and_queues(client: TestClient, conn: Conn) -> None:
    work(conn, *QUEUES)
    made = one_of_each(conn)
    record(conn, f"doc {SCRIPT}")
    conn.execute("UPDATE posthouse.events SET poisoned_at = now(), last_error = %s", [SCRIPT])
    page = client.get("/").text
    for state, job_id in made.items():
        assert f"/jobs/{job_id}" in page
        assert f'<span class="state {state}">{state}</span>' in page
    assert ">poisoned<" in page
    assert "1 event could not be turned into jobs (poisoned)." in page


def test_what_came_from_outside_is_shown_as_text(client: TestClient, conn: Conn) -> None:
    event_id = record(conn, SCRIPT)
    job_id = fail(conn, args=[SCRIPT], event_id=event_id, unique_key=SCRIPT)
    for path in ("/", f"/?event={event_id}", f"/jobs/{job_id}"):
        page = client.get(path).text
        assert "&lt;script&gt;alert(" in page
        assert re.findall(r"<script[^>]*>", page) == ['<script src="/static/refresh.js" defer>']


def test_nothing_is_inline_and_nothing_comes_from_elsewhere(client: TestClient, conn: Conn) -> None:
    for path in ("/", f"/jobs/{fail(conn)}"):
        page = client.get(path).text
        assert not re.search(r"\s(style|on\w+)=|<style|javascript:", page)
        assert not re.search(r"""(src|href)=["'](?!/|#)""", page)


def test_a_job_page_tells_the_whole_story(client: TestClient, conn: Conn) -> None:
    event_id = record(conn, "doc_7")
    page = client.get(f"/jobs/{fail(conn, args=['doc_7'], event_id=event_id)}").text
    for words in (
        "Attempt 1 did not succeed; it runs again in ",
        "ValueError",
        "Traceback",
        "doc_7",
        CHANGED,
    ):
        assert words in page


def test_large_arguments_are_cut_on_the_page(client: TestClient, conn: Conn) -> None:
    job_id = enqueue(conn, args=["x" * 300_000])
    assert len(client.get(f"/jobs/{job_id}").text) < 40_000
    assert len(client.get(f"/api/jobs/{job_id}").json()["message"]["args"][0]) == 300_000


def test_static_files_are_served(away: TestClient) -> None:
    for name in ("page.css", "refresh.js", "icon.svg"):
        assert away.get(f"/static/{name}").status_code == 200


# --- the verdict

WELL = "All is well: every queue is worked"
QUIET = {"running": 0, "due": 0, "later": 0, "retryable": 0, "oldest_s": 0, "completed": 0, "discarded": 0}


def queue(name: str = "index", **told: Any) -> Queue:
    ours = {"declared": True, "processes": 1, "wanted_processes": 1, "capacity": 4, "cancelled": 0}
    return Queue(name=name, **{**QUIET, **ours, **told})


@pytest.mark.parametrize(
    ("queues", "backlog", "level", "sentences"),
    [
        ([queue(running=2, due=1)], {}, "good", [f"{WELL}, 2 jobs running, 1 due."]),
        ([queue(processes=0)], {}, "bad", ["No worker process has been heard of lately."]),
        ([queue(), queue("b", processes=0, due=2)], {}, "bad", ["No process works b. 2 jobs wait for one."]),
        ([queue(due=9, oldest_s=240)], {}, "notice", ["index is behind: 9 jobs due, the oldest for 4 min."]),
        ([queue(discarded=1)], {}, "notice", ["1 job discarded in the last hour."]),
        ([queue()], {"waiting": 3, "oldest_s": 20}, "good", [f"{WELL}, 0 jobs running, 0 due."]),
        (
            [queue(discarded=2)],
            {"waiting": 3, "oldest_s": 90, "poisoned": 1},
            "bad",
            [
                "3 events not yet turned into jobs, the oldest for 90 s.",
                "1 event could not be turned into jobs (poisoned).",
                "2 jobs discarded in the last hour.",
            ],
        ),
        (
            [queue(), queue("old", declared=False, processes=0, due=1)],
            {},
            "notice",
            ["1 job in old, a queue that QUEUES does not declare."],
        ),
    ],
)
def test_the_verdict(queues: list[Queue], backlog: dict[str, float], level: str, sentences: list[str]) -> None:
    seen = Overview(queues=queues, events=Backlog(**{"waiting": 0, "oldest_s": 0, "poisoned": 0, **backlog}))
    verdict = overview.judge(seen)
    assert (verdict.level, [verdict.headline, *verdict.reasons]) == (level, sentences)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "under 1 s"), (1.9, "1 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")],
)
def test_ages_as_people_say_them(seconds: float, words: str) -> None:
    assert ages.spoken(seconds) == words


# --- who may ask


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "me.example", "localhost.example"])  # noqa: S104
def test_the_page_is_not_served_to_others(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        create_app(Settings(database_url=SecretStr(NOBODY), web_host=host))
    assert ended.value.code == 78
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"posthouse: WEB_HOST: {host} is open to others")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8400", ""])
def test_a_name_that_is_not_ours_is_refused(away: TestClient, host: str) -> None:
    for path in ("/", "/api/jobs", "/healthz", "/static/page.css"):
        assert away.get(path, headers={"host": host}).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1:8400", "localhost:9000", "LOCALHOST", "[::1]:8400"])
def test_our_own_names_are_accepted(away: TestClient, host: str) -> None:
    assert away.get("/healthz", headers={"host": host}).status_code == 200


def test_every_answer_tells_the_browser_what_it_may_not(client: TestClient) -> None:
    for path in ("/", "/jobs/x", "/api/jobs", "/nowhere", "/static/refresh.js", "/healthz"):
        told = client.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in told["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == "'self'"
        assert told["x-content-type-options"] == "nosniff"
        assert told["referrer-policy"] == "no-referrer"
        assert told["cache-control"] == ("no-cache" if "static" in path else "no-store")


# --- without the database


def test_without_a_database_each_answer_says_so(away: TestClient) -> None:
    page, problem = away.get("/"), away.get("/api/jobs")
    assert (page.status_code, "The database does not answer." in page.text) == (503, True)
    assert page.elapsed < timedelta(seconds=2)
    assert problem.headers["content-type"] == "application/problem+json"
    assert problem.json()["detail"] == "The database does not answer."
    assert "nobody" not in page.text + problem.text


def test_the_page_recovers_with_its_database(client: TestClient, admin: Conn, database_url: str) -> None:
    name = sql.Identifier(urlsplit(database_url).path[1:])
    assert client.get("/").status_code == 200
    admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'posthouse page'")
    assert client.get("/").status_code == 503
    admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
    # The pool tries again on its own time, not at the visitor's: the page comes back by itself, soon.
    until(lambda: client.get("/").status_code == 200)


def test_a_database_before_its_migrations_is_named(client: TestClient, conn: Conn) -> None:
    conn.execute("DROP SCHEMA posthouse CASCADE")
    page = client.get("/")
    assert (page.status_code, "run `python cli.py migrate`" in page.text) == (503, True)


def test_no_statement_outlasts_patience(client: TestClient, conn: Conn, database_url: str) -> None:
    with connect(database_url, name="posthouse test lock") as other, other.transaction():
        other.execute("LOCK TABLE dramatiq.queue")
        page, measured = client.get("/"), client.get("/metrics")
    assert (page.status_code, "The database took too long to answer." in page.text) == (503, True)
    assert page.elapsed < timedelta(seconds=3)
    assert "posthouse_database_up 0.0" in measured.text
    assert measured.elapsed < timedelta(seconds=1.2)


def test_the_page_writes_nothing(away: TestClient) -> None:
    paths = away.get("/openapi.json").json()["paths"]
    assert {"/api/jobs/{job_id}", "/api/jobs", "/api/events", "/api/queues"} <= paths.keys()
    assert {method for methods in paths.values() for method in methods} == {"get"}
    assert away.post("/api/jobs").status_code == 405


def test_a_fault_of_ours_tells_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise RuntimeError("what nobody may read")

    monkeypatch.setattr(overview, "load", load)
    careless = TestClient(client.app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    for path in ("/", "/api/queues"):
        answer = careless.get(path)
        assert (answer.status_code, "nobody may read" in answer.text) == (500, False)
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]


# --- as a process


def test_the_process_serves_with_three_connections_and_stops(database_url: str, conn: Conn, tmp_path: Path) -> None:
    work(conn, *QUEUES)
    one_of_each(conn)
    with running_web(database_url, tmp_path) as (process, address):
        assert json.loads(fetch(f"{address}/healthz"))["pid"] == process.pid
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(fetch, [f"{address}/"] * 24))
        used = conn.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'posthouse page'")
        assert used.fetchone() == {"count": 3}
        process.terminate()
        assert process.wait(5) == 0
    assert all(b"1 job discarded in the last hour." in answer for answer in answers)


@contextmanager
def running_web(database_url: str, data_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "cli.py", "web"],
        cwd=HOUSE,
        env={**os.environ, "DATABASE_URL": database_url, "WEB_PORT": str(port), "DATA_DIR": str(data_dir)},
    )
    try:
        address = f"http://127.0.0.1:{port}"
        give_up = time.monotonic() + 10
        while not answers(f"{address}/healthz"):
            assert time.monotonic() < give_up
            time.sleep(0.05)
        yield process, address
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return bool(fetch(url))
    except OSError:
        return False


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def test_other_processes_do_not_carry_the_web_framework() -> None:
    heavy = "{'fastapi', 'starlette', 'uvicorn'}"
    script = f"import sys, cli; sys.exit(bool({heavy} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], cwd=HOUSE, check=False).returncode == 0
