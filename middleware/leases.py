"""The control thread: renew what this process holds, rescue what others lost, mind the time limits and the parent."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg
import structlog

from middleware.lifecycle import Lifecycle
from middleware.metrics import Meter
from middleware.watchdog import Watchdog
from outbox import jobs, workers
from outbox.db import Conn, sever
from outbox.jobs import Claim

log = structlog.get_logger("posthouse.control")

#: Time limits are looked at so often while a job runs, and the clock so often while none does.
TICK_S, IDLE_TICK_S = 0.1, 0.5
RECONNECT_S = 1.0
#: What its statements rely on; a renewal that has to wait longer comes too late.
SESSION = {"statement_timeout": "5s", "lock_timeout": "200ms"}
#: A server that lives has answered by then.
SEVER_CONTROL_S = 8.0


def _parent_at_birth() -> int:
    # Not getppid: a parent that died while this process booted would never be missed.
    parent = multiprocessing.parent_process()
    return parent.pid if parent and parent.pid else os.getppid()


@dataclass
class Control:
    """Runs until `close`, which comes after the last job has settled: leases are renewed to the very end.

    *held*, *forget*: the consumer's leases; *expire*: raise in attempts whose time is up; *orphaned*: what to do when
    the parent is gone; *keep*: the keeper's turn, on each tick; *watchdogs*: of the threads that must not stand still.
    All on one reserved connection of its own.
    """

    connect: Callable[[], Conn]
    lifecycle: Lifecycle
    meter: Meter
    worker: workers.Worker
    lease_s: float
    renew_every_s: float
    rescue_every_s: float
    held: Callable[[], dict[str, str]] = dict
    forget: Callable[[Iterable[str]], list[Claim]] = lambda tokens: []
    expire: Callable[[float], None] = lambda now: None
    running: Callable[[], int] = int
    orphaned: Callable[[], None] = lambda: None
    keep: Callable[[Conn], None] = lambda conn: None
    watchdogs: list[Watchdog] = field(default_factory=list)
    ticked_at: float = field(default_factory=time.monotonic)
    _conn: Conn | None = None
    _closing: bool = False
    _parent: int = field(default_factory=_parent_at_birth)
    _confirmed: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        self._closing = True

    def sign_on(self) -> None:
        """Be in the register before the first claim: the host's keeper knows a process by its row there."""
        with suppress(psycopg.Error):
            workers.register(self._connected(), self.worker, running=0)

    def run(self) -> None:
        renew_at = rescue_at = sign_at = retry_at = 0.0
        while not self._closing:
            now = time.monotonic()
            try:
                if now >= renew_at and now >= retry_at:
                    renew_at = now + self.renew_every_s
                    self._renew()
                if now >= rescue_at and now >= retry_at:
                    rescue_at = now + self.rescue_every_s * random.uniform(0.8, 1.2)
                    self._rescue()
                if now >= retry_at:
                    self.keep(self._connected())
                if now >= sign_at and now >= retry_at:
                    # Last: this table is for people, and a lock that one of them holds must not cost a lease.
                    sign_at = now + self.renew_every_s
                    with suppress(psycopg.errors.LockNotAvailable):
                        workers.register(self._connected(), self.worker, running=self.running())
            except psycopg.Error as error:
                log.warning("control.disconnected", error=type(error).__name__, again_in_s=RECONNECT_S)
                self._drop()
                renew_at = rescue_at = sign_at = retry_at = time.monotonic() + RECONNECT_S
                self._expire_unconfirmed()
            # Not lifecycle.wait: leases outlive the stop signal, until the last job has settled.
            time.sleep(TICK_S if self.running() else IDLE_TICK_S)
        self._sign_off()

    def sever(self) -> None:
        """From another thread: give up what `run` waits for; it goes on with a new connection."""
        if (conn := self._conn) is not None:
            sever(conn)

    def watch(self) -> None:
        """Mind time limits, threads and the parent: a thread beside `run`, which a database that hangs holds up."""
        parent_at = 0.0
        while not self._closing:
            now = time.monotonic()
            self.expire(now)
            for watchdog in self.watchdogs:
                watchdog.look(now)
            if now >= parent_at:
                parent_at = now + 1
                self._mind_parent()
            time.sleep(TICK_S if self.running() else IDLE_TICK_S)

    def _mind_parent(self) -> None:
        if os.getppid() != self._parent and not self.lifecycle.stopping:
            log.warning("parent.gone", pid=self._parent)
            self.orphaned()

    def _connected(self) -> Conn:
        self.ticked_at = time.monotonic()
        if self._conn is None or self._conn.closed:
            self._conn = self.connect()
        return self._conn

    def _renew(self) -> None:
        conn = self._connected()
        held = self.held()
        if not held:
            self._confirmed.clear()
            return
        began = time.monotonic()
        renewed = {renewal.id for renewal in jobs.renew(conn, held, lease_s=self.lease_s)}
        self._confirmed = {
            token: began if job_id in renewed else self._confirmed.get(token, began) for job_id, token in held.items()
        }
        if missing := {job_id: token for job_id, token in held.items() if job_id not in renewed}:
            # A row that a commit of ours holds just now was skipped, not lost: a plain read tells.
            gone = set(missing) - jobs.still_held(conn, missing)
            self._lose({held[job_id] for job_id in gone})
        self._expire_unconfirmed()

    def _expire_unconfirmed(self) -> None:
        now = time.monotonic()
        self._lose({token for token, began in self._confirmed.items() if now > began + self.lease_s})

    def _lose(self, tokens: set[str]) -> None:
        # By token, never by id: the claim loop may have claimed the same job again meanwhile.
        for claim in self.forget(tokens):
            log.warning("lease.lost", job_id=claim.id)
            self.meter.lease_lost.inc()
        for token in tokens:
            self._confirmed.pop(token, None)

    def _rescue(self) -> None:
        while rescued := jobs.rescue(self._connected()):
            for job_id, queue, state in rescued:
                log.warning("job.rescued", job_id=job_id, queue=queue, state=state)
                self.meter.rescued.labels(queue).inc()
            if len(rescued) < jobs.PAGE:
                return

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _sign_off(self) -> None:
        try:
            if self._conn is not None:
                workers.leave(self._conn, self.worker)
        except psycopg.Error as error:
            log.info("worker.left_unsaid", error=type(error).__name__)
        finally:
            self._drop()
