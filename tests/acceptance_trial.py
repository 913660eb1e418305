"""The trial's actors, and some that are waited for, measured or hard on memory."""

import time

from broker import actor
from middleware.batches import Item
from middleware.failures import Backoff
from tests.trial_actors import FOLDER, note


@actor(name="trial.order", queue="single")
def order(book: str, name: str, seconds: float = 0) -> None:
    """Adds its name to the file *book*."""
    note(book, name)
    time.sleep(seconds)


@actor(name="trial.patient", queue="quick")
def patient(name: str) -> None:
    """Works until the file *name*.done is there, and can be asked to stop at any time."""
    note(name, "start")
    while not (FOLDER / f"{name}.done").exists():
        time.sleep(0.05)
    note(name, "end")


@actor(name="trial.within", queue="quick", attempts=2, backoff=Backoff(first_s=1, cap_s=5))
def within() -> None:
    """Fails; its first retry is due in 1 s to 5 s."""
    raise ValueError


@actor(name="trial.later-on", queue="quick", attempts=2, backoff=Backoff(first_s=200))
def later_on() -> None:
    """Fails; its first retry is some minutes away."""
    raise ValueError


@actor(name="trial.hog", queue="quick", attempts=1)
def hog(megabytes: int) -> None:
    """Has much in hand when it fails."""
    held = b"x" * (megabytes * 1_048_576)
    raise ValueError(len(held))


@actor(name="trial.hogs", queue="quick", attempts=1, batch=2)
def hogs(items: list[Item]) -> None:
    """As `hog`, for each of a batch; the item's error knows the frame that knows the items."""
    for item in items:
        try:
            hog.fn(*item.args)
        except ValueError as error:
            item.fail(error)
