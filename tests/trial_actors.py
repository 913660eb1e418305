"""Actors that leave a line in a file for each start and end, for tests with real worker processes."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from dramatiq.errors import Retry

import settings
from broker import actor, install, transaction
from middleware import logs
from middleware.failures import Backoff, Discard, Snooze
from outbox import catalogue

FOLDER = Path(os.environ["TRIAL_DIR"])
BOOTED_PATIENCE_S = float(os.environ.get("TRIAL_IMPORT_S", "0"))

logs.configure("json")
broker = install(settings.load())
catalogue.declare(catalogue.EventType("trial.happened", "something happened", "a name"))
time.sleep(BOOTED_PATIENCE_S)


def note(name: str, what: str) -> None:
    """Add the line "*what* <pid>" to the file of *name*."""
    line = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(line, f"{what} {os.getpid()}\n".encode())
    os.close(line)


@actor(name="trial.run", queue="quick", backoff=Backoff(first_s=0))
def run(name: str, seconds: float = 0) -> None:
    """Not idempotent, on purpose: its file counts how often it ran."""
    note(name, "start")
    time.sleep(seconds)
    note(name, "end")


@actor(name="trial.brief", queue="quick")
def brief(awaited: str = "") -> None:
    """Does nothing at all, unless it is told to wait for a file."""
    while awaited and not (FOLDER / awaited).exists():
        time.sleep(0.02)


@actor(name="trial.linger", queue="quick", backoff=Backoff(first_s=0))
def linger(name: str, seconds: float) -> None:
    """Takes its time, but only the first time."""
    run.fn(name, 0 if (FOLDER / name).exists() else seconds)


@actor(name="trial.slow", queue="single", backoff=Backoff(first_s=0))
def slow(name: str, seconds: float = 0) -> None:
    """As `run`, on the queue of one thread."""
    run.fn(name, seconds)


@actor(name="trial.heard", queue="quick", on="trial.happened", argument="subject")
def heard(name: str) -> None:
    """Says that the relay came by."""
    note(name, "heard")


@actor(name="trial.fail", queue="quick", attempts=3, backoff=Backoff(first_s=0))
def fail(name: str, text: str) -> None:
    """Fails each time."""
    note(name, "start")
    raise ValueError(text)


@actor(name="trial.give", queue="quick", attempts=1)
def give(value: Any = None, megabytes: int = 0) -> Any:
    """Returns what it was given, or so many megabytes."""
    return "x" * (megabytes * 1_000_000) if megabytes else value


@actor(name="trial.raise", queue="quick", attempts=1)
def raise_(kind: str) -> None:
    """Raises what an actor should not."""
    kinds: dict[str, BaseException] = {
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "MemoryError": MemoryError(),
        "RecursionError": RecursionError(),
        "unprintable": Unprintable(),
        "huge": ValueError("x" * 5_000_000),
        "NUL": ValueError("a\0b\ud800c"),
    }
    raise kinds[kind]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@actor(name="trial.snooze", queue="quick", attempts=1)
def snooze(seconds: float) -> None:
    """Says later, each time."""
    raise Snooze(seconds)


@actor(name="trial.discard", queue="quick")
def discard(reason: Any) -> None:
    """Gives up."""
    raise Discard(reason)


@actor(name="trial.retry", queue="quick")
def retry(delay_ms: Any) -> None:
    """Asks for another time, in Dramatiq's words."""
    raise Retry("later", delay=delay_ms)


@actor(name="trial.evil", queue="quick")
def evil() -> Any:
    """Returns what breaks whoever looks at it."""
    return Evil(a=1)


class Evil(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("evil")


@actor(name="trial.spin", queue="quick", attempts=1, time_limit_s=1)
def spin() -> None:
    """Never ends by itself."""
    while True:
        pass


@actor(name="trial.query", queue="quick", attempts=1, time_limit_s=1)
def query() -> None:
    """Waits in the database for longer than it may."""
    with transaction() as conn:
        conn.execute("SELECT pg_sleep(30)")


@actor(name="trial.swallow", queue="quick", attempts=1, time_limit_s=1)
def swallow() -> None:
    """Takes no for an answer only the second time."""
    try:
        spin.fn()
    except BaseException:  # noqa: BLE001 - that is the trial
        spin.fn()


@actor(name="trial.die", queue="quick", backoff=Backoff(first_s=0))
def die(name: str) -> None:
    """Takes its process with it."""
    note(name, "start")
    os.kill(os.getpid(), signal.SIGKILL)


@actor(name="trial.hold", queue="quick", time_limit_s=30, backoff=Backoff(first_s=0))
def hold(name: str, seconds: int) -> None:
    """Keeps the interpreter lock in C: until it is over no other thread of the process makes a step."""
    note(name, "start")
    ctypes.PyDLL(None).sleep(seconds)
    note(name, "end")


@actor(name="trial.seize", queue="quick", attempts=1)
def seize() -> None:
    """Takes the claim loop's lock and never gives it back."""
    broker.working.loop._lock.acquire()


@actor(name="trial.ask", queue="quick", attempts=1)
def ask(seconds: float) -> None:
    """Holds a pooled connection for a while."""
    with transaction() as conn:
        conn.execute("SELECT pg_sleep(%s)", [seconds])


if "TRIAL_LATER" in os.environ:

    @actor(name="trial.later", queue="quick")
    def later(name: str) -> None:
        """Known to some processes only."""
        note(name, "start")


if "TRIAL_BAD_SUBSCRIPTION" in os.environ:

    @actor(name="trial.deaf", queue="quick", on="nobody.says")
    def deaf(name: str) -> None:
        """Waits for what never comes."""
