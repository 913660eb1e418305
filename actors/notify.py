"""Mails to the owner about what happened; nobody's request ever waits for one."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

import structlog
from dramatiq.errors import Retry
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

import settings
from actors.effects.mail import Greylisted, Mail, MailMisconfigured, Server, send, server
from broker import actor, transaction
from middleware import context
from middleware.failures import Backoff, Discard, Snooze
from outbox import events
from outbox.db import Conn, sql

log = structlog.get_logger("posthouse.mail")

#: Eight attempts in about 6 hours.
BACKOFF = Backoff(first_s=20, factor=3, cap_s=14_580)
GREYLISTED_S = 60
MISCONFIGURED_S = 900

templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@actor(name="owner.notify", queue="notify", on="corpus.imported", attempts=8, backoff=BACKOFF)
def notify(event_id: str) -> str | None:
    """Mail OWNER_EMAIL what the event says: at least once, with one Message-ID; once accepted, not again."""
    config = settings.load()
    if config.smtp_url is None or not config.owner_email:
        log.info("mail.not_sent", event_id=event_id, reason="SMTP_URL or OWNER_EMAIL is not set")
        return "not sent"
    with transaction() as conn:
        event = events.load(conn, event_id)
        sent = was_sent(conn, event_id, "owner.notify")
    if event is None:
        raise Discard("the event is gone")
    if not sent:
        _send(letter(event, sender=config.mail_from, recipient=config.owner_email), config)
        with transaction() as conn:
            mark_sent(conn, event_id, "owner.notify")
    return None


def letter(event: events.Event, *, sender: str, recipient: str) -> Mail:
    """The mail about *event*; the first line of its text template is the subject."""
    date = event.created_at.astimezone(UTC)
    told = {"subject": event.subject, "at": f"{date:%d %B %Y at %H:%M} UTC", **event.data}
    subject, _, text = templates.get_template(f"{event.type}.txt").render(told).partition("\n")
    html = templates.get_template(f"{event.type}.html").render(told)
    return Mail(f"{event.id}.owner.notify", date, sender, recipient, subject, text.lstrip("\n"), html)


def _send(mail: Mail, config: settings.Settings) -> None:
    """Send, or say when to try again: where the server greylists, after a minute at the earliest."""
    try:
        send(mail, _server(config), ca_file=config.outbound_ca_file)
    except Greylisted as error:
        job = context.current()
        if job is None or job.claim.snoozed_s == 0:
            raise Snooze(GREYLISTED_S) from error
        delay_s = max(GREYLISTED_S, BACKOFF.delay_s(job.claim.attempt))
        raise Retry(str(error), delay=int(delay_s * 1000)) from error
    except MailMisconfigured as error:
        log.error("mail.misconfigured", reason=str(error), due_in_s=MISCONFIGURED_S)
        raise Snooze(MISCONFIGURED_S) from error


def _server(config: settings.Settings) -> Server:
    if not config.mail_from:
        raise MailMisconfigured("MAIL_FROM is not set")
    try:
        return server(config.smtp_url.get_secret_value() if config.smtp_url else "")
    except ValueError as error:
        raise MailMisconfigured(str(error)) from error


def was_sent(conn: Conn, event_id: str, kind: str) -> bool:
    """Whether the mail of that *kind* about the event has been accepted."""
    return conn.execute(sql(__file__, "was_sent"), {"event_id": event_id, "kind": kind}).fetchone() is not None


def mark_sent(conn: Conn, event_id: str, kind: str) -> None:
    conn.execute(sql(__file__, "mark_sent"), {"event_id": event_id, "kind": kind})


def _check_settings() -> None:
    """Refuse to start with a mail server that cannot be read."""
    config = settings.load()
    try:
        if config.smtp_url is not None:
            server(config.smtp_url.get_secret_value())
    except ValueError as error:
        settings.refuse(str(error))


_check_settings()
