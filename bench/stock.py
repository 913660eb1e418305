"""Dramatiq-pg's own broker and consumer, for `dramatiq bench.stock`."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.middleware import Retries, ShutdownNotifications, TimeLimit
from dramatiq_pg import PostgresBroker

# At its fastest: no results, no metrics.
broker = PostgresBroker(
    url=os.environ["DATABASE_URL"],
    results=False,
    middleware=[TimeLimit(), ShutdownNotifications(), Retries()],
)
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="bench", actor_name="noop")
def noop(number: int) -> None:
    """Nothing."""
