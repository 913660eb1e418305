"""How much is measured, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

OURS = "posthouse"
OURS_IN_BATCHES = "posthouse, batch=100"


@dataclass(frozen=True)
class Size:
    """How much work a run is.

    A drain is watched for *watch_s* at most and begins with *jobs*, or with what takes *fill_s* at a peer's usual pace
    if that is more; a backlog is *backlog* jobs, watched for *backlog_s*. What nobody picks up again within *rescue_s*
    counts as lost; *leases* are other settings than the default ones for that.
    """

    jobs: int
    fill_s: float
    watch_s: float
    singly: int
    in_bulk: int
    events: int
    pick_ups: int
    backlog: int
    backlog_s: float
    delayed: int
    files: int
    settle_s: float
    idle_s: float
    rescue_s: float
    leases: Mapping[str, str] = field(default_factory=dict)

    def count(self, pace: int) -> int:
        return max(self.jobs, int(pace * self.fill_s))


FULL = Size(
    jobs=20_000,
    fill_s=4.5,
    watch_s=3,
    singly=2_000,
    in_bulk=60_000,
    events=20_000,
    pick_ups=100,
    backlog=500_000,
    backlog_s=6,
    delayed=100_000,
    files=2_000,
    settle_s=6,
    idle_s=10,
    rescue_s=60,
)
SMALL = Size(
    jobs=100,
    fill_s=0,
    watch_s=10,
    singly=50,
    in_bulk=100,
    events=600,
    pick_ups=10,
    backlog=300,
    backlog_s=2,
    delayed=100,
    files=20,
    settle_s=0.5,
    idle_s=1,
    rescue_s=5,
    leases={"LEASE_S": "1", "CONTROL_INTERVAL_S": "0.3", "RESCUE_INTERVAL_S": "0.3"},
)


@dataclass
class Figure:
    """One thing measured of one contestant: a value a run, in their order. *failure*: why there are no more."""

    what: str
    who: str
    unit: str
    values: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None


def ratio(one: Figure, other: Figure) -> float | None:
    """One to the other, the median over the runs, in each of which both had the machine in the same state."""
    pairs = [mine / theirs for mine, theirs in zip(one.values, other.values, strict=False) if theirs]
    return median(pairs) if pairs else None
