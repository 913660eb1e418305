"""The ledger: enqueue, claim, renew, settle, release, rescue, retry, prune. One statement each, guarded by its WHERE.

The row in `dramatiq.queue` is the job. Every time that decides anything is the database's clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from uuid import UUID

from psycopg.errors import UniqueViolation

from outbox.db import Conn, at_once, configure, rows, sql
from outbox.enqueue import Enqueued as Enqueued
from outbox.enqueue import enqueue as enqueue
from outbox.enqueue import enqueue_many as enqueue_many
from outbox.newjob import BadJob as BadJob
from outbox.newjob import NewJob as NewJob
from outbox.newjob import is_uuid

#: A job that took its process with it this often is discarded: a poison job may not circulate.
MAX_CRASHES = 3
PAGE = 100
#: What claim and settle rely on: plans made once, and by index even while the statistics are those of an empty table; a
#: row that somebody has locked is not waited for; a statement that takes this long does not come back.
SESSION = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "lock_timeout": "200ms",
    "statement_timeout": "15s",
}


# jsonb's text is one value with nothing around it, so what `json.loads` does before and after is not needed.
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]


class RetryRefused(Exception):
    """The job is not discarded, or another unfinished job holds its unique key."""


@dataclass(slots=True)
class Claim:
    """A job in this process's hands. *token* proves it; *attempt* counts this one; *text* is its message as JSON.

    *actor* None: the message names none. *due_s*, *made_s*: when it was due and made, in seconds since 1970.
    """

    id: str
    token: str
    queue: str
    actor: str | None
    text: str | None
    priority: int
    attempt: int
    max_attempts: int | None
    snoozed_s: float
    event_id: str | None
    due_s: float
    made_s: float

    @property
    def message(self) -> Any:
        """The message, read from *text*; None for one that Python cannot read."""
        return _readable(self.text)


#: The order in which claims are to start.
in_order = attrgetter("priority", "due_s", "made_s")


@dataclass(frozen=True)
class Turn:
    """What came of a settle and a claim: the ids *settled*; *keyed*: queues in which jobs with a limit's key wait."""

    settled: set[str]
    claims: list[Claim]
    keyed: set[str]


@dataclass(slots=True)
class Settlement:
    """How an attempt ended. *state*: done, queued (due in *delay_s*) or rejected; *refund* takes the attempt back.

    *outcome* (None for a success, a snooze or a release) and the three error texts go to the history.
    """

    id: str
    token: str
    state: str
    delay_s: float = 0
    refund: int = 0
    snoozed_s: float = 0
    result: str | None = None
    outcome: str | None = None
    error_class: str | None = None
    error: str | None = None
    traceback: str | None = None

    @property
    def plain(self) -> bool:
        """Completed, and nothing to tell."""
        return self.state == "done" and self.result is None and self.outcome is None


@dataclass(frozen=True)
class Renewal:
    """One job after a renewal: whether it is still ours, and what its row asks for."""

    id: str
    cancel_requested: bool


#: Who claims nothing.
_NOBODY = str(UUID(int=0))
_VERDICT = tuple(Settlement.__dataclass_fields__)


def channel(queue: str) -> str:
    return f"posthouse_q_{queue}"


def tune(conn: Conn) -> None:
    """Prepare a session for the ledger's statements, as `connect(…, session=SESSION)` does."""
    configure(conn, SESSION)


def next_due(conn: Conn, queues: Sequence[str]) -> dict[str, float]:
    """Seconds until the next job of each of *queues* that is not due yet; a queue without one is left out."""
    return dict(rows(conn, sql(__file__, "next_due"), {"queues": list(queues)}))


def claim(conn: Conn, wanted: dict[str, int], *, worker_id: str, lease_s: float) -> list[Claim]:
    """Take due jobs, up to *wanted[queue]* of each queue, for *lease_s* seconds, in the order they are to start."""
    return settle_and_claim(conn, [], wanted, worker_id=worker_id, lease_s=lease_s).claims


def settle(conn: Conn, settlements: Sequence[Settlement]) -> set[str]:
    """Write how attempts ended; the ids written. What is missing was no longer ours."""
    return settle_and_claim(conn, settlements, {}, worker_id=_NOBODY, lease_s=0).settled


def settle_and_claim(
    conn: Conn, settlements: Sequence[Settlement], wanted: dict[str, int], *, worker_id: str, lease_s: float
) -> Turn:
    """`settle` and `claim` in one statement and one commit: both, or an exception and neither."""
    plain = [each for each in settlements if each.plain]
    told = [each for each in settlements if not each.plain]
    given = {
        **_array_texts(plain),
        "verdicts": json.dumps([{name: getattr(each, name) for name in _VERDICT} for each in told]),
        "wanted": json.dumps(wanted),
        "worker_id": worker_id,
        "lease_s": str(lease_s),
        "random": os.urandom(16).hex(),
    }
    found = at_once(conn, sql(__file__, "settle_and_claim"), given)
    claims = [Claim(*row) for row in found if row[1] is not None]
    claims.sort(key=in_order)
    return Turn(
        settled={row[0] for row in found if row[1] is None and row[0] is not None},
        claims=claims,
        keyed={row[2] for row in found if row[0] is None},
    )


