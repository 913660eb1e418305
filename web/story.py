"""A job's story: one sentence, and its moments in order."""

from __future__ import annotations

from datetime import datetime, timedelta

from web import ages
from web.models import Attempt, Job, State
from web.overview import counted

#: One statement writes a claim and a first start, or an attempt and an end, microseconds apart.
_SAME_MOMENT = timedelta(milliseconds=1)


def tell(job: Job, now: datetime) -> str:
    """*job* in one sentence: what has happened, and what is next."""
    again = ages.relative(job.available_at, now) if job.available_at > now else "when its turn comes"
    match job.state:
        case State.PENDING:
            return f"Has not run yet; it starts {again}."
        case State.RETRYABLE:
            return f"Attempt {job.attempt} did not succeed; it runs again {again}."
        case State.RUNNING:
            since = f" since {ages.spoken((now - job.claimed_at).total_seconds())}" if job.claimed_at else ""
            return f"Runs{since}, attempt {job.attempt}."
        case State.COMPLETED:
            return "Has done its work."
        case State.DISCARDED:
            return f"Was given up after {counted(job.attempt, 'attempt')}."
        case State.CANCELLED:
            return f"Was stopped: {(job.stop_cause or 'cancelled').replace('_', ' ')}."


def timeline(job: Job) -> list[tuple[str, datetime]]:
    """What happened to *job* and what is to come, in order."""
    waits = job.state in (State.PENDING, State.RETRYABLE)
    moments = [
        ("created", job.created_at),
        ("started", job.started_at),
        ("started again", job.claimed_at if not _same(job.claimed_at, job.started_at) else None),
        *(
            (f"attempt {attempt.attempt} {attempt.outcome}", attempt.ended_at)
            for attempt in job.attempts
            if not _same(attempt.ended_at, job.finished_at)
        ),
        ("cancel requested", job.cancel_requested_at),
        (job.state.value, job.finished_at),
        ("due", job.available_at if waits else None),
        ("lease ends", job.lease_until),
        ("deadline", job.deadline_at),
    ]
    return sorted(((name, at) for name, at in moments if at is not None), key=lambda moment: moment[1])


def _same(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and other is not None and abs(one - other) < _SAME_MOMENT


def blame(attempt: Attempt) -> str:
    """Why *attempt* did not succeed; the error's class once, whether or not its text begins with it."""
    name = (attempt.error_class or "").rpartition(".")[2]
    error = attempt.error or ""
    return error if name in error else ": ".join(filter(None, (name, error)))
