"""The limit: one loop that claims a hundred rows and completes them. No threads, no actors, no leases, no retries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.peers.program import URL, portions
from outbox.db import Conn, connect

TABLE = """
CREATE TABLE job (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state text NOT NULL DEFAULT 'queued',
    run_at timestamptz NOT NULL DEFAULT now(),
    claimed_at timestamptz,
    done_at timestamptz,
    payload jsonb NOT NULL
)
"""
INDEX = "CREATE INDEX job_claim ON job (run_at, id) WHERE state = 'queued'"
CLAIM = """
WITH due AS MATERIALIZED (
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


def schema() -> None:
    with connect(URL, name="bench") as conn:
        conn.execute(TABLE)
        conn.execute(INDEX)


def worker() -> None:
    """Until somebody ends the process."""
    with connect(URL, name="bench raw") as conn:
        while True:
            if claimed := conn.execute(CLAIM).fetchall():
                conn.execute(COMPLETE, [[row["id"] for row in claimed]])
            else:
                time.sleep(0.01)


class Producer:
    def __init__(self, conn: Conn) -> None:
        self._conn = conn

    def send(self, kind: str, number: int) -> None:
        self._conn.execute("INSERT INTO job (payload) VALUES (%s)", [_payload(kind, number)])

    def bulk(self, count: int) -> None:
        for numbers in portions(count):
            with self._conn.cursor().copy("COPY job (payload) FROM STDIN") as copy:
                for number in numbers:
                    copy.write_row([_payload("noop", number)])


def _payload(kind: str, number: int) -> str:
    return f'{{"kind":"{kind}","number":{number}}}'


@contextmanager
def producer() -> Iterator[Producer]:
    with connect(URL, name="bench") as conn:
        yield Producer(conn)
