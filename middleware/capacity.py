"""How much of each queue this process may hold: its threads, and a small stock of short jobs. Pure counting."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

#: A stocked job waits at most about so long for its thread.
STOCK_S = 0.05
STOCK_PER_THREAD = 32
#: Where nearly all runs are shorter, threads that take turns at the interpreter get less done than a few do.
BRIEF_S = 0.0002
BRIEF_AT_ONCE = 2
#: Behind jobs that take longer than those before them it is given back after so long, for whoever has a thread.
STALLED_S = 0.5
#: An awaited queue that has had nothing to do for QUIET_S is looked at only so often; its bell and the next due time do
#: the rest.
QUIET_S = 5.0
QUIET_POLL_S = 1.0
#: Weight of the newest run in the mean duration.
_NEWEST = 0.2


@dataclass
class Lane(Generic[T]):
    """One queue in this process: at most *threads* calls of its actors run at once; *stock* waits for a free thread.

    *batch*: the most jobs that one call takes; *fewest*: the same of the kinds that came last, so that no more are
    claimed than free threads can start. *mean_s*: what a run takes; *runs*, *run_s*, *brief_runs*: those that `weighed`
    has not taken in yet. *brief*: nearly all of the last ones were. *keyed*: jobs with a limit's key wait in it.
    Not *belled*: no notification tells of a job, so that its poll does not slow down.
    """

    name: str
    threads: int
    poll_s: float
    awaited: bool = False
    belled: bool = True
    batch: int = 1
    fewest: int | None = None
    keyed: bool = False
    running: int = 0
    stock: deque[T] = field(default_factory=deque)
    mean_s: float | None = None
    runs: int = 0
    run_s: float = 0.0
    brief_runs: int = 0
    brief: bool = False
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

    def again_in(self, seconds: float, now: float) -> None:
        """Something of this queue can be claimed in so many seconds."""
        self.poll_at = min(self.poll_at, now + seconds)

    def rang(self, now: float) -> None:
        self.hungry, self.busy_at = True, now

    def quiet(self, now: float) -> bool:
        return self.belled and now - self.busy_at > QUIET_S

    def measured(self, seconds: float) -> None:
        """A run took so long."""
        self.runs += 1
        self.run_s += seconds
        self.brief_runs += seconds < BRIEF_S

    def weighed(self) -> None:
        """Take the runs since the last time into the mean, each as their average: one that waited for the
        interpreter may have taken a hundred times as long as its neighbours."""
        if self.runs:
            seconds = self.run_s / self.runs
            older = (1 - _NEWEST) ** self.runs if self.mean_s is not None else 0.0
            self.mean_s = seconds + older * ((self.mean_s or 0.0) - seconds)
            self.brief = self.brief_runs > 0.9 * self.runs
            self.runs, self.run_s, self.brief_runs = 0, 0.0, 0

    def stalled(self, now: float) -> bool:
        """Whether the stock has waited too long for a thread; what runs takes at least so long, which is counted."""
        waited_s = now - max(self.started_at, self.claimed_at)
        if not self.stock or waited_s < STALLED_S:
            return False
        self.mean_s = max(waited_s, self.mean_s or 0)
        return True

    @property
    def lively(self) -> bool:
        """Whether it has a stock that threads soon ask for."""
        return bool(self.stock) and self.mean_s is not None and self.mean_s <= STOCK_S

    @property
    def unit(self) -> int:
        """Jobs a thread takes at a time."""
        return self.fewest or self.batch

    @property
    def stock_target(self) -> int:
        """0 until measured; then what the threads finish in 50 ms, so that slow jobs are never hoarded."""
        if self.mean_s is None:
            return 0
        return min(int(self.threads * STOCK_S / max(self.mean_s, 1e-6)), STOCK_PER_THREAD * self.threads)

    @property
    def capacity(self) -> int:
        return self.threads * self.unit + self.stock_target

    @property
    def share(self) -> int:
        """The most that one claim takes: half of what is short, so that threads have the other half meanwhile."""
        short = self.mean_s is not None and self.mean_s * self.unit <= STOCK_S
        return max(1, self.capacity // (2 * self.unit)) * self.unit if short else self.capacity

    @property
    def room(self) -> int:
        return max(0, self.capacity - self.running * self.unit - len(self.stock))

    @property
    def worth_asking(self) -> bool:
        """Claims come in batches: when half of the capacity is free, or nothing is in stock for a free thread."""
        free_thread = self.running < self.threads and not self.stock
        return free_thread or self.room * 2 >= self.capacity


def wanted(lanes: list[Lane[T]], total: int, now: float) -> dict[str, int]:
    """How many jobs to claim of each lane at *now*, in all at most what the process's *total* threads can take."""
    for lane in lanes:
        lane.weighed()
    free, stock_room = _left(lanes, total)
    stocked = any(lane.lively for lane in lanes)
    asked = {}
    # Whoever was served longest ago goes first: no backlog keeps another queue from the last free thread.
    for lane in sorted(lanes, key=lambda lane: lane.claimed_at):
        if (lane.hungry or now >= lane.poll_at) and (room := _room(lane, free, stock_room, stocked)) > 0:
            threads = min(max(lane.threads - lane.running, 0), free)
            asked[lane.name] = room
            free -= min(threads, -(-room // lane.unit))
            stock_room = max(0, stock_room - max(0, room - threads * lane.unit))
    return asked


def next_look(lanes: list[Lane[T]], total: int, now: float) -> float:
    """Seconds until a lane that may be asked is to be asked; 1 where only a job's end, which wakes, makes room."""
    free, stock_room = _left(lanes, total)
    stocked = any(lane.lively for lane in lanes)
    open_lanes = [lane for lane in lanes if _room(lane, free, stock_room, stocked) > 0]
    return max(0.0, min((0.0 if lane.hungry else lane.poll_at - now for lane in open_lanes), default=1.0))


def _room(lane: Lane[T], free: int, stock_room: int, stocked: bool) -> int:
    """What a claim may ask of *lane*, with so many *free* threads and so much *stock_room* in the process.

    *stocked*: some lane has a stock. Threads that live on it are never free, so each other lane may have one job
    waiting: it was served longest ago, and the next thread that ends takes it.
    """
    if not lane.worth_asking:
        return 0
    threads = min(max(lane.threads - lane.running, 0), free)
    stock = min(max(lane.stock_target - len(lane.stock), 0), stock_room)
    room = min(lane.room, threads * lane.unit + stock, lane.share)
    waits = stocked and stock_room > 0 and not lane.stock and lane.running < lane.threads
    return max(room, 1) if waits else room


def _left(lanes: list[Lane[T]], total: int) -> tuple[int, int]:
    """Free threads of the process, and the jobs it may still take in stock."""
    target = max((lane.stock_target for lane in lanes), default=0)
    stock_room = target - sum(len(lane.stock) for lane in lanes)
    free = total - sum(lane.running for lane in lanes)
    # What is beyond it waits for threads that are free: in batches, where jobs come in such.
    unit = max((lane.unit for lane in lanes if lane.stock), default=1)
    return max(0, free + min(0, stock_room) // unit), max(0, stock_room + min(0, free))
