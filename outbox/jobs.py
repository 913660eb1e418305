"""The ledger: enqueue, claim, renew, settle, release, rescue, retry, prune. One statement each, guarded by its WHERE.

The row in `dramatiq.queue` is the job. Every time that decides anything is the database's clock.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg.errors import UniqueViolation

from outbox.db import AnyConnection, Conn, rows, sql
from outbox.payload import MAX_ARGUMENTS_BYTES, BadPayload, encode

MAX_DELAY_S = 365 * 86_400
#: A job that took its process with it this often is discarded: a poison job may not circulate.
MAX_CRASHES = 3
#: Producers ring a queue's bell at most so often; between two rings a consumer's poll finds the job.
RING_INTERVAL_S = 0.1
PAGE = 100

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_QUEUE_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9._-]{0,39}")


class BadJob(ValueError):
    """A job that cannot be enqueued; nothing was written."""


class RetryRefused(Exception):
    """The job is not discarded, or another unfinished job holds its unique key."""


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """What is to be done: *actor* on *queue* with JSON arguments, due *delay_s* from the commit's clock.

    *priority*: lower goes first. *max_attempts* None: the actor's own. *unique_key*: at most one unfinished job has it.
    """

    queue: str
    actor: str
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    delay_s: float = 0
    max_attempts: int | None = None
    unique_key: str | None = None
    event_id: str | None = None
    id: str = field(default_factory=lambda: str(uuid.uuid4()))


@dataclass(frozen=True)
class Enqueued:
    """The answer: the job's *id*; *duplicate_of* names the unfinished job that was there first, else None."""

    id: str
    duplicate_of: str | None = None

    @property
    def inserted(self) -> bool:
        return self.duplicate_of is None


@dataclass(slots=True)
class Claim:
    """A job in this process's hands. *token* proves it; *attempt* counts this one."""

    id: str
    token: str
    queue: str
    message: Any
    priority: int
    attempt: int
    max_attempts: int | None
    snoozed_s: float
    event_id: str | None
    available_at: datetime
    created_at: datetime


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


@dataclass(frozen=True)
class Renewal:
    """One job after a renewal: whether it is still ours, and what its row asks for."""

    id: str
    cancel_requested: bool


def channel(queue: str) -> str:
    return f"posthouse_q_{queue}"


def enqueue(conn: AnyConnection, job: NewJob) -> Enqueued:
    """Add one job in the caller's transaction; never commits. Raises BadJob naming the fault, and writes nothing then.

    *conn* is a psycopg 3, psycopg2 or SQLAlchemy raw connection. An id or unique key that is there already changes
    nothing: the answer says which job was first.
    """
    return enqueue_many(conn, [job])[0]


def enqueue_many(conn: AnyConnection, new: Sequence[NewJob]) -> list[Enqueued]:
    """Add any number of jobs in one statement; the answers in the order given. Else as `enqueue`."""
    if not new:
        return []
    given = _columns(new)
    inserted = {row[0] for row in rows(conn, sql(__file__, "enqueue"), given)}
    first = _firsts(conn, [job for job in new if job.id not in inserted])
    # A key whose holder ended between the insert and the look-up is free again: those go once more.
    again = [job for job in new if job.id not in inserted and job.id not in first]
    answers = {answer.id: answer for answer in enqueue_many(conn, again)}
    return [answers.get(job.id) or Enqueued(job.id, first.get(job.id)) for job in new]


def _columns(new: Sequence[NewJob]) -> dict[str, Any]:
    now_ms = int(time.time() * 1000)
    if any(job.unique_key for job in new):
        # One order of keys for everybody, or two bulk inserts could wait for each other.
        new = sorted(new, key=lambda job: str(job.unique_key or ""))
    return {
        "ids": [_checked(job).id for job in new],
        "queues": [job.queue for job in new],
        "messages": [_message(job, now_ms) for job in new],
        "priorities": [job.priority for job in new],
        "delays_s": [float(job.delay_s) for job in new],
        "max_attempts": [job.max_attempts for job in new],
        "unique_keys": [job.unique_key for job in new],
        "event_ids": [job.event_id for job in new],
        "ring": _bells({job.queue for job in new}),
    }


def _checked(job: NewJob) -> NewJob:
    for fault in _faults(job):
        raise BadJob(f"{job.actor}: {fault}")
    return job


def _faults(job: Any) -> Iterator[str]:
    if not isinstance(job.queue, str) or not _QUEUE_NAME.fullmatch(job.queue):
        yield f"queue {job.queue!r}: a letter or _, then letters, digits, . _ -, at most 40 bytes"
    if not isinstance(job.actor, str) or not job.actor:
        yield f"actor {job.actor!r} is not a name"
    if not _is_uuid(job.id):
        yield f"id {job.id!r} is not a uuid"
    if job.event_id is not None and not _is_uuid(job.event_id):
        yield f"event_id {job.event_id!r} is not a uuid"
    if not _is_integer(job.priority, -_INTEGER, _INTEGER):
        yield f"priority {job.priority!r} is not an integer of 32 bits"
    if job.max_attempts is not None and not _is_integer(job.max_attempts, 1, _INTEGER):
        yield f"max_attempts {job.max_attempts!r} is not an integer of 32 bits from 1 on"
    if not isinstance(job.delay_s, int | float) or not 0 <= job.delay_s <= MAX_DELAY_S:
        yield f"delay_s {job.delay_s!r} does not lie between 0 and 365 days"
    if job.unique_key is not None and not _is_key(job.unique_key):
        yield f"unique_key {job.unique_key!r} is not a text of 1 to 512 bytes"
    if not isinstance(job.args, list | tuple):
        yield f"args is not a list but {type(job.args).__name__}"
    if not isinstance(job.kwargs, dict) or not all(isinstance(name, str) for name in job.kwargs):
        yield "kwargs is not a dict with names for keys"
    if not isinstance(job.options, dict):
        yield f"options is not a dict but {type(job.options).__name__}"


