"""What a test is told: what was asked for, what ran, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outbox.jobs import Claim, Settlement


@dataclass(frozen=True)
class Asked:
    """A job that was asked for. *due_in_s* is below 0 when it is due; *state* is what has become of it."""

    id: str
    queue: str
    actor: str
    state: str
    args: list[Any]
    kwargs: dict[str, Any]
    priority: int
    unique_key: str | None
    limit_key: str | None
    due_in_s: float

    def __str__(self) -> str:
        due = f", due in {self.due_in_s:.0f} s" if self.due_in_s > 0 else ""
        return f"{called(self.actor, self.args, self.kwargs)} {self.state}{due}"


@dataclass(frozen=True)
class Ran:
    """An attempt that `drain` ran, and what became of its job.

    *outcome*: completed; retryable (failed, due again in *due_in_s*); snoozed or released, both without blame;
    discarded; cancelled; or a fault's: lost, when its end was refused, crashed, when it was never written. *error* is
    the text that the job's history has.
    """

    id: str
    actor: str
    args: list[Any]
    kwargs: dict[str, Any]
    attempt: int
    outcome: str
    failed: bool
    result: Any
    error: str | None
    due_in_s: float

    def __str__(self) -> str:
        said = f": {self.error}" if self.error else ""
        return f"{called(self.actor, self.args, self.kwargs)} {self.outcome}{said}"


class JobFailed(AssertionError):
    """A job failed in `drain(raising=True)`; what its actor raised is the cause."""


class Endless(AssertionError):
    """`drain` found no end: jobs enqueue one another, or fail and are due again at once."""


def ran(claim: Claim, settlement: Settlement, job: Mapping[str, Any] | None, outcome: str | None) -> Ran:
    """The attempt of *claim* that ended as *settlement* says; *job* as it is now, *outcome* when a fault decides it."""
    message = claim.message if isinstance(claim.message, dict) else {}
    return Ran(
        id=claim.id,
        actor=str(message.get("actor_name")),
        args=message.get("args") or [],
        kwargs=message.get("kwargs") or {},
        attempt=claim.attempt,
        outcome=outcome or _outcome(settlement, job),
        failed=settlement.outcome is not None,
        result=job["result"] if job and settlement.state == "done" else None,
        error=settlement.error if settlement.outcome else None,
        due_in_s=settlement.delay_s,
    )


def _outcome(settlement: Settlement, job: Mapping[str, Any] | None) -> str:
    if settlement.state != "queued":
        return str(job["state"]) if job else "gone"
    if settlement.outcome:
        return "retryable"
    return "snoozed" if settlement.snoozed_s else "released"


def called(actor: str, args: list[Any], kwargs: Mapping[str, Any]) -> str:
    """A job as a call is written."""
    return f"{actor}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"
