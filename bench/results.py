"""The answer as files: JSON, a Markdown table, a plot. The latest ones are yours, the published ones are committed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.drain import MANY, ONE, TWO
from bench.figures import OURS
from bench.idle import NOT_AWAITED
from bench.latency import BUSY, IDLE
from bench.recovery import BESIDE_A_KEEPER, RE_RUN
from bench.report import brief, number

FOLDER = Path(__file__).parent / "results"
LATEST = FOLDER / "latest"
PUBLISHED = FOLDER / "queue"
BEGIN, END = "<!-- bench -->", "<!-- end of bench -->"

Lines = Mapping[tuple[str, str, str], dict[str, Any]]
"""Figures by test, what and who."""


@dataclass(frozen=True)
class Column:
    """A column of the summary: in one cell those of *whats* that *test* has measured."""

    title: str
    test: str
    whats: tuple[str, ...]


COLUMNS = [
    Column("drain, jobs/s", "drain", (ONE,)),
    Column("by 2 processes", "drain", (TWO,)),
    Column("with 500,000 waiting", "backlog", (MANY,)),
    Column("enqueued singly, jobs/s", "enqueue", ("single",)),
    Column("in bulk", "enqueue", ("bulk",)),
    Column("pick-up at idle, p50 / p99, ms", "latency", (f"{IDLE}, p50", f"{IDLE}, p99")),
    Column(f"pick-up at {BUSY}, p95, ms", "latency", (f"{BUSY}, p95",)),
    Column("kill -9 to re-run / beside a keeper, s", "recovery", (RE_RUN, BESIDE_A_KEEPER)),
    Column("idle: statements/s", "idle", ("statements",)),
    Column("connections", "idle", ("connections",)),
]


def keep(answer: dict[str, Any], where: Path = LATEST) -> None:
    """Write *answer* to *where*, with each of the endings."""
    where.parent.mkdir(exist_ok=True)
    where.with_suffix(".json").write_text(json.dumps(answer, indent=1) + "\n")
    publish(answer, where)


def publish(answer: dict[str, Any], where: Path = PUBLISHED) -> None:
    """The same without the data."""
    from bench import plot  # matplotlib takes a second to come

    where.with_suffix(".md").write_text("\n".join(markdown(answer)) + "\n")
    plot.draw(lines(answer), where.with_suffix(".png"))


def put_into(readme: Path, answer: dict[str, Any]) -> None:
    """Put the summary between the marks in *readme*."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{readme} lacks {BEGIN} and {END}"
    told = "\n".join([*_summary(lines(answer)), "", *_circumstances(answer)])
    readme.write_text(f"{before}{begin}\n{told}\n{end}{after}")


def lines(answer: dict[str, Any]) -> Lines:
    return {
        (test, line["what"], line["who"]): line for test, told in answer["tests"].items() for line in told["figures"]
    }


def markdown(answer: dict[str, Any]) -> Iterator[str]:
    """The summary, the targets, and where and how it was measured."""
    yield from _summary(lines(answer))
    yield ""
    yield from _targets(answer)
    yield ""
    yield from _circumstances(answer)


def _summary(found: Lines) -> Iterator[str]:
    columns = [each for each in COLUMNS if any(test == each.test for test, *_ in found)]
    shown = {(each.test, what) for each in columns for what in each.whats}
    contestants = dict.fromkeys(who for test, what, who in found if (test, what) in shown and _has_a_row(who))
    yield f"| | {' | '.join(each.title for each in columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for who in contestants:
        cells = [_cell([found.get((each.test, what, who)) for what in each.whats]) for each in columns]
        yield f"| {f'**{who}**' if who.startswith(OURS) else who} | {' | '.join(cells)} |"


def _has_a_row(who: str) -> bool:
    """Not the parts of the whole service, nor ours where nobody waits."""
    return not who.startswith(f"{OURS}: ") and not who.endswith(NOT_AWAITED)


def _cell(found: list[dict[str, Any] | None]) -> str:
    return " / ".join(
        brief(line["failure"]) or "–" if line["median"] is None else number(line["median"]) for line in found if line
    )


def _targets(answer: dict[str, Any]) -> Iterator[str]:
    yield "| target | measured | holds |"
    yield "|---|---:|---|"
    for test, told in answer["tests"].items():
        for target in told["targets"]:
            holds = "yes" if target["holds"] else "**no**"
            yield f"| {test}: {target['target']} | {number(target['value'])} | {holds} |"


def _circumstances(answer: dict[str, Any]) -> Iterator[str]:
    header = answer["header"]
    yield (
        "{machine}, {cores} cores, {memory_gib} GiB, {system}; Python {python}, PostgreSQL {postgres}, its settings as "
        "`make run` has them; {day}; medians of {runs} runs, but others' latency, backlog, recovery and idle were "
        "measured once.".format(**header, day=header["at"][:10])
    )
    if header["peers"]:
        yield ", ".join(f"{name} {version}" for name, version in header["peers"].items()) + "."
    for name, reason in answer["absent"].items():
        yield f"Left out: {name}: {reason}."
    yield "To repeat it: `make bench`."
