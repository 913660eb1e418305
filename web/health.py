"""Live and ready: two questions of a supervisor, with two answers (DESIGN.md 10)."""

from __future__ import annotations

import os

import anyio
import psycopg
from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from outbox import migrations, workers
from outbox.db import Database
from settings import Settings
from web.database import explain, read
from web.overview import heard_within_s, listed

READY_S = 2.0

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> dict[str, str | int]:
    """This process serves: true without a database, and while every thread waits for one."""
    return {"status": "ok", "pid": os.getpid()}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Whether jobs can be claimed: 200, or 503 with the reasons; within READY_S, even of a frozen server."""
    state = request.app.state
    reasons = ["The database did not answer in time."]
    with anyio.move_on_after(READY_S - 0.1):
        reasons = await to_thread.run_sync(
            _reasons, state.database, state.settings, state.schema, abandon_on_cancel=True
        )
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


def _reasons(database: Database, settings: Settings, schema: list[migrations.Step]) -> list[str]:
    """Why no job could be claimed just now, one sentence a fault."""
    try:
        with read(database, statement_s=READY_S / 4) as conn:
            if missing := migrations.pending(conn, schema):
                return [f"The database lacks {len(missing)} migrations, from {missing[0]} on."]
            alive = workers.alive(conn, within_s=heard_within_s(settings))
    except psycopg.Error as error:
        return [explain(error)]
    worked = {queue for worker in alive for queue in worker["queues"]}
    idle = [name for name in settings.queues if name not in worked]
    return [f"No process works {listed(idle)}."] if idle else []
