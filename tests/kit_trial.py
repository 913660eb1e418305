"""Actors that end in every way there is, alike under the test kit and in a worker process."""

import os
import signal
import time
from typing import Any

from dramatiq.errors import Retry

import settings
from broker import actor, install, transaction
from middleware import context, logs
from middleware.batches import Item
from middleware.failures import Backoff, Discard, Snooze
from outbox import catalogue

logs.configure("json")
broker = install(settings.load())
catalogue.declare(catalogue.EventType("kit.happened", "something happened", "a name"))
AT_ONCE = Backoff(first_s=0)


def attempt() -> int:
    """Which attempt this is."""
    job = context.current()
    return int(job.claim.attempt) if job else 0


@actor(name="kit.give", queue="quick", attempts=3)
def give(value: Any = None) -> Any:
    """Completes with what it was given."""
    return value


@actor(name="kit.odd", queue="quick", attempts=1)
def odd() -> Any:
    """Completes with what cannot be stored."""
    return {1, 2}


@actor(name="kit.flaky", queue="quick", attempts=5, backoff=Backoff(first_s=0.2, factor=1))
def flaky(failures: int) -> int:
    """Fails so often, then completes with its attempt."""
    if attempt() <= failures:
        raise ValueError(f"failure {attempt()}")
    return attempt()


@actor(name="kit.fail", queue="quick", attempts=3, backoff=AT_ONCE)
def fail(text: str) -> None:
    """Fails each time."""
    raise ValueError(text)


@actor(name="kit.raise", queue="quick", attempts=1)
def raise_(kind: str) -> None:
    """Raises what an actor should not."""
    raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt(), "NUL": ValueError("a\0b")}[kind]


@actor(name="kit.discard", queue="quick")
def discard(reason: str) -> None:
    """Gives up."""
    raise Discard(reason)


@actor(name="kit.throw", queue="quick", throws=(LookupError,))
def throw() -> None:
    """Raises what is final at once."""
    raise KeyError("k")


@actor(name="kit.retry", queue="quick")
def retry(delay_ms: int) -> str:
    """Asks for one more time, in Dramatiq's words."""
    if attempt() == 1:
        raise Retry("later", delay=delay_ms)
    return "retried"


@actor(name="kit.snooze", queue="quick", attempts=1)
def snooze(seconds: float) -> str:
    """Says later, once."""
    job = context.current()
    if job and job.claim.snoozed_s == 0:
        raise Snooze(seconds)
    return "woken"


@actor(name="kit.spin", queue="quick", attempts=1, time_limit_s=0.3)
def spin() -> None:
    """Never ends by itself."""
    while True:
        pass


@actor(name="kit.add", queue="quick", attempts=3)
def add(x: int, y: int) -> int:
    """For pipelines and groups."""
    return x + y


@actor(name="kit.after", queue="quick", attempts=1)
def after(message_data: dict[str, Any], what: Any) -> Any:
    """A callback."""
    return [message_data["actor_name"], what]


@actor(name="kit.heard", queue="quick", on="kit.happened", argument="subject")
def heard(name: str) -> str:
    """Says which event it heard of."""
    return name


@actor(name="kit.sort", queue="quick", batch=10, attempts=2, backoff=AT_ONCE)
def sort(items: list[Item]) -> None:
    """Each its own end."""
    for item in items:
        match item.args[0]:
            case "good":
                item.complete(item.attempt)
            case "bad":
                item.fail("bad")
            case "never":
                item.discard("never")


@actor(name="kit.pair", queue="quick", batch=2)
def pair(items: list[Item]) -> None:
    """Says how many came together."""
    for item in items:
        item.complete(len(items))


@actor(name="kit.perish", queue="quick", attempts=5)
def perish() -> str:
    """Takes a worker process with it at the first attempt; under the kit a fault does."""
    if attempt() == 1 and "TRIAL_PERISH" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@actor(name="kit.outlive", queue="quick", attempts=1)
def outlive() -> bool:
    """Has almost no lease left, and waits until it is renewed."""
    job = context.current()
    given = [job.claim.id if job else None]
    with transaction() as conn:
        conn.execute("UPDATE dramatiq.queue SET lease_until = now() + interval '1 s' WHERE message_id = %s", given)
    for _ in range(100):
        time.sleep(0.05)
        with transaction() as conn:
            query = "SELECT FROM dramatiq.queue WHERE message_id = %s AND lease_until > now() + interval '1.2 s'"
            if conn.execute(query, given).fetchone() is not None:
                return True
    return False


@actor(name="kit.more", queue="quick")
def more(count: int) -> None:
    """Enqueues the next of them."""
    if count > 1:
        more.send(count - 1)


@actor(name="kit.endless", queue="quick")
def endless() -> None:
    """Enqueues itself."""
    endless.send()


@actor(name="kit.elsewhere", queue="tasks")
def elsewhere() -> None:
    """On another queue."""
