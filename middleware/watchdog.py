"""Watches a thread that must never stand still, and ends the process, for its supervisor, when it does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

log = structlog.get_logger("posthouse.watchdog")

EXIT_STUCK = 70
#: Between two looks at most so much counts: after SIGSTOP, or when the machine slept, all threads are late alike.
AWAKE_S = 1.0


class Watched(Protocol):
    """What a thread runs: the monotonic time of its last turn, and how to cut the connection it waits on."""

    ticked_at: float

    def sever(self) -> None: ...


@dataclass
class Watchdog:
    """Watches what *thread* runs. Silent for *sever_after_s*, its connection is cut, so that an answer that never comes
    is a lost session; silent for *end_after_s*, it is the process that ends, with 70 (specs/queue.md 4).
    """

    thread: str
    watched: Watched
    sever_after_s: float
    end_after_s: float
    end: Callable[[int], None] = os._exit
    _tick: float = 0.0
    _looked_at: float = 0.0
    _silent_s: float = 0.0
    _sever_at_s: float = 0.0

    def look(self, now: float) -> None:
        """To be called again and again, with the monotonic time."""
        awake_s = min(now - self._looked_at, AWAKE_S)
        self._looked_at = now
        if (tick := self.watched.ticked_at) != self._tick:
            self._tick, self._silent_s, self._sever_at_s = tick, 0.0, self.sever_after_s
            return
        self._silent_s += awake_s
        if self._silent_s >= self.end_after_s:
            log.critical("watchdog.ended", thread=self.thread, silent_s=round(self._silent_s, 1))
            self.end(EXIT_STUCK)
        elif self._silent_s >= self._sever_at_s:
            self._sever_at_s += self.sever_after_s
            log.warning("watchdog.severed", thread=self.thread, silent_s=round(self._silent_s, 1))
            self.watched.sever()
