"""What was measured, as data, as tables, and in a file."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.figures import OURS, Figure, ratio
from outbox import embedded_wheel

LATEST = Path(__file__).parent / "results" / "latest.json"


def header() -> dict[str, Any]:
    """On what it was measured, and how busy that was."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgres": embedded_wheel.run("postgres", "--version").split()[-1],
        "load_before": round(os.getloadavg()[0], 1),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def answer(header: dict[str, Any], measured: dict[str, tuple[str, list[Figure]]]) -> dict[str, Any]:
    """Everything there is to say, as JSON has it; *measured*: for each test what it is, and its figures."""
    tests = {
        test: {"about": about, "figures": [_line(figure, _ours(figure, figures)) for figure in figures]}
        for test, (about, figures) in measured.items()
    }
    return {"header": {**header, "load_after": round(os.getloadavg()[0], 1)}, "tests": tests}


def _ours(figure: Figure, figures: list[Figure]) -> Figure | None:
    """What of ours *figure* is to be compared with."""
    if figure.who == OURS:
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
        "notes": sorted(set(figure.notes)),
    }


def keep(answer: dict[str, Any]) -> None:
    """Put *answer* where the next one looks for it."""
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text(json.dumps(answer, indent=1) + "\n")


def show(answer: dict[str, Any]) -> None:
    """Tables, for a terminal or a file."""
    console = Console()
    console.print(
        "{machine}, {cores} cores, {memory_gib} GiB, {system}; Python {python}, Postgres {postgres}; "
        "load {load_before} before, {load_after} after; {at}".format(**answer["header"])
    )
    for test, told in answer["tests"].items():
        console.print(f"\n{test}: {told['about']}", highlight=False)
        console.print(_table(told["figures"]))


def _table(lines: list[dict[str, Any]]) -> Table:
    compared = any(line["ours_to_theirs"] is not None for line in lines)
    table = Table("what", "who")
    for column in ("median", "of", *(["ours to theirs"] if compared else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        who = "\n".join([line["who"], *line["notes"]])
        values = f"{_number(min(line['values']))} … {_number(max(line['values']))}"
        times = line["ours_to_theirs"]
        shown = [line["what"], who, f"{_number(line['median'])} {line['unit']}", values]
        table.add_row(*shown, *([f"{times:.2f} ×" if times is not None else ""] if compared else []))
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
