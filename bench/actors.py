"""What the measured workers do: nothing at all, or say when they began."""

from __future__ import annotations

import os
import time

import settings
from broker import actor, install
from middleware import logs
from outbox import catalogue

logs.configure("json")
broker = install(settings.load())
catalogue.declare(catalogue.EventType("bench.happened", "Nothing did.", "a number"))

MARKS = os.environ.get("BENCH_MARKS", os.devnull)


@actor(name="bench.noop", queue="bench")
def noop(number: int) -> None:
    """Nothing; so it may run as often as it likes."""


@actor(name="bench.mark", queue="bench")
def mark(number: int) -> None:
    """Leave the line "*number* <seconds since the epoch>"; not idempotent, the first line counts."""
    began = time.time()
    marks = os.open(MARKS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(marks, f"{number} {began:.6f}\n".encode())
    os.close(marks)


@actor(name="bench.heard", queue="tasks", on="bench.happened", argument="subject")
def heard(number: str) -> None:
    """Nothing, and never: where the relay is measured nobody works its queue."""
