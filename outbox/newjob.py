"""A job that is to be: what it says, and what is refused of that.

Made for batches: a check is one look at all the jobs. Only when it finds something odd are they taken one by one,
to name the fault.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, cast

MAX_DELAY_S = 365 * 86_400

#: Less than one a year or more than a worker can count is a mistake, and sums of them leave what a timestamp can hold.
MIN_RATE_PER_S, MAX_RATE_PER_S = 1e-8, 1e9
MAX_INTEGER = 2**31 - 1
_KEY_BYTES = 512
_UUIDS = re.compile(r"(?:[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12},)*")
_UUID_LENGTH = 37
_QUEUE_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9._-]{0,39}")


class BadJob(ValueError):
    """A job that cannot be enqueued; nothing was written."""


_IDS = 128
_ids: list[str] = []
# Two processes of one fork would hand out the same ones.
os.register_at_fork(after_in_child=_ids.clear)


def new_id() -> str:
    """A random id that begins with the time it was made at (RFC 9562, version 7), so that new rows lie together."""
    try:
        return _ids.pop()
    except IndexError:
        now, random = f"{time.time_ns() // 1_000_000:012x}", os.urandom(_IDS * 8).hex()
        start = f"{now[:8]}-{now[8:]}-7{os.urandom(2).hex()[:3]}-8"
        _ids.extend(f"{start}{random[at : at + 3]}-{random[at + 3 : at + 15]}" for at in range(0, _IDS * 16, 16))
        return new_id()


#: What a job without them has; an empty dict for each would be most of what making a job costs.
NOTHING = cast(dict[str, Any], MappingProxyType({}))


@dataclass(slots=True, kw_only=True)
class NewJob:
    """What is to be done: *actor* on *queue* with JSON arguments, due *delay_s* from the commit's clock.

    *priority*: lower goes first. *max_attempts* None: the actor's own. *unique_key*: at most one unfinished job has it.
    *limit*: of the jobs with this *limit_key*, at most so many run at once; *rate_per_s*: at most so many start, with
    *rate_burst* (None: a second's worth) at once after a rest. Treat it as frozen; it is not for the time that takes.
    """

    queue: str
    actor: str
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = field(default_factory=lambda: NOTHING)
    options: dict[str, Any] = field(default_factory=lambda: NOTHING)
    priority: int = 0
    delay_s: float = 0
    max_attempts: int | None = None
    unique_key: str | None = None
    event_id: str | None = None
    limit_key: str | None = None
    limit: int | None = None
    rate_per_s: float | None = None
    rate_burst: int | None = None
    id: str = field(default_factory=new_id)


def check(new: Sequence[NewJob]) -> Collection[NewJob]:
    """One job of each kind. Raises BadJob naming the first fault; arguments are looked at when they are encoded."""
    try:
        kinds = {_kind(job): job for job in new}
    except TypeError:
        kinds = {}
    if not kinds or not _look_fine(new, kinds.values()):
        for job in new:
            for fault in _faults(job):
                raise BadJob(f"{job.actor}: {fault}")
    return kinds.values() or new


_kind = attrgetter(
    "queue", "actor", "priority", "delay_s", "max_attempts", "limit_key", "limit", "rate_per_s", "rate_burst"
)


def _look_fine(new: Sequence[NewJob], kinds: Collection[NewJob]) -> bool:
    """Whether one of each kind, and what differs from job to job, are as they should be."""
    return (
        not any(fault for job in kinds for fault in _faults(job))
        and _are_uuids([job.id for job in new])
        and _are_uuids([job.event_id for job in new if job.event_id is not None])
        and all(_is_key(job.unique_key) for job in new if job.unique_key is not None)
        and {type(job.args) for job in new} <= {list, tuple}
        and {type(given) for job in new for given in (job.kwargs, job.options)} <= {dict, MappingProxyType}
        and all(isinstance(name, str) for job in new for name in job.kwargs)
    )


def _faults(job: Any) -> Iterator[str]:
    if not isinstance(job.queue, str) or not _QUEUE_NAME.fullmatch(job.queue):
        yield f"queue {job.queue!r}: a letter or _, then letters, digits, . _ -, at most 40 bytes"
    if not isinstance(job.actor, str) or not job.actor:
        yield f"actor {job.actor!r} is not a name"
    if not is_uuid(job.id):
        yield f"id {job.id!r} is not a uuid"
    if job.event_id is not None and not is_uuid(job.event_id):
        yield f"event_id {job.event_id!r} is not a uuid"
    if not _is_integer(job.priority, -MAX_INTEGER, MAX_INTEGER):
        yield f"priority {job.priority!r} is not an integer of 32 bits"
    if job.max_attempts is not None and not _is_integer(job.max_attempts, 1, MAX_INTEGER):
        yield f"max_attempts {job.max_attempts!r} is not an integer of 32 bits from 1 on"
    if not isinstance(job.delay_s, int | float) or not 0 <= job.delay_s <= MAX_DELAY_S:
        yield f"delay_s {job.delay_s!r} does not lie between 0 and 365 days"
    if job.unique_key is not None and not _is_key(job.unique_key):
        yield f"unique_key {job.unique_key!r} is not a text of 1 to 512 bytes"
    yield from _limit_faults(job)
    if not isinstance(job.args, list | tuple):
        yield f"args is not a list but {type(job.args).__name__}"
    if not isinstance(job.kwargs, dict | MappingProxyType) or not all(isinstance(name, str) for name in job.kwargs):
        yield "kwargs is not a dict with names for keys"
    if not isinstance(job.options, dict | MappingProxyType):
        yield f"options is not a dict but {type(job.options).__name__}"


def _limit_faults(job: Any) -> Iterator[str]:
    limited = job.limit is not None or job.rate_per_s is not None
    if job.limit_key is None and limited:
        yield "limit and rate_per_s need a limit_key"
    if job.limit_key is not None and not limited:
        yield "limit_key needs a limit or a rate_per_s"
    if job.limit_key is not None and not _is_key(job.limit_key):
        yield f"limit_key {job.limit_key!r} is not a text of 1 to 512 bytes"
    if job.limit is not None and not _is_integer(job.limit, 1, MAX_INTEGER):
        yield f"limit {job.limit!r} is not an integer of 32 bits from 1 on"
    if job.rate_per_s is not None and not _is_rate(job.rate_per_s):
        yield f"rate_per_s {job.rate_per_s!r} is not a number from {MIN_RATE_PER_S:g} to {MAX_RATE_PER_S:g}"
    if job.rate_burst is not None and not _is_integer(job.rate_burst, 1, MAX_INTEGER):
        yield f"rate_burst {job.rate_burst!r} is not an integer of 32 bits from 1 on"
    if job.rate_burst is not None and job.rate_per_s is None:
        yield "rate_burst needs a rate_per_s"


def _is_integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_RATE_PER_S <= value <= MAX_RATE_PER_S


def _is_key(value: object) -> bool:
    try:
        return isinstance(value, str) and "\0" not in value and 0 < len(value.encode()) <= _KEY_BYTES
    except UnicodeEncodeError:
        return False


def is_uuid(text: object) -> bool:
    return isinstance(text, str) and _are_uuids([text])


def _are_uuids(given: Sequence[Any]) -> bool:
    try:
        joined = ",".join([*given, ""])
    except TypeError:
        return False
    return len(joined) == _UUID_LENGTH * len(given) and bool(_UUIDS.fullmatch(joined))