_INTEGER = 2**31 - 1


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_key(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and 0 < len(value.encode("utf-8", "replace")) <= 512


def _message(job: NewJob, now_ms: int) -> str:
    # Dramatiq's own message format, so that any of its tools reads the row.
    try:
        args = encode(list(job.args), where="args")
        kwargs = encode(job.kwargs, where="kwargs")
        options = encode(job.options, where="options")
        actor = encode(job.actor, where="actor")
        encode(job.unique_key, where="unique_key")
    except BadPayload as fault:
        raise BadJob(f"{job.actor}: {fault}") from None
    if (size := len(args.encode()) + len(kwargs.encode())) > MAX_ARGUMENTS_BYTES:
        raise BadJob(f"{job.actor}: args and kwargs: {size:,} bytes, at most {MAX_ARGUMENTS_BYTES:,} are allowed")
    return (
        f'{{"queue_name":"{job.queue}","actor_name":{actor},"args":{args},"kwargs":{kwargs},'
        f'"options":{options},"message_id":"{job.id}","message_timestamp":{now_ms}}}'
    )


def _firsts(conn: AnyConnection, missed: Sequence[NewJob]) -> dict[str, str]:
    if not missed:
        return {}
    given = {"ids": [job.id for job in missed], "unique_keys": [job.unique_key for job in missed]}
    return dict(rows(conn, sql(__file__, "find_duplicates"), given))


_rung: dict[str, float] = {}
_rung_lock = threading.Lock()


def _bells(queues: Iterable[str]) -> list[str]:
    now = time.monotonic()
    with _rung_lock:
        due = [queue for queue in queues if now - _rung.get(queue, float("-inf")) >= RING_INTERVAL_S]
        _rung.update(dict.fromkeys(due, now))
    return due


def tune(conn: Conn) -> None:
    """Prepare a session for the ledger's statements: plans made once, by the indexes, whatever the statistics say."""
    conn.execute(sql(__file__, "tune"))


def next_due(conn: Conn, queues: Sequence[str]) -> dict[str, float]:
    """Seconds until the next job of each of *queues* that is not due yet; a queue without one is left out."""
    return dict(rows(conn, sql(__file__, "next_due"), {"queues": list(queues)}))


def claim(conn: Conn, wanted: dict[str, int], *, worker_id: str, lease_s: float) -> list[Claim]:
    """Take due jobs, up to *wanted[queue]* of each queue, for *lease_s* seconds, in the order they are to start."""
    given = {"queues": list(wanted), "limits": list(wanted.values()), "worker_id": worker_id, "lease_s": lease_s}
    claimed = [Claim(*row) for row in rows(conn, sql(__file__, "claim"), given)]
    for job in claimed:
        job.message = _readable(job.message)
    return sorted(claimed, key=lambda job: (job.priority, job.available_at, job.created_at))


def _readable(text: str | None) -> Any:
    # PostgreSQL holds numbers and depths that Python refuses to read; such a row must not end whoever claims it.
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def renew(conn: Conn, held: dict[str, str], *, lease_s: float) -> list[Renewal]:
    """Move the leases of *held* (id → token) to *lease_s* from now. Left out: lost ones and rows locked elsewhere."""
    given = {"ids": list(held), "tokens": list(held.values()), "lease_s": lease_s}
    return [Renewal(*row) for row in rows(conn, sql(__file__, "renew"), given)]


def still_held(conn: Conn, held: dict[str, str]) -> set[str]:
    """Which of *held* (id → token) their tokens still own; a plain read, for what a renewal left out."""
    given = {"ids": list(held), "tokens": list(held.values())}
    return {row[0] for row in rows(conn, sql(__file__, "still_held"), given)}


def settle(conn: Conn, settlements: Sequence[Settlement]) -> set[str]:
    """Write how attempts ended, all in one statement; the ids written. What is missing was no longer ours."""
    columns = {
        name: [getattr(settlement, name) for settlement in settlements] for name in Settlement.__dataclass_fields__
    }
    return {row[0] for row in rows(conn, sql(__file__, "settle"), columns)}


def release(conn: Conn, held: dict[str, str], *, delay_s: float = 0) -> int:
    """Give jobs (id → token) back uncharged, due *delay_s* from now; 0: when they were due before. How many it was."""
    given = {"ids": list(held), "tokens": list(held.values()), "delay_s": delay_s}
    return len(rows(conn, sql(__file__, "release"), given))


def release_unheld(conn: Conn, worker_id: str, tokens: Iterable[str]) -> int:
    """Give back, uncharged, what *worker_id* has claimed beyond *tokens*: the answer never reached it. How many."""
    return len(rows(conn, sql(__file__, "release_unheld"), {"worker_id": worker_id, "tokens": list(tokens)}))


def rescue(conn: Conn, *, limit: int = PAGE) -> list[tuple[str, str, str]]:
    """End or requeue jobs whose lease has run out, charged as a crash: (id, queue, new state) each."""
    given = {"limit": limit, "max_crashes": MAX_CRASHES}
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
    if not _is_uuid(job_id):
        return None
    row = conn.execute(sql(__file__, "load_job"), {"id": job_id}).fetchone()
    if row is None:
        return None
    attempts = conn.execute(sql(__file__, "load_attempts"), {"id": job_id}).fetchall()
    read = {name: _readable(row[name]) for name in ("message", "result")}
    return {**row, **read, "attempts": attempts}


def _is_uuid(text: object) -> bool:
    return isinstance(text, str) and bool(_UUID.fullmatch(text))


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
