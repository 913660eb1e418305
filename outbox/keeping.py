"""What a host's keeper reads and writes: the processes beside it, the jobs they hold, and how those change hands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outbox.db import Conn, rows, sql


@dataclass(frozen=True)
class Neighbour:
    """A registered process of this pid space; *silent_s* since its last sign of life, by the database's clock."""

    id: str
    pid: int
    pid_started: int
    silent_s: float


@dataclass(frozen=True)
class Kept:
    """A job that a process holds under a lease: claimed *age_s* ago, the lease ends in *left_s*.

    *stopping*: it is to end, by a cancel or its deadline.
    """

    id: str
    token: str
    worker_id: str
    queue: str
    actor: str | None
    attempt: int
    max_attempts: int | None
    snoozed_s: float
    age_s: float
    left_s: float
    stopping: bool


def neighbours(conn: Conn, pid_space: str) -> list[Neighbour]:
    """The processes that registered from *pid_space*."""
    return [Neighbour(*row) for row in rows(conn, sql(__file__, "neighbours"), {"pid_space": pid_space})]


def kept_by(conn: Conn, worker_ids: Iterable[str]) -> list[Kept]:
    """The jobs that these processes hold."""
    return [Kept(*row) for row in rows(conn, sql(__file__, "kept_by"), {"worker_ids": list(worker_ids)})]


def take_over(conn: Conn, worker_id: str, *, tokens: Iterable[str], to: str, lease_s: float) -> list[Kept]:
    """Move all that *worker_id* holds to the worker *to*, if one of *tokens* is still among it; as it is then, else [].

    From here on nothing that *worker_id* writes counts.
    """
    given = {"worker_id": worker_id, "tokens": list(tokens), "to": to, "lease_s": lease_s}
    return [Kept(*row) for row in rows(conn, sql(__file__, "take_over"), given)]


def strike(conn: Conn, worker_ids: Iterable[str]) -> set[str]:
    """Take dead processes off the register; those that hold no job, and so need no further look."""
    return {row[0] for row in rows(conn, sql(__file__, "strike"), {"worker_ids": list(worker_ids)})}
