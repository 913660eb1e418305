"""Record what happened in the caller's transaction; load it, put it back on the road, forget it in time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from outbox import catalogue
from outbox.db import AnyConnection, Conn, rows, sql
from outbox.payload import encode

#: Events are thin: ids and small facts (specs/webhooks.md 1).
MAX_DATA_BYTES = 16_384

CHANNEL = "posthouse_events"


@dataclass(frozen=True)
class Event:
    """A fact. *body* is the webhook body, rendered once at fan-out; None before."""

    id: str
    seq: int
    type: str
    subject: str
    data: dict[str, Any]
    endpoint_id: str | None
    body: bytes | None
    created_at: datetime
    fanned_out_at: datetime | None
    jobs: int
    failures: int
    last_error: str | None
    poisoned_at: datetime | None


def record(
    conn: AnyConnection, type: str, subject: str, data: dict[str, Any] | None = None, *, endpoint_id: str | None = None
) -> str:
    """Write an event in the caller's transaction and return its id (a uuid); never commits.

    *conn* is a psycopg 3, psycopg2 or SQLAlchemy raw connection. Raises ValueError for an undeclared type and for
    *data* that is no object, that jsonb cannot hold, or whose compact JSON exceeds 16,384 bytes.
    """
    catalogue.find(type)
    if not isinstance({} if data is None else data, dict):
        raise ValueError(f"data of event {type} must be a dict, not {data.__class__.__name__}")
    encode(subject, where="subject", max_bytes=2_048)
    given = {
        "type": type,
        "subject": subject,
        "data": encode(data or {}, where="data", max_bytes=MAX_DATA_BYTES),
        "endpoint_id": endpoint_id,
    }
    return str(rows(conn, sql(__file__, "record"), given)[0][0])


def load(conn: Conn, event_id: str) -> Event | None:
    """The event called *event_id*, or None when it is gone."""
    row = conn.execute(sql(__file__, "load_event"), {"id": event_id}).fetchone()
    return Event(**row) if row else None


def requeue(conn: Conn, event_id: str) -> bool:
    """Put a poisoned event back on the road; False when it is not poisoned."""
    return conn.execute(sql(__file__, "requeue_event"), {"id": event_id}).rowcount == 1


def backlog(conn: Conn) -> dict[str, Any]:
    """How many events wait (*waiting*), the age of the oldest in seconds (*oldest_s*), how many are *poisoned*."""
    row = conn.execute(sql(__file__, "backlog")).fetchone()
    return dict(row or {})


def recent(conn: Conn, limit: int = 50) -> list[dict[str, Any]]:
    """The newest events, without their bodies."""
    return conn.execute(sql(__file__, "recent_events"), {"limit": limit}).fetchall()


def prune(conn: Conn, *, older_than_days: float, limit: int = 1_000) -> int:
    """Delete up to *limit* events fanned out longer ago than that and referred to by no delivery; how many went."""
    return conn.execute(
        sql(__file__, "prune_events"), {"older_than_s": older_than_days * 86_400, "limit": limit}
    ).rowcount


def publish_types(conn: Conn) -> None:
    """Make the database's list of declared types the code's, for those who record from SQL."""
    types = catalogue.declared()
    conn.execute(
        sql(__file__, "publish_types"),
        {
            "names": [event_type.name for event_type in types],
            "descriptions": [event_type.description for event_type in types],
            "exposures": [event_type.exposure.value for event_type in types],
        },
    )
