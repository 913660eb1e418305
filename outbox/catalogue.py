"""The declared event types: what may be recorded, and what may leave the house."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*){1,4}")


class Exposure(StrEnum):
    """INTERNAL (the default) never leaves; WEBHOOK types are sent to the endpoints that ask for them."""

    INTERNAL = "internal"
    WEBHOOK = "webhook"


INTERNAL = Exposure.INTERNAL
WEBHOOK = Exposure.WEBHOOK


@dataclass(frozen=True)
class EventType:
    """One kind of fact. *name*: 2-5 segments joined by dots; *subject*: what its subject names, for people."""

    name: str
    description: str
    subject: str
    exposure: Exposure = INTERNAL


_types: dict[str, EventType] = {}


def declare(event_type: EventType) -> EventType:
    """Add *event_type* to the catalogue. Raises ValueError for a malformed name and for one declared twice."""
    if len(event_type.name) > 128 or not _NAME.fullmatch(event_type.name):
        raise ValueError(f"event type {event_type.name!r}: 2 to 5 segments [a-z][a-z0-9_]* joined by dots")
    if event_type.name in _types:
        raise ValueError(f"event type {event_type.name} is declared twice")
    _types[event_type.name] = event_type
    return event_type


def declared() -> list[EventType]:
    return sorted(_types.values(), key=lambda event_type: event_type.name)


def find(name: str) -> EventType:
    """The type called *name*. Raises ValueError when it is not declared."""
    if name not in _types:
        raise ValueError(f"event type {name!r} is not declared; declare it with outbox.catalogue.declare")
    return _types[name]


def matches(glob: str, name: str) -> bool:
    """Whether *glob* covers *name*: `*` is exactly one segment, a last `**` one or more; whole segments, case kept."""
    wanted, given = glob.split("."), name.split(".")
    if wanted[-1] == "**":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else []
    return (
        bool(given or not wanted)
        and len(wanted) == len(given)
        and all(pattern in ("*", segment) for pattern, segment in zip(wanted, given, strict=True))
    )


def covered(glob: str, types: Iterable[EventType]) -> list[EventType]:
    """The *types* a subscription's *glob* covers; a lone `*` covers every WEBHOOK type (specs/webhooks.md 1)."""
    if glob == "*":
        return [event_type for event_type in types if event_type.exposure is WEBHOOK]
    return [event_type for event_type in types if matches(glob, event_type.name)]
