"""The claim loop: one connection for everything a process claims, settles and listens for.

Worker threads hand in how their attempts ended and take the next from the stock; whatever has gathered is written by
the statement that makes the next claim. While the database is away nothing is claimed and every verdict is
kept.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import psycopg
import structlog

from middleware.capacity import BRIEF_AT_ONCE, STALLED_S, Lane, next_look, wanted
from middleware.metrics import Meter
from outbox import jobs
from outbox.controls import Limited, claim_limited
from outbox.db import LOST, Conn, is_lost, sever
from outbox.events import CHANNEL as EVENTS_CHANNEL
from outbox.jobs import Claim, Settlement, Turn
from outbox.listener import Bells, Deaf, readable

log = structlog.get_logger("posthouse.consumer")

SETTLE_AT_MOST = 1_000
#: Under load an outcome waits so long at most for others to be written with.
LINGER_S = 0.005
#: An outcome whose row somebody has locked is tried again after so long.
LOCKED_S = 1.0
#: A turn comes at least so often: its watchdog waits for it.
TURN_S = 5.0


@dataclass(slots=True, eq=False)
class Held:
    """A leased job of this process: waiting in stock, or with a worker thread."""

    claim: Claim
    began: float = 0.0
    ended: bool = False
    lost: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """What a thread takes from *lane*: one job, or a batch of one actor's."""

    lane: Lane[Held]
    held: list[Held]
    began: float

    @property
    def claims(self) -> list[Claim]:
        return [held.claim for held in self.held]


