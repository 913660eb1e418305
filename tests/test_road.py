"""The whole road on the real Procfile: a folder in; found, told by webhook and by mail; a killed worker; a clean stop.

One service for all tests, with nothing but `cli.py` and HTTP to look at it by. Each test leaves it running and quiet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from tests.conftest import DATA_DIR

HOUSE = Path(__file__).parent.parent
LETTERS = HOUSE / "examples" / "letters"
READY = "Posthouse is ready"
SECRET = "whsec_cG9zdGhvdXNlIHBvc3Rob3VzZSBwb3N0aG91c2U="

#: Leases short enough to wait for, and the webhooks' own limits below each other as they must be.
HASTE = {
    "LEASE_S": "3",
    "CONTROL_INTERVAL_S": "1",
    "RESCUE_INTERVAL_S": "1",
    "WEBHOOK_HTTP_TIMEOUT_S": "4",
    "WEBHOOK_TIME_LIMIT_S": "5",
    "ENDPOINT_LEASE_S": "5.5",
}
#: The sink takes so long to answer a webhook: time to kill whoever waits for the answer.
SLOW_S = 1.5
#: From the signal to the end of everything.
STOP_S = 31

T = TypeVar("T")


def until(answer: Callable[[], T | None], within_s: float, otherwise: Callable[[], str] = lambda: "") -> T:
    """The first true *answer*, asked every 50 ms."""
    give_up = time.monotonic() + within_s
    while not (found := answer()):
        assert time.monotonic() < give_up, f"not within {within_s:g} s: {otherwise()}"
        time.sleep(0.05)
    return found


@dataclass
class Road:
    """A running service with its data folder, the folder of letters it is fed from, and the sink it talks to."""

    folder: Path
    web_port: int
    sink_port: int
    smtp_port: int
    services: list[subprocess.Popen[bytes]] = field(default_factory=list)
    sinks: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.letters = Path(shutil.copytree(LETTERS, self.folder / "letters"))
        self.data_dir = self.folder / "data"
        self.output = self.folder / "output"
        self.record = self.folder / "sink.jsonl"
        self.record.touch()
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            **HASTE,
            "DATA_DIR": str(self.data_dir),
            "WEB_PORT": str(self.web_port),
            "OUTBOUND_ALLOW": f"127.0.0.1=127.0.0.1/32:{self.sink_port}",
            "SMTP_URL": f"smtp://127.0.0.1:{self.smtp_port}?tls=none",
        }

    def start(self) -> None:
        """Start `cli.py up` and wait until it is ready."""
        times = self.said.count(READY) + 1 if self.services else 1
        with self.output.open("ab") as said:
            command = [sys.executable, "cli.py", "up"]
            self.services.append(self._open(command, self.environment, said.fileno()))
        until(lambda: self.said.count(READY) >= times or self.service.poll() is not None, 90, lambda: self.said)
        assert self.service.poll() is None, self.said

    def start_sink(self) -> None:
        """Start `cli.py sink`, which keeps a record and answers webhooks late;"""
        ports = ["--port", str(self.sink_port), "--smtp-port", str(self.smtp_port)]
        options = ["--secret", SECRET, "--record", str(self.record), "--delay", str(SLOW_S)]
        # Not told of the data folder: it is no part of the service, and stays when that stops.
        environment = {"PATH": os.environ["PATH"]}
        self.sinks.append(
            self._open([sys.executable, "cli.py", "sink", *ports, *options], environment, subprocess.DEVNULL)
        )

    def _open(self, command: list[str], environment: dict[str, str], out: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=HOUSE,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
            # Whoever runs the tests in the background may have Ctrl-C ignored, and so would we.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def service(self) -> subprocess.Popen[bytes]:
        return self.services[-1]

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of `cli.py`, told what the service was told."""
        command = [sys.executable, "cli.py", *arguments]
        told = {**self.environment, **environment}
        return subprocess.run(command, cwd=HOUSE, env=told, capture_output=True, text=True, timeout=60)

    def cli(self, *arguments: str) -> str:
        """What a command that goes well prints."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, path: str, **query: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.web_port}{path}", params=query, trust_env=False, timeout=10)

    def webhooks(self) -> list[dict[str, Any]]:
        return [record for record in self._records() if record["kind"] == "webhook"]

    def mails(self) -> list[str]:
        """The subjects of the owner's mails."""
        return [record["subject"] for record in self._records() if record["kind"] == "mail"]

    def _records(self) -> list[dict[str, Any]]:
        # A last line that is only half there is for the next look.
        return [json.loads(line) for line in self.record.read_text("utf-8").split("\n")[:-1]]

    def stop(self) -> int:
        """Press Ctrl-C and wait for the end; the exit code."""
        self.service.send_signal(signal.SIGINT)
        return self.service.wait(STOP_S)

    def left(self) -> list[str]:
        """The processes that know of the data folder, by their environment or their command line."""
        return [process.name() for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return str(self.data_dir) in " ".join([*process.cmdline(), *process.environ().values()])
        except psutil.Error:
            return False

    def worker_set(self, queue: str) -> psutil.Process:
        """The master of the worker processes of *queue*."""
        children = psutil.Process(self.service.pid).children()
        [master] = [child for child in children if f"--queues {queue}" in " ".join(child.cmdline())]
        return master

    def close(self) -> None:
        """End everything, in good order where that goes."""
        for process in [*self.services, *self.sinks]:
            process.send_signal(signal.SIGTERM)
        for process in [*self.services, *self.sinks]:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in filter(self._is_ours, psutil.process_iter()):
            left.kill()


def three_ports() -> tuple[int, int, int]:
    """Free ones, all different."""
    here = ("127.0.0.1", 0)
    with socket.create_server(here) as one, socket.create_server(here) as two, socket.create_server(here) as three:
        return one.getsockname()[1], two.getsockname()[1], three.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def road() -> Iterator[Road]:
    """The service, with an endpoint for changes, and the letters imported."""
    # Not pytest's `tmp_path`: whoever else runs pytest closes its parent to Postgres's user again.
    folder = Path(tempfile.mkdtemp(dir=DATA_DIR))
    running = Road(folder, *three_ports())
    try:
        running.start_sink()
        running.start()
        until(lambda: listens(running.sink_port) and listens(running.smtp_port), 30)
        url = f"http://127.0.0.1:{running.sink_port}/"
        running.cli("endpoint", "add", url, "--secret", SECRET, "--event", "document.updated")
        imported = running.cli("import", str(running.letters))
        assert imported == "5 added, 0 changed, 0 unchanged, 0 deleted, 0 skipped\n"
        yield running
    finally:
        running.close()
        shutil.rmtree(folder, ignore_errors=True)


def found(road: Road, *words: str) -> str:
    """What a search for *words* shows, once it finds something."""

    def shown() -> str | None:
        answer = road.cli("search", *words)
        return None if answer.startswith("0 found") else answer

    return until(shown, 30)


def edit(road: Road, name: str, sentence: str) -> None:
    """Add *sentence* to a letter, and import the folder: of all that is there, this one has changed."""
    with (road.letters / name).open("a", encoding="utf-8") as letter:
        letter.write(f"{sentence}\n")
    said = road.cli("import", str(road.letters))
    assert said == "0 added, 1 changed, 4 unchanged, 0 deleted, 0 skipped\n"


def delivered(road: Road) -> list[dict[str, Any]]:
    """The jobs that deliver, newest first, as the API has them."""
    listed: list[dict[str, Any]] = road.get("/api/jobs", actor="webhook.deliver").json()["jobs"]
    return listed


def test_an_edited_letter_is_found_and_told_by_webhook_and_mail(road: Road) -> None:
    assert "The relay" in found(road, "fresh", "horses")
    before = len(road.webhooks())
    edit(road, "mail-coach.md", "He also had a blunderbuss.")
    assert re.search(r"The mail coach .*blunderbuss.*\n1 found by postgres", found(road, "blunderbuss"))
    [webhook] = until(lambda: road.webhooks()[before:], 15)
    assert (webhook["verified"], webhook["event"]["type"]) == (True, "document.updated")
    assert webhook["event"]["id"] == webhook["headers"]["webhook-id"]
    until(lambda: delivered(road)[0]["state"] == "completed", 15)
    assert len(road.webhooks()) == before + 1
    until(lambda: "Import of letters: 0 added, 1 changed, 0 deleted" in road.mails(), 15)
    assert "Import of letters: 5 added, 0 changed, 0 deleted" in road.mails()


def test_the_page_and_the_api_show_what_was_done(road: Road) -> None:
    assert road.get("/healthz").json()["status"] == "ok"
    until(lambda: road.get("/readyz").json() == {"ready": True, "reasons": []}, 15)
    until(lambda: road.get("/api/jobs", actor="owner.notify", state="completed").json()["jobs"], 15)
    [job, *_] = road.get("/api/jobs", actor="owner.notify", state="completed").json()["jobs"]
    shown = road.get(f"/api/jobs/{job['id']}").json()
    assert (shown["state"], shown["attempt"], shown["attempts"]) == ("completed", 1, [])
    page = road.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "corpus.index" in page.text
    metrics = road.get("/metrics").text
    assert 'posthouse_queue_processes{queue="webhook"}' in metrics
    assert float(re.findall(r"^posthouse_claims_total (\S+)", metrics, re.MULTILINE)[0]) > 0


def test_a_killed_worker_s_job_runs_again_and_is_completed_once(road: Road) -> None:
    before = len(road.webhooks())
    restarts = road.said.count("webhook ended with SIGKILL; it starts again")
    master = road.worker_set("webhook")
    edit(road, "taxis.md", "Nobody could hide a late start.")
    until(lambda: road.webhooks()[before:], 15)
    os.killpg(master.pid, signal.SIGKILL)
    job_id = delivered(road)[0]["id"]
    assert road.get(f"/api/jobs/{job_id}").json()["finished_at"] is None

    def ended() -> dict[str, Any] | None:
        job: dict[str, Any] = road.get(f"/api/jobs/{job_id}").json()
        return job if job["finished_at"] else None

    job = until(ended, 45, lambda: road.said)
    assert (job["state"], job["attempt"], job["crashes"]) == ("completed", 2, 1)
    assert [(each["attempt"], each["outcome"]) for each in job["attempts"]] == [(1, "worker lost")]
    first, second = road.webhooks()[before:]
    assert first["headers"]["webhook-id"] == second["headers"]["webhook-id"]
    assert [each["headers"]["posthouse-attempt"] for each in (first, second)] == ["1", "2"]
    assert (first["verified"], second["verified"]) == (True, True)
    assert road.said.count("webhook ended with SIGKILL; it starts again") == restarts + 1
    assert road.worker_set("webhook").pid != master.pid


def test_ctrl_c_leaves_nothing_but_the_data_which_the_next_start_has(road: Road) -> None:
    assert "postgres" in road.left()
    assert road.stop() == 0, road.said
    assert road.left() == []
    socket.create_server(("127.0.0.1", road.web_port)).close()
    road.start()
    assert "The relay" in road.cli("search", "fresh", "horses")


def test_a_port_in_use_is_said_before_any_worker_starts(road: Road) -> None:
    # On the database that is there: what this is about comes after that, and no second Postgres need start.
    second = road.run("up", DATABASE_URL=database_url(road), DATA_DIR=str(road.folder / "second"))
    assert second.returncode == 73, second.stdout
    assert f"127.0.0.1:{road.web_port} cannot be listened on" in second.stdout
    assert "dramatiq" not in second.stdout
    assert "Traceback" not in second.stdout + second.stderr


def database_url(road: Road) -> str:
    """The URL of the service's Postgres, as its processes are told."""
    return str(road.worker_set("index").environ()["DATABASE_URL"])
