"""The claim loop: one connection for everything a process claims, settles and listens for.

Worker threads hand in how their attempt ended and go on; whatever has gathered is written in one statement. While the
database is away nothing is claimed and every verdict is kept.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass

import psycopg
import structlog

from middleware.capacity import Lane, next_look, wanted
from middleware.metrics import Meter
from outbox import jobs
from outbox.db import LOST, Conn, is_lost
from outbox.events import CHANNEL as EVENTS_CHANNEL
from outbox.jobs import Claim, Settlement
from outbox.listener import Bells, readable

log = structlog.get_logger("posthouse.consumer")

#: A process that does not know an actor puts its job back for so long.
UNKNOWN_ACTOR_S = 10.0
#: and says so once an actor in so long.
UNKNOWN_TOLD_S = 60.0
SETTLE_AT_MOST = 1_000


class UndecodableMessage(Exception):
    """The row's message is not one; the job is discarded with this reason."""


class UnknownActor(Exception):
    """This process has no actor of that name; another one may."""


@dataclass(slots=True, eq=False)
class Held:
    """A leased job of this process: waiting in stock, or with a worker thread."""

    claim: Claim
    work: object
    began: float = 0.0
    ended: bool = False
    lost: bool = False


class ClaimLoop:
    """Claims for free capacity only, delivers in order, settles in batches. One a process.

    *prepare* turns a claim into work or raises UndecodableMessage or UnknownActor; *deliver* hands it to the threads.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Conn],
        lanes: Iterable[Lane[Held]],
        threads: int,
        worker_id: str,
        lease_s: float,
        prepare: Callable[[Claim], object],
        deliver: Callable[[object], None],
        on_event: Callable[[], None],
        meter: Meter,
    ) -> None:
        self._connect = connect
        self._lanes = {lane.name: lane for lane in lanes}
        self._threads = threads
        self._worker_id = worker_id
        self._lease_s = lease_s
        self._prepare = prepare
        self._deliver = deliver
        self._on_event = on_event
        self._meter = meter
        self._lock = threading.Lock()
        # By token: a job that was lost and claimed again is here twice until its first run has ended.
        self._held: dict[str, Held] = {}
        self._ended: deque[Settlement] = deque()
        self._unknown_told: dict[str, float] = {}
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

    def finish(self, settlement: Settlement) -> None:
        """An attempt has ended: keep its settlement for the next write and give its place to the next in stock."""
        with self._lock:
            held = self._held.get(settlement.token)
            if held is None or held.ended:
                return
            lane = self._lanes[held.claim.queue]
            lane.running -= 1
            lane.measured(time.monotonic() - held.began)
            if held.lost:
                del self._held[settlement.token]
            else:
                held.ended = True
                self._ended.append(settlement)
            self._start_stock()
        self._wake()

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
    def unsettled(self) -> int:
        """Outcomes that are not written yet."""
        with self._lock:
            return sum(held.ended for held in self._held.values())

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            with suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    # The loop.

    def run(self) -> None:
        """The loop's thread: goes on through any loss of the database until `close` and nothing is left to write."""
        losses = 0
        while not self._done():
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
                self._sleep(None, delay)
        self._drop(politely=True)

    def _done(self) -> bool:
        with self._lock:
            return self._closing and not self._ended and all(held.lost for held in self._held.values())

    def _connected(self) -> tuple[Conn, Bells]:
        if self._conn is None or self._bells is None:
            self._conn = self._connect()
            jobs.tune(self._conn)
            self._bells = Bells(self._conn, [EVENTS_CHANNEL, *(jobs.channel(name) for name in self._lanes)])
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
        self.ticked_at = time.monotonic()
        self._settle(conn)
        if not self._claiming:
            self._release_stock(conn)
        elif (asked := self._wanted()) and self._claim(conn, asked):
            return
        self._sleep(bells, self._until_next())
        self._hear(bells.take())

    def _wanted(self) -> dict[str, int]:
        with self._lock:
            return wanted(list(self._lanes.values()), self._threads, time.monotonic())

    def _claim(self, conn: Conn, asked: dict[str, int]) -> bool:
        claimed = jobs.claim(conn, asked, worker_id=self._worker_id, lease_s=self._lease_s)
        unknown: dict[str, str] = {}
        for claim in claimed:
            self._take(claim, unknown)
        with self._lock:
            self._start_stock()
        self._meter.claimed(asked, claimed)
        if unknown:
            jobs.release(conn, unknown, delay_s=UNKNOWN_ACTOR_S)
        self._looked(conn, asked, claimed)
        return bool(claimed)

    def _looked(self, conn: Conn, asked: dict[str, int], claimed: list[Claim]) -> None:
        now = time.monotonic()
        with self._lock:
            for name, limit in asked.items():
                found = sum(claim.queue == name for claim in claimed)
                self._lanes[name].looked(now, found=found, asked=limit)
            quiet = [lane for name in asked if (lane := self._lanes[name]).awaited and lane.quiet(now)]
        if quiet:
            due_in = jobs.next_due(conn, [lane.name for lane in quiet])
            for lane in quiet:
                lane.poll_at = min(lane.poll_at, now + due_in.get(lane.name, float("inf")))

    def _take(self, claim: Claim, unknown: dict[str, str]) -> None:
        try:
            work = self._prepare(claim)
        except UnknownActor as error:
            unknown[claim.id] = claim.token
            self._tell_unknown(str(error), claim)
            self._meter.unknown_actor(claim.queue, str(error))
            return
        except UndecodableMessage as error:
            reason = f"undecodable: {error}"
            log.warning("job.undecodable", job_id=claim.id, queue=claim.queue)
            with self._lock:
                self._ended.append(
                    Settlement(claim.id, claim.token, "rejected", outcome="discarded", error=reason, error_class="")
                )
            return
        held = Held(claim, work)
        with self._lock:
            self._held[claim.token] = held
            self._lanes[claim.queue].stock.append(held)

    def _tell_unknown(self, actor: str, claim: Claim) -> None:
        now = time.monotonic()
        if now - self._unknown_told.get(actor, float("-inf")) >= UNKNOWN_TOLD_S:
            self._unknown_told = {name: at for name, at in self._unknown_told.items() if now - at < UNKNOWN_TOLD_S}
            self._unknown_told[actor] = now
            log.warning("job.actor_unknown", job_id=claim.id, queue=claim.queue, again_in_s=UNKNOWN_ACTOR_S)

    def _start_stock(self) -> None:
        free = self._threads - sum(lane.running for lane in self._lanes.values())
        for lane in sorted(self._lanes.values(), key=lambda lane: lane.started_at):
            while self._claiming and free > 0 and lane.stock and lane.running < lane.threads:
                held = lane.stock.popleft()
                held.began = lane.started_at = time.monotonic()
                lane.running += 1
                free -= 1
                self._deliver(held.work)

    def _release_stock(self, conn: Conn) -> None:
        with self._lock:
            stock = {held.claim.id: held.claim.token for lane in self._lanes.values() for held in lane.stock}
        if stock:
            log.info("jobs.released", count=jobs.release(conn, stock), started=False)
            self.forget(stock.values())

    def _settle(self, conn: Conn) -> None:
        for _ in range(-(-len(self._ended) // SETTLE_AT_MOST)):
            batch = [self._ended.popleft() for _ in range(min(len(self._ended), SETTLE_AT_MOST))]
            try:
                self._settled(batch, jobs.settle(conn, batch))
            except psycopg.Error as error:
                if is_lost(error):
                    self._ended.extendleft(reversed(batch))
                    raise
                self._settle_singly(conn, batch)

    def _settle_singly(self, conn: Conn, batch: list[Settlement]) -> None:
        # One outcome that the database refuses must not keep its neighbours' from being written; none may get lost.
        waiting, locked = deque(batch), []
        try:
            while waiting:
                try:
                    self._settled([waiting[0]], self._settle_one(conn, waiting[0]))
                except psycopg.errors.LockNotAvailable:
                    # Somebody has this row open, in psql say: later, and its neighbours now.
                    locked.append(waiting[0])
                waiting.popleft()
        finally:
            self._ended.extendleft(reversed(waiting))
            self._ended.extend(locked)

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
        return jobs.settle(
            conn,
            [
                Settlement(
                    settlement.id,
                    settlement.token,
                    "done" if done else "rejected",
                    result=json.dumps({"error": reason}) if done else None,
                    outcome=None if done else "failed",
                    error=None if done else reason,
                )
            ],
        )

    def _settled(self, batch: list[Settlement], written: set[str]) -> None:
        with self._lock:
            for settlement in batch:
                self._held.pop(settlement.token, None)
        self._meter.settled(len(batch))
        for settlement in batch:
            if settlement.id not in written:
                log.warning("settle.refused", job_id=settlement.id, error="lease lost")
                self._meter.lease_lost.inc()

    def _until_next(self) -> float:
        with self._lock:
            if self._ended or self._closing:
                return 0.05 if self._closing else 0.0
            return next_look(list(self._lanes.values()), self._threads, time.monotonic()) if self._claiming else 1.0

    def _sleep(self, bells: Bells | None, seconds: float) -> None:
        self._asleep = True
        if bells is None:
            readable(self._wake_read, within_s=seconds)
        elif not self._ended:
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

    def _drop(self, *, politely: bool = False) -> None:
        conn, bells = self._conn, self._bells
        self._conn = self._bells = None
        if conn is None:
            return
        with closing(conn), suppress(*LOST):
            if politely and bells is not None:
                bells.close()
