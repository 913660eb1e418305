"""One claimed job, or one batch, from its row to its settlement: decode, hooks, the actor's call, the verdict.

Runs in a thread that Dramatiq's worker lends, a lent thread going from job to job: see `Errand`. Nothing that an actor
or a hook raises gets out of here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import dramatiq
import structlog
from dramatiq.broker import MessageProxy
from dramatiq.middleware import SkipMessage

from middleware import context
from middleware.failures import COMPLETED, Discard, Policy, Verdict, describe, judge, misjudged
from middleware.metrics import meter
from outbox.jobs import BadJob, Claim, Settlement
from outbox.payload import clean, encode

log = structlog.get_logger("posthouse.jobs")

MAX_RESULT_BYTES = 262_144
#: A process that does not know an actor puts its job back for so long.
UNKNOWN_ACTOR_S = 10.0
#: and says so once an actor in so long.
UNKNOWN_TOLD_S = 60.0
#: By `message.fail()` in a hook: dead, as with Dramatiq.
REFUSED = Verdict("rejected", outcome="discarded", reason="failed by middleware before it ran")


class UndecodableMessage(Exception):
    """The row's message is not one; the job is discarded with this reason."""


class UnknownActor(Exception):
    """This process has no actor of that name; another one may."""


class Actor(Protocol):
    actor_name: str
    policy: Policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Broker(Protocol):
    """What is needed of the broker: its actors, and its middleware's ears."""

    actors: Mapping[str, Any]

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None: ...
    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None: ...
    def emit_ending(self, signal: str, job: Any) -> None: ...


class Job(MessageProxy):
    """A claimed job on its way through the middleware. It prints as its name, never as its arguments."""

    def __init__(self, message: dramatiq.Message[Any], claim: Claim, actor: Actor) -> None:
        self.failed = False
        self._message = message
        self._exception: BaseException | None = None
        self.args, self.kwargs, self.options = message.args, message.kwargs, message.options
        self.actor_name = message.actor_name
        self.claim = claim
        self.actor = actor
        self.verdict = COMPLETED
        #: Middleware kept it from its actor; it is not told that it was processed.
        self.skipped = False

    @property
    def error(self) -> BaseException | None:
        """What the attempt ended with."""
        return self._exception

    def clear_exception(self) -> None:
        self._exception = None

    def not_followed(self, error: Exception) -> None:
        """What should follow could not be enqueued: the attempt has failed, for good when trying again cannot help."""
        final = isinstance(error, BadJob)
        self.stuff_exception(Discard(f"what follows cannot be enqueued: {error}") if final else error)
        self.verdict = _judged(self)

    def __str__(self) -> str:
        return f"{self.claim.id} of {self.actor.actor_name}"

    def __repr__(self) -> str:
        return f"<Job {self}>"

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def decode(claim: Claim, actors: Mapping[str, Any]) -> Job:
    """The job of *claim*. Raises UndecodableMessage or UnknownActor."""
    message = claim.message
    if not isinstance(message, dict):
        raise UndecodableMessage(f"a JSON object is wanted, not {type(message).__name__}")
    for name, kind in (("actor_name", str), ("args", list), ("kwargs", dict), ("options", dict)):
        if not isinstance(message.get(name), kind):
            raise UndecodableMessage(f"{name} is missing or not a {kind.__name__}")
    actor = actors.get(message["actor_name"])
    if actor is None:
        raise UnknownActor(message["actor_name"])
    options = message["options"]
    if "throws" in options:
        # A class does not travel in JSON; Dramatiq would take what is there for one and lose the thread.
        del options["throws"]
    return Job(
        dramatiq.Message(
            queue_name=claim.queue,
            actor_name=message["actor_name"],
            args=tuple(message["args"]),
            kwargs=message["kwargs"],
            options=options,
            message_id=claim.id,
            message_timestamp=message.get("message_timestamp", 0),
        ),
        claim,
        actor,
    )


def perform(broker: Broker, claim: Claim) -> Settlement:
    """Run the job of *claim* in this thread; how its attempt ended. Raises nothing."""
    try:
        job = decode(claim, broker.actors)
    except (UndecodableMessage, UnknownActor) as error:
        return refuse(claim, error)
    # In no variable of this frame: an exception would know it by way of its traceback, and both would stay.
    return conclude(broker, job, *_called(broker, job))


def conclude(broker: Broker, job: Job, error: BaseException | None, result: Any) -> Settlement:
    """Tell middleware and log how *job*'s call ended; what the ledger is to write."""
    job.stuff_exception(error)
    job.verdict = _judged(job)
    _heard(lambda: _told(broker, job, result))
    try:
        settlement = _settlement(job, result)
    except BaseException as fault:  # noqa: BLE001 - a job whose end cannot be told must end all the same
        job.verdict = misjudged(fault)
        settlement = _settlement(job, None)
    _tell(job, settlement)
    # An exception holds its frames, and they all that the actor had in hand.
    job.clear_exception()
    return settlement


