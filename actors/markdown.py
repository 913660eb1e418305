"""One Markdown file with front matter, as a document; or the reason why it cannot be one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

MAX_FRONT_MATTER = 65_536
MAX_TITLE = 1_000

_ID = re.compile(r"[A-Za-z0-9_-]{1,511}")
_FRONT_MATTER = re.compile(r"---[ \t]*\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^ {0,3}#[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Unreadable(Exception):
    """The file cannot become a document; the text says why."""


@dataclass(frozen=True)
class Page:
    """A document as a file says it. *sha256* is of the file's bytes."""

    id: str
    source: str
    kind: str
    title: str
    body: str
    tags: tuple[str, ...]
    lang: str
    visible: bool
    sha256: str


def parse(data: bytes, source: str) -> Page:
    """The document in *data*, the content of the file at the relative path *source*. Raises Unreadable."""
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise Unreadable(f"not UTF-8 (byte {error.start:,})") from None
    front, body = _split(text)
    return Page(
        id=document_id(_word(front, "id") or source),
        source=source,
        kind=_word(front, "kind") or "page",
        title=_title(front, body, source),
        body=_clean(body),
        tags=_tags(front),
        lang=_word(front, "lang"),
        visible=_flag(front, "visible", default=True),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def document_id(subject: str) -> str:
    """*subject* where it may be an id of the index, else its SHA-256 in hex (specs/integrations.md 1)."""
    return subject if _ID.fullmatch(subject) else hashlib.sha256(subject.encode()).hexdigest()


def _split(text: str) -> tuple[Mapping[str, Any], str]:
    if not re.match(r"---[ \t]*(\n|\Z)", text):
        return {}, text
    found = _FRONT_MATTER.match(text)
    if found is None:
        raise Unreadable("front matter begins with --- but does not end")
    if len(found[1]) > MAX_FRONT_MATTER:
        raise Unreadable(f"front matter is longer than {MAX_FRONT_MATTER:,} characters")
    try:
        front = yaml.load(found[1], _LOADER) or {}  # noqa: S506 - the safe loader, in C where there is one
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unreadable(f"front matter is not YAML: {_first_line(error)}") from None
    if not isinstance(front, Mapping):
        raise Unreadable("front matter is not a list of names and values")
    return front, text[found.end() :]


def _first_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    said = getattr(error, "problem", None) or str(error) or type(error).__name__
    return f"{said} (line {mark.line + 2})" if mark else str(said).splitlines()[0]


def _title(front: Mapping[str, Any], body: str, source: str) -> str:
    if title := _word(front, "title"):
        return title[:MAX_TITLE]
    heading = _HEADING.search(_FENCED.sub("", body))
    return " ".join(_clean(heading[1] if heading else PurePosixPath(source).stem).split())[:MAX_TITLE]


def _word(front: Mapping[str, Any], name: str) -> str:
    match front.get(name):
        case None:
            return ""
        case bool() | list() | dict() | set() | bytes():
            raise Unreadable(f"front matter: {name} must be text")
        case value:
            return " ".join(_clean(str(value)).split())


def _tags(front: Mapping[str, Any]) -> tuple[str, ...]:
    match front.get("tags"):
        case None:
            return ()
        case str(text):
            given: list[Any] = text.split(",")
        case list(items) if all(isinstance(item, str | int | float) for item in items):
            given = items
        case _:
            raise Unreadable("front matter: tags must be a list of words")
    return tuple(dict.fromkeys(tag for item in given if (tag := " ".join(_clean(str(item)).split()))))


def _flag(front: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = front.get(name, default)
    if not isinstance(value, bool):
        raise Unreadable(f"front matter: {name} must be true or false")
    return value


def _clean(text: str) -> str:
    # NUL and, from a YAML escape, half of a surrogate pair: PostgreSQL stores neither.
    return text.replace("\0", "").encode("utf-8", "replace").decode()
