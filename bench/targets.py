"""What the figures have to be. A target is of a median, or of the median of a run's ratios, as `ratio` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.drain import FEW, MANY, MANY_DELAYED, NONE_DELAYED, ONE, OVER_IDLE, TWO
from bench.figures import OURS, OURS_IN_BATCHES, Figure, ratio
from bench.idle import NOT_AWAITED
from bench.latency import BUSY, IDLE
from bench.peers.every import PGQUEUER, RAW, STOCK, THREADS
from bench.recovery import BESIDE_A_KEEPER, RE_RUN

Key = tuple[str, str]
"""What, and who."""


@dataclass(frozen=True)
class Target:
    """*says* what must hold of figure *of* in *test*, or of its ratio to figure *to*: *least* or *most*."""

    test: str
    says: str
    of: Key
    to: Key | None = None
    least: float | None = None
    most: float | None = None

    def value(self, figures: Mapping[Key, Figure]) -> float | None:
        """None where it was not measured."""
        of, to = figures.get(self.of), figures.get(self.to) if self.to else None
        if of is None or (self.to and to is None):
            return None
        return ratio(of, to) if to else of.median

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


TARGETS = [
    Target("drain", "1 process: at least 20 × dramatiq-pg", (ONE, OURS), (ONE, STOCK), least=20),
    Target("drain", "1 process: at least PgQueuer's batches of 100", (ONE, OURS), (ONE, PGQUEUER), least=1),
    Target("drain", "1 process: at least 0.35 × the raw loop", (ONE, OURS), (ONE, RAW), least=0.35),
    Target("drain", "2 processes: at least 1.3 × one", (TWO, OURS), (ONE, OURS), least=1.3),
    Target("drain", "batch actors: at least 0.7 × the raw loop", (ONE, OURS_IN_BATCHES), (ONE, RAW), least=0.7),
    Target("drain", "commits a job: below 0.2", (f"{ONE}, commits", OURS), most=0.2),
    Target("enqueue", "in bulk: at least 60,000 jobs/s", ("bulk", OURS), least=60_000),
    Target("latency", "idle, p50: below 2 ms", (f"{IDLE}, p50", OURS), most=2),
    Target("latency", "idle, p99: below 5 ms", (f"{IDLE}, p99", OURS), most=5),
    Target("latency", "at 300 jobs/s, p95: below 10 ms", (f"{BUSY}, p95", OURS), most=10),
    Target("backlog", "500,000 waiting: at least 0.9 × the rate of 20,000", (MANY, OURS), (FEW, OURS), least=0.9),
    Target("backlog", "500,000 waiting: at most 30 MB over idle", (OVER_IDLE, OURS), most=30),
    Target("backlog", f"at most {THREADS + 3} connections", (f"connections, {MANY}", OURS), most=THREADS + 3),
    Target(
        "delayed",
        "100,000 delayed: at least 0.9 × the rate of none",
        (MANY_DELAYED, OURS),
        (NONE_DELAYED, OURS),
        least=0.9,
    ),
    Target(
        "delayed",
        "100,000 delayed: at most 1.1 × the memory of none",
        (f"memory, {MANY_DELAYED}", OURS),
        (f"memory, {NONE_DELAYED}", OURS),
        most=1.1,
    ),
    Target("recovery", "below 30 s", (RE_RUN, OURS), most=30),
    Target("recovery", "beside a keeper: below 3 s", (BESIDE_A_KEEPER, OURS), most=3),
    Target("idle", "a queue that is not awaited: below 2 statements/s", ("statements", OURS + NOT_AWAITED), most=2),
    Target("idle", f"at most {THREADS + 3} connections", ("connections", OURS), most=THREADS + 3),
    Target("idle", "a process: below 1 % CPU", ("CPU", OURS), most=1),
    Target("relay", "at least 5,000 events/s", ("1 subscription", OURS), least=5_000),
]


def judged(test: str, figures: list[Figure]) -> list[dict[str, Any]]:
    """Each target of *test* with its *value*, and whether it *holds*; those that were not measured are left out."""
    found = {(figure.what, figure.who): figure for figure in figures}
    judgements = [(target, target.value(found)) for target in TARGETS if target.test == test]
    return [
        {"target": target.says, "value": value, "holds": target.holds(value)}
        for target, value in judgements
        if value is not None
    ]
