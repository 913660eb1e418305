"""Jobs brought to where a test wants them, by the ledger's own verbs."""

from __future__ import annotations

import uuid
from typing import Any

from outbox import jobs
from outbox.db import Conn
from outbox.jobs import Claim, NewJob, Settlement

WORKER = str(uuid.uuid4())
#: What the statement `settle_and_claim` is given to claim four of one queue.
CLAIMING = {
    "ids": "{}",
    "tokens": "{}",
    "verdicts": "[]",
    "wanted": '{"q": 4}',
    "worker_id": WORKER,
    "random": "r",
    "lease_s": "9",
}


def new(**given: Any) -> NewJob:
    return NewJob(**{"queue": "q", "actor": "a", **given})


def add(conn: Conn, **given: Any) -> str:
    return jobs.enqueue(conn, new(**given)).id


def claim(conn: Conn, count: int = 1, queue: str = "q", lease_s: float = 20) -> list[Claim]:
    return jobs.claim(conn, {queue: count}, worker_id=WORKER, lease_s=lease_s)


def claimed(conn: Conn, **given: Any) -> Claim:
    """The only job there is, just claimed."""
    add(conn, **given)
    return claim(conn)[0]


def settle(conn: Conn, held: Claim, state: str = "done", **outcome: Any) -> bool:
    """Whether the outcome was written."""
    return jobs.settle(conn, [Settlement(held.id, held.token, state, **outcome)]) == {held.id}


def fail(conn: Conn, held: Claim, state: str = "queued", error: str = "no") -> bool:
    return settle(conn, held, state, outcome="failed", error_class="ValueError", error=error, traceback="t")


def expire(conn: Conn, job_id: str) -> None:
    """The lease runs out now."""
    conn.execute("UPDATE dramatiq.queue SET lease_until = clock_timestamp() WHERE message_id = %s", [job_id])


def lose(conn: Conn, held: Claim) -> str:
    """The worker dies, the job is rescued; its new state in the table."""
    expire(conn, held.id)
    return {job_id: state for job_id, _, state in jobs.rescue(conn)}[held.id]


def row(conn: Conn, job_id: str) -> dict[str, Any]:
    found = conn.execute("SELECT * FROM dramatiq.queue WHERE message_id = %s", [job_id]).fetchone()
    assert found is not None
    return found


def shown(conn: Conn, job_id: str) -> dict[str, Any]:
    found = jobs.load(conn, job_id)
    assert found is not None
    return found


def count(conn: Conn) -> int:
    found = conn.execute("SELECT count(*) AS n FROM dramatiq.queue").fetchone()
    return found["n"] if found else 0


def in_state(conn: Conn, state: str) -> str:
    """A job of its own queue in one of the states people see."""
    job_id = add(conn, queue=state)
    held = None if state == "pending" else claim(conn, queue=state)[0]
    if held and state != "running":
        settle(conn, held, {"completed": "done", "discarded": "rejected"}.get(state, "queued"), delay_s=9)
    assert shown(conn, job_id)["state"] == state
    return job_id


def plan_of_a_claim(conn: Conn) -> dict[str, Any]:
    """The server's plan for four more, made once for every claim as it is for a worker's; it is carried out."""
    claim(conn, 0)
    (made,) = conn.execute(
        "SELECT name FROM pg_prepared_statements WHERE statement LIKE %s", ["%claimed AS (%UPDATE dramatiq.queue q%"]
    ).fetchall()
    given = ", ".join(f"'{text}'" for text in CLAIMING.values())
    explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {made['name']} ({given})"
    (found,) = conn.execute(explain.encode()).fetchall()
    plan: dict[str, Any] = found["QUERY PLAN"][0]["Plan"]
    return plan
