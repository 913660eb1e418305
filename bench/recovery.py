"""Recovery: a worker is killed during a job while another one has nothing to do. How long until the job runs again?"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.contest import Contest, side_by_side, turn
from bench.figures import Figure
from bench.peers.peer import Peer
from bench.processes import START_S, Command, Running, all_running, environment, running, until

RE_RUN = "kill -9 to re-run"
BESIDE_A_KEEPER = "kill -9 to re-run, beside a keeper"


def recovery(contest: Contest) -> list[Figure]:
    """Seconds from kill -9 of a worker to the start of its job on another; all side by side, with default settings."""
    kept = contest.twin()
    turns = [(peer, Figure(RE_RUN, peer.name, "s"), False) for peer in contest.awaited]
    turns.append((kept, Figure(BESIDE_A_KEEPER, kept.name, "s"), True))
    for run in range(contest.runs):
        now = [
            partial(turn, peer, [figure], partial(_recovered, contest, peer, number, keeper=keeper))
            for number, (peer, figure, keeper) in enumerate(turns)
            if run == 0 or peer.entry.ours
        ]
        side_by_side(now)
    return [figure for _, figure, _ in turns]


def _recovered(contest: Contest, peer: Peer, number: int, *, keeper: bool) -> list[float]:
    marks = contest.folder / f"recovered-{number}"
    marks.unlink(missing_ok=True)
    way = peer.entry.prompt
    assert way is not None
    peer.ready()
    pair = peer.workers(replace(way, told={**way.told, **contest.size.leases}), marks=marks) * 2
    with _keeper(peer, marks) if keeper else nullcontext(), all_running(pair, contest.folder) as workers:
        time.sleep(contest.size.settle_s)
        peer.run("one", "sleep", "0")
        assert until(lambda: _starts(marks), START_S), f"the job did not start within {START_S} s"
        [(_, pid)] = _starts(marks)
        killed_at = _kill(workers, pid)
        within_s = contest.size.rescue_s
        assert until(lambda: len(_starts(marks)) > 1, within_s), f"not within {within_s:g} s"
        return [_starts(marks)[1][0] - killed_at]


@contextmanager
def _keeper(peer: Peer, marks: Path) -> Iterator[Running]:
    told = environment(**peer.store.told, **peer.entry.fast.told, DATA_DIR=str(peer.folder / "data"))
    with running(Command([sys.executable, "cli.py", "relay"], told), marks.with_suffix(".log")) as keeper:
        yield keeper


def _starts(marks: Path) -> list[tuple[float, int]]:
    """When, in seconds since the epoch, and in which process it has started."""
    if not marks.exists():
        return []
    lines = [line.split() for line in marks.read_text().splitlines()]
    return [(float(at), int(pid)) for _, at, pid in lines]


def _kill(workers: list[Running], pid: int) -> float:
    [holder] = [worker for worker in workers if worker.has(pid)]
    killed_at = time.time()
    holder.kill()
    return killed_at