def _array_texts(settlements: Sequence[Settlement]) -> dict[str, str]:
    # Uuids need no quoting in an array's text, and to build it is a tenth of what a list costs the driver.
    return {
        "ids": "{" + ",".join([each.id for each in settlements]) + "}",
        "tokens": "{" + ",".join([each.token for each in settlements]) + "}",
    }


def _readable(text: str | None) -> Any:
    # PostgreSQL holds numbers and depths that Python refuses to read; such a row must not end whoever claims it.
    try:
        return None if text is None else _scan(text, 0)[0]
    except (ValueError, RecursionError, StopIteration):
        return None


def renew(conn: Conn, held: dict[str, str], *, lease_s: float) -> list[Renewal]:
    """Move the leases of *held* (id → token) to *lease_s* from now. Left out: lost ones and rows locked elsewhere."""
    given = {"ids": list(held), "tokens": list(held.values()), "lease_s": lease_s}
    return [Renewal(*row) for row in rows(conn, sql(__file__, "renew"), given)]


def still_held(conn: Conn, held: dict[str, str]) -> set[str]:
    """Which of *held* (id → token) their tokens still own; a plain read, for what a renewal left out."""
    given = {"ids": list(held), "tokens": list(held.values())}
    return {row[0] for row in rows(conn, sql(__file__, "still_held"), given)}


def release(conn: Conn, held: dict[str, str], *, delay_s: float = 0) -> int:
    """Give jobs (id → token) back uncharged, due *delay_s* from now; 0: when they were due before. How many it was."""
    given = {"ids": list(held), "tokens": list(held.values()), "delay_s": delay_s}
    return len(rows(conn, sql(__file__, "release"), given))


def release_unheld(conn: Conn, worker_id: str, tokens: Iterable[str]) -> int:
    """Give back, uncharged, what *worker_id* has claimed beyond *tokens*: the answer never reached it. How many."""
    return len(rows(conn, sql(__file__, "release_unheld"), {"worker_id": worker_id, "tokens": list(tokens)}))


def rescue(conn: Conn, *, dead: Iterable[str] = (), limit: int = PAGE) -> list[tuple[str, str, str]]:
    """End or requeue, charged as a crash, jobs whose lease has run out or whose worker is one of *dead*.

    (id, queue, new state) each.
    """
    given = {"limit": limit, "max_crashes": MAX_CRASHES, "dead": list(dead)}
    return [(row[0], row[1], row[2]) for row in rows(conn, sql(__file__, "rescue"), given)]


def retry(conn: Conn, job_id: str) -> None:
    """Put a discarded job back, due now, with fresh attempts; its history stays. Raises RetryRefused."""
    try:
        done = rows(conn, sql(__file__, "retry"), {"id": job_id})
    except UniqueViolation:
        raise RetryRefused("another unfinished job has its unique key") from None
    if not done:
        raise RetryRefused("only a discarded job can be retried")


def prune(conn: Conn, *, completed_s: float, failed_s: float, limit: int = 1_000) -> int:
    """Delete up to *limit* jobs that completed, or failed or were cancelled, longer ago than that; how many went."""
    given = {"completed_s": completed_s, "failed_s": failed_s, "limit": limit}
    return conn.execute(sql(__file__, "prune_jobs"), given).rowcount


def load(conn: Conn, job_id: str) -> dict[str, Any] | None:
    """One job as people see it, with its attempts; None for an id that is unknown, malformed or pruned."""
    if not is_uuid(job_id):
        return None
    row = conn.execute(sql(__file__, "load_job"), {"id": job_id}).fetchone()
    if row is None:
        return None
    attempts = conn.execute(sql(__file__, "load_attempts"), {"id": job_id}).fetchall()
    read = {name: _readable(row[name]) for name in ("message", "result")}
    return {**row, **read, "attempts": attempts}


def listing(
    conn: Conn,
    *,
    state: str | None = None,
    queue: str | None = None,
    actor: str | None = None,
    event_id: str | None = None,
    limit: int = PAGE,
) -> list[dict[str, Any]]:
    """The newest jobs that match, without arguments; *state* is one of the six shown ones."""
    given = {"state": state, "queue": queue, "actor": actor, "event_id": event_id, "limit": limit}
    return conn.execute(sql(__file__, "listing"), given).fetchall()


def depths(conn: Conn) -> list[dict[str, Any]]:
    """For each queue with unfinished jobs: *due*, *later*, *running*, *retryable* and *oldest_s*, the longest wait."""
    return conn.execute(sql(__file__, "depths")).fetchall()


def ended(conn: Conn) -> list[dict[str, Any]]:
    """For each queue, what ended in the last hour: *completed*, *discarded*, *cancelled*."""
    return conn.execute(sql(__file__, "ended")).fetchall()
