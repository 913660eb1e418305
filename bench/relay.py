"""Relay: how fast events become jobs."""

from __future__ import annotations

from bench.contest import Contest
from bench.figures import Figure
from bench.processes import all_running, until
from outbox.db import Conn, connect

FAN_OUT_S = 60
WAITING = "SELECT count(*) AS n FROM posthouse.events WHERE fanned_out_at IS NULL"
RECORDED = """
INSERT INTO posthouse.events (type, subject)
SELECT 'bench.happened', number FROM generate_series(1, %s) AS number
"""
FANNED_OUT = """
SELECT count(*) FILTER (WHERE fanned_out_at > first) AS n,
       extract(epoch FROM max(fanned_out_at) - min(fanned_out_at))::float AS seconds
FROM (SELECT fanned_out_at, min(fanned_out_at) OVER () AS first FROM posthouse.events) AS events
"""


def relay(contest: Contest) -> list[Figure]:
    """Events a second, from the first one's fan-out to the last one's, by one worker process that has nothing else."""
    ours, size = contest.ours, contest.size
    figure = Figure("1 subscription", ours.name, "events/s")
    for _ in range(contest.runs):
        ours.ready()
        with connect(ours.store.told["DATABASE_URL"], name="bench") as conn:
            conn.execute(RECORDED, [size.events])
            conn.execute("VACUUM (ANALYZE) posthouse.events")
            with all_running(ours.workers(ours.entry.fast), contest.folder) as [worker]:
                assert until(lambda: worker.lives() and conn.execute(WAITING).fetchone() == {"n": 0}, FAN_OUT_S, 0.25)
            assert ours.store.unfinished() == size.events
            figure.values.append(_rate(conn))
    return [figure]


def _rate(conn: Conn) -> float:
    row = conn.execute(FANNED_OUT).fetchone()
    return row["n"] / row["seconds"] if row and row["seconds"] else 0.0
