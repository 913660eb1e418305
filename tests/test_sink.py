"""The sink takes what a receiver and a mail server would, and says whether it was signed by whom it knows."""

from __future__ import annotations

import json
import smtplib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors import signing
from settings import child_environment
from web import sink

CLI = Path(__file__).parent.parent / "cli.py"
SECRET = signing.make_shared_secret()
BODY = '{"type":"parcel.sent","subject":"é"}'.encode()


@dataclass
class Sink:
    """A sink in a process of its own."""

    url: str
    smtp_port: int
    record: Path
    process: subprocess.Popen[str]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.record.read_text("utf-8").splitlines()]


def two_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def started(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    environment = child_environment(DATA_DIR=str(tmp_path / "data"), PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    command = [sys.executable, str(CLI), "sink", *options]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Sink]:
    http, smtp = two_ports()
    record = tmp_path / "record.jsonl"
    options = ["--port", str(http), "--smtp-port", str(smtp), "--secret", SECRET, "--record", str(record)]
    process = started(tmp_path, *options)
    assert process.stdout is not None
    assert process.stdout.readline() == f"webhooks at http://127.0.0.1:{http}/, mails at 127.0.0.1:{smtp}\n"
    yield Sink(f"http://127.0.0.1:{http}/", smtp, record, process)
    process.kill()
    process.communicate()


def post(url: str, secret: str) -> int:
    now = int(time.time())
    headers = {
        "webhook-id": "e-1",
        "webhook-timestamp": str(now),
        "webhook-signature": signing.sign("e-1", now, BODY, [secret]),
        "posthouse-attempt": "2",
    }
    return httpx.post(url, content=BODY, headers=headers, trust_env=False).status_code


def test_webhooks_and_mails_are_shown_recorded_and_verified(running: Sink) -> None:
    assert post(running.url, SECRET) == 204
    assert post(running.url, signing.make_shared_secret()) == 401
    with smtplib.SMTP("127.0.0.1", running.smtp_port) as server:
        server.sendmail("a@x.example", ["b@y.example"], "Subject: =?utf-8?q?=C3=A9?=\r\n\r\nGood morning\r\n")
    good, bad, mail = running.records()
    assert (good["verified"], good["body"].encode(), good["event"]["subject"]) == (True, BODY, "é")
    assert (bad["verified"], bad["fault"]) == (False, "no signature fits")
    assert (mail["from"], mail["to"], mail["subject"]) == ("a@x.example", ["b@y.example"], "é")
    assert mail["text"].strip() == "Good morning"
    running.process.terminate()
    shown, errors = running.process.communicate(timeout=10)
    assert (running.process.returncode, errors) == (0, "")
    assert [text[10:] for text in shown.splitlines()] == [
        "webhook  parcel.sent é, attempt 2, verified",
        "webhook  parcel.sent é, attempt 2, NOT VERIFIED: no signature fits",
        "mail     to b@y.example: é",
    ]


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = started(tmp_path, "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 73
    assert errors.count("\n") == 1
    assert "--port" in errors


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b"[1]", b"{"])
def test_a_body_that_is_no_event_is_recorded_as_it_came(body: bytes) -> None:
    record = sink.webhook_record("/", {}, body, "header webhook-id is missing")
    assert record["event"] == {}
    assert sink.line(record) == "webhook  ? ?, attempt ?, NOT VERIFIED: header webhook-id is missing"
