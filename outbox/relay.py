"""The relay: events to jobs, each event once, in any number of processes, with no leader and no cursor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
import structlog

from outbox import catalogue, jobs
from outbox.db import LOST, Conn, rows, sql
from outbox.jobs import NewJob
from outbox.payload import clean

log = structlog.get_logger("posthouse.relay")

#: An event that fails so often is taken off the road and raises an alert.
POISONED_AFTER = 5


@dataclass(frozen=True)
class Subscription:
    """An actor's wish for events: one job each, with the event's id or its subject as the only argument.

    *coalesce*: one job a subject in a batch, for the latest event; only for actors that read the current state.
    *limits*: what its jobs have of NewJob's `limit_key`, `limit`, `rate_per_s` and `rate_burst`.
    """

    glob: str
    actor: str
    queue: str
    argument: Literal["event_id", "subject"] = "event_id"
    coalesce: bool = False
    priority: int = 0
    max_attempts: int | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)

    def covers(self, type_name: str) -> bool:
        return any(covered.name == type_name for covered in catalogue.covered(self.glob, catalogue.declared()))


@dataclass(frozen=True)
class Fact:
    """What the relay needs of an event."""

    id: str
    type: str
    subject: str


Transaction = Callable[[], AbstractContextManager[Conn]]


def relay(transaction: Transaction, subscriptions: Sequence[Subscription], *, batch: int = 200) -> int:
    """One pass: up to *batch* waiting events become their jobs and are marked, in one transaction; how many events.

    An event whose transaction commits late is found by its own state, since nothing here goes by number. Raises
    psycopg.Error when the pass failed; nothing is marked then.
    """
    with transaction() as conn:
        facts = _claim(conn, batch)
        if facts:
            _fan_out(conn, facts, subscriptions)
        return len(facts)


def relay_singly(transaction: Transaction, subscriptions: Sequence[Subscription], *, batch: int = 200) -> int:
    """After a pass that failed: each event in a transaction of its own, so that one bad event holds up no other.

    An event that fails 5 times is poisoned: it stays where it is, with its reason, until `events.requeue`.
    """
    with transaction() as conn:
        facts = _claim(conn, batch)
    done = 0
    for fact in facts:
        try:
            with transaction() as conn:
                if held := _hold(conn, fact.id):
                    _fan_out(conn, held, subscriptions)
            done += 1
        except LOST:
            raise
        except (psycopg.Error, jobs.BadJob) as error:
            with transaction() as conn:
                _blame(conn, fact, error)
    return done


def _claim(conn: Conn, batch: int) -> list[Fact]:
    return [Fact(*row) for row in rows(conn, sql(__file__, "claim_events"), {"limit": batch})]


def _hold(conn: Conn, event_id: str) -> list[Fact]:
    return [Fact(*row) for row in rows(conn, sql(__file__, "hold_event"), {"id": event_id})]


def _fan_out(conn: Conn, facts: Sequence[Fact], subscriptions: Sequence[Subscription]) -> None:
    new = list(_jobs(facts, subscriptions))
    jobs.enqueue_many(conn, new)
    counts: dict[str | None, int] = {}
    for job in new:
        counts[job.event_id] = counts.get(job.event_id, 0) + 1
    _mark_fanned_out(conn, {fact.id: counts.get(fact.id, 0) for fact in facts})


def _mark_fanned_out(conn: Conn, counts: dict[str, int]) -> None:
    conn.execute(sql(__file__, "mark_fanned_out"), {"ids": list(counts), "jobs": list(counts.values())})


def _jobs(facts: Sequence[Fact], subscriptions: Sequence[Subscription]) -> Iterable[NewJob]:
    for subscription in subscriptions:
        wanted = [fact for fact in facts if subscription.covers(fact.type)]
        if subscription.coalesce:
            wanted = list({fact.subject: fact for fact in wanted}.values())
        for fact in wanted:
            yield NewJob(
                queue=subscription.queue,
                actor=subscription.actor,
                args=[fact.id if subscription.argument == "event_id" else fact.subject],
                priority=subscription.priority,
                max_attempts=subscription.max_attempts,
                event_id=fact.id,
                **subscription.limits,
            )


def _blame(conn: Conn, fact: Fact, error: Exception) -> None:
    given = {"id": fact.id, "error": clean(f"{type(error).__name__}: {error}", 512), "poisoned_after": POISONED_AFTER}
    row = conn.execute(sql(__file__, "blame_event"), given).fetchone()
    if row and row["poisoned"]:
        log.error("event.poisoned", event_id=fact.id, type=fact.type, error=type(error).__name__)
