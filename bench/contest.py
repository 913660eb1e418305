"""Those who are measured beside each other: each with a store of its own, taking turns within each run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from bench.figures import Figure, Size
from bench.peers import environments, stores
from bench.peers.every import OUR_JOBS, POSTHOUSE
from bench.peers.peer import Entry, Keys, Peer, Store
from bench.places import Place

WRONG = (AssertionError, OSError, subprocess.SubprocessError, psycopg.Error)


@dataclass(frozen=True)
class Contest:
    """Who takes part, where, with how much work, how often. *absent*: why others do not, by name."""

    place: Place
    peers: list[Peer]
    size: Size
    runs: int
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.place.folder

    @property
    def ours(self) -> Peer:
        return next(peer for peer in self.peers if peer.entry == POSTHOUSE)

    @property
    def queues(self) -> list[Peer]:
        """Each of them once, in the way that is its main one."""
        return [peer for peer in self.peers if not peer.entry.only_drains]

    @property
    def awaited(self) -> list[Peer]:
        """Those with jobs that somebody waits for."""
        return [peer for peer in self.peers if peer.entry.prompt]

    def twin(self) -> Peer:
        """Ours once more, with a database of its own, to be measured at the same time."""
        store = stores.Rows(OUR_JOBS, self.place.database("bench_twin"), self.place.url)
        return Peer(POSTHOUSE, store, self.folder)


def turn(peer: Peer, figures: Sequence[Figure], measure: Callable[[], Sequence[float]]) -> None:
    """Measure *peer* once: a value for each of *figures*. What fails of somebody else's is told beside them."""
    if any(figure.failure for figure in figures):
        return
    try:
        values = measure()
    except WRONG as error:
        if peer.entry.ours:
            raise
        for figure in figures:
            figure.failure = _first_line(error)
        return
    for figure, value in zip(figures, values, strict=True):
        figure.values.append(value)


def _first_line(error: BaseException) -> str:
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{next(iter(str(error).splitlines()), '')}"[:200]


def side_by_side(turns: Sequence[Callable[[], None]]) -> None:
    """All of them at once: for what mostly waits."""
    with ThreadPoolExecutor(len(turns)) as pool:
        for done in [pool.submit(each) for each in turns]:
            done.result()


def rounds(contest: Contest, peers: Sequence[Peer]) -> Iterator[tuple[int, Peer]]:
    """Run after run, in each of them one after the other; others' queues only in the first one."""
    for run in range(contest.runs):
        for peer in peers:
            if run == 0 or peer.entry.environment is None:
                yield run, peer


@contextmanager
def contest(
    place: Place, entries: Sequence[Entry], size: Size, runs: int, tell: Callable[[str], None]
) -> Iterator[Contest]:
    """Those of *entries* that can be measured here."""
    missing = environments.make([entry.environment for entry in entries if entry.environment], tell)
    absent = {
        entry.name: missing[entry.environment.name]
        for entry in entries
        if entry.environment and entry.environment.name in missing
    }
    able = [entry for entry in entries if entry.name not in absent]
    with ExitStack() as stack:
        peers = [Peer(entry, _store(place, entry, stack), place.folder) for entry in able]
        yield Contest(place, peers, size, runs, absent)


def _store(place: Place, entry: Entry, stack: ExitStack) -> Store:
    if isinstance(entry.jobs, Keys):
        return stores.Redis(entry.jobs, stack.enter_context(stores.redis(place.folder)))
    database = place.database("bench_" + re.sub(r"\W+", "_", entry.name.lower()))
    return stores.Rows(entry.jobs, database, place.url)
