"""Housekeeping by the clock: what has served its time goes, in small batches."""

from __future__ import annotations

from collections.abc import Callable

import structlog

import settings
from broker import actor, transaction
from middleware import rate_limits
from middleware.lifecycle import process
from middleware.periodic import cron
from outbox import controls, events, jobs, workers
from outbox.db import Conn

log = structlog.get_logger("posthouse.maintenance")

BATCH = 1_000


@actor(name="maintenance.events_retention", queue="maintenance", periodic=cron("7 * * * *"), attempts=1)
def events_retention() -> None:
    """Delete events fanned out longer ago than EVENT_RETENTION_DAYS; repeatable, it deletes by age."""
    days = settings.load().event_retention_days
    _prune("events", lambda conn: events.prune(conn, older_than_days=days, limit=BATCH))


@actor(name="maintenance.jobs_retention", queue="maintenance", periodic=cron("17 * * * *"), attempts=1)
def jobs_retention() -> None:
    """Delete ended jobs past their time, processes long unheard of, spent limits; repeatable, it deletes by age."""
    told = settings.load()
    completed_s = told.completed_job_retention_hours * 3_600
    failed_s = told.failed_job_retention_days * 86_400
    _prune("jobs", lambda conn: jobs.prune(conn, completed_s=completed_s, failed_s=failed_s, limit=BATCH))
    _prune("workers", workers.prune)
    _prune("rate limits", rate_limits.prune)
    _prune("buckets", controls.prune_buckets)


def _prune(what: str, prune: Callable[[Conn], int]) -> None:
    total = 0
    while not process.stopping:
        with transaction() as conn:
            gone = prune(conn)
        total += gone
        if gone < BATCH:
            break
    log.info("pruned", what=what, count=total)
