"""What holds a job back on purpose: a paused queue, a full key, an empty token bucket.

A waiting job costs no attempt and is not moved; those behind it are found past it. Who holds a key is read from the
leased rows themselves, so what a dead worker held is free again with its lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from outbox import jobs
from outbox.db import Conn, rows, sql, transaction
from outbox.jobs import Claim, in_order
from outbox.payload import clean

MAX_REASON_CHARACTERS = 512
MAX_PAUSE_S = 365 * 86_400
#: So many keys and priorities of a queue are stepped through at most by one claim; the next one goes on from there.
STEPS = 500
#: So many more keys are locked than jobs are wanted: one may turn out to be full.
SPARE_KEYS = 8
#: Whoever has locked a key is done with it in a few milliseconds; what he leaves is looked at again then.
MISSED_S = 0.01


class BadPause(ValueError):
    """A pause that says not who, why, or for how long; nothing was written."""


@dataclass(frozen=True)
class Pause:
    """A queue that claims nothing until *until_at*; None: until somebody resumes it."""

    queue: str
    paused_at: datetime
    paused_by: str
    reason: str
    until_at: datetime | None


def pause(conn: Conn, queue: str, *, by: str, reason: str, until_s: float | None = None) -> None:
    """From this commit on no job of *queue* is claimed, for *until_s* seconds or until `resume`; running ones finish.

    A second pause replaces the first. Raises BadPause. Contract: specs/queue.md 7.
    """
    for name, text in (("by", by), ("reason", reason)):
        if not text.strip() or len(text) > MAX_REASON_CHARACTERS:
            raise BadPause(f"{name} must have 1 to {MAX_REASON_CHARACTERS} characters")
    if until_s is not None and not 0 < until_s <= MAX_PAUSE_S:
        raise BadPause("a pause lasts for more than 0 seconds and at most 365 days")
    told = {"by": clean(by, MAX_REASON_CHARACTERS), "reason": clean(reason, MAX_REASON_CHARACTERS)}
    conn.execute(sql(__file__, "pause"), {"queue": queue, "until_s": until_s, **told})


def resume(conn: Conn, queue: str) -> bool:
    """End *queue*'s pause and ring its bell, so that what waits starts at once; whether it was paused."""
    return any(row[0] for row in rows(conn, sql(__file__, "resume"), {"queue": queue}))


def pauses(conn: Conn) -> dict[str, Pause]:
    """The pauses in force, by queue."""
    return {row[0]: Pause(*row) for row in rows(conn, sql(__file__, "pauses"), {})}


@dataclass(frozen=True)
class Limited:
    """What was claimed. *again_in_s*: queues that will have more, a token say, and the seconds until then.

    *keyed*: queues in which jobs with a key may wait still.
    """

    claims: list[Claim]
    again_in_s: dict[str, float]
    keyed: set[str]


@dataclass(frozen=True)
class _Step:
    """The jobs of one priority of a key that is locked; up to *room* of the key may start, None: any number."""

    queue: str
    key: str
    priority: int
    room: int | None


#: The last key of each queue that was stepped over when there were too many for one claim.
_after: dict[str, str] = {}


def claim_limited(conn: Conn, wanted: dict[str, int], *, worker_id: str, lease_s: float) -> Limited:
    """Take due jobs as `jobs.claim`, but those with a key too, in one order by priority and due time.

    Of a key never more than its limit run, over all processes, and none starts without a token. A key that another
    process decides about at this moment is left to it. Of one key's jobs with different limits the first in line
    decides. A token is spent at the claim, and stays so when the job is given back unstarted.
    """
    with transaction(conn):
        steps, again_in_s = _lock_keys(conn, wanted)
        claims = _claim_limited(conn, wanted, steps, worker_id, lease_s) if steps else []
    found = Counter(claim.queue for claim in claims)
    if left := {queue: n - found[queue] for queue, n in wanted.items() if n > found[queue]}:
        rest = jobs.settle_and_claim(conn, [], left, worker_id=worker_id, lease_s=lease_s)
        return Limited(sorted(claims + rest.claims, key=in_order), again_in_s, (wanted.keys() - left) | rest.keyed)
    return Limited(sorted(claims, key=in_order), again_in_s, set(wanted))


def _claim_limited(
    conn: Conn, wanted: dict[str, int], steps: Sequence[_Step], worker_id: str, lease_s: float
) -> list[Claim]:
    queues = sorted({step.queue for step in steps})
    given = {
        "queues": queues,
        "limits": [wanted[queue] for queue in queues],
        "step_queues": [step.queue for step in steps],
        "step_keys": [step.key for step in steps],
        "step_priorities": [step.priority for step in steps],
        "step_rooms": [step.room for step in steps],
        "worker_id": worker_id,
        "lease_s": lease_s,
    }
    return [Claim(*row) for row in rows(conn, sql(__file__, "claim_limited"), given)]


def _lock_keys(conn: Conn, wanted: dict[str, int]) -> tuple[list[_Step], dict[str, float]]:
    given = {
        "queues": list(wanted),
        "limits": list(wanted.values()),
        "after": [_after.pop(queue, "") for queue in wanted],
        "steps": STEPS,
        "spare": SPARE_KEYS,
        "missed_s": MISSED_S,
    }
    steps, again_in_s = [], {}
    for queue, key, priority, room, seconds in rows(conn, sql(__file__, "lock_keys"), given):
        if priority is not None:
            steps.append(_Step(queue, key, priority, room))
            continue
        if key is not None:
            _after[queue] = key
        if seconds is not None:
            again_in_s[queue] = seconds
    return steps, again_in_s


def prune_buckets(conn: Conn, *, limit: int = 1_000) -> int:
    """Delete up to *limit* buckets that are full again; how many went."""
    return conn.execute(sql(__file__, "prune_buckets"), {"limit": limit}).rowcount
