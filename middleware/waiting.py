"""Waiting for what another process writes: looking often at first, then ever more seldom."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FIRST_S, FACTOR, SELDOM_S = 0.005, 1.5, 0.25


def wait_for(look: Callable[[], T | None], within_s: float | None) -> T | None:
    """The first answer of *look* that is not None; None after *within_s* seconds, which None makes endless.

    It looks at least once. The pauses grow from 5 ms to 250 ms. The thread sleeps, and holds no connection meanwhile.
    """
    give_up = float("inf") if within_s is None else time.monotonic() + within_s
    pause = FIRST_S
    while (found := look()) is None:
        left = give_up - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(pause * FACTOR, SELDOM_S)
    return found
