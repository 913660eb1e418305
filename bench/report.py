"""What was measured, as data and as tables."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.figures import OURS, Figure, ratio
from bench.peers.peer import Entry
from bench.targets import judged
from outbox import embedded_wheel


def header(entries: list[Entry], runs: int) -> dict[str, Any]:
    """On what it was measured, beside which versions, and how busy that was."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgres": embedded_wheel.run("postgres", "--version").split()[-1],
        "runs": runs,
        "peers": {
            entry.name: entry.environment.version for entry in entries if entry.environment and not entry.only_drains
        },
        "load_before": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def answer(
    header: dict[str, Any], measured: dict[str, tuple[str, list[Figure]]], absent: dict[str, str]
) -> dict[str, Any]:
    """Everything there is to say, as JSON has it; *measured*: for each test what it is, and its figures."""
    tests = {
        test: {
            "about": about,
            "figures": [_line(figure, _ours(figure, figures)) for figure in figures],
            "targets": judged(test, figures),
        }
        for test, (about, figures) in measured.items()
    }
    return {"header": {**header, "load_after": round(os.getloadavg()[0], 1)}, "absent": absent, "tests": tests}


def _ours(figure: Figure, figures: list[Figure]) -> Figure | None:
    """What of ours *figure* is to be compared with."""
    if figure.who.startswith(OURS):
        return None
    return next((each for each in figures if each.who == OURS and each.what == figure.what), None)


def _line(figure: Figure, ours: Figure | None) -> dict[str, Any]:
    return {
        "what": figure.what,
        "who": figure.who,
        "unit": figure.unit,
        "median": figure.median,
        "values": figure.values,
        "ours_to_theirs": ratio(ours, figure) if ours else None,
        "failure": figure.failure,
    }


def show(answer: dict[str, Any], *, judging: bool = True) -> None:
    """Tables, for a terminal or a file; with the targets unless what was measured is too small to be judged."""
    console = Console()
    console.print(
        "{machine}, {cores} cores, {memory_gib} GiB, {system}; Python {python}, Postgres {postgres}; "
        "load {load_before} before, {load_after} after; {at}".format(**answer["header"])
    )
    for name, reason in answer["absent"].items():
        console.print(f"left out: {name}: {reason}", highlight=False)
    for test, told in answer["tests"].items():
        console.print(f"\n{test}: {told['about']}", highlight=False)
        console.print(_table(told["figures"]))
        if told["targets"] and judging:
            console.print(_targets(told["targets"]))


def _table(lines: list[dict[str, Any]]) -> Table:
    """A row for each contestant; beside a median how far the runs lie apart, and how many times of it ours is."""
    columns = {line["what"]: line["unit"] for line in lines}
    table = Table("")
    for what, unit in columns.items():
        table.add_column(f"{what}, {unit}".rstrip(", "), justify="right")
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        rows.setdefault(line["who"], {})[line["what"]] = line
    for who, cells in rows.items():
        table.add_row(who, *(_cell(cells[what]) if what in cells else "" for what in columns))
    return table


def _cell(line: dict[str, Any]) -> str:
    if line["median"] is None:
        return str(line["failure"])
    times = line["ours_to_theirs"]
    compared = f"({times:.2f} ×)" if times is not None else ""
    return " ".join(filter(None, [number(line["median"]), _spread(line), compared]))


def _targets(targets: list[dict[str, Any]]) -> Table:
    table = Table("target", "is", "holds")
    for target in targets:
        table.add_row(target["target"], number(target["value"]), "yes" if target["holds"] else "NO")
    return table


def _spread(line: dict[str, Any]) -> str:
    low, high = min(line["values"]), max(line["values"])
    return f"±{(high - low) / 2 / line['median'] * 100:.0f}%" if high > low and line["median"] else ""


def brief(failure: str) -> str:
    """Where there is little room; all of it is in the data."""
    return failure if len(failure) <= 30 else "failed"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
