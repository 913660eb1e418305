"""A receiver for trials: takes webhooks and mails, checks the signatures, shows and records what came."""

from __future__ import annotations

import asyncio
import email
import email.policy
import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import uvicorn
from aiosmtpd.smtp import SMTP, Envelope

from actors.signing import SignatureError, verify

MAX_BODY_BYTES = 1_048_576

Show = Callable[[dict[str, Any]], None]


def serve(http: socket.socket, smtp: socket.socket, secrets: Sequence[str], show: Show, *, delay_s: float = 0) -> None:
    """Take webhooks at *http* and mails at *smtp* (both listening) until SIGINT or SIGTERM.

    *show* gets a record of each as it comes. A webhook that none of *secrets* signed is answered 401, others
    204, both *delay_s* seconds later.
    """
    asyncio.run(_serve(http, smtp, Webhooks(secrets, show, delay_s), Mails(show)))


async def _serve(http: socket.socket, smtp: socket.socket, webhooks: Webhooks, mails: Mails) -> None:
    config = uvicorn.Config(
        webhooks,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    async with await asyncio.get_running_loop().create_server(lambda: SMTP(mails, enable_SMTPUTF8=True), sock=smtp):
        await uvicorn.Server(config).serve(sockets=[http])


class Webhooks:
    """An ASGI application that takes any POST for a webhook."""

    def __init__(self, secrets: Sequence[str], show: Show, delay_s: float) -> None:
        self._secrets = secrets
        self._show = show
        self._delay_s = delay_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await _body(receive)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        fault = _fault(headers, body, self._secrets)
        self._show(webhook_record(scope["path"], headers, body, fault))
        await asyncio.sleep(self._delay_s)
        await send({"type": "http.response.start", "status": 401 if fault else 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Mails:
    """An aiosmtpd handler that takes every mail."""

    def __init__(self, show: Show) -> None:
        self._show = show

    async def handle_DATA(self, server: object, session: object, envelope: Envelope) -> str:  # noqa: N802  its API
        self._show(mail_record(envelope.mail_from or "", envelope.rcpt_tos, _bytes(envelope.content)))
        return "250 OK"


def webhook_record(path: str, headers: dict[str, str], body: bytes, fault: str | None) -> dict[str, Any]:
    """What is shown and recorded of a webhook; *fault* says why it is not verified, None that it is."""
    text = body.decode("utf-8", "replace")
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    return {
        "kind": "webhook",
        "at": _now(),
        "verified": fault is None,
        "fault": fault,
        "path": path,
        "headers": headers,
        "body": text,
        "event": content if isinstance(content, dict) else {},
    }


def mail_record(sender: str, recipients: Sequence[str], content: bytes) -> dict[str, Any]:
    """What is shown and recorded of a mail; *text* is its plain part."""
    message = email.message_from_bytes(content, policy=email.policy.default)
    plain = message.get_body(("plain",))
    return {
        "kind": "mail",
        "at": _now(),
        "from": sender,
        "to": list(recipients),
        "subject": str(message["subject"] or ""),
        "text": plain.get_content() if plain else "",
        "headers": {name: str(value) for name, value in message.items()},
    }


def line(record: dict[str, Any]) -> str:
    """One line for people about *record*."""
    if record["kind"] == "mail":
        return f"mail     to {', '.join(record['to'])}: {record['subject']}"
    event, headers = record["event"], record["headers"]
    state = "verified" if record["verified"] else f"NOT VERIFIED: {record['fault']}"
    attempt = headers.get("posthouse-attempt", "?")
    return f"webhook  {event.get('type', '?')} {event.get('subject', '?')}, attempt {attempt}, {state}"


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body = (body + message.get("body", b""))[:MAX_BODY_BYTES]
        more = message.get("more_body", False)
    return body


def _fault(headers: dict[str, str], body: bytes, secrets: Sequence[str]) -> str | None:
    try:
        verify(headers, body, secrets, time.time())
    except SignatureError as error:
        return str(error)
    return None


def _bytes(content: bytes | str | None) -> bytes:
    return content.encode() if isinstance(content, str) else content or b""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
