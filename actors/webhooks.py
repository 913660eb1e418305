"""Webhooks: tell the endpoints that ask for it what happened, at least once, signed (specs/webhooks.md)."""

from __future__ import annotations

from datetime import timedelta

import structlog

import settings
from actors import deliveries, endpoints, envelope, outbound
from actors.deliveries import Turn
from actors.effects.http import Answer, Failure
from actors.outcomes import ATTEMPTS, SCHEDULE_S, Outcome, Verdict, classify
from actors.sealing import CannotOpen, vault
from broker import actor, transaction
from middleware import context
from middleware.failures import Discard, Schedule, Snooze
from outbox import catalogue, events
from outbox.catalogue import EventType
from outbox.db import LOST

log = structlog.get_logger("posthouse.webhooks")

MAX_ANSWER_BYTES = 16_384
#: After a result that came too late: time for the holder of the lease to end.
STALE_RETRY_S = 5
#: After the database was away: nobody's attempt is spent on that.
DATABASE_RETRY_S = 30

catalogue.declare(
    EventType("webhook.test", "somebody asked to test an endpoint", "an endpoint's id", catalogue.WEBHOOK)
)
catalogue.declare(EventType("webhook.endpoint_disabled", "an endpoint gets nothing any more", "an endpoint's id"))


class DeliveryFailed(Exception):
    """The receiver did not take it; to be tried again."""


@actor(name="webhook.fanout", queue="webhook", on="*", time_limit_s=30)
def fanout(event_id: str) -> None:
    """Make a delivery for each endpoint that wants the event. Harmless twice: (endpoint, event) is unique."""
    with transaction() as conn:
        event = events.load(conn, event_id)
        if event is None:
            raise Discard("the event is gone")
        try:
            deliveries.fan_out(conn, event, deliver.job)
        except envelope.BodyTooLarge as error:
            raise Discard(str(error)) from None


@actor(
    name="webhook.deliver",
    queue="webhook",
    time_limit_s=settings.load().webhook_time_limit_s,
    attempts=ATTEMPTS,
    backoff=Schedule(SCHEDULE_S),
)
def deliver(delivery_id: str) -> None:
    """Post one delivery to its endpoint. Harmless twice: a receiver knows it again by its `webhook-id`."""
    try:
        outcome = _attempt(delivery_id)
    except LOST as error:
        raise Snooze(DATABASE_RETRY_S) from error
    if outcome is not None:
        _conclude(outcome)


def _attempt(delivery_id: str) -> Outcome | None:
    """Make one request if it is this delivery's turn, and write down what came of it; None: delivered before.

    Raises Snooze and Discard when it is not its turn, or not any more.
    """
    with transaction() as conn:
        turn = deliveries.take(conn, delivery_id, lease_s=settings.load().endpoint_lease_s)
    if isinstance(turn, Snooze | Discard):
        raise turn
    if turn is None:
        return None
    result = _post(turn)
    ended_at = turn.now + timedelta(milliseconds=result.trace.total_ms)
    outcome = classify(result, ended_at, snoozes=turn.snoozes)
    with transaction() as conn:
        is_ours = deliveries.finish(conn, turn, result, outcome, next_in_s=_next_in_s(outcome), ended=_ended(outcome))
    if not is_ours:
        raise Snooze(STALE_RETRY_S)
    if outcome.error_class == "internal_error":
        log.error("webhook.internal_error", delivery_id=delivery_id, reason=outcome.reason)
    return outcome


def _post(turn: Turn) -> Answer | Failure:
    told = settings.load()
    try:
        secrets = endpoints.open_secrets(vault(), turn.endpoint_id, turn.secret_sealed, turn.old_secrets, turn.now)
        custom = endpoints.open_headers(vault(), turn.endpoint_id, turn.headers)
    except CannotOpen as error:
        return Failure("internal_error", str(error))
    return outbound.client().exchange(
        "POST",
        turn.url,
        headers=envelope.headers(
            turn.event_id, turn.body, at=turn.now, attempt=turn.attempt_no, secrets=secrets, custom=custom
        ),
        body=turn.body,
        deadline_s=told.webhook_http_timeout_s,
        max_body_bytes=MAX_ANSWER_BYTES,
        allow_http=told.webhook_allow_http,
    )


def _next_in_s(outcome: Outcome) -> float | None:
    """Seconds to the next attempt at the earliest; None when there is none."""
    if outcome.verdict is Verdict.SNOOZE:
        return outcome.delay_s
    if outcome.verdict is Verdict.RETRY and not _is_last():
        return float(Schedule(SCHEDULE_S).delay_s(_spent()))
    return None


def _ended(outcome: Outcome) -> str | None:
    if outcome.verdict is Verdict.RETRY and _is_last():
        return "attempts exhausted"
    return {Verdict.DELIVERED: "delivered", Verdict.DISCARD: outcome.reason}.get(outcome.verdict)


def _spent() -> int:
    """Attempts of this job that count, with this one; those that were put off do not."""
    job = context.current()
    return job.claim.attempt if job else 1


def _is_last() -> bool:
    return _spent() >= ATTEMPTS


def _conclude(outcome: Outcome) -> None:
    match outcome.verdict:
        case Verdict.RETRY:
            raise DeliveryFailed(outcome.reason)
        case Verdict.SNOOZE:
            raise Snooze(outcome.delay_s)
        case Verdict.DISCARD:
            raise Discard(outcome.reason)


def _check_settings() -> None:
    """Refuse to start with outbound rules, authorities or keys that cannot be read."""
    try:
        outbound.client()
        vault()
    except ValueError as error:
        settings.refuse(str(error))


_check_settings()
