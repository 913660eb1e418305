"""Idle: what a worker process and the whole service cost when there is nothing to do."""

from __future__ import annotations

import time
from functools import partial

from bench import service
from bench.contest import Contest, side_by_side, turn
from bench.figures import Figure
from bench.peers.peer import Peer, Way
from bench.processes import START_S, all_running, until

NOT_AWAITED = ", not awaited"


def idle(contest: Contest) -> list[Figure]:
    """Of one worker process with nothing to do: statements, CPU of a core, memory; of the whole service: CPU."""
    return [*workers(contest), *service.idle(contest.size, contest.runs)]


def workers(contest: Contest) -> list[Figure]:
    """The first of these; all side by side, since they only wait."""
    entries = [(peer, peer.entry.prompt, "") for peer in contest.awaited]
    ours = contest.twin()
    entries.append((ours, ours.entry.fast, NOT_AWAITED))
    turns = [(peer, way, _figures(peer.name + suffix)) for peer, way, suffix in entries]
    for run in range(contest.runs):
        now = [
            partial(turn, peer, figures, partial(_idle, contest, peer, way))
            for peer, way, figures in turns
            if way and (run == 0 or peer.entry.environment is None)
        ]
        side_by_side(now)
    return [figure for column in zip(*(figures for *_, figures in turns), strict=True) for figure in column]


def _figures(who: str) -> list[Figure]:
    return [
        Figure("statements", who, "/s"),
        Figure("CPU", who, "%"),
        Figure("memory", who, "MB"),
        Figure("connections", who, ""),
    ]


def _idle(contest: Contest, peer: Peer, way: Way) -> list[float]:
    peer.ready()
    with peer.store.counted() as statements, all_running(peer.workers(way), contest.folder) as [worker]:
        assert until(lambda: worker.lives() and peer.store.connections(), START_S), "it connects to nothing"
        time.sleep(contest.size.settle_s)
        asked, spent_s, began = statements(), worker.cpu_s(), time.monotonic()
        time.sleep(contest.size.idle_s)
        seconds = time.monotonic() - began
        assert worker.lives()
        return [
            (statements() - asked) / seconds,
            (worker.cpu_s() - spent_s) / seconds * 100,
            worker.memory_mb(),
            peer.store.connections(),
        ]
