"""The host's keeper: it sees the processes beside it die, hang and overrun where they cannot say so themselves.

A process that is gone: its jobs are rescued at once. One that lives in silence, say while a job holds the interpreter
lock in C: its leases are renewed. A job of such a process that is far past its time limit: the process is killed, the
job has timed out. Processes that cannot be seen from here, or that somebody has stopped, are left to their leases.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import structlog
from psycopg.errors import LockNotAvailable

from middleware.failures import Policy, TimeLimitExceeded, describe, judge
from middleware.metrics import Meter
from outbox import jobs, keeping, processes
from outbox.db import Conn
from outbox.jobs import Settlement
from outbox.keeping import Kept, Neighbour

log = structlog.get_logger("posthouse.keeper")


@dataclass(frozen=True)
class Kind:
    """What the keeper must know of a job: the seconds an attempt may take, and how it fails."""

    time_limit_s: float
    policy: Policy


@dataclass(eq=False)
class Watched:
    """A process as the register last told of it, and what was seen of it since.

    *alive*: it has been seen, so its absence proves something. Copies of one virtual machine share boot, pids and all.
    """

    told: Neighbour
    alive: bool = False
    silent_looks: int = 0
    untouchable: bool = False

    def look(self) -> processes.Sign:
        sign = processes.look(self.told.pid, self.told.pid_started)
        self.alive |= sign in ("running", "stopped")
        return sign


@dataclass
class Keeper:
    """Lives by its `turn`. *worker_id* is its own process's, *kind* tells what is known of an actor on a queue.

    A process is silent *silent_after_s* after its last sign of life, a job overdue *patience_s* past its time limit.
    Only *silent_looks* silent looks in a row, *look_every_s* apart, cost a process its life: while the database hangs
    nobody is heard.
    """

    worker_id: str
    kind: Callable[[str | None, str], Kind | None]
    meter: Meter
    lease_s: float
    silent_after_s: float
    patience_s: float
    look_every_s: float
    silent_looks: int
    pid_space: str | None = field(default_factory=processes.pid_space)
    _watched: dict[str, Watched] = field(default_factory=dict)
    _look_at: float = 0.0

    def __post_init__(self) -> None:
        if self.pid_space is None:
            log.warning("keeper.off", reason="this system has no /proc that tells processes apart: leases alone decide")

    def turn(self, conn: Conn) -> None:
        """Rescue the jobs of processes that are gone; see to those of the silent, when it is time to ask who is.

        To be called often: it only speaks to the database when it is time, or somebody is gone. Raises psycopg.Error.
        """
        if self.pid_space is None:
            return
        asked = self._ask(conn, self.pid_space)
        signs = [(watched, watched.look()) for watched in self._watched.values()]
        gone = [watched for watched, sign in signs if sign == "gone"]
        if dead := [watched for watched in gone if watched.alive or self._silent(watched)]:
            self._rescue(conn, dead)
        if asked:
            self._see_to(conn, [watched for watched, sign in signs if sign == "running" and self._silent(watched)])

    def _ask(self, conn: Conn, pid_space: str) -> bool:
        """Ask the register who is silent, when it is time; whether it answered."""
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + self.look_every_s
        try:
            told = {one.id: one for one in keeping.neighbours(conn, pid_space) if one.id != self.worker_id}
        except LockNotAvailable:
            return False
        # Who was seen alive and left the register stays until it is gone: it may leave a job behind.
        self._watched = {known: watched for known, watched in self._watched.items() if known in told or watched.alive}
        for worker_id, neighbour in told.items():
            watched = self._watched.setdefault(worker_id, Watched(neighbour))
            watched.told = neighbour
            watched.silent_looks = watched.silent_looks + 1 if self._silent(watched) else 0
        return True

    def _silent(self, watched: Watched) -> bool:
        return watched.told.silent_s > self.silent_after_s

    # Of processes that are gone.

    def _rescue(self, conn: Conn, dead: list[Watched]) -> None:
        ids = [watched.told.id for watched in dead]
        while rescued := jobs.rescue(conn, dead=ids):
            pids = [watched.told.pid for watched in dead]
            log.warning("keeper.rescued", pids=pids, job_ids=[job_id for job_id, _, _ in rescued])
            for _, queue, _ in rescued:
                self.meter.keeper_rescued.labels(queue).inc()
            if len(rescued) < jobs.PAGE:
                break
        with suppress(LockNotAvailable):
            for worker_id in keeping.strike(conn, ids):
                del self._watched[worker_id]

    # Of processes that live and say nothing.

    def _see_to(self, conn: Conn, silent: list[Watched]) -> None:
        if not silent:
            return
        kept = keeping.kept_by(conn, [watched.told.id for watched in silent])
        for watched in silent:
            self._see_to_one(conn, watched, [job for job in kept if job.worker_id == watched.told.id])

    def _see_to_one(self, conn: Conn, watched: Watched, kept: list[Kept]) -> None:
        kinds = {job.id: kind for job in kept if (kind := self.kind(job.actor, job.queue))}
        # What has no known limit would be renewed for ever.
        kept = [job for job in kept if job.id in kinds]
        overdue = {job.id: kinds[job.id] for job in kept if self._overdue(job, kinds[job.id])}
        if overdue and watched.silent_looks >= self.silent_looks:
            if self._killable(watched) and self._kill(conn, watched, kept, overdue):
                return
            kept = [job for job in kept if job.id not in overdue]
        self._renew(conn, watched, [job for job in kept if job.left_s < self.lease_s / 2])

    def _overdue(self, job: Kept, kind: Kind) -> bool:
        return job.age_s > kind.time_limit_s + self.patience_s

    def _renew(self, conn: Conn, watched: Watched, late: list[Kept]) -> None:
        renewed = jobs.renew(conn, {job.id: job.token for job in late}, lease_s=self.lease_s) if late else []
        if renewed:
            log.warning("keeper.renewed", pid=watched.told.pid, job_ids=[renewal.id for renewal in renewed])
            self.meter.keeper_renewed.inc(len(renewed))

    def _killable(self, watched: Watched) -> bool:
        try:
            os.kill(watched.told.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            if not watched.untouchable:
                watched.untouchable = True
                log.error("keeper.cannot_kill", pid=watched.told.pid, reason="it is another user's process")
            return False
        return True

    def _kill(self, conn: Conn, watched: Watched, kept: list[Kept], overdue: dict[str, Kind]) -> bool:
        """Kill the process for its *overdue* jobs; False when they have ended meanwhile or another keeper was first."""
        # The jobs change hands first: nobody else then judges them, and nothing that the process still writes counts.
        tokens = [job.token for job in kept if job.id in overdue]
        taken = keeping.take_over(conn, watched.told.id, tokens=tokens, to=self.worker_id, lease_s=self.lease_s)
        if not taken:
            return False
        if watched.look() in ("running", "stopped"):
            with suppress(ProcessLookupError):
                os.kill(watched.told.pid, signal.SIGKILL)
        timed_out = [job for job in taken if job.id in overdue and not job.stopping]
        beside = [job for job in taken if job.id not in overdue and not job.stopping]
        log.error(
            "keeper.killed", pid=watched.told.pid, timed_out=[job.id for job in timed_out],
            put_back=[job.id for job in beside],
        )  # fmt: skip
        self.meter.keeper_killed.inc()
        jobs.settle(conn, [_timed_out(job, overdue[job.id], watched.told.pid) for job in timed_out])
        jobs.release(conn, {job.id: job.token for job in beside})
        # What is left is to end by a cancel or its deadline; the rescue knows how.
        jobs.rescue(conn, dead=[self.worker_id])
        return True


def _timed_out(job: Kept, kind: Kind, pid: int) -> Settlement:
    error = TimeLimitExceeded(
        f"ran longer than its limit of {kind.time_limit_s:g} s, deaf to it: process {pid} was killed"
    )
    policy = kind.policy if job.max_attempts is None else replace(kind.policy, max_attempts=job.max_attempts)
    verdict = judge(error, attempt=job.attempt, snoozed_s=job.snoozed_s, policy=policy)
    return Settlement(
        job.id,
        job.token,
        verdict.state,
        delay_s=verdict.delay_s,
        outcome=verdict.outcome,
        error_class=describe(error)[0],
        error=verdict.reason,
    )
