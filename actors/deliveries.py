"""Deliveries: one event for one endpoint, who may send it now, and what came of each attempt."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from actors import envelope
from actors.effects.http import Answer, Failure
from actors.endpoints import wants
from actors.outcomes import EXPIRY_S, Outcome, Verdict
from middleware.failures import Discard, Snooze
from outbox import catalogue, events, jobs
from outbox.db import Conn, sql
from outbox.events import Event
from outbox.jobs import NewJob
from outbox.payload import clean

MAX_PARK_S = 3_600
KEPT_BODY_BYTES, KEPT_ERROR_CHARACTERS, KEPT_HEADER_CHARACTERS = 4_096, 512, 256
KEPT_HEADERS = ("content-type", "content-length", "retry-after", "server", "date", "x-request-id")


@dataclass(frozen=True)
class Turn:
    """The right to make one request: the endpoint's lease is ours until *token* is given back.

    *attempt_no* counts requests and never restarts; *now* is the database's clock.
    """

    delivery_id: str
    endpoint_id: str
    event_id: str
    token: str
    version: int
    url: str
    body: bytes = field(repr=False)
    headers: list[dict[str, str]] = field(repr=False)
    secret_sealed: bytes = field(repr=False)
    old_secrets: list[dict[str, Any]] = field(repr=False)
    trigger: str
    attempt_no: int
    snoozes: int
    now: datetime


def fan_out(conn: Conn, event: Event, job: Callable[[str], NewJob]) -> int:
    """Make the deliveries of *event* and, for each one really made, its *job*; how many that was.

    Raises envelope.BodyTooLarge. Twice, or twice at once, changes nothing the second time.
    """
    _store_body(conn, event)
    wished = {str(uuid.uuid4()): endpoint_id for endpoint_id in _endpoints_for(conn, event)}
    planned = {delivery_id: job(delivery_id) for delivery_id in wished}
    new = _insert(conn, event, wished, planned)
    jobs.enqueue_many(conn, [planned[delivery_id] for delivery_id in new])
    return len(new)


def _store_body(conn: Conn, event: Event) -> None:
    body = envelope.render(event.id, event.type, event.subject, event.created_at, event.data)
    conn.execute(sql(__file__, "store_body"), {"id": event.id, "body": body})


def _endpoints_for(conn: Conn, event: Event) -> list[str]:
    if event.endpoint_id is not None:
        return [event.endpoint_id]
    event_type = catalogue.find(event.type)
    rows = conn.execute(sql(__file__, "endpoints_for"), {"created_at": event.created_at})
    return [row["id"] for row in rows if wants(row["event_types"], event_type)]


def _insert(conn: Conn, event: Event, wished: dict[str, str], planned: dict[str, NewJob]) -> list[str]:
    """Insert the deliveries (id → endpoint) that are not there yet; their ids."""
    rows = conn.execute(
        sql(__file__, "insert_deliveries"),
        {
            "ids": list(wished),
            "endpoint_ids": list(wished.values()),
            "job_ids": [planned[delivery_id].id for delivery_id in wished],
            "event_id": event.id,
            "trigger": "test" if event.endpoint_id else "auto",
        },
    )
    return [row["id"] for row in rows]


def take(conn: Conn, delivery_id: str, *, lease_s: float) -> Turn | Snooze | Discard | None:
    """Take the endpoint's lease for a delivery, or say why not: later, never, or (None) delivered already."""
    if conn.execute(sql(__file__, "take_lock"), {"delivery_id": delivery_id}).fetchone() is None:
        return Discard("endpoint deleted")
    given = {"delivery_id": delivery_id, "lease_s": lease_s, "expiry_s": EXPIRY_S}
    taken = conn.execute(sql(__file__, "take_lease"), given).fetchone()
    return Turn(**taken) if taken else _refusal(conn, delivery_id)


def _refusal(conn: Conn, delivery_id: str) -> Snooze | Discard | None:
    given = {"delivery_id": delivery_id, "expiry_s": EXPIRY_S}
    match conn.execute(sql(__file__, "refusal"), given).fetchone():
        case {"delivered": True}:
            return None
        case {"expired": True}:
            return _end(conn, delivery_id, "expired")
        case {"enabled": False}:
            return _end(conn, delivery_id, "endpoint disabled")
        case {"has_body": False}:
            return _end(conn, delivery_id, "the event has no body")
        case {"wait_s": wait_s, "parked": parked}:
            return _park(conn, delivery_id, wait_s, parked)
        case _:
            return Discard("endpoint deleted")


