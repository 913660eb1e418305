"""Numbers at the boundaries that matter, by queue and actor only; each process writes files, the page adds them up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as CountOf
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import settings

settings.metrics_dir()

from prometheus_client import Counter, Gauge, Histogram  # noqa: E402 - it reads the folder's name when imported

from outbox.jobs import Claim  # noqa: E402 - after the above, to keep one block


class BulkHistogram(Histogram):
    """A histogram that takes many values at the price of one: each file write of a value costs more than to sort it."""

    def observe_all(self, values: Sequence[float]) -> None:
        """As `observe` of each."""
        counts = CountOf(bisect_left(self._upper_bounds, value) for value in values)
        for bucket, count in counts.items():
            self._buckets[bucket].inc(count)
        self._sum.inc(sum(values))


class Meter:
    """What one process counts. Actors nobody knows are called "unknown": a label is never made of what came in."""

    def __init__(self) -> None:
        self.jobs_claimed = Counter("posthouse_jobs_claimed", "Jobs claimed", ["queue"])
        self.claims = Counter("posthouse_claims", "Claim statements")
        self.unknown = Counter("posthouse_unknown_actor", "Jobs put back: no such actor here", ["queue"])
        self.settle_batch = Histogram(
            "posthouse_settle_batch", "Outcomes written in one statement", buckets=(1, 2, 5, 10, 25, 50, 100, 250, 1000)
        )
        self.lease_lost = Counter("posthouse_lease_lost", "Results refused: the lease was no longer ours")
        self.reconnects = Counter("posthouse_reconnects", "Queue connections lost")
        self.probe_failures = Counter("posthouse_listen_probe_failures", "Notifications to oneself that were not heard")
        self.listener_up = Gauge("posthouse_listener_up", "Processes that listen now", multiprocess_mode="livesum")
        self.attempts = Counter("posthouse_attempts", "Attempts ended", ["queue", "actor", "outcome"])
        self.seconds = BulkHistogram(
            "posthouse_attempt_seconds",
            "Duration of an attempt",
            ["queue", "actor"],
            buckets=(0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 600),
        )
        self.rescued = Counter("posthouse_rescued", "Jobs whose lease ran out", ["queue"])
        self.keeper_rescued = Counter("posthouse_keeper_rescued", "Jobs whose process was seen dead", ["queue"])
        self.keeper_renewed = Counter("posthouse_keeper_renewed", "Leases renewed for processes that were silent")
        self.keeper_killed = Counter("posthouse_keeper_killed", "Processes killed for jobs past their time limit")
        self.relayed = Counter("posthouse_events_relayed", "Events fanned out")
        self.relay_failures = Counter("posthouse_relay_failures", "Relay passes that failed")
        self.running = Gauge("posthouse_running", "Jobs running now", multiprocess_mode="livesum")

    def claimed(self, asked: Mapping[str, int], claimed: Sequence[Claim]) -> None:
        self.claims.inc()
        for queue in asked:
            if count := sum(claim.queue == queue for claim in claimed):
                self.jobs_claimed.labels(queue).inc(count)

    def unknown_actor(self, queue: str, _actor: str) -> None:
        self.unknown.labels(queue).inc()

    def settled(self, count: int) -> None:
        self.settle_batch.observe(count)

    def attempted(self, ends: Mapping[tuple[str, str | None, str], Sequence[float]]) -> None:
        """Attempts that have ended: by queue, actor and outcome, the seconds that each took."""
        for (queue, actor, outcome), seconds in ends.items():
            counter, timer = self._of_attempt(queue, str(actor), outcome)
            counter.inc(len(seconds))
            timer.observe_all(seconds)

    @cache  # noqa: B019 - one meter a process
    def _of_attempt(self, queue: str, actor: str, outcome: str) -> tuple[Counter, BulkHistogram]:
        # To look a label up costs more than to count it.
        return self.attempts.labels(queue, actor, outcome), self.seconds.labels(queue, actor)


@lru_cache
def meter() -> Meter:
    """This process's meter."""
    return Meter()