def _called(broker: Broker, job: Job) -> tuple[BaseException | None, Any]:
    """What the actor raised, and what it returned."""
    context.enter(job)
    try:
        broker.emit_before("process_message", job)
        if not job.failed:
            return None, job.actor(*job.args, **job.kwargs)
    except SkipMessage:
        skipped(broker, job)
    except BaseException as error:  # noqa: BLE001 - whatever an actor raises is a failed attempt (specs/queue.md 3)
        return error, None
    finally:
        context.leave()
    return None, None


def skipped(broker: Broker, job: Job) -> None:
    """Middleware has kept *job* from its actor."""
    job.skipped = True
    _heard(lambda: broker.emit_after("skip_message", job))


def _heard(tell: Callable[[], None]) -> None:
    # The broker absorbs what its middleware raises, but for SystemExit and its like: that would cost the thread.
    try:
        tell()
    except BaseException:
        log.critical("middleware.panicked", exc_info=True)


def _judged(job: Job) -> Verdict:
    """What becomes of *job*, by its actor's policy and its own limits."""
    if job.error is None:
        return REFUSED if job.failed else COMPLETED
    try:
        policy = job.actor.policy
        if job.claim.max_attempts is not None:
            policy = replace(policy, max_attempts=job.claim.max_attempts)
        return judge(job.error, attempt=job.claim.attempt, snoozed_s=job.claim.snoozed_s, policy=policy)
    except BaseException as fault:  # noqa: BLE001 - as above
        return misjudged(fault)


def _told(broker: Broker, job: Job, result: Any) -> None:
    # As Dramatiq's own worker: middleware sees whether the message failed, then its acknowledgement.
    if job.verdict.state == "rejected":
        job.fail()
    if job.error is None:
        if not job.skipped:
            broker.emit_after("process_message", job, result=result)
    else:
        broker.emit_after("process_message", job, exception=job.error)
    broker.emit_ending("nack" if job.failed else "ack", job)


def _settlement(job: Job, result: Any) -> Settlement:
    """The verdict as the ledger writes it."""
    claim, verdict = job.claim, job.verdict
    if verdict.state == "done":
        return Settlement(claim.id, claim.token, "done", result=None if result is None else _stored(result))
    error_class, text, trace = describe(job.error) if job.error and verdict.outcome else (None, None, None)
    return Settlement(
        claim.id,
        claim.token,
        verdict.state,
        delay_s=verdict.delay_s,
        refund=0 if verdict.charged else 1,
        snoozed_s=verdict.snoozed_s,
        outcome=verdict.outcome,
        error_class=error_class,
        error=clean(verdict.reason, 8_192) if verdict.outcome else text,
        traceback=trace,
    )


def _stored(result: Any) -> str:
    try:
        return encode(result, where="result", max_bytes=MAX_RESULT_BYTES)
    except BaseException as fault:  # noqa: BLE001 - a value of the actor's own types may raise what it likes
        return encode({"error": f"the result could not be stored: {fault}"}, where="result")


def refuse(claim: Claim, error: UndecodableMessage | UnknownActor) -> Settlement:
    """A job that cannot run here: what nobody can read ends, what others may know goes back uncharged."""
    if isinstance(error, UnknownActor):
        _tell_unknown(str(error), claim)
        meter().unknown_actor(claim.queue, str(error))
        return Settlement(claim.id, claim.token, "queued", delay_s=UNKNOWN_ACTOR_S, refund=1)
    log.warning("job.undecodable", job_id=claim.id, queue=claim.queue)
    return Settlement(
        claim.id, claim.token, "rejected", outcome="discarded", error=f"undecodable: {error}", error_class=""
    )


_unknown_told: dict[str, float] = {}


def _tell_unknown(actor: str, claim: Claim) -> None:
    now = time.monotonic()
    if now - _unknown_told.get(actor, float("-inf")) >= UNKNOWN_TOLD_S:
        for name in [name for name, at in list(_unknown_told.items()) if now - at >= UNKNOWN_TOLD_S]:
            _unknown_told.pop(name, None)
        _unknown_told[actor] = now
        log.warning("job.actor_unknown", job_id=claim.id, queue=claim.queue, again_in_s=UNKNOWN_ACTOR_S)


def _tell(job: Job, settlement: Settlement) -> None:
    verdict = job.verdict
    if verdict.state == "done":
        return
    told = {"job_id": job.claim.id, "actor": job.actor.actor_name, "attempt": job.claim.attempt}
    if verdict.outcome:
        told |= {"outcome": verdict.outcome, "error_class": settlement.error_class}
    match verdict:
        case Verdict(state="rejected"):
            log.error("job.discarded", **told)
        case Verdict(outcome=None):
            log.info("job.put_back", **told, due_in_s=round(verdict.delay_s, 1))
        case _:
            log.warning("job.failed", **told, due_in_s=round(verdict.delay_s, 1))
