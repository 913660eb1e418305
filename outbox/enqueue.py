"""Putting jobs in: one statement in the caller's transaction for any number of them, and who was first."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from typing import Any, Literal

from psycopg.errors import UniqueViolation

from outbox.db import AnyConnection, can_retract, retractable, rows, sql
from outbox.newjob import MAX_INTEGER, BadJob, NewJob, check
from outbox.payload import MAX_ARGUMENTS_BYTES, BadPayload, encode, encode_each

#: So many are first tried as if none of their ids were there: to look for each beforehand is a quarter of the work.
MANY = 500
_LOOK_FIRST = "ON CONFLICT DO NOTHING"
#: All messages of one call: as jsonb, at most six times the text, they must stay below its 256 MiB.
MAX_CALL_BYTES = 41_943_040


@dataclass(slots=True)
class Enqueued:
    """The answer: the job's *id*; *duplicate_of* names the unfinished job that was there first, else None."""

    id: str
    duplicate_of: str | None = None

    @property
    def inserted(self) -> bool:
        return self.duplicate_of is None


def enqueue(conn: AnyConnection, job: NewJob) -> Enqueued:
    """Add one job in the caller's transaction; never commits. Raises BadJob naming the fault, and writes nothing then.

    *conn* is a psycopg 3, psycopg2 or SQLAlchemy raw connection. An id or unique key that is there already changes
    nothing: the answer says which job was first.
    """
    return enqueue_many(conn, [job])[0]


def enqueue_many(conn: AnyConnection, new: Sequence[NewJob]) -> list[Enqueued]:
    """Add jobs, up to 40 MiB of them, in one statement; the answers in the order given. Else as `enqueue`."""
    if not new:
        return []
    given = _given(new, check(new))
    statement = sql(__file__, "enqueue")
    if len(new) >= MANY and not any(job.unique_key for job in new) and can_retract(conn):
        with suppress(UniqueViolation), retractable(conn):
            rows(conn, statement.replace(_LOOK_FIRST, ""), given)
            return [Enqueued(job.id) for job in new]
    [(count, inserted)] = rows(conn, statement, given)
    if count == len(new):
        return [Enqueued(job.id) for job in new]
    return _answers(conn, new, set(inserted.split()))