def _park(conn: Conn, delivery_id: str, wait_s: float, others: int) -> Snooze:
    """Wait for the endpoint, spread out, so that of *others* parked there about two a second wake."""
    conn.execute(sql(__file__, "park"), {"delivery_id": delivery_id})
    return Snooze(min(max(wait_s, 0) + random.uniform(0, 2) + others * random.uniform(0, 1), MAX_PARK_S))


def _end(conn: Conn, delivery_id: str, result: str) -> Discard:
    conn.execute(sql(__file__, "end_delivery"), {"delivery_id": delivery_id, "result": result})
    return Discard(result)


def finish(
    conn: Conn,
    turn: Turn,
    result: Answer | Failure,
    outcome: Outcome,
    *,
    next_in_s: float | None,
    ended: str | None,
) -> bool:
    """Give the lease back and write down what came of the attempt; False when another has the lease by now.

    Such a stale result is only logged: endpoint and delivery are the new holder's. *ended* is the delivery's
    result, None while it goes on.
    """
    released = _release(conn, turn, outcome, result.trace.total_ms)
    charged = released is not None and released["charged"]
    _log(conn, _attempt(turn, result, outcome, next_in_s), charged=charged, stale=released is None)
    if released is None:
        return False
    snoozed = outcome.verdict is Verdict.SNOOZE
    conn.execute(sql(__file__, "finish_delivery"), {"id": turn.delivery_id, "result": ended, "snoozed": snoozed})
    if outcome.gone:
        events.record(conn, "webhook.endpoint_disabled", turn.endpoint_id, {"reason": "gone"})
    if not outcome.pauses:
        _wake(conn, turn.endpoint_id)
    return True


def _wake(conn: Conn, endpoint_id: str) -> None:
    conn.execute(sql(__file__, "wake"), {"endpoint_id": endpoint_id, "channel": jobs.channel("webhook")})


def _release(conn: Conn, turn: Turn, outcome: Outcome, duration_ms: float) -> dict[str, Any] | None:
    """Give back the lease and change the endpoint's health; None when the lease is not ours any more."""
    return conn.execute(
        sql(__file__, "release_endpoint"),
        {
            "id": turn.endpoint_id,
            "token": turn.token,
            "version": turn.version,
            "charge": outcome.charge.value,
            "gone": outcome.gone,
            "pause_s": outcome.delay_s if outcome.pauses else None,
            "duration_ms": duration_ms,
        },
    ).fetchone()


def _log(conn: Conn, attempt: dict[str, Any], *, charged: bool, stale: bool) -> None:
    conn.execute(sql(__file__, "log_attempt"), {**attempt, "charged": charged, "stale": stale})


def _attempt(turn: Turn, result: Answer | Failure, outcome: Outcome, next_in_s: float | None) -> dict[str, Any]:
    trace = result.trace
    return {
        "delivery_id": turn.delivery_id,
        "attempt_no": turn.attempt_no,
        "trigger": turn.trigger,
        "started_at": turn.now,
        "status": result.status if isinstance(result, Answer) else None,
        "error_class": outcome.error_class,
        "error": clean(outcome.reason, 4 * KEPT_ERROR_CHARACTERS)[:KEPT_ERROR_CHARACTERS] or None,
        "remote_ip": trace.remote_ip,
        "dns_ms": trace.dns_ms,
        "connect_ms": trace.connect_ms,
        "tls_ms": trace.tls_ms,
        "first_byte_ms": trace.first_byte_ms,
        "total_ms": trace.total_ms,
        "response_headers": Jsonb(_kept_headers(result)),
        "response_body": _kept_body(result),
        "outcome": outcome.verdict.value,
        "next_in_s": next_in_s,
        "lease_token": turn.token,
    }


def _kept_headers(result: Answer | Failure) -> dict[str, str]:
    if isinstance(result, Failure):
        return {}
    named = {name: result.header(name) for name in KEPT_HEADERS}
    return {name: clean(value, 1_024)[:KEPT_HEADER_CHARACTERS] for name, value in named.items() if value is not None}


def _kept_body(result: Answer | Failure) -> str | None:
    """The first 4,096 bytes as text PostgreSQL can store; nothing of a body that is encoded."""
    if isinstance(result, Failure) or result.header("content-encoding"):
        return None
    return result.body[:KEPT_BODY_BYTES].decode("utf-8", "replace").replace("\0", "\ufffd")
