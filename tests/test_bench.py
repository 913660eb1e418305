"""The benchmark works and answers in its form: each test of it, with those that need nothing installed. No rate is
tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import drain, enqueue, idle, latency, recovery, relay, report, results
from bench.contest import Contest, contest, turn
from bench.figures import SMALL, Figure, ratio
from bench.peers import environments
from bench.peers.environments import Environment
from bench.peers.every import BUILT_IN, DRAMATIQ_PG, IN_BATCHES, OTHERS, POSTHOUSE, RAW_LOOP
from bench.peers.peer import Peer
from bench.places import Place
from bench.targets import TARGETS, judged
from tests.conftest import DATA_DIR

HOUSE = Path(__file__).parent.parent
LATEST = results.LATEST.with_suffix(".json")
OURS, BATCHES, RAW = POSTHOUSE.name, IN_BATCHES.name, RAW_LOOP.name
NOT_AWAITED = OURS + idle.NOT_AWAITED


@pytest.fixture(scope="module")
def small(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contest]:
    """Ours and the raw loop on the tests' own server, with tiny sizes, one run each."""
    place = Place(tmp_path_factory.mktemp("bench"), server_url)
    with contest(place, [POSTHOUSE, IN_BATCHES, RAW_LOOP], SMALL, 1, lambda name: None) as measuring:
        yield measuring


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files; Postgres's user can reach it."""
    with tempfile.TemporaryDirectory(dir=DATA_DIR) as folder:
        yield Path(folder)


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *words]
    told = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=HOUSE, env=told, capture_output=True, text=True, timeout=60)


def _each(who: list[str], *whats: str) -> set[tuple[str, str]]:
    return {(what, name) for what in whats for name in who}


EXPECTED: dict[str, tuple[Callable[[Contest], list[Figure]], set[tuple[str, str]]]] = {
    "drain": (
        drain.drain,
        _each([OURS, BATCHES, RAW], "1 process", "2 processes", "1 process, commits", "2 processes, commits"),
    ),
    "enqueue": (enqueue.enqueue, _each([OURS, RAW], "single", "bulk")),
    "latency": (
        latency.latency,
        _each([OURS], *(f"{pace}, p{percent}" for pace in ("idle", "300/s") for percent in (50, 95, 99))),
    ),
    "backlog": (
        drain.backlog,
        _each(
            [OURS],
            "few waiting",
            "many waiting",
            "memory, many waiting",
            "memory over idle",
            "connections, many waiting",
        ),
    ),
    "delayed": (
        drain.delayed,
        _each([OURS], "none delayed", "many delayed", "memory, none delayed", "memory, many delayed"),
    ),
    "recovery": (recovery.recovery, _each([OURS], "kill -9 to re-run", "kill -9 to re-run, beside a keeper")),
    "idle": (idle.workers, _each([OURS, NOT_AWAITED], "statements", "CPU", "memory", "connections")),
    "relay": (relay.relay, _each([OURS], "1 subscription")),
}


@pytest.mark.parametrize("test", EXPECTED)
def test_each_contestant_has_a_figure_of_each_run_and_each_target_its_figures(small: Contest, test: str) -> None:
    measure, expected = EXPECTED[test]
    figures = measure(replace(small, peers=[peer for peer in small.peers if peer.name in {who for _, who in expected}]))
    assert expected == {(figure.what, figure.who) for figure in figures}
    assert [(1, "")] * len(figures) == [(len(figure.values), figure.failure) for figure in figures]
    # Against others there is no judgement here, and a rate of 0 has no ratio.
    against_none = [target.says for target in TARGETS if target.test == test and target.to is None]
    assert set(against_none) <= {judgement["target"] for judgement in judged(test, figures)}
    named = {key for target in TARGETS if target.test == test for key in (target.of, target.to) if key}
    assert {key for key in named if key[1] in (OURS, BATCHES, RAW, NOT_AWAITED)} <= expected


def test_the_command_answers_in_json_and_leaves_nothing(temporary: Path) -> None:
    kept = LATEST.read_bytes() if LATEST.exists() else None
    done = bench(temporary, "enqueue", "--small", "--json", "--runs", "1")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert {"machine", "cores", "python", "postgres", "runs", "load_before", "load_after"} <= answer["header"].keys()
    lines = answer["tests"]["enqueue"]["figures"]
    assert [("single", who) for who in (OURS, RAW, "dramatiq-pg")] + [("bulk", who) for who in (OURS, RAW)] == [
        (line["what"], line["who"]) for line in lines
    ]
    assert all(len(line["values"]) == 1 for line in lines)
    assert [line["ours_to_theirs"] is None for line in lines] == [line["who"] == OURS for line in lines]
    assert list(temporary.glob("posthouse-*")) == []
    assert kept == (LATEST.read_bytes() if LATEST.exists() else None)


