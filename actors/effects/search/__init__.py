"""Search as the rest of the house knows it: one small interface, two engines, and nobody asks which.

`postgres.py` is the full-text index in the database, `meilisearch.py` a server (specs/integrations.md 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

MAX_TITLE = 1_000
MAX_BODY = 200_000
MAX_TAGS = 100
MAX_TAG = 100
MAX_LIMIT = 100
MAX_OFFSET = 1_000

_ID = re.compile(r"[A-Za-z0-9_-]{1,511}")


class Transient(Exception):
    """The engine cannot do it now; the same call may work later. Every call may be repeated."""


class Throttled(Transient):
    """The engine asks to be left alone for *after_s* seconds."""

    def __init__(self, message: str, after_s: float) -> None:
        super().__init__(message)
        self.after_s = after_s


class Misconfigured(Exception):
    """Address, key or index are wrong: only a person can mend it, nothing is lost meanwhile."""


class Permanent(Exception):
    """The engine will never accept this."""


class Refused(Permanent):
    """At least one of the documents given is at fault; the others would be accepted without it."""


class MissingIndex(Transient):
    """The engine has no index yet: `ensure`, then once more."""


@dataclass(frozen=True)
class Document:
    """What is searched; made by `document`, which cuts and cleans. *truncated*: not all of it is."""

    id: str
    kind: str
    title: str
    body: str
    tags: tuple[str, ...]
    lang: str
    updated_at: datetime
    version: int
    truncated: bool = False


@dataclass(frozen=True)
class Receipt:
    """The engine took it. *task* None: done already; else ask `settle`. *rejected*: refused ids and why."""

    task: int | None = None
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Waiting:
    pass


@dataclass(frozen=True)
class Failed:
    """The task ended without effect. *error* is what an answer with this code would have raised."""

    code: str
    error: Transient | Permanent | Misconfigured


@dataclass(frozen=True)
class Hit:
    id: str
    score: float


@dataclass(frozen=True)
class Hits:
    engine: str
    hits: tuple[Hit, ...] = ()


class Search(Protocol):
    """An engine. Every call raises only Transient, Permanent or Misconfigured, and NetworkInTransaction."""

    engine: str

    def ensure(self) -> None:
        """Make index and settings what they should be; changes nothing when they are."""

    def upsert(self, documents: Sequence[Document], *, job: str = "") -> Receipt:
        """Put *documents* in, each in place of the one with its id. Raises Refused when one is at fault."""

    def delete(self, ids: Sequence[str], *, job: str = "") -> Receipt:
        """Take *ids* out; unknown ones are no error."""

    def settle(self, receipt: Receipt) -> Done | Waiting | Failed:
        """What became of it, without waiting."""

    def search(
        self,
        text: str,
        *,
        limit: int = 20,
        offset: int = 0,
        kind: str | None = None,
        lang: str | None = None,
        tag: str | None = None,
    ) -> Hits:
        """Best first, within 2 s; every word must match, the last may go on.

        Raises ValueError for a *limit* outside 1-100 or an *offset* above 1,000.
        """

    def count(self) -> int:
        """How many documents the index holds."""

    def health(self) -> None:
        """Return when the engine answers; raise what keeps it from working."""


def document(
    id: str,
    *,
    kind: str,
    title: str,
    body: str,
    tags: Sequence[str],
    lang: str,
    updated_at: datetime,
    version: int,
) -> Document:
    """A document within the limits of the index: longer texts are cut, what cannot be stored is replaced."""
    kept = tuple(_clean(tag)[:MAX_TAG] for tag in tags[:MAX_TAGS])
    cut = len(title) > MAX_TITLE or len(body) > MAX_BODY or kept != tuple(tags)
    return Document(
        id,
        _clean(kind),
        _clean(title[:MAX_TITLE]),
        _clean(body[:MAX_BODY]),
        kept,
        _clean(lang),
        updated_at,
        version,
        cut,
    )


def _clean(text: str) -> str:
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def check_ids(ids: Sequence[str]) -> None:
    """Raise Refused for an id that an engine could take for something else."""
    for id in ids:
        if not _ID.fullmatch(id):
            raise Refused(f"invalid_document_id: {id[:100]!r} is not 1 to 511 of A-Z a-z 0-9 _ -")


def check_page(limit: int, offset: int) -> None:
    """Raise ValueError for a page outside what every engine can serve."""
    if not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit is {limit}, but must be 1 to {MAX_LIMIT}")
    if not 0 <= offset <= MAX_OFFSET:
        raise ValueError(f"offset is {offset}, but must be 0 to {MAX_OFFSET:,}")
