"""What the measured workers do: nothing at all, or say when they began."""

from __future__ import annotations

import settings
from bench.peers import program
from broker import actor, install
from middleware import logs
from middleware.batches import Item
from outbox import catalogue

logs.configure("json")
broker = install(settings.load())
catalogue.declare(catalogue.EventType("bench.happened", "Nothing did.", "a number"))


@actor(name="bench.noop", queue="bench")
def noop(number: int) -> None:
    """Nothing; so it may run as often as it likes."""


@actor(name="bench.batch", queue="bench", batch=100)
def batch(items: list[Item]) -> None:
    """Nothing, for many jobs at once; so it may run as often as it likes."""


@actor(name="bench.mark", queue="bench")
def mark(number: int) -> None:
    """Say when it began; not idempotent, the first time counts."""
    program.mark(number)


@actor(name="bench.sleep", queue="bench")
def sleep(number: int) -> None:
    """Say when it began, and take some seconds; not idempotent, each time counts."""
    program.mark_and_sleep(number)


@actor(name="bench.heard", queue="tasks", on="bench.happened", argument="subject")
def heard(number: str) -> None:
    """Nothing, and never: where the relay is measured nobody works its queue."""
