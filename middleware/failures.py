"""What an exception means for its job: `judge` decides, without I/O; the consumer writes it down."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from dramatiq.errors import Retry

from outbox.payload import clean

MIN_SNOOZE_S = 0.1
MAX_SNOOZE_S = 36_000
MAX_RETRY_S = 365 * 86_400
MAX_MESSAGE_BYTES = 8_192
MAX_TRACEBACK_BYTES = 32_768


class Snooze(Exception):
    """Later, without blame: due in *seconds* (0.1 s to 10 h), the attempt is not charged."""

    def __init__(self, seconds: float) -> None:
        if not math.isfinite(seconds):
            raise ValueError(f"cannot snooze for {seconds} s")
        super().__init__(f"snoozed for {seconds:g} s")
        self.seconds = seconds


class Discard(Exception):
    """Never again: the job ends discarded with *reason*."""

    def __init__(self, reason: object) -> None:
        super().__init__(reason)
        self.reason = str(reason)


class Released(BaseException):
    """The process is stopping: the job goes back, uncharged, for another process."""


class TimeLimitExceeded(BaseException):
    """The attempt took longer than its kind's time limit; raised in the actor, only there."""


@dataclass(frozen=True)
class Backoff:
    """Delay before the n-th retry: first_s × factor^(n-1), at most cap_s; jitter of 0 to +10 % comes on top."""

    first_s: float = 1
    factor: float = 2
    cap_s: float = 900

    def delay_s(self, failures: int) -> float:
        # The exponent is capped before the power: 100,000 attempts must not overflow, whatever the factor.
        try:
            return min(self.cap_s, self.first_s * self.factor ** min(max(failures, 1) - 1, 64))
        except OverflowError:
            return self.cap_s


@dataclass(frozen=True)
class Schedule:
    """Delays before the first, second, … retry in seconds; the last one repeats."""

    delays_s: Sequence[float]

    def __post_init__(self) -> None:
        if not self.delays_s:
            raise ValueError("a schedule has at least one delay")

    def delay_s(self, failures: int) -> float:
        return self.delays_s[min(max(failures, 1), len(self.delays_s)) - 1]


@dataclass(frozen=True)
class Policy:
    """How a kind of job fails: attempts in all, the delays between, what is final at once, how long it may snooze."""

    max_attempts: int = 10
    backoff: Backoff | Schedule = Backoff()
    throws: tuple[type[BaseException], ...] = ()
    max_snooze_s: float = 7 * 86_400


@dataclass(frozen=True)
class Verdict:
    """What becomes of the job: *state* done, queued or rejected. *outcome* None adds nothing to its history."""

    state: str
    delay_s: float = 0
    charged: bool = True
    snoozed_s: float = 0
    outcome: str | None = None
    reason: str = ""


COMPLETED = Verdict("done")
RELEASED = Verdict("queued", charged=False)


def judge(
    error: BaseException | None,
    *,
    attempt: int,
    snoozed_s: float,
    policy: Policy,
    jitter: float | None = None,
) -> Verdict:
    """The verdict on an attempt that returned (*error* None) or raised (specs/queue.md 3).

    *attempt* counts this one, *snoozed_s* is what the job has snoozed before, *jitter* a number in [0, 1).
    """
    match error:
        case None:
            return COMPLETED
        case Released():
            return RELEASED
        case Discard():
            return Verdict("rejected", outcome="discarded", reason=error.reason)
        case Snooze() if snoozed_s < policy.max_snooze_s:
            seconds = min(max(error.seconds, MIN_SNOOZE_S), MAX_SNOOZE_S)
            return Verdict("queued", delay_s=seconds, charged=False, snoozed_s=seconds)
        case TimeLimitExceeded():
            return _failure("timed out", str(error) or "time limit exceeded", attempt, policy, jitter)
        case Retry() if error.delay is not None and attempt < policy.max_attempts:
            delay_s = min(max(error.delay / 1000, 0), MAX_RETRY_S)
            return Verdict("queued", delay_s=delay_s, outcome="failed", reason=_said(error))
        case _ if policy.throws and isinstance(error, policy.throws):
            return Verdict("rejected", outcome="discarded", reason=_said(error))
        case _:
            return _failure("failed", _said(error), attempt, policy, jitter)


def misjudged(error: BaseException) -> Verdict:
    """What becomes of a job whose verdict could not be found or written down: it ends, with that as its reason."""
    return Verdict("rejected", outcome="failed", reason=f"the outcome could not be judged: {_said(error)}")


def _failure(outcome: str, reason: str, attempt: int, policy: Policy, jitter: float | None) -> Verdict:
    if attempt >= policy.max_attempts:
        return Verdict("rejected", outcome=outcome, reason=f"attempts exhausted ({attempt}): {reason}")
    delay = policy.backoff.delay_s(attempt)
    return Verdict("queued", delay_s=delay * (1 + 0.1 * _jitter(jitter)), outcome=outcome, reason=reason)


def _jitter(given: float | None) -> float:
    return random.random() if given is None else given


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - an actor's exception may fail even at being printed
        return type(error).__name__


def describe(error: BaseException) -> tuple[str, str, str]:
    """Class, message (8 KiB) and traceback without locals (32 KiB) of *error*, as PostgreSQL can store them."""
    try:
        trace = "".join(traceback.format_exception(error, limit=-40))
    except BaseException:  # noqa: BLE001 - likewise
        trace = ""
    return (
        clean(f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."), 200),
        clean(_said(error), MAX_MESSAGE_BYTES),
        clean(trace, MAX_TRACEBACK_BYTES),
    )
