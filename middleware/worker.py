"""One worker process: its claim loop, control and relay threads, put together at boot and taken apart in order."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import structlog

from middleware.capacity import Lane
from middleware.consumer import ClaimLoop, Held, Work
from middleware.leases import SESSION, SEVER_CONTROL_S, Control
from middleware.lifecycle import Lifecycle
from middleware.metrics import meter
from middleware.relay import Relay
from middleware.time_limits import standing
from middleware.watchdog import Watchdog
from outbox import jobs
from outbox.db import Database, connect
from outbox.relay import Subscription
from outbox.workers import Worker
from settings import Settings

log = structlog.get_logger("posthouse.worker")

EXIT_PANIC = 1
EXIT_CUT = 75
#: The signal may come twice, to the group and forwarded by the master: within so long it is one and the same.
SAME_SIGNAL_S = 1.0
#: A thread that computes lets the next one at the interpreter after so long: the claim loop and the renewals are among
#: those that wait, and Python's own 5 ms are as long as a claim.
SWITCH_S = 0.001


@dataclass
class WorkerProcess:
    """The running parts of this process. *batch_of* and *deliver* are the broker's (see `ClaimLoop`)."""

    settings: Settings
    url: str
    listen_url: str
    listens: bool
    queues: Sequence[str]
    actors: Sequence[str]
    threads: int
    database: Database
    lifecycle: Lifecycle
    subscriptions: Sequence[Subscription]
    batch_of: Callable[[str | None], int]
    batches: Mapping[str, int]
    deliver: Callable[[Work], None]
    hurry: bool = False
    _signalled_at: float = 0.0

    def __post_init__(self) -> None:
        told = self.settings
        self.worker = Worker(tuple(self.queues), self.threads, tuple(self.actors))
        self.relay = Relay(
            self.database.transaction,
            self.subscriptions,
            self.lifecycle,
            meter(),
            batch=told.relay_batch,
            sweep_s=told.relay_sweep_s if self.listens else told.poll_interval_s,
        )
        self.loop = ClaimLoop(
            connect=lambda: connect(self.listen_url, name="posthouse queue", session=jobs.SESSION),
            lanes=[self._lane(name) for name in self.queues],
            threads=self.threads,
            worker_id=self.worker.id,
            lease_s=told.lease_s,
            batch_of=self.batch_of,
            deliver=self.deliver,
            on_event=self.relay.ring,
            meter=meter(),
            listens=self.listens,
            probe_every_s=told.listen_probe_interval_s,
        )
        self.control = Control(
            connect=lambda: connect(self.url, name="posthouse control", session=SESSION),
            lifecycle=self.lifecycle,
            meter=meter(),
            worker=self.worker,
            lease_s=told.lease_s,
            renew_every_s=told.control_interval_s,
            rescue_every_s=told.rescue_interval_s,
            held=self.loop.held,
            forget=self.loop.forget,
            expire=self._expire,
            running=lambda: self.loop.busy,
            orphaned=self._orphaned,
        )
        self.control.watchdogs.append(Watchdog("consumer", self.loop, told.watchdog_s / 3, told.watchdog_s))
        self.control.watchdogs.append(Watchdog("control", self.control, SEVER_CONTROL_S, told.watchdog_s))

    def _lane(self, name: str) -> Lane[Held]:
        queue = self.settings.queues[name]
        poll_s = self.settings.awaited_poll_interval_s if queue.awaited else self.settings.poll_interval_s
        return Lane(
            name,
            min(queue.threads, self.threads),
            poll_s,
            queue.awaited,
            belled=self.listens,
            batch=self.batches.get(name, 1),
        )

    def _expire(self, now: float) -> None:
        for guard in standing():
            if guard.expire(now):
                log.warning("job.time_limit", limit_s=guard.limit_s)

    def _orphaned(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.lifecycle.spawn("orphan", self._end, joined=False)

    def _end(self) -> None:
        # Dramatiq's boot waits for its master's answer without end: an orphan of that moment never gets to its stop.
        time.sleep(self.settings.shutdown_total_s)
        log.warning("orphan.ended")
        os._exit(EXIT_CUT)

    def start(self) -> None:
        """Take over the signals, then start the threads; the claim loop last."""
        self._take_over(signal.SIGTERM)
        if hasattr(signal, "SIGHUP"):
            self._take_over(signal.SIGHUP)
        self.lifecycle.on_panic = lambda name: os.kill(os.getpid(), signal.SIGTERM)
        self.control.sign_on()
        sys.setswitchinterval(SWITCH_S)
        self.lifecycle.spawn("control", self.control.run)
        self.lifecycle.spawn("watch", self.control.watch)
        self.lifecycle.spawn("relay", self.relay.run)
        self.lifecycle.spawn("consumer", self.loop.run)
        log.info(
            "worker.started", worker_id=self.worker.id, queues=list(self.queues), threads=self.threads,
            grace_s=self.settings.shutdown_grace_s,
        )  # fmt: skip

    def _take_over(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)

        def asked_to_stop(signum: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if not self._signalled_at:
                self._signalled_at = now
                self.lifecycle.stop()
                self.loop.stop_claiming()
                if callable(before):
                    before(signum, frame)
            elif now - self._signalled_at >= SAME_SIGNAL_S:
                self.hurry = True

        signal.signal(number, asked_to_stop)

    @property
    def stop_by(self) -> float:
        """When this process must be gone (monotonic); counted from the signal."""
        return (self._signalled_at or time.monotonic()) + self.settings.shutdown_total_s

    @property
    def grace_by(self) -> float:
        return (self._signalled_at or time.monotonic()) + self.settings.shutdown_grace_s
