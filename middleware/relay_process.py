"""The stand-alone relay and host's keeper: events to jobs, rescue of what lost workers left; it works no queue."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from middleware import boot
from middleware.keeper import Keeper, Kind
from middleware.leases import SESSION, SEVER_CONTROL_S, Control
from middleware.lifecycle import Lifecycle
from middleware.metrics import Meter, meter
from middleware.relay import Relay
from middleware.watchdog import Watchdog
from outbox.db import LOST, Conn, Database, connect, sever
from outbox.events import CHANNEL
from outbox.listener import Bells, Deaf
from outbox.relay import Subscription
from outbox.workers import Worker
from settings import Settings

log = structlog.get_logger("posthouse.relay")

EXIT_PANIC = 1
EXIT_CUT = 75
RECONNECT_S = 1.0
#: The keeper asks so often who is silent.
LOOK_S = 1.0


def run(
    settings: Settings,
    url: str,
    subscriptions: Sequence[Subscription],
    kind: Callable[[str | None, str], Kind | None],
    lifecycle: Lifecycle,
) -> int:
    """Relay until SIGTERM or SIGINT; the exit code. Three connections: LISTEN, control, and one for the passes.

    The keeper has its turns in the control thread: without the database it could do nothing anyway.
    """
    listens = boot.listens(settings, url)
    database = Database(url, name="posthouse relay", max_size=1)
    relay = Relay(
        database.transaction,
        subscriptions,
        lifecycle,
        meter(),
        batch=settings.relay_batch,
        sweep_s=settings.relay_sweep_s if listens else settings.poll_interval_s,
    )
    worker = Worker((), 0)
    control = Control(
        connect=lambda: connect(url, name="posthouse control", session=SESSION),
        lifecycle=lifecycle,
        meter=meter(),
        worker=worker,
        lease_s=settings.lease_s,
        renew_every_s=settings.control_interval_s,
        rescue_every_s=settings.rescue_interval_s,
        orphaned=lifecycle.stop,
        keep=_keeper(settings, worker, kind).turn,
    )
    listen_url = settings.database_listen_url.get_secret_value() if settings.database_listen_url else url
    listener = Listener(listen_url, relay, lifecycle, meter(), settings.listen_probe_interval_s)
    control.watchdogs.append(Watchdog("control", control, SEVER_CONTROL_S, settings.watchdog_s))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: lifecycle.stop())
    lifecycle.on_panic = lambda name: lifecycle.stop()
    lifecycle.spawn("control", control.run)
    lifecycle.spawn("watch", control.watch)
    lifecycle.spawn("relay", relay.run)
    if listens:
        control.watchdogs.append(Watchdog("listener", listener, settings.watchdog_s / 3, settings.watchdog_s))
        lifecycle.spawn("listener", listener.run)
    log.info("relay.started", subscriptions=len(subscriptions))
    while not lifecycle.wait(60):
        pass
    relay.ring()
    control.close()
    stuck = lifecycle.join(settings.shutdown_total_s - 2)
    if stuck:
        log.warning("shutdown.timed_out", names=stuck)
        return EXIT_CUT
    database.close()
    log.info("shutdown.complete")
    return EXIT_PANIC if lifecycle.panics else 0


def _keeper(settings: Settings, worker: Worker, kind: Callable[[str | None, str], Kind | None]) -> Keeper:
    # Often enough to renew a short lease in its second half.
    look_every_s = min(LOOK_S, settings.lease_s / 8)
    return Keeper(
        worker_id=worker.id,
        kind=kind,
        meter=meter(),
        lease_s=settings.lease_s,
        silent_after_s=2 * settings.control_interval_s,
        patience_s=settings.keeper_patience_s,
        look_every_s=look_every_s,
        silent_looks=math.ceil(2 * settings.control_interval_s / look_every_s),
    )


@dataclass
class Listener:
    """The LISTEN connection of a process that claims nothing: rings the relay, and comes back after any loss."""

    url: str
    relay: Relay
    lifecycle: Lifecycle
    meter: Meter
    probe_every_s: float
    ticked_at: float = field(default_factory=time.monotonic)
    _conn: Conn | None = None

    def sever(self) -> None:
        """From another thread: give up what `run` waits for; it goes on with a new connection."""
        if (conn := self._conn) is not None:
            sever(conn)

    def run(self) -> None:
        while not self.lifecycle.stopping:
            self.ticked_at = time.monotonic()
            try:
                with connect(self.url, name="posthouse listen") as self._conn:
                    self._hear(Bells(self._conn, [CHANNEL], probe_every_s=self.probe_every_s))
            except LOST as error:
                if isinstance(error, Deaf):
                    self.meter.probe_failures.inc()
                log.warning("listener.disconnected", error=type(error).__name__, again_in_s=RECONNECT_S)
                self.lifecycle.wait(RECONNECT_S)
            finally:
                self.meter.listener_up.set(0)

    def _hear(self, bells: Bells) -> None:
        self.meter.listener_up.set(1)
        self.relay.ring()
        while not self.lifecycle.stopping:
            self.ticked_at = time.monotonic()
            bells.probe(self.ticked_at)
            bells.sleep(1)
            if bells.take():
                self.relay.ring()
        bells.close()
