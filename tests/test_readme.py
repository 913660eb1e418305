"""README.md says what is so: its commands, settings, queues and numbers are the code's, and its actor works."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import SecretStr

import cli
from middleware import connection_budget
from outbox import jobs
from outbox.db import Conn
from settings import QUEUES, Settings

HOUSE = Path(__file__).parent.parent
README = (HOUSE / "README.md").read_text("utf-8")
WORKER = [sys.executable, "-m", "dramatiq", "actors", "--queues", "tasks", "--processes", "1", "--threads", "2"]


def commands() -> dict[str, set[str]]:
    """Each command of `cli.py` and its options."""
    found: dict[str, set[str]] = {}

    def walk(name: str, command: Any) -> None:
        if hasattr(command, "commands"):
            for part, inner in command.commands.items():
                walk(f"{name} {part}".strip(), inner)
        else:
            found[name] = {option for parameter in command.params for option in parameter.opts} | {"--help"}

    walk("", typer.main.get_command(cli.app))
    return found


def command_lines() -> list[str]:
    """What follows `python cli.py` wherever README.md calls it."""
    return [line for line in re.findall(r"python cli\.py ([^`\n#]+)", README) if not line.startswith("…")]


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first heading is *heading*."""
    table = README.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def command_of(line: str) -> str:
    """The longest name of a command that *line* begins with; "" for none."""
    words = line.split()
    return next((name for size in (2, 1) if (name := " ".join(words[:size])) in commands()), "")


def block(after: str) -> str:
    """The fenced block that follows the words *after*."""
    found = re.search(re.escape(after) + r"[^`]*\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, after
    return found[1]


@pytest.mark.parametrize("line", command_lines())
def test_a_command_that_is_called_exists_with_its_options(line: str) -> None:
    name = command_of(line)
    assert name, line
    assert set(re.findall(r"--[a-z-]+", line)) <= commands()[name]


def test_the_table_of_commands_is_that_of_the_code() -> None:
    told = {}
    for cell, says in rows("command"):
        here = [command_of(code) for code in re.findall(r"`([^`]+)`", cell)]
        options = set(re.findall(r"--[a-z-]+", says))
        told.update(dict.fromkeys(here, options))
        assert any(options <= commands()[name] for name in here), cell
    assert told.keys() == commands().keys()


def shown(default: object) -> str:
    """A default as the table writes it."""
    match default:
        case None | "" | ():
            return "unset"
        case SecretStr():
            return "unset" if not default.get_secret_value() else "set"
        case bool():
            return str(default).lower()
        case int() | float():
            return f"{default:g}"
        case tuple():
            return f"`{','.join(map(str, default))}`"
        case dict():
            return "see below"
        case _:
            return f"`{default}`"


def test_the_table_of_settings_is_that_of_the_code() -> None:
    told = {name.strip("`"): default for name, default, _ in rows("setting")}
    assert told == {name.upper(): shown(field.default) for name, field in Settings.model_fields.items()}


def test_the_table_of_queues_is_that_of_the_code() -> None:
    told = [cells[:3] for cells in rows("queue")]
    assert told == [
        [f"`{name}`", f"{queue.processes} × {queue.threads}", f"{queue.time_limit_s:g} s"]
        for name, queue in QUEUES.items()
    ]


def test_the_exit_codes_and_the_connections_are_those_of_the_code() -> None:
    assert [code for code, _ in rows("exit code")] == re.findall(r"\b\d+\b", cli.__doc__ or "")
    total = sum(line.connections for line in connection_budget.lines(QUEUES))
    assert f"the scheduler 1: {total} as shipped" in " ".join(README.split())


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the house with the actor in it, just as the README has it."""
    place = tmp_path / "house"
    shutil.copytree(HOUSE, place, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests", "bench"))
    (place / "actors" / "parcels.py").write_text(block("This is a complete one, `actors/parcels.py`:"), "utf-8")
    package = place / "actors" / "__init__.py"
    text = package.read_text("utf-8").replace(" notify, ", " notify, parcels, ")
    package.write_text(text.replace('"notify", ', '"notify", "parcels", '), "utf-8")
    return place


@contextmanager
def working(house: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The workers of the queue `tasks`; none outlives the block."""
    with (house / "worker.log").open("wb") as log:
        worker = subprocess.Popen(WORKER, cwd=house, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield worker
    finally:
        worker.terminate()
        try:
            worker.wait(15)
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)


def completed(conn: Conn, log: Path) -> dict[str, Any]:
    """The label's job, once it is done."""
    give_up = time.monotonic() + 40
    while not (found := jobs.listing(conn, actor="parcel.label", state="completed")):
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.05)
    job = jobs.load(conn, found[0]["id"])
    assert job is not None
    return job


def test_the_actor_works_as_it_is_written(house: Path, database_url: str, conn: Conn) -> None:
    data_dir = house / "data"
    environment = {"PATH": os.environ["PATH"], "DATABASE_URL": database_url, "DATA_DIR": str(data_dir)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("cli.py", "migrate")
    with working(house, environment):
        event_id = str(conn.execute(block("from any language:").encode()).fetchone()["record_event"])  # type: ignore[index]
        job = completed(conn, house / "worker.log")
    assert (job["result"], job["event_id"]) == (f"{event_id}.txt", event_id)
    assert (data_dir / "labels" / f"{event_id}.txt").read_text() == "To Mechelen\nParcel 42\n"
    enqueue = block("also in your own transaction:")
    answers = [run("-c", f"event_id = {event_id!r}\n{enqueue}") for _ in range(2)]
    [again] = jobs.listing(conn, actor="parcel.label", state="pending")
    assert again["available_at"] > again["created_at"]
    assert again["id"] in answers[0]
    assert f"duplicate_of='{again['id']}'" in answers[1]


def test_the_batch_and_the_test_of_an_actor_work_as_they_are_written(house: Path, database_url: str) -> None:
    with (house / "actors" / "parcels.py").open("a", encoding="utf-8") as file:
        file.write(block("its own end is the verdict:"))
    (house / "conftest.py").write_text(block("In `conftest.py`:"), "utf-8")
    (house / "test_parcels.py").write_text(block("and in `test_parcels.py`:") + WEIGHED, "utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": database_url,
        "DATA_DIR": str(house / "data"),
        "QUEUES": '{"scales": {"threads": 1, "time_limit_s": 10}}',
        "MAX_CONNECTIONS": "110",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parcels.py"]
    done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, timeout=90)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


WEIGHED = """

def test_parcels_are_weighed_together(kit):
    from actors.parcels import weigh

    for number in (3, -1, 4):
        weigh.send(number)
    ran = kit.drain()
    assert sorted(job.outcome for job in ran) == ["completed", "completed", "discarded"]
"""
