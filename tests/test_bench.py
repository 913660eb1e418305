"""The benchmark works and answers in its form. What it measures is never tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import queue
from bench.figures import SMALL, Figure, Size, ratio
from bench.places import Place
from tests.conftest import DATA_DIR

HOUSE = Path(__file__).parent.parent
LATEST = HOUSE / "bench" / "results" / "latest.json"


@pytest.fixture
def place(server_url: str, tmp_path: Path) -> Place:
    """The tests' own server."""
    return Place(tmp_path, server_url)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files; Postgres's user can reach it."""
    with tempfile.TemporaryDirectory(dir=DATA_DIR) as folder:
        yield Path(folder)


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *words]
    told = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=HOUSE, env=told, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (
            queue.drain,
            {
                (what, who): "jobs/s"
                for what in ("1 process", "2 processes")
                for who in ("posthouse", "raw loop", "dramatiq-pg")
            },
        ),
        (queue.relay, {("1 subscription", "posthouse"): "events/s"}),
        (queue.latency, {("pick-up, p50", "posthouse"): "ms", ("pick-up, p99", "posthouse"): "ms"}),
    ],
)
def test_each_contestant_has_a_figure_of_each_run(
    place: Place,
    measure: Callable[[Place, Size, int], list[Figure]],
    expected: dict[tuple[str, str], str],
) -> None:
    figures = measure(place, SMALL, 1)
    assert expected == {(figure.what, figure.who): figure.unit for figure in figures}
    assert all(len(figure.values) == 1 for figure in figures)
    assert all(figure.notes == [] for figure in figures)


def test_the_command_answers_in_json_and_leaves_nothing(temporary: Path) -> None:
    kept = LATEST.read_bytes() if LATEST.exists() else None
    done = bench(temporary, "enqueue", "--small", "--json", "--runs", "2")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert {"machine", "cores", "python", "postgres", "load_before", "load_after"} <= answer["header"].keys()
    lines = answer["tests"]["enqueue"]["figures"]
    assert [("single", who) for who in ("posthouse", "raw loop", "dramatiq-pg")] + [
        ("bulk", who) for who in ("posthouse", "raw loop")
    ] == [(line["what"], line["who"]) for line in lines]
    assert all(len(line["values"]) == 2 for line in lines)
    assert [line["ours_to_theirs"] is None for line in lines] == [line["who"] == "posthouse" for line in lines]
    assert list(temporary.glob("posthouse-*")) == []
    assert kept == (LATEST.read_bytes() if LATEST.exists() else None)


def test_a_ratio_is_the_median_of_the_runs_ratios() -> None:
    ours = Figure("drain", "posthouse", "jobs/s", [100, 400, 90])
    theirs = Figure("drain", "raw loop", "jobs/s", [200, 200, 100])
    assert ratio(ours, theirs) == 0.9
    assert ratio(ours, Figure("drain", "raw loop", "jobs/s", [0, 0, 0])) is None


def test_an_unknown_test_is_refused(temporary: Path) -> None:
    done = bench(temporary, "speed")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'speed' is not one of" in done.stderr
