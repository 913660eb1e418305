"""/metrics: what this host's processes counted, added up, and what the database holds."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import anyio
import psycopg
import structlog
from anyio import to_thread
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

import settings
from outbox.db import Database
from web import overview
from web.database import read
from web.models import Overview

log = structlog.get_logger("posthouse.web")

DATABASE_S = 0.8

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Prometheus text, within a second; without the database the processes' own numbers are still there."""
    state = request.app.state
    seen: Overview | None = None
    with anyio.move_on_after(DATABASE_S):
        seen = await to_thread.run_sync(_look, state.database, state.settings, abandon_on_cancel=True)
    return Response(await to_thread.run_sync(_render, seen), media_type=CONTENT_TYPE_LATEST)


def _look(database: Database, told: settings.Settings) -> Overview | None:
    try:
        with read(database, statement_s=DATABASE_S) as conn:
            return overview.load(conn, told)
    except psycopg.Error as error:
        log.warning("metrics.database_missed", error=type(error).__name__)
        return None


def _render(seen: Overview | None) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families([*from_files(settings.metrics_dir()), *from_database(seen)]))
    return generate_latest(registry)


class _Families(Collector):
    """Families that are known already, in the form the registry wants them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def from_files(folder: Path) -> Iterable[Metric]:
    """The sums over all processes: all that the dead ever counted, but not what they had in hand."""
    files = [str(file) for file in sorted(folder.glob("*.db")) if not _of_the_dead(file)]
    try:
        return _merged(files)
    except (OSError, RuntimeError, ValueError, struct.error):
        # A process killed as it made its file leaves a half: all but the halves, then.
        return _merged([file for file in files if _readable(file)])


def _merged(files: list[str]) -> Iterable[Metric]:
    return MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call,no-any-return]


def _of_the_dead(file: Path) -> bool:
    """Whether *file*, as in `gauge_livesum_4711.db`, holds the present of a process that has none."""
    pid = file.stem.rpartition("_")[2]
    return file.name.startswith("gauge_live") and not (pid.isdigit() and _alive(int(pid)))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _readable(file: str) -> bool:
    try:
        _merged([file])
    except (OSError, RuntimeError, ValueError, struct.error):
        log.warning("metrics.file_unreadable", file=Path(file).name)
        return False
    return True


def from_database(seen: Overview | None) -> Iterator[Metric]:
    """Depths and backlogs; None: only that the database did not answer."""
    yield _gauge("posthouse_database_up", "Whether the database answered in time", seen is not None)
    if seen is None:
        return
    depth = GaugeMetricFamily("posthouse_queue_jobs", "Unfinished jobs", labels=["queue", "state"])
    retryable = GaugeMetricFamily("posthouse_queue_retryable", "Jobs that failed and will run again", labels=["queue"])
    oldest = GaugeMetricFamily("posthouse_queue_oldest_seconds", "Wait of the longest due job", labels=["queue"])
    capacity = GaugeMetricFamily("posthouse_queue_capacity", "Jobs that could run at once", labels=["queue"])
    processes = GaugeMetricFamily("posthouse_queue_processes", "Processes heard of lately", labels=["queue"])
    for queue in seen.queues:
        for state in ("due", "later", "running"):
            depth.add_metric([queue.name, state], getattr(queue, state))
        retryable.add_metric([queue.name], queue.retryable)
        oldest.add_metric([queue.name], queue.oldest_s)
        capacity.add_metric([queue.name], queue.capacity)
        processes.add_metric([queue.name], queue.processes)
    yield from (depth, retryable, oldest, capacity, processes)
    yield _gauge("posthouse_events_waiting", "Events not yet turned into jobs", seen.events.waiting)
    yield _gauge("posthouse_events_oldest_seconds", "Age of the oldest of them", seen.events.oldest_s)
    yield _gauge("posthouse_events_poisoned", "Events that cannot be turned into jobs", seen.events.poisoned)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value=float(value))
