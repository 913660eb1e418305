"""Documents and the search over them: every committed change reaches the index, whichever engine that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import structlog

import settings
from actors import documents, indexing
from actors.effects.search import Hit, Hits, Misconfigured, Permanent, Search, Throttled, Transient
from actors.effects.search.words import snippet
from actors.markdown import document_id
from broker import actor, installed, transaction
from middleware import context
from middleware.failures import Discard, Snooze
from outbox.catalogue import WEBHOOK, EventType, declare
from outbox.db import sql

log = structlog.get_logger("posthouse.corpus")

MISCONFIGURED_WAIT_S = 300

for change in ("created", "updated", "deleted"):
    declare(EventType(f"document.{change}", f"A document was {change}.", "the document's id", WEBHOOK))
declare(EventType("corpus.imported", "A folder was imported; data has the counts.", "the folder's name"))


@actor(name="corpus.index", queue="index", on="document.*", argument="subject", coalesce=True)
def index(subject: str) -> None:
    """Make the index say what the row says now; idempotent by the document's version."""
    try:
        indexing.index(transaction, engine(), document_id(subject), job=_job_id())
    except Misconfigured as error:
        log.error("search.misconfigured", engine=engine_name(), reason=str(error))
        raise Snooze(MISCONFIGURED_WAIT_S) from error
    except Throttled as error:
        raise Snooze(error.after_s) from error
    except Permanent as error:
        log.error("search.refused", engine=engine_name(), reason=str(error))
        raise Discard(str(error)) from error


def _job_id() -> str:
    job = context.current()
    return str(job.claim.id) if job else ""


def _check_engine() -> None:
    """Refuse to boot where the search server answers with a redirect, in which a write would vanish."""
    if not settings.load().meili_url:
        return
    try:
        unprepared_engine().health()
    except Misconfigured as error:
        settings.refuse(f"MEILI_URL: {error}")
    except (Transient, Permanent) as error:
        log.warning("search.away", engine=engine_name(), reason=str(error))


installed().boot_checks["index"] = _check_engine


@cache
def engine() -> Search:
    """The process's engine, its index as it should be: Meilisearch where MEILI_URL is set, else Postgres."""
    search = unprepared_engine()
    search.ensure()
    return search


def engine_name() -> str:
    return "meilisearch" if settings.load().meili_url else "postgres"


def unprepared_engine() -> Search:
    """The engine as it is, for those who only read."""
    config = settings.load()
    if config.meili_url:
        from actors.effects.search.meilisearch import MeiliSearch

        return MeiliSearch(config.meili_url, config.meili_api_key.get_secret_value(), config.meili_index)
    from actors.effects.search.postgres import PostgresSearch

    return PostgresSearch(transaction)


class SearchUnavailable(Exception):
    """The engine does not answer; the text says why. Never shown as an empty result."""


@dataclass(frozen=True)
class Found:
    """A document a search found. *title* and *snippet* are plain text, to be escaped where they are shown."""

    id: str
    kind: str
    title: str
    snippet: str
    score: float


@dataclass(frozen=True)
class Answer:
    """What a search found, best first, and which *engine* says so."""

    engine: str
    found: list[Found]


def search(
    words: str,
    *,
    limit: int = 20,
    offset: int = 0,
    kind: str | None = None,
    lang: str | None = None,
    tag: str | None = None,
) -> Answer:
    """Find documents that have every one of *words*, the last one perhaps longer.

    Raises SearchUnavailable, and ValueError for a *limit* outside 1-100 or an *offset* above 1,000.
    """
    try:
        hits = unprepared_engine().search(words, limit=limit, offset=offset, kind=kind, lang=lang, tag=tag)
    except (Transient, Misconfigured, Permanent) as error:
        reason = " ".join(str(error).split())
        raise SearchUnavailable(f"search_unavailable: {engine_name()} does not answer: {reason}") from error
    return Answer(hits.engine, _found_documents(hits, words))


def _found_documents(hits: Hits, words: str) -> list[Found]:
    with transaction() as conn:
        rows = conn.execute(sql(__file__, "found_documents"), {"ids": [hit.id for hit in hits.hits]}).fetchall()
    shown = {row["id"]: row for row in rows}
    return [_shown(shown[hit.id], hit, words) for hit in hits.hits if hit.id in shown]


def _shown(row: dict[str, str], hit: Hit, words: str) -> Found:
    return Found(hit.id, row["kind"], row["title"], snippet(row["body"], words), hit.score)


def import_folder(
    folder: Path,
    *,
    collection: str = "",
    delete: bool = False,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> documents.Summary:
    """See `documents.import_folder`; on this process's database."""
    return documents.import_folder(transaction, folder, collection=collection, delete=delete, tell=tell)