def test_an_unknown_test_is_refused(temporary: Path) -> None:
    done = bench(temporary, "speed")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'speed' is not one of" in done.stderr


def test_a_ratio_is_the_median_of_the_runs_ratios() -> None:
    ours = Figure("drain", OURS, "jobs/s", [100, 400, 90])
    theirs = Figure("drain", RAW, "jobs/s", [200, 200, 100])
    assert ratio(ours, theirs) == 0.9
    assert ratio(ours, Figure("drain", RAW, "jobs/s", [0, 0, 0])) is None


def test_a_target_is_judged_by_the_value_or_by_the_ratio() -> None:
    figures = [
        Figure("1 process", OURS, "jobs/s", [10_000, 14_000, 9_000]),
        Figure("1 process", RAW, "jobs/s", [20_000, 40_000, 40_000]),
        Figure("1 process, commits", OURS, "a job", [0.3]),
    ]
    expected = [
        {"target": "1 process: at least 0.35 × the raw loop", "value": 0.35, "holds": True},
        {"target": "commits a job: below 0.2", "value": 0.3, "holds": False},
    ]
    assert expected == judged("drain", figures)


class Store:
    """Of a peer that is never asked for anything."""

    told: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it


def test_what_fails_of_somebody_elses_is_told_and_of_ours_ends_the_test(tmp_path: Path) -> None:
    def fails() -> list[float]:
        raise AssertionError("nothing was done\nfor a long time")

    theirs, ours = (Peer(entry, Store(), tmp_path) for entry in (DRAMATIQ_PG, POSTHOUSE))  # type: ignore[arg-type]
    figure = Figure("1 process", theirs.name, "jobs/s", [1.0])
    turn(theirs, [figure], fails)
    turn(theirs, [figure], lambda: [2.0])
    expected = Figure("1 process", theirs.name, "jobs/s", [1.0], failure="nothing was done")
    assert expected == figure
    with pytest.raises(AssertionError, match="nothing was done"):
        turn(ours, [Figure("1 process", ours.name, "jobs/s")], fails)


def test_a_program_that_is_not_installed_leaves_its_peer_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    lacking = Environment("lacking", ("nothing==1.0",), programs=("no-such-program",))
    made = Environment("made", ("one==1.2", "other==3.4"))
    made.folder.mkdir()
    (made.folder / "pins").write_text("one==1.2\nother==3.4\n")
    expected = {"lacking": "no-such-program is not installed"}
    assert expected == environments.make([lacking, made], lambda name: None)


def test_each_entry_has_its_program_and_each_other_one_its_pins() -> None:
    entries = [*BUILT_IN, *OTHERS]
    files = {entry.module if "." in entry.module else f"{entry.module}.py" for entry in entries}
    assert files <= {file.name for file in (HOUSE / "bench" / "peers").iterdir()}
    assert len(entries) == len({entry.name for entry in entries})
    pins = [pin for entry in OTHERS if entry.environment for pin in entry.environment.packages]
    assert [pin for pin in pins if "==" not in pin and pin.count("@") != 1] == []


def test_the_answer_is_kept_as_json_as_a_table_and_as_a_plot(tmp_path: Path) -> None:
    figures = [
        Figure("1 process", OURS, "jobs/s", [12_345.6, 20_000, 10_000]),
        Figure("2 processes", OURS, "jobs/s", [20_000]),
        Figure("1 process", RAW, "jobs/s", [30_000, 30_000, 40_000]),
        Figure("1 process", "slow", "jobs/s", failure="nothing was done in 60 s"),
    ]
    header = report.header(BUILT_IN, runs=3)
    answer = report.answer(header, {"drain": ("No-op jobs.", figures)}, {"other": "npm is not installed"})
    results.keep(answer, tmp_path / "queue")
    assert answer == json.loads((tmp_path / "queue.json").read_text())
    table = (tmp_path / "queue.md").read_text().splitlines()
    assert [
        "| | drain, jobs/s | by 2 processes |",
        "|---|---:|---:|",
        f"| **{OURS}** | 12,346 | 20,000 |",
        f"| {RAW} | 30,000 |  |",
        "| slow | nothing was done in 60 s |  |",
    ] == table[:5]
    assert "| drain: 1 process: at least 0.35 × the raw loop | 0.412 | yes |" in table
    assert "Left out: other: npm is not installed." in table
    assert (tmp_path / "queue.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "README.md").write_text("a\n<!-- bench -->\nold\n<!-- end of bench -->\nb\n")
    results.put_into(tmp_path / "README.md", answer)
    shown = (tmp_path / "README.md").read_text().splitlines()
    assert ["a", "<!-- bench -->", *table[:5], ""] == shown[:8]
    assert shown.index("b") == shown.index("<!-- end of bench -->") + 1
    assert "old" not in shown
