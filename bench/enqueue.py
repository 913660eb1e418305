"""Enqueue: how fast one producer puts jobs in."""

from __future__ import annotations

from functools import partial

from bench.contest import Contest, turn
from bench.figures import Figure
from bench.peers.peer import Peer


def enqueue(contest: Contest) -> list[Figure]:
    """Jobs a second of one producer: one a transaction, and by the fastest call there is for many."""
    size = contest.size
    figures = [
        (Figure(what, peer.name, "jobs/s"), peer, word, count)
        for what, word, count in (("single", "single", size.singly), ("bulk", "bulk", size.in_bulk))
        for peer in contest.queues
        if word == "single" or peer.entry.has_bulk
    ]
    for _ in range(contest.runs):
        for figure, peer, word, count in figures:
            turn(peer, [figure], partial(_enqueued, peer, word, count))
    return [figure for figure, *_ in figures]


def _enqueued(peer: Peer, word: str, count: int) -> list[float]:
    peer.ready()
    seconds = float(peer.run(word, str(count)))
    found = peer.store.unfinished()
    assert found == count, f"{found} of {count} jobs are there"
    return [count / seconds]
