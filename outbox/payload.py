"""What may travel as JSON: encoded once, refused at the door with the path of the fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

#: Arguments of a job, encoded (specs/queue.md 2).
MAX_ARGUMENTS_BYTES = 1_048_576

_BETWEEN = ',"\\u0000",'


class BadPayload(ValueError):
    """A value that PostgreSQL's jsonb cannot hold or that is too large; the text names its path."""


_to_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


def encode(value: Any, *, where: str, max_bytes: int = MAX_ARGUMENTS_BYTES) -> str:
    """*value* as compact JSON text. Tuples become lists and integer keys strings.

    Raises BadPayload naming the path below *where*, as in `args[0].price`, for NUL, lone surrogates, NaN, infinities,
    bytes, sets, Decimal, dates and anything else JSON has no form for, and above *max_bytes* of UTF-8.
    """
    try:
        text = _to_json(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError):
        raise BadPayload(next(_faults(value, where, 0), f"{where}: not JSON")) from None
    if "\\u0000" in text and (fault := next(_faults(value, where, 0), None)):
        raise BadPayload(fault)
    if size > max_bytes:
        raise BadPayload(f"{where}: {size:,} bytes as JSON, at most {max_bytes:,} are allowed")
    return text


def encode_each(values: Sequence[Any]) -> list[str] | None:
    """The JSON text of each of *values*, by one call of the encoder; None when `encode` has to look at each of them.

    Between the values stands what none of them may contain: a NUL.
    """
    try:
        text = _to_json([part for value in values for part in (value, "\0")])
        text.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    if text.count("\\u0000") != len(values):
        return None
    return text[1 : -len(_BETWEEN)].split(_BETWEEN)


def _faults(value: Any, where: str, depth: int) -> Iterator[str]:
    if depth > 200:
        yield f"{where}: nested deeper than 200 levels"
        return
    match value:
        case None | bool() | int():
            return
        case str():
            if reason := _text_fault(value):
                yield f"{where}: {reason}"
        case float():
            if value != value or value in (float("inf"), float("-inf")):
                yield f"{where}: {value} has no form in JSON"
        case dict():
            for key, item in value.items():
                yield from _key_faults(key, where)
                yield from _faults(item, f"{where}.{_shown(key)}", depth + 1)
        case list() | tuple():
            for index, item in enumerate(value):
                yield from _faults(item, f"{where}[{index}]", depth + 1)
        case _:
            yield f"{where}: {type(value).__name__} has no form in JSON"


def _key_faults(key: Any, where: str) -> Iterator[str]:
    if not isinstance(key, str | int | float | None):
        yield f"{where}: a {type(key).__name__} cannot be a key in JSON"
    elif isinstance(key, str) and (reason := _text_fault(key)):
        yield f"{where}.{_shown(key)}: {reason} in the key"
    elif isinstance(key, float):
        yield from _faults(key, f"{where}.{key}", 0)


def _text_fault(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character, which PostgreSQL cannot store"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "a lone surrogate, which is not Unicode text"
    return None


def _shown(key: Any) -> str:
    return str(key)[:40].encode("ascii", "backslashreplace").decode()


def clean(text: str, max_bytes: int) -> str:
    """*text* as PostgreSQL can store it (NUL and lone surrogates replaced), cut to *max_bytes* of UTF-8."""
    data = text.replace("\0", "�").encode("utf-8", "replace")
    return data[:max_bytes].decode("utf-8", "ignore")
