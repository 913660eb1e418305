"""The queue measured: drain, enqueue, relay, latency. A function a test; contestants take turns within each run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import LiteralString

from psycopg.sql import SQL

from bench.figures import OURS, Figure, Size
from bench.peers import Peer, Posthouse, Raw, Stock
from bench.places import Place
from bench.processes import START_S, Running, all_running, running, until
from outbox import jobs
from outbox.db import Conn, connect
from outbox.jobs import NewJob

#: Whoever has not finished so long after the first completion is stopped; the rate is that of what was done.
CUT_S = 20
#: Between two looks at how far a worker is: each of them costs the server a count.
LOOK_S = 0.25
PICK_UP_EVERY_S = 0.05


def drain(place: Place, size: Size, runs: int) -> list[Figure]:
    """No-op jobs a second, from the first completion to the last, by the database's clock."""
    peers = _peers(place)
    entries = [
        (Figure(what, peer.name, "jobs/s"), peer, processes)
        for processes, what in ((1, "1 process"), (2, "2 processes"))
        for peer in peers
    ]
    for _ in range(runs):
        for figure, peer, processes in entries:
            _drain(figure, peer, processes, place.folder, size.jobs * peer.times)
    return [figure for figure, _, _ in entries]


def _peers(place: Place) -> list[Peer]:
    return [Posthouse(place.database("ours")), Raw(place.database("raw")), Stock(place.database("stock"))]


def _drain(figure: Figure, peer: Peer, processes: int, folder: Path, count: int) -> None:
    with connect(peer.url, name="bench") as conn:
        _ready(conn, peer, fill=count)
        with all_running(peer.workers(folder, processes), folder) as workers:
            _until(workers, lambda: _count(conn, peer.unfinished) < count, START_S)
            finished = _until(workers, lambda: _count(conn, peer.unfinished) == 0, CUT_S)
        figure.values.append(_rate(conn, peer.ended))
        if not finished:
            figure.notes.append(f"(stopped after {CUT_S} s)")


def _ready(conn: Conn, peer: Peer, *, fill: int = 0) -> None:
    """The same state for every run: only the jobs to be done, statistics made, nothing left to be written out."""
    conn.execute(peer.empty)
    peer.fill(conn, fill)
    conn.execute("VACUUM (ANALYZE)")
    conn.execute("CHECKPOINT")


def _until(workers: list[Running], true: Callable[[], bool], within_s: float) -> bool:
    return until(lambda: all(worker.lives() for worker in workers) and true(), within_s, LOOK_S)


def _count(conn: Conn, statement: LiteralString) -> int:
    row = conn.execute(statement).fetchone()
    return int(row["n"]) if row else 0


def _rate(conn: Conn, ended: LiteralString) -> float:
    """How many a second ended, of those after the first, by what *ended* selects as "at"."""
    row = conn.execute(
        SQL(
            """
            SELECT count(*) FILTER (WHERE at > first) AS n, extract(epoch FROM max(at) - min(first))::float AS seconds
            FROM (SELECT at, min(at) OVER () AS first FROM ({}) AS ended) AS ended
            """
        ).format(SQL(ended))
    ).fetchone()
    return row["n"] / row["seconds"] if row and row["seconds"] else 0.0


def enqueue(place: Place, size: Size, runs: int) -> list[Figure]:
    """Rows a second: one a transaction, and in bulk, 1,000 a statement."""
    peers = _peers(place)
    singly = [Figure("single", peer.name, "rows/s") for peer in peers]
    in_bulk = [Figure("bulk", peer.name, "rows/s") for peer in peers]
    for _ in range(runs):
        for peer, one, many in zip(peers, singly, in_bulk, strict=True):
            one.values.append(_enqueued(peer, peer.send, size.singly))
            if peer.has_bulk:
                many.values.append(_enqueued(peer, peer.fill, size.jobs))
    return [figure for figure in (*singly, *in_bulk) if figure.values]


def _enqueued(peer: Peer, enqueue: Callable[[Conn, int], None], count: int) -> float:
    with connect(peer.url, name="bench") as conn:
        _ready(conn, peer)
        began = time.perf_counter()
        enqueue(conn, count)
        seconds = time.perf_counter() - began
        assert _count(conn, peer.unfinished) == count
    return count / seconds


WAITING = "SELECT count(*) AS n FROM posthouse.events WHERE fanned_out_at IS NULL"
FANNED_OUT = "SELECT fanned_out_at AS at FROM posthouse.events"
RECORDED = """
INSERT INTO posthouse.events (type, subject)
SELECT 'bench.happened', number FROM generate_series(1, %s) AS number
"""


def relay(place: Place, size: Size, runs: int) -> list[Figure]:
    """Events a second, from the first one's fan-out to the last one's, by one worker process that has nothing else."""
    figure = Figure("1 subscription", OURS, "events/s")
    peer = Posthouse(place.database("ours"))
    for _ in range(runs):
        with connect(peer.url, name="bench") as conn:
            _ready(conn, peer)
            conn.execute(RECORDED, [size.events])
            conn.execute("VACUUM (ANALYZE) posthouse.events")
            with all_running(peer.workers(place.folder, 1), place.folder) as workers:
                assert _until(workers, lambda: _count(conn, WAITING) == 0, START_S + CUT_S)
            assert _count(conn, peer.unfinished) == size.events
            figure.values.append(_rate(conn, FANNED_OUT))
    return [figure]


def latency(place: Place, size: Size, runs: int) -> list[Figure]:
    """From an enqueue's return to the actor's first line, in ms: one job each 50 ms on an idle, awaited queue."""
    p50, p99 = Figure("pick-up, p50", OURS, "ms"), Figure("pick-up, p99", OURS, "ms")
    peer = Posthouse(place.database("ours"))
    for run in range(runs):
        marks = place.folder / f"marks-{run}"
        [command] = peer.workers(place.folder, 1, awaited=True, BENCH_MARKS=str(marks))
        with connect(peer.url, name="bench") as conn, running(command, place.folder / "latency.log") as worker:
            _ready(conn, peer)
            assert until(lambda: worker.says("consumer.listening"), START_S)
            percentiles = quantiles(_picked_up(conn, marks, size.pick_ups), n=100)
        p50.values.append(percentiles[49])
        p99.values.append(percentiles[98])
    return [p50, p99]


def _picked_up(conn: Conn, marks: Path, count: int) -> list[float]:
    """Milliseconds of each, but for the first three, which warm up."""
    sent = []
    next_at = time.monotonic()
    for number in range(count + 3):
        next_at += PICK_UP_EVERY_S
        time.sleep(max(0.0, next_at - time.monotonic()))
        jobs.enqueue(conn, NewJob(queue="bench", actor="bench.mark", args=[number]))
        sent.append(time.time())
    assert until(lambda: marks.exists() and len(marks.read_text().splitlines()) == len(sent), CUT_S)
    began = dict(map(str.split, marks.read_text().splitlines()))
    return [(float(began[str(number)]) - at) * 1_000 for number, at in enumerate(sent)][3:]
