"""A queue's unfinished jobs as a whole, for tests: whether there are any, and away with those that wait."""

from __future__ import annotations

from outbox.db import Conn, sql


def unfinished(conn: Conn, queue: str) -> bool:
    """Whether a job of *queue* waits, is delayed or runs."""
    row = conn.execute(sql(__file__, "unfinished"), {"queue": queue}).fetchone()
    return bool(row and row["unfinished"])


def flush(conn: Conn, queue: str) -> int:
    """Delete the jobs of *queue* that wait or are delayed, with their history; running ones stay. How many went."""
    return conn.execute(sql(__file__, "flush"), {"queue": queue}).rowcount
