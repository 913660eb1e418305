"""The request of a delivery: its body, rendered once, and its headers, made anew for each attempt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from actors import signing

MAX_BODY_BYTES = 20_000
MAX_HEADERS, MAX_HEADER_VALUE_BYTES = 20, 4_096
USER_AGENT = "Posthouse-Webhooks/0.1.0"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_VALUE = re.compile(r"[\t\x20-\x7e]*")
_RESERVED = frozenset(
    {
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "content-language",
        "content-location",
        "connection",
        "keep-alive",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
        "expect",
        "date",
        "user-agent",
        "accept",
        "accept-encoding",
        "cookie",
        "set-cookie",
        "forwarded",
        "via",
        "age",
        "cache-control",
        "clear-site-data",
        "expires",
        "pragma",
        "warning",
        "www-authenticate",
    }
)
_RESERVED_PREFIXES = (
    "webhook-",
    "posthouse-",
    "svix-",
    "x-svix-",
    "x-forwarded-",
    "proxy-",
    "x-amz-",
    "x-amzn-",
    "x-google",
    "x-goog-",
    "x-gfe",
    "x-azure-",
    "x-fd-",
)

Header = tuple[str, str]


class BodyTooLarge(Exception):
    """The rendered body exceeds 20,000 bytes."""


def render(event_id: str, event_type: str, subject: str, occurred_at: datetime, data: dict[str, Any]) -> bytes:
    """Return what every attempt sends: fixed key order, compact, UTF-8 unescaped. Raises BodyTooLarge."""
    content = {
        "id": event_id,
        "type": event_type,
        "subject": subject,
        "occurred_at": _zulu(occurred_at),
        "data": data,
    }
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body has {len(body):,} bytes, at most {MAX_BODY_BYTES:,} are sent")
    return body


def headers(
    event_id: str,
    body: bytes,
    *,
    at: datetime,
    attempt: int,
    secrets: Iterable[str],
    custom: Iterable[Header],
) -> list[Header]:
    """Return the headers of one attempt, signed for *at*; reserved and malformed custom ones are dropped."""
    timestamp = int(at.timestamp())
    return [
        ("content-type", "application/json"),
        ("user-agent", USER_AGENT),
        ("accept", "*/*"),
        ("accept-encoding", "identity"),
        ("connection", "close"),
        ("webhook-id", event_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", signing.sign(event_id, timestamp, body, secrets)),
        ("posthouse-attempt", str(attempt)),
        *((name, value) for name, value in custom if not is_reserved(name) and fault_in(name, value) is None),
    ]


def is_reserved(name: str) -> bool:
    """Whether a custom header called *name* could change what the receiver is told by us."""
    lowered = name.lower()
    return lowered in _RESERVED or lowered.startswith(_RESERVED_PREFIXES)


def fault_in(name: str, value: str) -> str | None:
    """Return what is wrong with a custom header, or None."""
    if not _NAME.fullmatch(name):
        return "a name is a letter or digit, then letters, digits, _ or -, at most 64 characters"
    if len(value) > MAX_HEADER_VALUE_BYTES:
        return f"a value has at most {MAX_HEADER_VALUE_BYTES:,} bytes"
    if not _VALUE.fullmatch(value):
        return "a value is visible ASCII, space and tab"
    return None


def faults(custom: Sequence[Header]) -> list[tuple[str, str, str]]:
    """Return code, field and message of everything wrong with the custom headers of an endpoint."""
    found = []
    if len(custom) > MAX_HEADERS:
        found.append(("invalid_header", "headers", f"at most {MAX_HEADERS} headers"))
    lowered = [name.lower() for name, _ in custom]
    for index, (name, value) in enumerate(custom):
        field = f"headers.{name[:64]}" if _NAME.fullmatch(name) else f"headers[{index}]"
        if message := fault_in(name, value):
            found.append(("invalid_header", field, message))
        elif is_reserved(name):
            found.append(("reserved_header", field, "this name is ours"))
        elif lowered.index(name.lower()) != index:
            found.append(("invalid_header", field, "this name is given twice"))
    return found


def _zulu(at: datetime) -> str:
    moment = at.astimezone(UTC).replace(tzinfo=None)
    digits = "milliseconds" if moment.microsecond >= 1_000 else "seconds"
    return moment.isoformat(timespec=digits) + "Z"
