"""Latency: from the return of an enqueue to the first line of the job, on queues that people wait for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import quantiles

from bench.contest import Contest, rounds, turn
from bench.figures import Figure
from bench.peers.peer import Peer
from bench.processes import START_S, Running, all_running, until

#: The warm-up's, which is not counted.
FIRST = 3
IDLE_PER_SECOND = 20
BUSY_PER_SECOND = 300
#: Whoever has not begun the last job so long after it was sent is out.
CUT_S = 20
PERCENTS = (50, 95, 99)
IDLE, BUSY = "idle", f"{BUSY_PER_SECOND}/s"


def latency(contest: Contest) -> list[Figure]:
    """Pick-up in ms, from an enqueue's return to the actor's first line: one job each 50 ms, then 300 a second."""
    figures: dict[str, list[Figure]] = {}
    for run, peer in rounds(contest, contest.awaited):
        mine = figures.setdefault(
            peer.name,
            [Figure(f"{pace}, p{percent}", peer.name, "ms") for pace in (IDLE, BUSY) for percent in PERCENTS],
        )
        turn(peer, mine, partial(_latency, contest, peer, contest.folder / f"{peer.name}-{run}.marks"))
    return [figure for column in zip(*figures.values(), strict=True) for figure in column]


def _latency(contest: Contest, peer: Peer, marks: Path) -> list[float]:
    idle, busy = contest.size.pick_ups, contest.size.pick_ups * 9
    way = peer.entry.prompt
    assert way is not None
    peer.ready()
    with all_running(peer.workers(way, marks=marks), contest.folder) as workers:
        _picked_up(peer, workers, marks, range(FIRST), IDLE_PER_SECOND)
        at_idle = _picked_up(peer, workers, marks, range(FIRST, FIRST + idle), IDLE_PER_SECOND)
        later = range(FIRST + idle, FIRST + idle + busy)
        at_pace = _picked_up(peer, workers, marks, later, BUSY_PER_SECOND)
    return [quantiles(each, n=100)[percent - 1] for each in (at_idle, at_pace) for percent in PERCENTS]


def _picked_up(peer: Peer, workers: list[Running], marks: Path, numbers: range, per_second: int) -> list[float]:
    """Milliseconds of each."""
    file = marks.with_suffix(".sent")
    first, count = str(numbers[0]), str(len(numbers))
    peer.run("steadily", first, count, str(per_second), str(file))

    def begun() -> bool:
        assert all(worker.lives() for worker in workers)
        return numbers[-1] in _times(marks) and len(_times(marks)) > numbers[-1]

    patience_s = START_S if numbers[0] == 0 else CUT_S
    assert until(begun, patience_s, 0.1), f"not every job had begun {patience_s} s after the last was sent"
    began, sent = _times(marks), _times(file)
    return [(began[number] - sent[number]) * 1_000 for number in numbers]


def _times(file: Path) -> dict[int, float]:
    """Number → seconds since the epoch, the first line of each."""
    if not file.exists():
        return {}
    lines = [line.split() for line in file.read_text().splitlines()]
    return {int(number): float(at) for number, at, *_ in reversed(lines)}
