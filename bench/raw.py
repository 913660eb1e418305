"""The limit: one loop that claims a hundred rows and completes them. No threads, no actors, no leases, no retries."""

from __future__ import annotations

import os
import time

from outbox.db import connect

CLAIM = """
WITH due AS (
    SELECT id FROM job
    WHERE state = 'queued' AND run_at <= now()
    ORDER BY run_at, id
    LIMIT 100
    FOR UPDATE SKIP LOCKED
)
UPDATE job
SET state = 'running', claimed_at = now()
FROM due
WHERE job.id = due.id
RETURNING job.id, job.payload
"""
COMPLETE = "UPDATE job SET state = 'done', done_at = now() WHERE id = ANY(%s)"


def work(url: str) -> None:
    """Until somebody ends the process."""
    with connect(url, name="bench raw") as conn:
        while True:
            if claimed := conn.execute(CLAIM).fetchall():
                conn.execute(COMPLETE, [[row["id"] for row in claimed]])
            else:
                time.sleep(0.01)


if __name__ == "__main__":
    work(os.environ["DATABASE_URL"])