class ClaimLoop:
    """Claims for free capacity only, delivers in order, settles in batches. One a process.

    *deliver* hands work to a sleeping thread; *batch_of* tells how many jobs one call of an actor takes, 0 where
    there is none of that name. Not *listens*:
    behind a transaction pooler nothing rings, and it polls.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Conn],
        lanes: Iterable[Lane[Held]],
        threads: int,
        worker_id: str,
        lease_s: float,
        deliver: Callable[[Work], None],
        on_event: Callable[[], None],
        meter: Meter,
        listens: bool,
        probe_every_s: float,
        batch_of: Callable[[str | None], int] = lambda actor: 1,
    ) -> None:
        self._connect = connect
        self._lanes = {lane.name: lane for lane in lanes}
        self._threads = threads
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._deliver = deliver
        self._on_event = on_event
        self._meter = meter
        self._listens = listens
        self._probe_every_s = probe_every_s
        self._batch_of = batch_of
        self._lock = threading.Lock()
        # By token: a job that was lost and claimed again is here twice until its first run has ended.
        self._held: dict[str, Held] = {}
        self._ended: deque[Settlement] = deque()
        # By queue, actor and outcome, the seconds that attempts took which are not counted yet.
        self._ends: dict[tuple[str, str | None, str], list[float]] = {}
        self._ended_at = 0.0
        # Outcomes whose rows somebody has locked, and when to try those again.
        self._locked: deque[Settlement] = deque()
        self._locked_until = 0.0
        # Written once already, in a session that broke before it answered.
        self._unanswered: set[str] = set()
        # What threads have in hand.
        self._works: set[Work] = set()
        self._conn: Conn | None = None
        self._bells: Bells | None = None
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._asleep = False
        self._claiming = True
        self._closing = False
        self.ticked_at = time.monotonic()

    # What worker threads and the control thread call.

    def finish(self, work: Work, settlements: Iterable[Settlement]) -> Work | None:
        """These attempts have ended: keep their settlements for the next write. What the thread is to do next."""
        now = time.monotonic()
        with self._lock:
            lane = work.lane
            lane.running -= 1
            self._works.remove(work)
            seconds = (now - work.began) / len(work.held)
            lane.measured(seconds)
            for held, settlement in zip(work.held, settlements, strict=True):
                held.ended = True
                if self._batch_of(held.claim.actor):
                    end = (lane.name, held.claim.actor, settlement.outcome or settlement.state)
                    self._ends.setdefault(end, []).append(seconds)
                if held.lost:
                    del self._held[settlement.token]
                    continue
                if not self._ended:
                    self._ended_at = now
                self._ended.append(settlement)
            upcoming = self._next(now)
            first = len(self._ended) <= len(work.held)
            ask = self._asleep and lane.hungry and lane.worth_asking
        if first or ask or upcoming is None:
            self._wake()
        return upcoming

    def held(self) -> dict[str, str]:
        """Every leased job not yet settled, id → token, for the renewals."""
        with self._lock:
            return {held.claim.id: token for token, held in self._held.items() if not held.lost}

    def forget(self, tokens: Iterable[str]) -> list[Claim]:
        """These leases are lost: nothing is written under them any more. Those that it was news for.

        An attempt that has ended is left to its settlement, which the fence refuses if need be.
        """
        lost = []
        with self._lock:
            for token in tokens:
                held = self._held.get(token)
                if held is None or held.ended or held.lost:
                    continue
                lost.append(held.claim)
                held.lost = True
                if not held.began:
                    del self._held[token]
                    self._lanes[held.claim.queue].stock.remove(held)
        return lost

    def stop_claiming(self) -> None:
        """No claim from now on; what waits in stock is given back by the loop's next turn."""
        self._claiming = False
        self._wake()

    def close(self) -> None:
        """Let the loop end once everything held is settled; `run` returns then."""
        self._closing = True
        self._wake()

    @property
    def running(self) -> list[Claim]:
        """What worker threads have in hand."""
        with self._lock:
            return [held.claim for held in self._held.values() if held.began and not held.ended]

    @property
    def busy(self) -> int:
        """How many worker threads have something in hand."""
        return len(self._works)

    @property
    def unsettled(self) -> int:
        """Outcomes that are not written yet."""
        with self._lock:
            return sum(held.ended for held in self._held.values())

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    def _next(self, now: float, spared: Collection[str] = ()) -> Work | None:
        """Under the lock: work for one more thread, of the lane that was served longest ago; none of *spared*."""
        chosen: Lane[Held] | None = None
        if self._claiming and len(self._works) < self._threads:
            for lane in self._lanes.values():
                can = lane.stock and lane.running < lane.threads and lane.name not in spared
                if can and (not chosen or lane.started_at < chosen.started_at):
                    chosen = lane
        if chosen is None:
            return None
        held = self._taken(chosen.stock)
        for each in held:
            each.began = now
        chosen.started_at = now
        chosen.running += 1
        self._works.add(work := Work(chosen, held, now))
        return work

    def _starting(self, now: float) -> list[Work]:
        """Under the lock: work for sleeping threads, all of them but where the jobs are too brief to be worth it."""
        started = []
        spared = {lane.name for lane in self._lanes.values() if lane.stock and lane.brief and self._brisk(lane, now)}
        while work := self._next(now, spared):
            started.append(work)
            if work.lane.brief and self._brisk(work.lane, now):
                spared.add(work.lane.name)
        return started

    def _brisk(self, lane: Lane[Held], now: float) -> bool:
        """Under the lock: whether as many threads of *lane* as brief jobs need have taken theirs a moment ago."""
        return sum(work.lane is lane and work.began > now - LINGER_S for work in self._works) >= BRIEF_AT_ONCE

    def _taken(self, stock: deque[Held]) -> list[Held]:
        first = stock.popleft()
        size = self._size(first.claim)
        batch, others = [first], list[Held]()
        while stock and len(batch) < size:
            held = stock.popleft()
            fits = held.claim.actor == first.claim.actor and held.claim.attempt == 1
            (batch if fits else others).append(held)
        stock.extendleft(reversed(others))
        return batch

    def _size(self, claim: Claim) -> int:
        """How many one call takes of a kind. What failed before goes alone: it must not fail its neighbours again."""
        return 1 if claim.attempt > 1 else max(1, self._batch_of(claim.actor))

    # The loop.

    def run(self) -> None:
        """The loop's thread: goes on through any loss of the database until `close` and nothing is left to write."""
        losses = 0
        while not self._done():
            self.ticked_at = time.monotonic()
            try:
                self._turn(*self._connected())
                losses = 0
            except psycopg.Error as error:
                # Whatever it was, a revoked right say: it may pass, and a new session is a clean start.
                self._drop()
                delay = min(0.1 * 2**losses, 5.0) * random.uniform(1, 1.2)
                losses = min(losses + 1, 10)
                log.warning("consumer.disconnected", error=type(error).__name__, again_in_s=round(delay, 1))
                self._meter.reconnects.inc()
                if isinstance(error, Deaf):
                    self._meter.probe_failures.inc()
                self._sleep(None, delay)
        self._drop(politely=True)

    def step(self, queues: Sequence[str]) -> None:
        """One turn, for who has no threads to sleep in: settle what has ended, claim of *queues* for what is free.

        Raises psycopg.Error; the next step is on a new session.
        """
        try:
            conn, _ = self._connected()
            for lane in self._lanes.values():
                lane.hungry, lane.poll_at = lane.name in queues, float("inf")
            batch, asked = self._gathered(), self._wanted(time.monotonic())
            if batch or asked:
                self._written_and_claimed(conn, batch, asked)
        except psycopg.Error:
            self._drop()
            raise

    def _done(self) -> bool:
        with self._lock:
            unwritten = self._ended or self._locked
            return self._closing and not unwritten and all(held.lost for held in self._held.values())

    def _connected(self) -> tuple[Conn, Bells]:
        if self._conn is None or self._bells is None:
            self._conn = self._connect()
            channels = [EVENTS_CHANNEL, *(jobs.channel(name) for name in self._lanes)] if self._listens else []
            self._bells = Bells(self._conn, channels, probe_every_s=self._probe_every_s)
            self._meter.listener_up.set(self._listens)
            self._release_unheld(self._conn)
            self._on_event()
            for lane in self._lanes.values():
                lane.hungry = True
            log.info("consumer.listening", queues=sorted(self._lanes))
        return self._conn, self._bells

    def _release_unheld(self, conn: Conn) -> None:
        with self._lock:
            tokens = [*self._held, *(settlement.token for settlement in self._ended)]
        if count := jobs.release_unheld(conn, self._worker_id, tokens):
            log.warning("jobs.released", count=count, started=False)

    def _turn(self, conn: Conn, bells: Bells) -> None:
        # Asleep before it looks: whoever hands something in meanwhile wakes it.
        self._asleep = True
        now = time.monotonic()
        self._hear(bells.take())
        bells.probe(now)
        self._rally(now)
        seconds = self._linger_s(now)
        if seconds <= 0:
            self._asleep = False
            self._settle_locked(conn, now)
            asked = self._wanted(now)
            batch = self._gathered()
            claimed = self._written_and_claimed(conn, batch, asked) if batch or asked else []
            self._release_stock(conn, now)
            if claimed:
                return
            self._asleep = True
            seconds = self._until_next()
        self._sleep(bells, min(seconds, TURN_S))

    def _rally(self, now: float) -> None:
        """Wake threads that brief jobs had spared, if those that work them are held up by longer ones."""
        with self._lock:
            started = self._starting(now)
        for work in started:
            self._deliver(work)

    def _linger_s(self, now: float) -> float:
        """Under load outcomes gather, so that many share a statement; not while a thread has nothing to do."""
        with self._lock:
            busy = self._ended and self._claiming and any(lane.stock for lane in self._lanes.values())
            worth_asking = any(lane.worth_asking for lane in self._lanes.values() if lane.hungry)
            return self._ended_at + LINGER_S - now if busy and not worth_asking else 0.0

    def _wanted(self, now: float) -> dict[str, int]:
        if not self._claiming:
            return {}
        with self._lock:
            return wanted(list(self._lanes.values()), self._threads, now)

    def _gathered(self) -> list[Settlement]:
        with self._lock:
            return [self._ended.popleft() for _ in range(min(len(self._ended), SETTLE_AT_MOST))]

    def _written_and_claimed(self, conn: Conn, batch: list[Settlement], asked: dict[str, int]) -> list[Claim]:
        """Settle *batch* and claim what is *asked* for in one commit; when that is refused only settle, each alone."""
        plain = {name: limit for name, limit in asked.items() if not self._lanes[name].keyed}
        try:
            turn = jobs.settle_and_claim(conn, batch, plain, worker_id=self._worker_id, lease_s=self._lease_s)
        except psycopg.Error as error:
            if not batch or (is_lost(error) and not isinstance(error, psycopg.errors.QueryCanceled)):
                self._unanswered.update(settlement.token for settlement in batch)
                self._put_back(batch)
                raise
            self._settle_singly(conn, batch)
            batch = []
            turn = jobs.settle_and_claim(conn, [], plain, worker_id=self._worker_id, lease_s=self._lease_s)
        again_in_s = self._settled(batch, turn.settled)
        if not asked:
            self._look_again(again_in_s)
            return []
        limited = self._limited(conn, asked, plain, turn)
        claims = turn.claims + limited.claims
        self._took(conn, asked, claims)
        self._look_again(again_in_s)
        self._look_again(limited.again_in_s)
        return claims

    def _look_again(self, in_s: Mapping[str, float]) -> None:
        for name, seconds in in_s.items():
            self._lanes[name].again_in(seconds, time.monotonic())

    def _limited(self, conn: Conn, asked: dict[str, int], plain: dict[str, int], turn: Turn) -> Limited:
        """Claim what is still asked for of the queues in which jobs with a limit's key wait."""
        found = Counter(claim.queue for claim in turn.claims)
        left = {
            name: limit - found[name]
            for name, limit in asked.items()
            if (name not in plain or name in turn.keyed) and limit > found[name]
        }
        limited = Limited([], {}, set())
        if left:
            limited = claim_limited(conn, left, worker_id=self._worker_id, lease_s=self._lease_s)
        for name in asked:
            self._lanes[name].keyed = name in turn.keyed or name in limited.keyed
        return limited

    def _put_back(self, batch: Iterable[Settlement]) -> None:
        with self._lock:
            self._ended.extendleft(reversed(list(batch)))

    def _took(self, conn: Conn, asked: dict[str, int], claimed: list[Claim]) -> None:
        now = time.monotonic()
        surplus = list[Held]()
        with self._lock:
            for claim in claimed:
                held = self._held[claim.token] = Held(claim)
                self._lanes[claim.queue].stock.append(held)
            started = self._starting(now)
            for name, limit in asked.items():
                lane = self._lanes[name]
                sizes = [self._size(claim) for claim in claimed if claim.queue == name]
                lane.looked(now, found=len(sizes), asked=limit)
                if sizes and lane.batch > 1:
                    expected, lane.fewest = lane.unit, min(sizes)
                    if expected > lane.unit:
                        # Claimed for larger batches than came: what has no thread, beyond the stock of short jobs.
                        surplus += self._unstocked(lane, keep=lane.stock_target)
            quiet = [lane for name in asked if (lane := self._lanes[name]).awaited and lane.quiet(now)]
        for work in started:
            self._deliver(work)
        self._meter.claimed(asked, claimed)
        self._release(conn, surplus)
        if quiet:
            due_in = jobs.next_due(conn, [lane.name for lane in quiet])
            for lane in quiet:
                lane.poll_at = min(lane.poll_at, now + due_in.get(lane.name, float("inf")))

    def _release_stock(self, conn: Conn, now: float) -> None:
        """Give back what will not start: all that waits once we stop, and what waits behind jobs that take long."""
        with self._lock:
            lanes = [lane for lane in self._lanes.values() if not self._claiming or lane.stalled(now)]
            stock = [held for lane in lanes for held in self._unstocked(lane)]
        if stock:
            log.info("jobs.released", count=self._release(conn, stock), started=False)

    def _unstocked(self, lane: Lane[Held], keep: int = 0) -> list[Held]:
        """Under the lock: what is in stock beyond *keep*, taken out, so that no thread starts what is given back."""
        taken = list(lane.stock)[keep:]
        for held in taken:
            lane.stock.pop()
            del self._held[held.claim.token]
        return taken

    def _release(self, conn: Conn, stock: list[Held]) -> int:
        return jobs.release(conn, {held.claim.id: held.claim.token for held in stock}) if stock else 0

    def _settle_singly(self, conn: Conn, batch: Sequence[Settlement]) -> None:
        # One outcome that the database refuses must not keep its neighbours' from being written; none may get lost.
        waiting, locked = deque(batch), []
        try:
            while waiting:
                self.ticked_at = time.monotonic()
                try:
                    self._look_again(self._settled([waiting[0]], self._settle_one(conn, waiting[0])))
                except psycopg.errors.LockNotAvailable:
                    # Somebody has this row open, in psql say: later, and its neighbours now.
                    locked.append(waiting[0])
                waiting.popleft()
        finally:
            self._put_back(waiting)
            self._locked.extend(locked)
            self._locked_until = time.monotonic() + LOCKED_S

    def _settle_locked(self, conn: Conn, now: float) -> None:
        if self._locked and now >= self._locked_until:
            batch, self._locked = self._locked, deque()
            self._settle_singly(conn, batch)

    def _settle_one(self, conn: Conn, settlement: Settlement) -> set[str]:
        try:
            return jobs.settle(conn, [settlement])
        except psycopg.Error as error:
            if is_lost(error) or isinstance(error, psycopg.errors.LockNotAvailable):
                raise
            log.error("settle.refused", job_id=settlement.id, error=type(error).__name__)
        # Nothing of the refused one but how it ended; what would have been tried again ends too.
        done = settlement.state == "done"
        reason = "the outcome could not be stored"
        bare = Settlement(
            settlement.id,
            settlement.token,
            "done" if done else "rejected",
            result=json.dumps({"error": reason}) if done else None,
            outcome=None if done else "failed",
            error=None if done else reason,
        )
        try:
            return jobs.settle(conn, [bare])
        except psycopg.Error as error:
            if is_lost(error) or isinstance(error, psycopg.errors.LockNotAvailable):
                raise
            # Not even that: it is left to its lease, which nobody renews from here on.
            log.error("settle.refused", job_id=settlement.id, error=type(error).__name__, final=True)
            return set()

    def _settled(self, batch: Sequence[Settlement], written: set[str]) -> dict[str, float]:
        """Count and forget them; by queue, in how many seconds the first of those that were put back is due."""
        again_in_s = dict[str, float]()
        if not batch:
            return again_in_s
        with self._lock:
            ends, self._ends = self._ends, {}
            for settlement in batch:
                held = self._held.pop(settlement.token, None)
                if held is not None and settlement.state == "queued":
                    queue = held.claim.queue
                    again_in_s[queue] = min(again_in_s.get(queue, settlement.delay_s), settlement.delay_s)
            for lane in self._lanes.values():
                # A place of some key may be free.
                lane.hungry |= lane.keyed
        self._meter.settled(len(batch))
        self._meter.attempted(ends)
        if len(written) == len(batch):
            self._unanswered.clear()
            return again_in_s
        for settlement in batch:
            if settlement.id in written:
                continue
            if settlement.token in self._unanswered:
                log.info("settle.unanswered", job_id=settlement.id)
            else:
                log.warning("settle.refused", job_id=settlement.id, error="lease lost")
                self._meter.lease_lost.inc()
            self._unanswered.discard(settlement.token)
        return again_in_s

    def _until_next(self) -> float:
        with self._lock:
            if self._ended or self._closing:
                return 0.05 if self._closing else 0.0
            now = time.monotonic()
            seconds = next_look(list(self._lanes.values()), self._threads, now) if self._claiming else 1.0
            if self._locked:
                seconds = min(seconds, max(0.0, self._locked_until - now))
            stocked = [lane for lane in self._lanes.values() if lane.stock]
            # What waits behind long jobs is given back in time, or gets the threads that were spared.
            return min([seconds, *(LINGER_S if lane.brief else STALLED_S for lane in stocked)])

    def _sleep(self, bells: Bells | None, seconds: float) -> None:
        self._asleep = True
        if bells is None:
            readable(self._wake_read, within_s=seconds)
        else:
            bells.sleep(seconds, self._wake_read)
        self._asleep = False
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)

    def _hear(self, channels: set[str]) -> None:
        for channel in channels:
            if channel == EVENTS_CHANNEL:
                self._on_event()
            elif lane := self._lanes.get(channel.removeprefix(jobs.channel(""))):
                lane.rang(time.monotonic())

    def sever(self) -> None:
        """From another thread: give up what the loop waits for; it goes on with a new connection."""
        if (conn := self._conn) is not None:
            sever(conn)

    def _drop(self, *, politely: bool = False) -> None:
        conn, bells = self._conn, self._bells
        self._conn = self._bells = None
        self._meter.listener_up.set(0)
        if conn is None:
            return
        with closing(conn), suppress(*LOST):
            if politely and bells is not None:
                bells.close()
