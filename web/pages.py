"""The pages: what is going on, and one job's whole story."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outbox import events, explain, jobs
from settings import QUEUE_NAME
from web import ages, overview, story
from web.database import AppDatabase, read
from web.models import EventLine, JobLine, State, load_job

LINES = 40
#: More of a value than this is for the API to show.
SHOWN_CHARACTERS = 20_000
LINE_CHARACTERS = 60

router = APIRouter(default_response_class=HTMLResponse, include_in_schema=False)

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@router.get("/")
def first_page(
    request: Request,
    database: AppDatabase,
    state: State | None = None,
    queue: Annotated[str | None, Query(pattern=QUEUE_NAME)] = None,
    event: UUID | None = None,
) -> HTMLResponse:
    """The verdict, the queues, and the newest jobs and events; the jobs narrowed by the query."""
    wanted = {"state": state, "queue": queue, "event": str(event) if event else None}
    with read(database) as conn:
        seen = overview.load(conn, request.app.state.settings)
        newest = jobs.listing(conn, state=state, queue=queue, event_id=wanted["event"], limit=LINES)
        happened = events.recent(conn, LINES)
    return render(
        "overview.html",
        verdict=overview.judge(seen),
        queues=seen.queues,
        jobs=[JobLine.model_validate(row) for row in newest],
        events=[EventLine.model_validate(row) for row in happened],
        states=list(State),
        wanted=wanted,
    )


@router.get("/jobs/{job_id}")
def job_page(request: Request, job_id: str, database: AppDatabase) -> HTMLResponse:
    """One job: when what happened to it, what it waits for, each failed attempt, its arguments and its event."""
    heard_within_s = overview.heard_within_s(request.app.state.settings)
    with read(database) as conn:
        job = load_job(conn, job_id)
        event = events.load(conn, job.event_id) if job and job.event_id else None
        explanation = explain.explain(conn, job_id, heard_within_s=heard_within_s)
    if job is None or explanation is None:
        raise HTTPException(404, "There is no such job, or its time here is over.")
    return render(
        "job.html",
        job=job,
        event=event,
        story=story.tell(job, _now()),
        reasons=explanation.reasons,
        timeline=story.timeline(job),
    )


def render(template: str, status: int = 200, **given: Any) -> HTMLResponse:
    """*template* with what every page has."""
    page = _templates.get_template(template).render(now=_now(), status=status, **given)
    return HTMLResponse(page, status)


def _now() -> datetime:
    return datetime.now(UTC)


def _pretty(value: Any) -> str:
    short = json.dumps(value, ensure_ascii=False)
    text = short if len(short) <= LINE_CHARACTERS else json.dumps(value, indent=2, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}\n… in full in the API"


def _link(wanted: dict[str, str | None], **changed: str | None) -> str:
    """The first page's address with *wanted* narrowed or widened by *changed*."""
    query = {name: value for name, value in {**wanted, **changed}.items() if value is not None}
    return f"/?{urlencode(query)}#jobs" if query else "/#jobs"


_templates.filters |= {
    "pretty": _pretty,
    "spoken": ages.spoken,
    "relative": ages.relative,
    "exact": ages.exact,
    "blame": story.blame,
    "on_whose_word": overview.on_whose_word,
}
_templates.globals["link"] = _link
