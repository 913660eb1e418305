"""The stand-alone relay: events to jobs and rescue of lost leases, in a process that works no queue."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import structlog

from middleware.leases import Control
from middleware.lifecycle import Lifecycle
from middleware.metrics import meter
from middleware.relay import Relay
from outbox.db import LOST, Database, connect
from outbox.events import CHANNEL
from outbox.listener import Bells
from outbox.relay import Subscription
from outbox.workers import Worker
from settings import Settings

log = structlog.get_logger("posthouse.relay")

EXIT_PANIC = 1
EXIT_CUT = 75
RECONNECT_S = 1.0


def run(settings: Settings, url: str, subscriptions: Sequence[Subscription], lifecycle: Lifecycle) -> int:
    """Relay until SIGTERM or SIGINT; the exit code. Three connections: LISTEN, control, and one for the passes."""
    database = Database(url, name="posthouse relay", max_size=1)
    relay = Relay(
        database.transaction,
        subscriptions,
        lifecycle,
        meter(),
        batch=settings.relay_batch,
        sweep_s=settings.relay_sweep_s,
    )
    control = Control(
        connect=lambda: connect(url, name="posthouse control"),
        lifecycle=lifecycle,
        meter=meter(),
        worker=Worker((), 0),
        lease_s=settings.lease_s,
        renew_every_s=settings.control_interval_s,
        rescue_every_s=settings.rescue_interval_s,
        orphaned=lifecycle.stop,
    )
    listen_url = settings.database_listen_url.get_secret_value() if settings.database_listen_url else url
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: lifecycle.stop())
    lifecycle.on_panic = lambda name: lifecycle.stop()
    lifecycle.spawn("control", control.run)
    lifecycle.spawn("watch", control.watch)
    lifecycle.spawn("relay", relay.run)
    lifecycle.spawn("listener", lambda: _listen(listen_url, relay, lifecycle))
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


def _listen(url: str, relay: Relay, lifecycle: Lifecycle) -> None:
    while not lifecycle.stopping:
        try:
            with connect(url, name="posthouse listen") as conn:
                _hear(Bells(conn, [CHANNEL]), relay, lifecycle)
        except LOST as error:
            log.warning("listener.disconnected", error=type(error).__name__, again_in_s=RECONNECT_S)
            lifecycle.wait(RECONNECT_S)


def _hear(bells: Bells, relay: Relay, lifecycle: Lifecycle) -> None:
    relay.ring()
    while not lifecycle.stopping:
        bells.sleep(1)
        if bells.take():
            relay.ring()
    bells.close()
