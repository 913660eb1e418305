"""The register of working processes, for people and for the host's keeper. Whose a job is, the job's lease says."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from typing import Any

from outbox.db import Conn, sql
from outbox.processes import own_start, pid_space

VERSION = "0.1.0"


@dataclass(frozen=True)
class Worker:
    """One process, from its start to its end; *id* is new each time it starts."""

    queues: tuple[str, ...]
    threads: int
    actors: tuple[str, ...] = ()
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    pid_space: str | None = field(default_factory=pid_space)
    pid_started: int | None = field(default_factory=own_start)
    version: str = VERSION


def register(conn: Conn, worker: Worker, *, running: int) -> None:
    """Say that *worker* is alive and has *running* jobs in hand."""
    lists = {"queues": list(worker.queues), "actors": list(worker.actors)}
    conn.execute(sql(__file__, "register"), {**vars(worker), **lists, "running": running})


def leave(conn: Conn, worker: Worker) -> None:
    conn.execute(sql(__file__, "leave"), {"id": worker.id})


def alive(conn: Conn, *, within_s: float = 15) -> list[dict[str, Any]]:
    """The processes heard of in the last *within_s* seconds."""
    return conn.execute(sql(__file__, "alive"), {"within_s": within_s}).fetchall()


def prune(conn: Conn, *, unseen_s: float = 3_600) -> int:
    """Strike out processes unheard of for *unseen_s* seconds; how many went."""
    return conn.execute(sql(__file__, "prune_workers"), {"unseen_s": unseen_s}).rowcount
