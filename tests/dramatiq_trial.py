"""Dramatiq's documented examples as actors: what they do is told in a file of `TRIAL_DIR`, a line of JSON each time."""

import json
import os
import time
from pathlib import Path
from typing import Any

from dramatiq.middleware import CurrentMessage
from dramatiq.rate_limits import ConcurrentRateLimiter

import settings
from broker import actor, install
from middleware import logs
from middleware.failures import Backoff, Snooze

FOLDER = Path(os.environ["TRIAL_DIR"])
SOON = Backoff(first_s=0)

logs.configure("json")
broker = install(settings.load())


def tell(name: str, *what: Any) -> None:
    """Add a line to the file called *name*."""
    line = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(line, f"{json.dumps(what)}\n".encode())
    os.close(line)


@actor(name="add", queue="quick")
def add(x: int, y: int) -> int:
    """The user guide's."""
    return x + y


@actor(name="identity", queue="quick", attempts=2, backoff=SOON)
def identity(x: Any) -> Any:
    """Likewise; fails at what is not a number."""
    if isinstance(x, str):
        raise ValueError(x)
    return x


@actor(name="fail", queue="quick", attempts=1)
def fail() -> None:
    """Likewise."""
    raise Exception("failed")


@actor(name="write", queue="quick")
def write(name: str, *what: Any) -> None:
    """Says what it was given."""
    tell(name, *what)


@actor(name="snooze_once", queue="quick")
def snooze_once(name: str) -> None:
    """Says later the first time."""
    if not (FOLDER / name).exists():
        tell(name, "snoozed")
        raise Snooze(0.1)


@actor(name="print_result", queue="quick")
def print_result(message_data: dict[str, Any], result: Any) -> None:
    """The user guide's, into a file."""
    tell("results", message_data["message_id"], result)


@actor(name="print_error", queue="quick")
def print_error(message_data: dict[str, Any], exception_data: dict[str, str]) -> None:
    """Likewise."""
    tell("errors", message_data["message_id"], exception_data)


@actor(name="watched", queue="quick", attempts=1, on_success="print_result", on_failure="print_error")
def watched(x: Any) -> Any:
    """Its callbacks are its own."""
    return identity.fn(x)


@actor(name="one_at_a_time", queue="quick", attempts=100, backoff=Backoff(first_s=0.05, factor=1))
def one_at_a_time(name: str) -> None:
    """The user guide's distributed mutex: says when it comes and goes."""
    with ConcurrentRateLimiter(broker.rate_limits, "distributed-mutex", limit=1).acquire():
        tell(name, "in")
        time.sleep(0.02)
        tell(name, "out")


@actor(name="aside", queue="tasks")
def aside(x: int, y: int) -> int:
    """As `add`, on a queue that nobody works."""
    return x + y


@actor(name="hold", queue="single")
def hold(name: str) -> None:
    """Runs until somebody removes its file."""
    tell(name, "held")
    while (FOLDER / name).exists():
        time.sleep(0.02)


@actor(name="who_am_i", queue="quick")
def who_am_i() -> str:
    """The id that Dramatiq's own middleware knows."""
    message = CurrentMessage.get_current_message()
    return message.message_id if message else ""
