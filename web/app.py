"""The application that `cli.py web` serves, and its faults in the form the caller can read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from middleware.boot import EXIT_UNAVAILABLE
from outbox import migrations
from outbox.workers import VERSION
from settings import Settings, refuse
from web import api, guard, health, metrics, pages
from web.database import explain, open_database

log = structlog.get_logger("posthouse.web")


def create_app(settings: Settings) -> FastAPI:
    """The page on the database of *settings*, which need not answer yet. Exits 78 on a public WEB_HOST."""
    guard.require_loopback(settings)
    app = FastAPI(title="Posthouse", version=VERSION, docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.settings = settings
    app.state.database = open_database(_url(settings))
    app.state.schema = migrations.steps("")
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"))
    for part in (health, metrics, api, pages):
        app.include_router(part.router)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=guard.own_names(settings), www_redirect=False)
    app.add_middleware(guard.SecurityHeaders)
    app.exception_handler(HTTPException)(_refused)
    app.exception_handler(RequestValidationError)(_misread)
    app.exception_handler(psycopg.Error)(_without_database)
    app.exception_handler(Exception)(_broken)
    return app


def _url(settings: Settings) -> str:
    if settings.database_url is None:
        refuse("no database: DATABASE_URL is unset", EXIT_UNAVAILABLE)
    return settings.database_url.get_secret_value()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.database.close()


async def _refused(request: Request, error: HTTPException) -> Response:
    return _fault(request, error.status_code, str(error.detail))


async def _misread(request: Request, error: RequestValidationError) -> Response:
    said = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
    return _fault(request, HTTPStatus.UNPROCESSABLE_ENTITY, said)


async def _without_database(request: Request, error: psycopg.Error) -> Response:
    log.warning("page.database_missed", error=type(error).__name__)
    return _fault(request, HTTPStatus.SERVICE_UNAVAILABLE, explain(error))


async def _broken(request: Request, error: Exception) -> Response:
    answer = _fault(request, HTTPStatus.INTERNAL_SERVER_ERROR, "That is a fault of ours; the log says which.")
    answer.headers.update(guard.HEADERS)
    return answer


def _fault(request: Request, status: int, detail: str) -> Response:
    """A problem document for programs (RFC 9457), a page for people."""
    title = HTTPStatus(status).phrase
    if request.url.path.startswith("/api/"):
        problem = {"type": "about:blank", "title": title, "status": status, "detail": detail}
        return JSONResponse(problem, status, media_type="application/problem+json")
    return pages.render("fault.html", status, title=title, detail=detail)
