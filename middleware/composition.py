"""What follows a job, in Dramatiq's words: the next message of a pipeline, callbacks, the end of a group.

What follows is enqueued when the actor has returned, in a transaction of its own, before the job's end is written: it
may be enqueued again, and is there once, because its id follows from the job's. Where it cannot be enqueued, with the
database away say, the attempt has failed: the job runs again by its policy, and nothing of the chain is lost.
"""

from __future__ import annotations

import uuid
from typing import Any

import dramatiq
import structlog
from dramatiq.middleware import GroupCallbacks, Pipelines

from middleware.failures import describe
from middleware.rate_limits import RateLimits, Transaction, arrive

log = structlog.get_logger("posthouse.composition")

#: A group waits so long for its next member: longer than a discarded one is kept for somebody's retry.
GROUP_S = 30 * 86_400


class Composition(GroupCallbacks):
    """Dramatiq's `Pipelines`, `Callbacks` and `GroupCallbacks` in one, each thing once a job.

    A pipeline's messages have their ids from when it is made, so it runs once; to run it again, make it anew.
    `on_success` is sent when the job has completed, `on_failure` for each attempt that failed; one that is put back
    without blame (snoozed, released) calls nobody. A group counts a member once, however often it runs; a member that
    ends discarded leaves its group open, until it completes after somebody's retry.
    """

    def __init__(self, rate_limits: RateLimits, transaction: Transaction) -> None:
        super().__init__(rate_limits)
        self._transaction = transaction
        self._pipelines = Pipelines()

    @property
    def actor_options(self) -> set[str]:
        return {"on_success", "on_failure", "pipe_ignore", "pipe_target"}

    def after_process_message(
        self, broker: dramatiq.Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        own = message.actor.options
        if not message.options and "on_success" not in own and "on_failure" not in own:
            return
        if message.verdict.state != "done":
            self._failed(broker, message, exception)
            return
        try:
            self._pipelines.after_process_message(broker, message, result=result)
            self._succeeded(broker, message, result)
            self._arrived(broker, message)
        except Exception as error:  # noqa: BLE001 - whatever it was: a chain must not end without a word
            log.warning("job.not_followed", job_id=message.message_id, error=type(error).__name__)
            message.not_followed(error)

    def _failed(self, broker: dramatiq.Broker, message: Any, error: BaseException | None) -> None:
        if error is None or message.verdict.outcome is None:
            return
        if target := _target("on_failure", broker, message):
            name, (_, said, _) = type(error).__name__, describe(error)
            target.send(message.asdict(), {"type": name, "message": said.removeprefix(f"{name}: ")})

    def _succeeded(self, broker: dramatiq.Broker, message: Any, result: Any) -> None:
        if target := _target("on_success", broker, message):
            callback = target.message(message.asdict(), result)
            once = uuid.uuid5(uuid.UUID(message.message_id), target.actor_name)
            broker.enqueue(callback.copy(message_id=str(once)))

    def _arrived(self, broker: dramatiq.Broker, message: Any) -> None:
        group = message.options.get("group_completion_uuid")
        if not group:
            return
        with self._transaction() as conn:
            missing = arrive(conn, group, message.message_id, ttl_s=GROUP_S)
        if missing is None:
            log.error("group.gone", group=group, job_id=message.message_id)
        elif missing <= 0:
            # Each time the last one runs: they have ids of their own, and the first time may have failed.
            for callback in message.options.get("group_completion_callbacks") or ():
                broker.enqueue(dramatiq.Message(**callback))


def _target(option: str, broker: dramatiq.Broker, message: Any) -> dramatiq.Actor[Any, Any] | None:
    name = message.options.get(option) or message.actor.options.get(option)
    return broker.get_actor(name) if name else None
