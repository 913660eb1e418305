"""Drain, a backlog, and delayed jobs: how fast no-op jobs end, and the memory that takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from bench.contest import Contest, rounds, turn
from bench.figures import Figure
from bench.peers.peer import Peer, Table
from bench.processes import START_S, all_running, until

ONE, TWO = "1 process", "2 processes"
FEW, MANY, OVER_IDLE = "few waiting", "many waiting", "memory over idle"
NONE_DELAYED, MANY_DELAYED = "none delayed", "many delayed"

#: Between two looks at how far a worker is, each of which costs the server a count: until its first job has ended,
LOOK_S = 0.1
#: then, as far as its pace says that it is not done yet,
SELDOM_S = 1.0
#: and at the end.
SOON_S = 0.02


@dataclass(frozen=True)
class Drained:
    """*commits* and *done* are of the whole run, from the worker's start to its end; the rest of the time watched."""

    per_second: float
    memory_mb: float
    connections: int
    commits: int | None
    done: int

    @property
    def commits_a_job(self) -> float:
        return (self.commits or 0) / max(1, self.done)


def drain(contest: Contest) -> list[Figure]:
    """No-op jobs a second: 8 threads a process, or what a peer has in their place; PgQueuer in batches of 100."""
    entries = []
    for processes, what in ((1, ONE), (2, TWO)):
        for peer in contest.peers:
            rate = Figure(what, peer.name, "jobs/s")
            commits = [Figure(f"{what}, commits", peer.name, "a job")] if isinstance(peer.entry.jobs, Table) else []
            entries.append((peer, processes, [rate, *commits]))
    for run in range(contest.runs):
        for peer, processes, figures in entries:
            if run and processes > 1 and peer.entry.environment:
                continue
            turn(peer, figures, partial(_drain, contest, peer, processes, len(figures)))
    told = [figure for _, _, figures in entries for figure in figures]
    return sorted(told, key=lambda figure: "commits" in figure.what)


def _drain(contest: Contest, peer: Peer, processes: int, wanted: int) -> list[float]:
    count = contest.size.count(peer.entry.pace * processes)
    drained = _drained(contest, peer, count, contest.size.watch_s, processes=processes)
    return [drained.per_second, drained.commits_a_job][:wanted]


def _drained(
    contest: Contest, peer: Peer, count: int, watch_s: float, *, later: int = 0, processes: int = 1
) -> Drained:
    """Let its fastest workers loose on *count* due jobs; watched for *watch_s* at most, from the first one's end."""
    peer.ready(count, later=later)
    committed = peer.store.commits()
    with all_running(peer.workers(peer.entry.fast, processes), contest.folder) as workers:

        def left() -> int:
            assert all(worker.lives() for worker in workers)
            return peer.store.unfinished()

        assert until(lambda: left() < count, START_S, LOOK_S), f"nothing was done in {START_S} s"
        first, began = left(), time.monotonic()
        last, ended = first, began
        while last and ended - began < watch_s:
            pace = (first - last) / (ended - began) if last < first else 0.0
            wait_s = min(max(last / pace, SOON_S), SELDOM_S) if pace else LOOK_S
            time.sleep(min(wait_s, max(0.0, began + watch_s - ended)))
            last, ended = left(), time.monotonic()
        memory_mb = max(worker.memory_mb() for worker in workers)
        connections = peer.store.connections()
    done = count - peer.store.unfinished()
    after = peer.store.commits()
    return Drained(
        per_second=(first - last) / max(ended - began, SOON_S),
        memory_mb=memory_mb,
        connections=connections,
        commits=None if after is None or committed is None else after - committed,
        done=done,
    )


def backlog(contest: Contest) -> list[Figure]:
    """No-op jobs a second of one process with 500,000 waiting, of ours also with 20,000; memory of the largest one."""
    figures: dict[str, list[Figure]] = {}
    for _, peer in rounds(contest, contest.queues):
        whats = [(FEW, "jobs/s"), (OVER_IDLE, "MB"), (f"connections, {MANY}", "")] if peer.entry.ours else []
        whats = [(MANY, "jobs/s"), (f"memory, {MANY}", "MB"), *whats]
        mine = figures.setdefault(peer.name, [Figure(what, peer.name, unit) for what, unit in whats])
        turn(peer, mine, partial(_backlog, contest, peer))
    return [figure for mine in figures.values() for figure in mine]


def _backlog(contest: Contest, peer: Peer) -> list[float]:
    size = contest.size
    if not peer.entry.ours:
        many = _drained(contest, peer, size.backlog, size.backlog_s)
        return [many.per_second, many.memory_mb]
    idle_mb = _idle_mb(contest, peer)
    few = _drained(contest, peer, size.jobs, size.backlog_s)
    many = _drained(contest, peer, size.backlog, size.backlog_s)
    return [many.per_second, many.memory_mb, few.per_second, many.memory_mb - idle_mb, many.connections]


def _idle_mb(contest: Contest, peer: Peer) -> float:
    peer.ready()
    with all_running(peer.workers(peer.entry.fast), contest.folder) as workers:
        assert until(peer.store.connections, START_S), "it connects to nothing"
        time.sleep(contest.size.settle_s)
        return max(worker.memory_mb() for worker in workers)


def delayed(contest: Contest) -> list[Figure]:
    """No-op jobs a second of one process beside 100,000 due in an hour, of ours also without them; its memory."""
    figures: dict[str, list[Figure]] = {}
    for _, peer in rounds(contest, contest.queues):
        whats = [NONE_DELAYED] if peer.entry.ours else []
        mine = figures.setdefault(
            peer.name,
            [
                figure
                for what in (MANY_DELAYED, *whats)
                for figure in (Figure(what, peer.name, "jobs/s"), Figure(f"memory, {what}", peer.name, "MB"))
            ],
        )
        turn(peer, mine, partial(_delayed, contest, peer))
    return [figure for mine in figures.values() for figure in mine]


def _delayed(contest: Contest, peer: Peer) -> list[float]:
    count = contest.size.count(peer.entry.pace)
    numbers = [0, contest.size.delayed] if peer.entry.ours else [contest.size.delayed]
    drains = [_drained(contest, peer, count, contest.size.watch_s, later=later) for later in numbers]
    return [value for drained in reversed(drains) for value in (drained.per_second, drained.memory_mb)]
