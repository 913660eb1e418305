"""Batch actors that do to each item what it says, alike in a test's own process and in a worker's."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import settings
from broker import actor, install
from middleware import logs
from middleware.batches import Item
from middleware.failures import Backoff
from middleware.time_limits import standing

FOLDER = Path(os.environ["TRIAL_DIR"])
BATCH = 10
AT_ONCE = Backoff(first_s=0)

logs.configure("json")
broker = install(settings.load())


def note(line: str) -> None:
    """Add a line to the file that a test reads; one write, so that lines of several threads stay whole."""
    file = os.open(FOLDER / "calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def wait_for(name: str) -> None:
    """Until the test lets go."""
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def spin() -> None:
    """Never ends by itself."""
    while True:
        pass


def stop() -> None:
    """What a process that stops does to its calls once their grace is over."""
    for guard in standing():
        guard.release()
    spin()


def fail(error: BaseException) -> None:
    raise error


def say_nothing(item: Item, count: int) -> None:
    pass


def mend(item: Item) -> None:
    item.fail("no good")
    item.complete("good after all")


def spoil(item: Item) -> None:
    item.complete("good")
    item.fail("no good after all")


#: What is said of an item, by its argument; of one that is not here, nothing.
SAYS: dict[str, Callable[[Item, int], None]] = {
    "complete": lambda item, count: item.complete({"together": count, "attempt": item.attempt}),
    "fail": lambda item, count: item.fail("no good"),
    "raise": lambda item, count: item.fail(LookupError("not there")),
    "discard": lambda item, count: item.discard("never"),
    "snooze": lambda item, count: item.snooze(60),
    "mend": lambda item, count: mend(item),
    "spoil": lambda item, count: spoil(item),
    "unsayable": lambda item, count: item.complete({1, 2}),
}
#: How the call then ends, by the first argument that is here.
ENDS: dict[str, Callable[[], None]] = {
    "break": lambda: fail(ValueError("broken")),
    "exit": lambda: fail(SystemExit(3)),
    "spin": spin,
    "stop": stop,
}


@actor(name="batch.tell", queue="quick", batch=BATCH, attempts=2, backoff=AT_ONCE, time_limit_s=0.5)
def tell(items: list[Item]) -> None:
    """Say of each item what its argument says, then end as one of them wants."""
    for item in items:
        SAYS.get(item.args[0], say_nothing)(item, len(items))
    for item in items:
        ENDS.get(item.args[0], lambda: None)()


@actor(name="batch.other", queue="quick", batch=BATCH)
def other(items: list[Item]) -> None:
    """Another kind, on the same queue."""
    tell.fn(items)


@actor(name="batch.narrow", queue="quick", batch=2)
def narrow(items: list[Item]) -> None:
    """A kind of small batches."""
    tell.fn(items)


@actor(name="batch.alone", queue="quick")
def alone(name: str) -> None:
    """One at a time, until the test lets go."""
    note(f"alone {name}")
    wait_for("go")


@actor(name="batch.hold", queue="quick", batch=BATCH, backoff=AT_ONCE)
def hold(items: list[Item]) -> None:
    """Complete the first, and say nothing of the others until the test lets go."""
    items[0].complete("first")
    note(f"hold {len(items)}")
    wait_for("go")


@actor(name="batch.poison", queue="single", batch=BATCH, backoff=AT_ONCE)
def poison(items: list[Item]) -> None:
    """Take the process along when one item says so, with all others of the call in hand."""
    note(" ".join(item.args[0] for item in items))
    if any(item.args[0] == "poison" for item in items):
        os.kill(os.getpid(), signal.SIGKILL)
