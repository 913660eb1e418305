"""Two transactions want one job: each verb that has it, against every other, committed and rolled back (line 29).

The first has done its statement and holds the row; the second passes the row over, or waits for it and looks again.
What comes of it must be what comes of the two one after the other, or of the first alone where the second says that it
did nothing. The orders in which a lease runs out between two looks are in test_jobs.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from outbox import jobs, keeping
from outbox.controls import claim_limited
from outbox.db import Conn, connect
from outbox.jobs import NewJob, RetryRefused, Settlement
from tests import emptied

shared_url, database_url = emptied.shared_url, emptied.database_url

KEEPER = str(uuid.uuid4())
RIVAL = str(uuid.uuid4())


@dataclass
class Case:
    """One job, its owner and his token."""

    id: str
    owner: str = field(default_factory=lambda: str(uuid.uuid4()))
    token: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def queue(self) -> str:
        """Its own, so that a claim of it is of nothing else."""
        return f"q{self.owner[:8]}"


#: Does it, and says whether that changed anything.
Verb = Callable[[Conn, Case], bool]


def settled(state: str, **told: Any) -> Verb:
    return lambda conn, case: jobs.settle(conn, [Settlement(case.id, case.token, state, **told)]) == {case.id}


def claimed(conn: Conn, case: Case) -> bool:
    return bool(jobs.claim(conn, {case.queue: 1}, worker_id=RIVAL, lease_s=600))


def claimed_with_keys(conn: Conn, case: Case) -> bool:
    return bool(claim_limited(conn, {case.queue: 1}, worker_id=RIVAL, lease_s=600).claims)


def taken_over(conn: Conn, case: Case) -> bool:
    return bool(keeping.take_over(conn, case.owner, tokens=[case.token], to=KEEPER, lease_s=600))


def retried(conn: Conn, case: Case) -> bool:
    try:
        jobs.retry(conn, case.id)
    except RetryRefused:
        return False
    return True


VERBS: dict[str, Verb] = {
    "complete": settled("done"),
    "complete with a result": settled("done", result="1"),
    "fail": settled("queued", outcome="failed", error="no"),
    "discard": settled("rejected", outcome="discarded", error="no"),
    "renew": lambda conn, case: bool(jobs.renew(conn, {case.id: case.token}, lease_s=600)),
    "release": lambda conn, case: jobs.release(conn, {case.id: case.token}) == 1,
    "release unheld": lambda conn, case: jobs.release_unheld(conn, case.owner, []) == 1,
    "rescue": lambda conn, case: bool(jobs.rescue(conn, dead=[case.owner])),
    "take over": taken_over,
    "claim": claimed,
    "claim with keys": claimed_with_keys,
    "retry": retried,
    "prune": lambda conn, case: jobs.prune(conn, completed_s=0, failed_s=0) == 1,
}

_GIVEN_BACK = dict.fromkeys(["fail", "release", "release unheld", "rescue"], "waiting")
#: The contract (specs/queue.md 2): what a verb makes of a state; where it is not named, nothing.
BECOMES: dict[str, dict[str, str]] = {
    "waiting": {"claim": "rival's", "claim with keys": "rival's"},
    "held": {
        **_GIVEN_BACK,
        "complete": "done",
        "complete with a result": "done",
        "discard": "discarded",
        "renew": "held",
        "take over": "kept",
    },
    "kept": {},
    "rival's": {},
    "done": {"prune": "gone"},
    "discarded": {"prune": "gone", "retry": "waiting"},
    "gone": {},
}
ADDS_HISTORY = ("fail", "discard", "rescue")


def begin(conn: Conn, state: str) -> Case:
    """The only job there is, brought to *state* by its owner."""
    conn.execute("DELETE FROM dramatiq.queue")
    case = Case(str(uuid.uuid4()))
    jobs.enqueue(conn, NewJob(id=case.id, queue=case.queue, actor="a"))
    if state == "waiting":
        return case
    (claim,) = jobs.claim(conn, {case.queue: 1}, worker_id=case.owner, lease_s=600)
    case.token = claim.token
    way = {"kept": "take over", "done": "complete", "discarded": "discard"}.get(state)
    assert way is None or VERBS[way](conn, case)
    conn.execute("DELETE FROM posthouse.attempts")
    assert where(conn, case) == state
    return case


def where(conn: Conn, case: Case) -> str:
    """The state that the table tells."""
    row = conn.execute("SELECT state, worker_id::text FROM dramatiq.queue WHERE message_id = %s", [case.id]).fetchone()
    if row is None:
        return "gone"
    holders = {case.owner: "held", KEEPER: "kept", RIVAL: "rival's"}
    return {"queued": "waiting", "done": "done", "rejected": "discarded"}.get(row["state"]) or holders[row["worker_id"]]


@dataclass
class Pair:
    """Two sessions that want the same, and a third one that looks on."""

    first: Conn
    second: Conn
    onlooker: Conn
    pool: ThreadPoolExecutor

    def meet(self, state: str, first: str, second: str, *, commits: bool) -> None:
        """The first verb is done but not committed as the second one comes."""
        case = begin(self.onlooker, state)
        self.first.execute("BEGIN")
        assert VERBS[first](self.first, case)
        late = self.pool.submit(VERBS[second], self.second, case)
        waited = self._waits(late)
        self.first.execute("COMMIT" if commits else "ROLLBACK")
        came = late.result(10)

        found = BECOMES[state][first] if commits else state
        assert where(self.onlooker, case) == (BECOMES[found].get(second) if came else found)
        assert came or not waited or second not in BECOMES[found], "it waited for what it then did not see"
        self._count(case, state, [first] * commits + [second] * came)
        if not came:
            assert VERBS[second](self.second, case) == (second in BECOMES[found]), "what was passed over is lost"

    def _waits(self, late: Future[bool]) -> bool:
        """Whether it has come to wait for the first; else it has ended."""
        query = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        while not wait([late], timeout=0.002).done:
            if self.onlooker.execute(query, [self.second.info.backend_pid]).fetchall():
                return True
        return False

    def _count(self, case: Case, state: str, written: list[str]) -> None:
        """The counters and the history tell of what was written, and of nothing else."""
        row = self.onlooker.execute("SELECT * FROM dramatiq.queue WHERE message_id = %s", [case.id]).fetchone()
        if row is None:
            return
        verbs = dict.fromkeys(VERBS, 0) | {verb: written.count(verb) for verb in written}
        attempt = 0 if state == "waiting" or verbs["retry"] else 1
        attempt += verbs["claim"] + verbs["claim with keys"] - verbs["release"] - verbs["release unheld"]
        assert (row["attempt"], row["crashes"]) == (attempt, verbs["rescue"])
        told = self.onlooker.execute("SELECT outcome FROM posthouse.attempts WHERE job_id = %s", [case.id]).fetchall()
        assert len(told) == sum(verbs[verb] for verb in ADDS_HISTORY)


@pytest.fixture
def pair(database_url: str) -> Iterator[Pair]:
    with ExitStack() as opened:
        first, second, onlooker = (opened.enter_context(connect(database_url, name=name)) for name in "abc")
        yield Pair(first, second, onlooker, opened.enter_context(ThreadPoolExecutor(1)))


@pytest.mark.parametrize(("state", "first"), [(state, verb) for state, verbs in BECOMES.items() for verb in verbs])
def test_two_that_want_one_job_end_as_one_after_the_other(pair: Pair, state: str, first: str) -> None:
    for second, commits in product(VERBS, (True, False)):
        try:
            pair.meet(state, first, second, commits=commits)
        except AssertionError as failed:
            failed.add_note(f"{second!r} while {first!r} was {'committed' if commits else 'rolled back'}: {state} job")
            raise
