"""Batch actors: one call gets a list of jobs of its kind, and each of them has its own verdict, attempt and history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dramatiq.middleware import SkipMessage

from middleware import context
from middleware.failures import Discard, Snooze
from middleware.perform import Broker, Job, UndecodableMessage, UnknownActor, conclude, decode, refuse, skipped
from outbox.jobs import Claim, Settlement


class ItemFailed(Exception):
    """What `Item.fail` was told."""


class Item:
    """One job of a batch: its arguments, and where the actor says what became of it.

    An item of which nothing was said shares the call's own end: completed when the actor returns, failed with what it
    raises. What was said last holds, whatever happens to the others.
    """

    __slots__ = ("_error", "_job", "_result", "_said", "args", "kwargs")

    def __init__(self, job: Job) -> None:
        self.args, self.kwargs = job.args, job.kwargs
        self._job = job
        self._error: BaseException | None = None
        self._result: Any = None
        self._said = False

    @property
    def id(self) -> str:
        """The job's id."""
        return self._job.claim.id

    @property
    def attempt(self) -> int:
        """Which attempt at this job it is, from 1 on. From the second on a job comes alone."""
        return self._job.claim.attempt

    def complete(self, result: Any = None) -> None:
        """This one is done; *result* is stored as the job's."""
        self._said, self._error, self._result = True, None, result

    def fail(self, error: BaseException | str) -> None:
        """This attempt failed: tried again, alone, by the actor's policy."""
        self._say(error if isinstance(error, BaseException) else ItemFailed(error))

    def discard(self, reason: object) -> None:
        """Never again."""
        self._say(Discard(reason))

    def snooze(self, seconds: float) -> None:
        """Later, without blame. Raises ValueError for seconds that are no number."""
        self._say(Snooze(seconds))

    def _say(self, error: BaseException) -> None:
        self._said, self._error = True, error


def perform_batch(broker: Broker, claims: Sequence[Claim]) -> list[Settlement]:
    """Run the jobs of *claims*, all of one actor, in one call in this thread; how each attempt ended, in order."""
    settlements: dict[str, Settlement] = {}
    items = []
    for claim in claims:
        try:
            items.append(Item(decode(claim, broker.actors)))
        except (UndecodableMessage, UnknownActor) as error:
            settlements[claim.token] = refuse(claim, error)
    passed = [item for item in items if _announced(broker, item)]
    raised = _called(passed)
    for item in items:
        ended = item._error if item._said else raised
        settlements[item._job.claim.token] = conclude(broker, item._job, ended, item._result)
        item._error = None
    # An exception knows this frame by way of its traceback: as long as it is known here, both would stay.
    ended = raised = None
    return [settlements[claim.token] for claim in claims]


def _announced(broker: Broker, item: Item) -> bool:
    """Whether the middleware lets this one pass; one that is skipped is done."""
    try:
        broker.emit_before("process_message", item._job)
    except SkipMessage:
        skipped(broker, item._job)
        item.complete()
    except BaseException as error:  # noqa: BLE001 - as for a job alone
        item.fail(error)
    if item._job.failed:
        item.complete()
    return not item._said


def _called(items: list[Item]) -> BaseException | None:
    if not items:
        return None
    context.enter(items[0]._job)
    try:
        items[0]._job.actor(items)
    except BaseException as error:  # noqa: BLE001 - whatever an actor raises is a failed attempt (specs/queue.md 3)
        return error
    finally:
        context.leave()
    return None
