"""What an actor's decorator may say; anything else is refused when the file is read, by the actor's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from middleware.failures import Backoff, Schedule
from middleware.periodic import Cron

MAX_BATCH = 10_000
MAX_TIME_LIMIT_S = 86_400
ARGUMENTS = ("event_id", "subject")


def faults(
    *,
    batch: Any = 1,
    time_limit_s: Any = None,
    backoff: Any = None,
    throws: Any = (),
    periodic: Any = None,
    unique: Any = None,
    argument: Any = "event_id",
) -> Iterator[str]:
    """What is wrong with a declaration, a sentence each."""
    if not isinstance(batch, int) or isinstance(batch, bool) or not 1 <= batch <= MAX_BATCH:
        yield f"batch={batch!r} is not a number from 1 to {MAX_BATCH:,}"
    if time_limit_s is not None and not (
        isinstance(time_limit_s, int | float) and 0 < time_limit_s <= MAX_TIME_LIMIT_S
    ):
        yield f"time_limit_s={time_limit_s!r} is not a number of seconds above 0, at most {MAX_TIME_LIMIT_S:,}"
    if backoff is not None and not isinstance(backoff, Backoff | Schedule):
        yield f"backoff={backoff!r} is neither a Backoff nor a Schedule"
    if not isinstance(throws, tuple) or not all(
        isinstance(each, type) and issubclass(each, BaseException) for each in throws
    ):
        yield f"throws={throws!r} is not a tuple of exceptions"
    if periodic is not None and not isinstance(periodic, Cron):
        yield f"periodic={periodic!r} is not a cron(…)"
    if unique not in (None, "args"):
        yield f"unique={unique!r} is not 'args'"
    if argument not in ARGUMENTS:
        yield f"argument={argument!r} is not one of {', '.join(ARGUMENTS)}"
