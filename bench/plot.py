"""The answer as a picture: a panel a question, a bar a contestant, ours in colour, the best one on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import NullFormatter

from bench.drain import MANY, ONE, TWO
from bench.figures import OURS
from bench.latency import BUSY, IDLE
from bench.peers.every import RAW
from bench.recovery import BESIDE_A_KEEPER, RE_RUN
from bench.report import brief, number

OURS_COLOUR, OTHERS_COLOUR, LIMIT_COLOUR, INK = "#0b6e4f", "#9db4c0", "#d9d9d9", "#253237"
WIDTH_IN, BAR_IN, TITLE_IN, DPI = 12, 0.24, 0.6, 100
#: What a label takes of a panel's width, beyond the longest bar.
LABEL = 0.3


@dataclass(frozen=True)
class Panel:
    """Of *test*: a bar to *what*, and a line on to *further*; *also* is one more bar, by its label."""

    title: str
    test: str
    what: str
    further: str = ""
    also: tuple[str, str] = ("", "")
    more_is_better: bool = True


PANELS = [
    Panel("No-op jobs/s: bar 1 process, line 2 processes", "drain", ONE, TWO),
    Panel("No-op jobs/s with 500,000 waiting", "backlog", MANY),
    Panel("Enqueued in bulk, jobs/s", "enqueue", "bulk"),
    Panel("Enqueued one by one, jobs/s", "enqueue", "single"),
    Panel("Pick-up at idle, ms: bar p50, line p99", "latency", f"{IDLE}, p50", f"{IDLE}, p99", more_is_better=False),
    Panel(f"Pick-up at {BUSY}, ms: bar p50, line p95", "latency", f"{BUSY}, p50", f"{BUSY}, p95", more_is_better=False),
    Panel(
        "kill -9 to re-run, s",
        "recovery",
        RE_RUN,
        also=(BESIDE_A_KEEPER, "beside a keeper"),
        more_is_better=False,
    ),
    Panel("Idle process, statements/s", "idle", "statements", more_is_better=False),
]


@dataclass(frozen=True)
class Bar:
    who: str
    value: float | None
    further: float | None
    failure: str

    @property
    def label(self) -> str:
        if self.value is None:
            return brief(self.failure)
        return " … ".join(number(value) for value in (self.value, self.further) if value is not None)

    @property
    def colour(self) -> str:
        if self.who.startswith(OURS):
            return OURS_COLOUR
        return LIMIT_COLOUR if self.who == RAW else OTHERS_COLOUR


def draw(found: Mapping[tuple[str, str, str], dict[str, Any]], file: Path) -> None:
    """Write what was measured to *file*; nothing when nothing was."""
    panels = [(panel, bars) for panel in PANELS if (bars := _bars(panel, found))]
    if not panels:
        return
    pairs = [panels[at : at + 2] for at in range(0, len(panels), 2)]
    heights = [max(len(bars) for _, bars in pair) * BAR_IN + TITLE_IN for pair in pairs]
    picture = Picture(figsize=(WIDTH_IN, sum(heights)), dpi=DPI, layout="constrained")
    grid = picture.subplots(len(pairs), 2, squeeze=False, height_ratios=heights)
    for row, pair in zip(grid, pairs, strict=True):
        for axes in row[len(pair) :]:
            axes.set_axis_off()
        for axes, (panel, bars) in zip(row, pair, strict=False):
            _draw(axes, panel, bars)
    picture.savefig(file)


def _bars(panel: Panel, found: Mapping[tuple[str, str, str], dict[str, Any]]) -> list[Bar]:
    bars = []
    for (test, what, who), line in found.items():
        if test == panel.test and what in (panel.what, panel.also[0]):
            name = f"{who}, {panel.also[1]}" if what == panel.also[0] else who
            further = found.get((test, panel.further, who))
            bars.append(Bar(name, line["median"], further["median"] if further else None, line["failure"]))
    worst = float("-inf") if panel.more_is_better else float("inf")
    return sorted(bars, key=lambda bar: worst if bar.value is None else bar.value, reverse=panel.more_is_better)


def _draw(axes: Axes, panel: Panel, bars: list[Bar]) -> None:
    seen = [value for bar in bars for value in (bar.value, bar.further) if value]
    low, high = (min(seen) / 2, max(seen)) if seen else (0.1, 1.0)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** LABEL)
    for place, bar in enumerate(bars):
        value, further = max(bar.value or low, low), max(bar.further or low, low)
        axes.barh(place, value - low, left=low, color=bar.colour, height=0.7)
        if bar.further:
            axes.plot([min(value, further), max(value, further)], [place, place], color=INK, linewidth=1.2)
            axes.plot([further], [place], "|", color=INK, markersize=8)
        axes.annotate(
            bar.label,
            (max(value, further), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set_title(f"{panel.title} ({'more' if panel.more_is_better else 'less'} is better)", fontsize=10, loc="left")
    axes.set_yticks(range(len(bars)), [bar.who for bar in bars], fontsize=8)
    for tick, bar in zip(axes.get_yticklabels(), bars, strict=True):
        tick.set_fontweight("bold" if bar.who.startswith(OURS) else "normal")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
