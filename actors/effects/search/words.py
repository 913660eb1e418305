"""Text as the index knows it: normalised words, and the vector and query literals made of them.

The work is done here and not in SQL, so that what is found does not depend on the database's locale: in C
PostgreSQL's own `lower()` and text parser leave everything beyond ASCII alone (specs/integrations.md 4).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator

MAX_QUERY_BYTES = 512
MAX_QUERY_WORDS = 10

# PostgreSQL's tsvector allows so much: a word, all words with their positions, a position, positions a word.
MAX_WORD_BYTES = 2_046
MAX_VECTOR_BYTES = 1_048_575
MAX_POSITION = 16_383
MAX_POSITIONS = 255

_MARK = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
_WORD = re.compile(rf"[^\W_](?:[^\W_]|[{re.escape(_MARK)}])*")
_ACCENTED = re.compile(
    r"([a-z\u00df-\u02af\u0370-\u052f\u1c80-\u1c8f\u1d00-\u1d7f\u1e00-\u1fff\u2c60-\u2c7f"
    r"\ua640-\ua69f\ua720-\ua7ff])"
    r"[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff]+"
)
# Han, Kana, Hangul: written without spaces, or with words too long to be searched whole.
_CJK = re.compile(
    r"[\u1100-\u11ff\u3005-\u3007\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]+"
)


class TooManyWords(ValueError):
    """The text has more distinct words than one entry of the index can hold."""


def normalise(text: str) -> str:
    """Without width, case, and accents of Latin, Greek and Cyrillic letters: `ÉCOLE` and `ecole` are one."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", _ACCENTED.sub(r"\1", unicodedata.normalize("NFD", folded)))


def words(text: str) -> list[str]:
    """The runs of letters and digits of *text*, normalised; no quote and no operator survives."""
    return _WORD.findall(normalise(text))


def query_words(text: str) -> list[str]:
    """The words a search is made of: of the first 512 bytes, at most 10."""
    return words(text.encode("utf-8", "replace")[:MAX_QUERY_BYTES].decode("utf-8", "ignore"))[:MAX_QUERY_WORDS]


def query(text: str) -> str:
    """*text* as a tsquery literal: every word must be there, the last may go on; empty without any word."""
    terms = [term for word in query_words(text) for term in _query_terms(word)]
    if terms:
        terms[-1] = terms[-1].removesuffix(":*") + ":*"
    return " & ".join(terms)


def _query_terms(word: str) -> Iterator[str]:
    for part, is_cjk in _parts(word):
        if not is_cjk or len(part) == 1:
            yield f"'{part}':*" if is_cjk else f"'{part}'"
        else:
            yield from (f"'{part[at : at + 2]}'" for at in range(len(part) - 1))


def vector(title: str, tags: Iterable[str], body: str) -> str:
    """A tsvector literal: title weight A, tags B, body D. Too many words: the body is halved, up to 4 times.

    Raises TooManyWords when even that is not enough.
    """
    for halvings in range(5):
        places = _places(title, tags, body[: len(body) >> halvings])
        if _size(places) <= MAX_VECTOR_BYTES:
            return " ".join(f"'{term}':{','.join(at)}" for term, at in places.items())
    raise TooManyWords(f"more distinct words than fit into {MAX_VECTOR_BYTES:,} bytes, even after halving it 4 times")


def _places(title: str, tags: Iterable[str], body: str) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    position = 0
    for text, weight in ((title, "A"), *((tag, "B") for tag in tags), (body, "")):
        for term in _terms(text):
            position = min(position + 1, MAX_POSITION)
            at = places.setdefault(term, [])
            if len(at) < MAX_POSITIONS:
                at.append(f"{position}{weight}")
    return places


def _terms(text: str) -> Iterator[str]:
    for word in words(text):
        for part, is_cjk in _parts(word):
            if is_cjk:
                # Overlapping pairs, and the last character alone: one character is searched as a prefix.
                yield from (part[at : at + 2] for at in range(len(part)))
            elif len(part) * 4 <= MAX_WORD_BYTES or len(part.encode()) <= MAX_WORD_BYTES:
                yield part


def _parts(word: str) -> Iterator[tuple[str, bool]]:
    at = 0
    for run in _CJK.finditer(word) if not word.isascii() else ():
        if run.start() > at:
            yield word[at : run.start()], False
        yield run[0], True
        at = run.end()
    if at < len(word):
        yield word[at:], False


def _size(places: dict[str, list[str]]) -> int:
    # As PostgreSQL counts it: the word, aligned to 2, a count of 2 bytes, and 2 bytes a position.
    size = 0
    for term, at in places.items():
        length = len(term.encode())
        size += length + length % 2 + 2 + 2 * len(at)
    return size


def snippet(text: str, query_text: str, width: int = 160) -> str:
    """About *width* characters of *text*, on one line, around the first word found; plain, not escaped."""
    start = max(_first_hit(text, query_text) - width // 3, 0)
    cut = "".join(c if c.isprintable() else " " for c in text[start : start + width])
    return ("…" if start else "") + " ".join(cut.split()) + ("…" if start + width < len(text) else "")


def _first_hit(text: str, query_text: str) -> int:
    parts = [part for word in query_words(query_text) for part in _parts(word)]
    heads = tuple(part for part, is_cjk in parts if not is_cjk)
    inner = [part for part, is_cjk in parts if is_cjk]
    for match in _WORD.finditer(text):
        word = normalise(match[0])
        if word.startswith(heads):
            return match.start()
        if found := next((part for part in inner if part in word), None):
            return match.start() + word.index(found)
    return 0
