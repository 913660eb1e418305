"""The JSON API. Faults are problem details (RFC 9457)."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, HTTPException, Query, Request
from pydantic import BaseModel

from outbox import events, explain, jobs
from settings import QUEUE_NAME
from web import overview
from web.database import AppDatabase, read
from web.models import EventLine, Job, JobLine, Overview, State, load_job

router = APIRouter(prefix="/api", tags=["api"])

QueueName = Annotated[str | None, Query(pattern=QUEUE_NAME)]
Limit = Annotated[int, Query(ge=1, le=500)]


class JobList(BaseModel):
    jobs: list[JobLine]


class EventList(BaseModel):
    events: list[EventLine]


@router.get("/jobs/{job_id}")
def show_job(job_id: str, database: AppDatabase) -> Job:
    """One job: its state, its times, its result, and each attempt that failed. 404 for an id that is none."""
    with read(database) as conn:
        job = load_job(conn, job_id)
    if job is None:
        raise HTTPException(404, "There is no such job, or its time here is over.")
    return job


@router.get("/jobs/{job_id}/explain")
def explain_job(job_id: str, database: AppDatabase, request: Request) -> explain.Explanation:
    """Why it is not running, every true reason, the decisive one first. 404 for an id that is none."""
    heard_within_s = overview.heard_within_s(request.app.state.settings)
    with read(database) as conn:
        found = explain.explain(conn, job_id, heard_within_s=heard_within_s)
    if found is None:
        raise HTTPException(404, "There is no such job, or its time here is over.")
    return found


@router.get("/jobs")
def list_jobs(
    database: AppDatabase,
    state: State | None = None,
    queue: QueueName = None,
    actor: Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]+$")] = None,
    event: UUID | None = None,
    limit: Limit = 100,
) -> JobList:
    """The newest jobs that match, without their arguments."""
    with read(database) as conn:
        rows = jobs.listing(
            conn, state=state, queue=queue, actor=actor, event_id=str(event) if event else None, limit=limit
        )
    return JobList(jobs=[JobLine.model_validate(row) for row in rows])


@router.get("/events")
def list_events(database: AppDatabase, limit: Limit = 100) -> EventList:
    """The newest events."""
    with read(database) as conn:
        rows = events.recent(conn, limit)
    return EventList(events=[EventLine.model_validate(row) for row in rows])


@router.get("/queues")
def list_queues(database: AppDatabase, request: Request) -> Overview:
    """Each queue now, and the events not yet turned into jobs."""
    with read(database) as conn:
        return overview.load(conn, request.app.state.settings)
