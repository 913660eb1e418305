"""Endpoints somebody wants: everything wrong with one is said at once, and nothing is called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from actors import envelope, signing
from actors.effects.addresses import BlockedAddress
from actors.effects.http import Client
from actors.effects.resolver import NameNotFound, NoCapacity
from actors.effects.urls import InvalidUrl, parse_url
from actors.envelope import Header
from outbox import catalogue

MAX_EVENT_TYPES = 50
MAX_DESCRIPTION = 200
SIGNING = ("v1", "v1a", "both")
EVERY_WEBHOOK_TYPE = "*"

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Draft:
    """An endpoint somebody wants. *secret* None: a new one is made."""

    url: str
    description: str = ""
    event_types: Sequence[str] = (EVERY_WEBHOOK_TYPE,)
    headers: Sequence[Header] = field(default=(), repr=False)
    signing: str = "v1"
    secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a draft; *message* names the rule, not the value."""

    code: str
    field: str
    message: str


class Refused(Exception):
    """A draft cannot become an endpoint; *problems* holds all reasons."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.message}" for problem in problems))
        self.problems = list(problems)


def check(draft: Draft, client: Client, *, allow_http: bool) -> tuple[Draft, str | None]:
    """Return the draft as it is to be stored, and a warning or None. Raises Refused with all problems.

    Looks the host up, so no transaction may be open.
    """
    url, found, warning = _check_url(draft.url, client, allow_http)
    problems = [
        *found,
        *_text_problems(draft),
        *_glob_problems(draft.event_types),
        *(Problem(*fault) for fault in envelope.faults(draft.headers)),
        *_secret_problems(draft),
    ]
    if problems:
        raise Refused(problems)
    types = tuple(dict.fromkeys(draft.event_types))
    headers = [(name, value.strip(" \t")) for name, value in draft.headers]
    return replace(draft, url=url, event_types=types, headers=headers), warning


def _check_url(url: str, client: Client, allow_http: bool) -> tuple[str, list[Problem], str | None]:
    try:
        target = parse_url(url, client.policy, allow_http=allow_http)
        client.look_up(target)
    except InvalidUrl as error:
        return url, [Problem("invalid_url", "url", str(error))], None
    except BlockedAddress:
        return url, [Problem("blocked_address", "url", "the host is where calls may not go")], None
    except (NameNotFound, NoCapacity):
        return target.url, [], "the host does not resolve now"
    return target.url, [], None


def _text_problems(draft: Draft) -> Iterable[Problem]:
    if len(draft.description) > MAX_DESCRIPTION or _CONTROL.search(draft.description):
        yield Problem("invalid_value", "description", f"at most {MAX_DESCRIPTION} characters, no control characters")
    if draft.signing not in SIGNING:
        yield Problem("invalid_value", "signing", f"one of {', '.join(SIGNING)}")


def _glob_problems(globs: Sequence[str]) -> Iterable[Problem]:
    if not 1 <= len(set(globs)) <= MAX_EVENT_TYPES:
        yield Problem("invalid_event_types", "event_types", f"1 to {MAX_EVENT_TYPES} event types")
    sent = [event_type for event_type in catalogue.declared() if event_type.exposure is catalogue.WEBHOOK]
    for index, glob in enumerate(globs):
        place = f"event_types[{index}]"
        if "**" in glob.split(".")[:-1]:
            yield Problem("invalid_event_types", place, "** stands only in the last place")
        elif not catalogue.covered(glob, sent):
            yield Problem("invalid_event_types", place, "no event type that is sent matches")


def _secret_problems(draft: Draft) -> Iterable[Problem]:
    if draft.secret is None:
        return
    try:
        signing.check_secret(draft.secret)
    except ValueError as error:
        yield Problem("invalid_secret", "secret", str(error))
        return
    if draft.signing == "both" or (draft.signing == "v1a") != draft.secret.startswith(signing.PRIVATE):
        yield Problem("invalid_secret", "secret", "v1 takes a whsec_ secret, v1a a whsk_ one; for both they are made")