def unique_by_args(actor: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The unique key of *actor* with these arguments: its name and a hash of them as JSON, names in order.

    A tuple equals a list; an argument given by name differs from the same one given by place, as 1 does from 1.0.
    Raises BadJob as `enqueue` does.
    """
    job = NewJob(queue="", actor=actor)
    given = [json.loads(_encoded(job, *part)) for part in (("args", args), ("kwargs", kwargs))]
    canonical = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return f"{actor}:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _given(new: Sequence[NewJob], kinds: Collection[NewJob]) -> dict[str, str | None]:
    """The statement's parameters, each one text: no driver is slow at those."""
    if any(job.unique_key for job in new):
        # One order of keys for everybody, or two bulk inserts could wait for each other.
        new = sorted(new, key=lambda job: job.unique_key or "")
    alike, own = _columns(new, kinds)
    return {
        **{name: None if value is None else str(value) for name, value in alike.items()},
        "own": json.dumps(own),
        "messages": _messages(new),
        "count": str(len(new)),
    }


#: What jobs of one actor mostly have in common. One and True are alike to Python, but not to PostgreSQL.
_ALIKE: dict[str, type] = {
    "priority": int,
    "delay_s": float,
    "max_attempts": int,
    "limit_key": str,
    "limit": int,
    "rate_per_s": float,
    "rate_burst": int,
}
_OWN: dict[str, type] = {"unique_key": str, "event_id": str}
_alike = attrgetter(*_ALIKE)


def _columns(new: Sequence[NewJob], kinds: Collection[NewJob]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The columns that are alike in all of *new*, and for each job those that are not; empty when there are none."""
    own = {name: kind for name, kind in _OWN.items() if any(getattr(job, name) is not None for job in new)}
    same = len(set(map(_alike, kinds))) == 1
    own |= {} if same else _ALIKE
    alike = _values(new[0], _ALIKE) if same else dict.fromkeys(_ALIKE)
    return alike, [_values(job, own) for job in new] if own else []


def _values(job: NewJob, kinds: dict[str, type]) -> dict[str, Any]:
    values = {name: None if (value := getattr(job, name)) is None else kind(value) for name, kind in kinds.items()}
    if values.get("rate_per_s") is not None and values["rate_burst"] is None:
        values["rate_burst"] = max(1, min(ceil(job.rate_per_s or 0), MAX_INTEGER))
    return values


def _messages(new: Sequence[NewJob]) -> str:
    """All messages as one JSON array, in Dramatiq's own format, so that any of its tools reads the rows."""
    args, kwargs, options = (_encode_all(new, name) for name in ("args", "kwargs", "options"))
    if 4 * sum(max(map(len, texts)) for texts in (args, kwargs, options)) > MAX_ARGUMENTS_BYTES:
        _refuse_large(new, args, kwargs, options)
    by_actor = {job.actor: job for job in new}
    begin = {actor: f'","actor_name":{_encoded(job, "actor", actor)},"args":' for actor, job in by_actor.items()}
    end = f'","message_timestamp":{int(time.time() * 1000)}}}'
    messages = ",".join(
        f'{{"queue_name":"{job.queue}{begin[job.actor]}{args},"kwargs":{kwargs},"options":{options},"message_id":"{job.id}{end}'
        for job, args, kwargs, options in zip(new, args, kwargs, options, strict=True)
    )
    if len(messages) > MAX_CALL_BYTES // 4 and (size := len(messages.encode())) > MAX_CALL_BYTES:
        raise BadJob(f"{len(new):,} jobs of {size:,} bytes in one call, at most {MAX_CALL_BYTES:,} are allowed")
    return f"[{messages}]"


def _encode_all(new: Sequence[NewJob], name: Literal["args", "kwargs", "options"]) -> list[str]:
    empty: Any = () if name == "args" else {}
    values = [getattr(job, name) or empty for job in new]
    if not any(values):
        return [encode(empty, where=name)] * len(values)
    return encode_each(values) or [_encoded(job, name, value) for job, value in zip(new, values, strict=True)]


def _encoded(job: NewJob, name: str, value: Any) -> str:
    try:
        return encode(value, where=name)
    except BadPayload as fault:
        raise BadJob(f"{job.actor}: {fault}") from None


def _refuse_large(new: Sequence[NewJob], args: Sequence[str], kwargs: Sequence[str], options: Sequence[str]) -> None:
    for job, args_text, kwargs_text, options_text in zip(new, args, kwargs, options, strict=True):
        for what, text in (("args and kwargs", args_text + kwargs_text), ("options", options_text)):
            if (size := len(text.encode())) > MAX_ARGUMENTS_BYTES:
                raise BadJob(f"{job.actor}: {what}: {size:,} bytes, at most {MAX_ARGUMENTS_BYTES:,} are allowed")


def _answers(conn: AnyConnection, new: Sequence[NewJob], inserted: set[str]) -> list[Enqueued]:
    """What became of each, when not all were *inserted*."""
    answers = [Enqueued(job.id) for job in new]
    missed = []
    for place, job in enumerate(new):
        # The second of two with one id in one call was not.
        inserted.remove(job.id.lower()) if job.id.lower() in inserted else missed.append(place)
    first = _find_duplicates(conn, [new[place] for place in missed])
    again = []
    for place in missed:
        answers[place].duplicate_of = first[new[place].id.lower()]
        if not answers[place].duplicate_of:
            again.append(place)
    # A key whose holder ended between the insert and the look-up is free again: those go once more.
    for place, answer in zip(again, enqueue_many(conn, [new[place] for place in again]), strict=True):
        answers[place] = answer
    return answers


def _find_duplicates(conn: AnyConnection, missed: Sequence[NewJob]) -> dict[str, str | None]:
    """Who was there first, by the id of who came second."""
    own = [{"id": job.id, "unique_key": job.unique_key} for job in missed]
    return dict(rows(conn, sql(__file__, "find_duplicates"), {"missed": json.dumps(own)}))
