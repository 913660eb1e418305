"""What the API, the page and the command line show: only what is named here, so never a lease token."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from outbox import jobs
from outbox.controls import Pause
from outbox.db import Conn


class State(StrEnum):
    """The six states people see (DESIGN.md 4)."""

    PENDING = "pending"
    RETRYABLE = "retryable"
    RUNNING = "running"
    COMPLETED = "completed"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"


class JobLine(BaseModel):
    """A job in a list. *actor* is null in a row that is no message; *max_attempts* null: the actor's own."""

    id: str
    state: State
    actor: str | None
    queue: str
    attempt: int
    max_attempts: int | None
    crashes: int
    event_id: str | None
    created_at: datetime
    available_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    last_error: str | None


class Attempt(BaseModel):
    """An attempt that did not simply succeed."""

    attempt: int
    worker_id: str | None
    started_at: datetime | None
    ended_at: datetime
    outcome: str
    error_class: str | None
    error: str | None
    traceback: str | None


class Job(JobLine):
    """One job with its history. *message* is the row's, as stored: its arguments are in there."""

    priority: int
    unique_key: str | None
    limit_key: str | None
    worker_id: str | None
    claimed_at: datetime | None
    lease_until: datetime | None
    deadline_at: datetime | None
    cancel_requested_at: datetime | None
    cancel_requested_by: str | None
    stop_cause: str | None
    progress: Any
    message: Any
    result: Any
    attempts: list[Attempt]


class EventLine(BaseModel):
    """An event in a list. *jobs*: how many it was fanned out to."""

    id: str
    seq: int
    type: str
    subject: str
    data: dict[str, Any]
    created_at: datetime
    fanned_out_at: datetime | None
    jobs: int
    failures: int
    last_error: str | None
    poisoned_at: datetime | None


class Queue(BaseModel):
    """One queue now, and what ended in the last hour. *processes*, *capacity*: of those heard of lately.

    *paused*: by whom, why and until when it claims nothing; null when it does.
    """

    name: str
    declared: bool
    processes: int
    wanted_processes: int
    running: int
    capacity: int
    due: int
    later: int
    retryable: int
    oldest_s: float
    completed: int
    discarded: int
    cancelled: int
    paused: Pause | None = None


class Backlog(BaseModel):
    """Events not yet turned into jobs, the age of the oldest in seconds, and how many cannot be."""

    waiting: int
    oldest_s: float
    poisoned: int


class Overview(BaseModel):
    queues: list[Queue]
    events: Backlog


def load_job(conn: Conn, job_id: str) -> Job | None:
    """The job called *job_id*; None when that is no id, or no job's."""
    try:
        canonical = str(uuid.UUID(job_id))
    except ValueError:
        return None
    row = jobs.load(conn, canonical)
    return Job.model_validate(row) if row else None
