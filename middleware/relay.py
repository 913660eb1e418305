"""The relay's thread, in every worker process and the stand-alone relay: rung by notifications, swept by a timer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import psycopg
import structlog
from psycopg_pool import PoolTimeout

from middleware.lifecycle import Lifecycle
from middleware.metrics import Meter
from outbox.db import is_lost
from outbox.jobs import BadJob
from outbox.relay import Subscription, Transaction, relay, relay_singly

log = structlog.get_logger("posthouse.relay")

FIRST_BACKOFF_S = 2.0
LONGEST_BACKOFF_S = 60.0


@dataclass
class Relay:
    """Passes until nothing waits, then sleeps until `ring` or the sweep. A failing pass backs off, 2 s to 1 min.

    One that lost its database waits only for the next ring, which comes when it is back.
    """

    transaction: Transaction
    subscriptions: Sequence[Subscription]
    lifecycle: Lifecycle
    meter: Meter
    batch: int
    sweep_s: float
    _bell: threading.Event = field(default_factory=threading.Event)

    def ring(self) -> None:
        self._bell.set()

    def run(self) -> None:
        failures = 0
        while not self.lifecycle.stopping:
            self._bell.clear()
            try:
                self._pass(singly=failures > 0)
                failures = 0
            except (psycopg.Error, PoolTimeout, BadJob) as error:
                failures += 1
                delay = min(FIRST_BACKOFF_S * 2 ** min(failures - 1, 10), LONGEST_BACKOFF_S)
                log.warning("relay.failed", error=type(error).__name__, again_in_s=delay)
                self.meter.relay_failures.inc()
                self.lifecycle.wait(FIRST_BACKOFF_S if is_lost(error) else delay)
                if is_lost(error):
                    self._bell.wait(delay - FIRST_BACKOFF_S)
                continue
            self._bell.wait(self.sweep_s)

    def _pass(self, *, singly: bool) -> None:
        once = relay_singly if singly else relay
        while not self.lifecycle.stopping:
            relayed = once(self.transaction, self.subscriptions, batch=self.batch)
            self.meter.relayed.inc(relayed)
            if relayed:
                log.info("events.relayed", count=relayed)
            if relayed < self.batch:
                return
