"""How much is measured, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

OURS = "posthouse"


@dataclass(frozen=True)
class Size:
    """How much work a run is."""

    jobs: int
    singly: int
    events: int
    pick_ups: int
    files: int
    settle_s: float
    idle_s: float


FULL = Size(jobs=20_000, singly=2_000, events=20_000, pick_ups=200, files=2_000, settle_s=10, idle_s=20)
SMALL = Size(jobs=100, singly=50, events=600, pick_ups=10, files=20, settle_s=1, idle_s=2)


@dataclass
class Figure:
    """One thing measured of one contestant: a value a run, in the order of the runs."""

    what: str
    who: str
    unit: str
    values: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.values)


def ratio(ours: Figure, theirs: Figure) -> float | None:
    """Ours to theirs, the median over the runs, in each of which both had the machine in the same state."""
    pairs = [mine / other for mine, other in zip(ours.values, theirs.values, strict=True) if other]
    return median(pairs) if pairs else None
