"""How much of each queue this process may hold: its threads, and a small stock of short jobs. Pure counting."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: A stocked job waits at most about so long for its thread.
STOCK_S = 0.05
STOCK_PER_THREAD = 16
#: An awaited queue that has had nothing to do for QUIET_S is looked at only so often; its bell and the next due time do
#: the rest.
QUIET_S = 5.0
QUIET_POLL_S = 1.0
#: Weight of the newest run in the mean duration.
_NEWEST = 0.2


@dataclass
class Lane(Generic[T]):
    """One queue in this process: at most *threads* of its jobs run at once; *stock* waits for a free place."""

    name: str
    threads: int
    poll_s: float
    awaited: bool = False
    running: int = 0
    stock: deque[T] = field(default_factory=deque)
    mean_s: float | None = None
    hungry: bool = True
    poll_at: float = 0.0
    busy_at: float = 0.0
    claimed_at: float = 0.0
    started_at: float = 0.0

    def looked(self, now: float, *, found: int, asked: int) -> None:
        """A claim at *now* asked for so many and found so many: when to look again."""
        self.hungry = found >= asked
        if found:
            self.busy_at = self.claimed_at = now
        self.poll_at = now + (max(self.poll_s, QUIET_POLL_S) if self.quiet(now) else self.poll_s)

    def rang(self, now: float) -> None:
        self.hungry, self.busy_at = True, now

    def quiet(self, now: float) -> bool:
        return now - self.busy_at > QUIET_S

    def measured(self, seconds: float) -> None:
        self.mean_s = seconds if self.mean_s is None else self.mean_s + _NEWEST * (seconds - self.mean_s)

    @property
    def stock_target(self) -> int:
        """0 until measured; then what the threads finish in 50 ms, so that slow jobs are never hoarded."""
        if self.mean_s is None:
            return 0
        return min(int(self.threads * STOCK_S / max(self.mean_s, 1e-6)), STOCK_PER_THREAD * self.threads)

    @property
    def room(self) -> int:
        return max(0, self.threads + self.stock_target - self.running - len(self.stock))

    @property
    def worth_asking(self) -> bool:
        """Claims come in batches: when a quarter of the capacity is free, or nothing is in stock for a free thread."""
        free_thread = self.running < self.threads and not self.stock
        return free_thread or self.room * 4 >= self.threads + self.stock_target


def wanted(lanes: list[Lane[T]], total: int, now: float) -> dict[str, int]:
    """How many jobs to claim of each lane at *now*, in all at most what the process's *total* threads can take."""
    left = _left(lanes, total)
    asked = {}
    # Whoever was served longest ago goes first: no backlog keeps another queue from the last free thread.
    for lane in sorted(lanes, key=lambda lane: lane.claimed_at):
        if (lane.hungry or now >= lane.poll_at) and lane.worth_asking and (room := min(lane.room, left)) > 0:
            asked[lane.name] = room
            left -= room
    return asked


def next_look(lanes: list[Lane[T]], total: int, now: float) -> float:
    """Seconds until a lane that may be asked is to be polled; 1 where only a job's end, which wakes, makes room."""
    if _left(lanes, total) <= 0:
        return 1.0
    return max(0.0, min((lane.poll_at - now for lane in lanes if lane.room and lane.worth_asking), default=1.0))


def _left(lanes: list[Lane[T]], total: int) -> int:
    stock_room = max((lane.stock_target for lane in lanes), default=0)
    return total + stock_room - sum(lane.running + len(lane.stock) for lane in lanes)
