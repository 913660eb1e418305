"""Paused queues, limits and rates, on the ledger: what is held back, what passes it, and what frees it again.

With whole processes (lines 14 to 17) they are in test_controls_processes.py.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest

from outbox import controls, jobs
from outbox.controls import BadPause, claim_limited
from outbox.db import Conn, connect, sql
from outbox.jobs import Claim, NewJob, Settlement
from outbox.listener import Bells
from tests import emptied, ledger

shared_url, database_url = emptied.shared_url, emptied.database_url

WORKER = str(uuid.uuid4())


@pytest.fixture(autouse=True)
def _from_the_first_key() -> None:
    controls._after.clear()


def add(conn: Conn, name: str = "", **given: Any) -> str:
    return jobs.enqueue(conn, NewJob(**{"queue": "q", "actor": "a", "args": [name], **given})).id


def limited(conn: Conn, count: int = 9, queue: str = "q", lease_s: float = 20) -> list[Claim]:
    return claim_limited(conn, {queue: count}, worker_id=WORKER, lease_s=lease_s).claims


def claim(conn: Conn, count: int = 9, queue: str = "q") -> list[Claim]:
    return jobs.claim(conn, {queue: count}, worker_id=WORKER, lease_s=20)


def names(claims: list[Claim]) -> list[str]:
    return [claim.message["args"][0] for claim in claims]


def settle(conn: Conn, held: Claim, state: str = "done", **outcome: Any) -> None:
    assert jobs.settle(conn, [Settlement(held.id, held.token, state, **outcome)]) == {held.id}


def expire(conn: Conn, job_id: str) -> None:
    """The lease runs out now."""
    conn.execute("UPDATE dramatiq.queue SET lease_until = clock_timestamp() WHERE message_id = %s", [job_id])


def row(conn: Conn, job_id: str) -> dict[str, Any]:
    found = conn.execute("SELECT * FROM dramatiq.queue WHERE message_id = %s", [job_id]).fetchone()
    assert found is not None
    return found


# Pause.


def test_a_paused_queue_claims_nothing_and_others_go_on(conn: Conn) -> None:
    for queue in ("q", "r"):
        add(conn, "free", queue=queue)
        add(conn, "keyed", queue=queue, limit_key="k", limit=9)
    controls.pause(conn, "q", by="ana", reason="the index is rebuilt")
    assert (claim(conn), limited(conn)) == ([], [])
    assert names(limited(conn, queue="r") + claim(conn, queue="r")) == ["free", "keyed"]
    assert controls.resume(conn, "q")
    assert names(limited(conn)) == ["free", "keyed"]


def test_running_jobs_of_a_paused_queue_finish(conn: Conn) -> None:
    add(conn)
    (held,) = claim(conn)
    controls.pause(conn, "q", by="ana", reason="enough")
    settle(conn, held)


def test_a_pause_says_who_why_and_until_when(conn: Conn) -> None:
    controls.pause(conn, "q", by="ana", reason="first")
    controls.pause(conn, "q", by="ben", reason="second", until_s=60)
    controls.pause(conn, "r", by="ana", reason="third")
    found = controls.pauses(conn)
    assert [(pause.queue, pause.paused_by, pause.reason) for pause in found.values()] == [
        ("q", "ben", "second"),
        ("r", "ana", "third"),
    ]
    until_at = found["q"].until_at
    assert until_at is not None
    assert 59 < (until_at - found["q"].paused_at).total_seconds() < 61
    assert found["r"].until_at is None


def test_a_pause_whose_time_is_over_is_none(conn: Conn) -> None:
    add(conn)
    controls.pause(conn, "q", by="ana", reason="for a moment", until_s=60)
    assert claim(conn) == []
    conn.execute("UPDATE posthouse.pauses SET until_at = clock_timestamp()")
    assert controls.pauses(conn) == {}
    assert not controls.resume(conn, "q")
    assert len(claim(conn)) == 1


def test_a_resume_rings_the_bell_of_its_queue(conn: Conn, database_url: str) -> None:
    controls.pause(conn, "q", by="ana", reason="for a moment")
    with closing(connect(database_url, name="listener")) as other:
        bells = Bells(other, [jobs.channel("q")])
        controls.resume(conn, "q")
        bells.sleep(5)
        assert bells.take() == {jobs.channel("q")}


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ({"by": " "}, "by must have 1 to 512 characters"),
        ({"reason": ""}, "reason must have 1 to 512 characters"),
        ({"reason": "x" * 513}, "reason must have 1 to 512 characters"),
        ({"until_s": 0}, "a pause lasts for more than 0 seconds and at most 365 days"),
        ({"until_s": float("nan")}, "a pause lasts for more than 0 seconds and at most 365 days"),
        ({"until_s": 366 * 86_400}, "a pause lasts for more than 0 seconds and at most 365 days"),
    ],
)
def test_a_pause_without_a_word_or_an_end_is_refused(conn: Conn, told: dict[str, Any], fault: str) -> None:
    with pytest.raises(BadPause, match=fault):
        controls.pause(conn, "q", **{"by": "ana", "reason": "why", **told})
    assert controls.pauses(conn) == {}


# Limits.


def test_no_more_of_a_key_than_its_limit_and_what_is_behind_passes(conn: Conn) -> None:
    for number in range(5):
        add(conn, f"a{number}", limit_key="a", limit=2, priority=-1)
    add(conn, "b", limit_key="b", limit=1)
    add(conn, "free")
    assert names(limited(conn)) == ["a0", "a1", "b", "free"]
    assert names(limited(conn)) == []


def test_waiting_for_a_full_key_costs_no_attempt_and_moves_no_row(conn: Conn) -> None:
    add(conn, limit_key="k", limit=1)
    limited(conn)
    waiting = add(conn, limit_key="k", limit=1)
    before = row(conn, waiting)
    assert limited(conn) == []
    assert row(conn, waiting) == before


def test_jobs_with_and_without_a_key_start_in_one_order(conn: Conn) -> None:
    for name, priority, key in [
        ("late", 5, "k"),
        ("urgent", -5, "k"),
        ("free", 0, None),
        ("other", 0, "l"),
        ("free urgent", -9, None),
        ("free late", 9, None),
    ]:
        add(conn, name, priority=priority, limit_key=key, limit=9 if key else None)
    assert names(limited(conn, 3)) == ["free urgent", "urgent", "free"]
    assert names(limited(conn, 3)) == ["other", "late", "free late"]


def test_a_claim_gives_jobs_without_a_key_no_less_than_their_turn(conn: Conn) -> None:
    """F67: neither kind starves the other; of equal priority, who was due first is first."""
    for number in range(20):
        add(conn, f"keyed {number}", limit_key=f"k{number}", limit=1)
        add(conn, f"free {number}")
    taken = [name for _ in range(20) for name in names(limited(conn, 2))]
    assert taken == [f"{kind} {number}" for number in range(20) for kind in ("keyed", "free")]


def test_a_key_counts_over_its_queues(conn: Conn) -> None:
    add(conn, "q1", limit_key="k", limit=2)
    for number in range(2):
        add(conn, f"r{number}", queue="r", limit_key="k", limit=2)
    both = claim_limited(conn, {"q": 4, "r": 4}, worker_id=WORKER, lease_s=9).claims
    assert names(both) == ["q1", "r0"]
    assert limited(conn, queue="r") == []


def test_a_claim_takes_as_many_as_asked_of_each_queue(conn: Conn) -> None:
    for queue in "qrs":
        for number in range(6):
            add(conn, queue=queue, limit_key=f"{queue}{number % 2}", limit=2, priority=number % 3)
    taken = claim_limited(conn, {"q": 3, "r": 1, "s": 0, "nobody": 4}, worker_id=WORKER, lease_s=9).claims
    assert sorted(claim.queue for claim in taken) == ["q", "q", "q", "r"]
    assert claim_limited(conn, {}, worker_id=WORKER, lease_s=9).claims == []


def test_a_job_that_is_claimed_by_key_is_leased_as_any_other(conn: Conn) -> None:
    add(conn, limit_key="k", limit=1)
    (held,) = limited(conn)
    now = row(conn, held.id)
    assert (held.attempt, now["attempt"], now["state"], str(now["worker_id"])) == (1, 1, "consumed", WORKER)
    assert 19 < (now["lease_until"] - now["claimed_at"]).total_seconds() <= 20
    assert (str(now["lease_token"]), now["started_at"] is not None) == (held.token, True)


def test_of_jobs_of_one_key_with_different_limits_the_first_in_line_decides(conn: Conn) -> None:
    add(conn, "two", limit_key="k", limit=2)
    add(conn, "one", limit_key="k", limit=1)
    add(conn, "three", limit_key="k", limit=3)
    (two,) = limited(conn)
    assert (names([two]), limited(conn)) == (["two"], [])
    settle(conn, two)
    assert (names(limited(conn)), names(limited(conn))) == (["one"], ["three"])


@pytest.mark.parametrize("end", ["completed", "failed", "discarded", "released"])
def test_an_end_frees_the_place(conn: Conn, end: str) -> None:
    add(conn, "first", limit_key="k", limit=1)
    (held,) = limited(conn)
    add(conn, "second", limit_key="k", limit=1, priority=-1)
    match end:
        case "completed":
            settle(conn, held)
        case "failed":
            settle(conn, held, "queued", outcome="failed", delay_s=9)
        case "discarded":
            settle(conn, held, "rejected", outcome="discarded")
        case _:
            jobs.release(conn, {held.id: held.token})
    assert names(limited(conn)) == ["second"]


def test_an_expired_lease_counts_against_no_limit(conn: Conn) -> None:
    """F13."""
    add(conn, "dead", limit_key="k", limit=1)
    (dead,) = limited(conn)
    add(conn, "next", limit_key="k", limit=1)
    assert limited(conn) == []
    expire(conn, dead.id)
    assert names(limited(conn)) == ["next"]
    jobs.rescue(conn)
    assert limited(conn) == []


def test_the_rescue_of_a_last_attempt_frees_its_keys(conn: Conn) -> None:
    """F15, F77; line 35."""
    add(conn, "dead", limit_key="k", limit=1, unique_key="u", max_attempts=1)
    (dead,) = limited(conn)
    add(conn, "next", limit_key="k", limit=1)
    expire(conn, dead.id)
    assert jobs.rescue(conn) == [(dead.id, "q", "rejected")]
    assert names(limited(conn)) == ["next"]
    assert jobs.enqueue(conn, NewJob(queue="q", actor="a", unique_key="u")).inserted


def test_many_who_claim_at_once_never_exceed_a_limit_and_leave_nothing(database_url: str, conn: Conn) -> None:
    """Lines 15 and 17 on the ledger: counted while the jobs run, by who runs them."""
    for number in range(240):
        add(conn, f"k{number % 3}", limit_key=f"k{number % 3}", limit=2)
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    done: list[str] = []
    lock = threading.Lock()

    def work(_: int) -> None:
        with connect(database_url, name="claimer") as own:
            while len(done) < 240:
                taken = limited(own, 3)
                with lock:
                    running.update(names(taken))
                    most.update(running - most)
                for held in taken:
                    time.sleep(0.002)
                    with lock:
                        running.subtract(names([held]))
                        done.append(held.id)
                    settle(own, held)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len(done) == len(set(done)) == 240
    assert most == {"k0": 2, "k1": 2, "k2": 2}


def test_a_key_that_somebody_decides_about_is_left_to_him_and_others_pass(conn: Conn, database_url: str) -> None:
    for name in ("a", "a", "b"):
        add(conn, name, limit_key=name, limit=5)
    with connect(database_url, name="claimer") as other, other.transaction():
        assert names(claim_limited(other, {"q": 1}, worker_id=WORKER, lease_s=9).claims) == ["a"]
        # All open keys are locked while he decides, not only the one he took from.
        add(conn, "c", limit_key="c", limit=1)
        found = claim_limited(conn, {"q": 9}, worker_id=WORKER, lease_s=9)
        assert (names(found.claims), found.again_in_s) == (["c"], {"q": controls.MISSED_S})
    assert names(limited(conn)) == ["a", "b"]


def test_a_row_that_somebody_has_locked_holds_up_no_other_of_its_key(conn: Conn, database_url: str) -> None:
    first = add(conn, "first", limit_key="k", limit=2)
    add(conn, "second", limit_key="k", limit=2)
    with connect(database_url, name="psql") as other, other.transaction():
        other.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [first])
        assert names(limited(conn, 1)) == ["second"]
    assert names(limited(conn, 1)) == ["first"]


def test_no_session_lock_is_left(conn: Conn) -> None:
    add(conn, limit_key="k", limit=1)
    limited(conn)
    assert conn.execute("SELECT FROM pg_locks WHERE locktype = 'advisory'").fetchall() == []


# Rates.


def rated(conn: Conn, name: str = "", key: str = "r", rate_per_s: float = 0.5, burst: int = 2, **given: Any) -> str:
    return add(conn, name, limit_key=key, rate_per_s=rate_per_s, rate_burst=burst, **given)


def pass_(conn: Conn, seconds: float) -> None:
    """Time goes by for the buckets."""
    conn.execute("UPDATE posthouse.buckets SET refilled_at = refilled_at - %s * interval '1 second'", [seconds])


def test_a_bucket_gives_its_burst_and_then_its_rate(conn: Conn) -> None:
    for number in range(9):
        rated(conn, str(number), rate_per_s=0.5, burst=2)
    assert names(limited(conn)) == ["0", "1"]
    empty = claim_limited(conn, {"q": 9}, worker_id=WORKER, lease_s=9)
    assert empty.claims == []
    assert 1.5 < empty.again_in_s["q"] <= 2
    pass_(conn, 2)
    assert names(limited(conn)) == ["2"]
    pass_(conn, 999)
    assert names(limited(conn)) == ["3", "4"]


def test_a_bucket_is_one_for_all_priorities_and_queues_of_its_key(conn: Conn) -> None:
    told: dict[str, dict[str, Any]] = {"second": {"priority": 1}, "far": {"queue": "r", "priority": 2}, "first": {}}
    for name, given in told.items():
        for _ in range(2):
            rated(conn, name, burst=3, **given)
    taken = claim_limited(conn, {"q": 9, "r": 9}, worker_id=WORKER, lease_s=9).claims
    assert names(taken) == ["first", "first", "second"]


def test_a_claim_that_takes_the_last_token_tells_of_the_next(conn: Conn) -> None:
    for _ in range(3):
        rated(conn, rate_per_s=4, burst=1)
    taken = claim_limited(conn, {"q": 9}, worker_id=WORKER, lease_s=9)
    assert (len(taken.claims), taken.again_in_s) == (1, {"q": 0.25})


def test_waiting_for_a_token_costs_no_attempt_and_what_is_behind_passes(conn: Conn) -> None:
    rated(conn, burst=1)
    limited(conn)
    waiting = rated(conn, priority=-1, burst=1)
    before = row(conn, waiting)
    add(conn, "free")
    add(conn, "other", limit_key="k", limit=1)
    assert names(limited(conn)) == ["free", "other"]
    assert row(conn, waiting) == before


def test_a_key_may_have_both_a_limit_and_a_rate(conn: Conn) -> None:
    for number in range(6):
        rated(conn, str(number), limit=3, burst=2)
    first = limited(conn)
    pass_(conn, 999)
    assert (names(first), names(limited(conn)), names(limited(conn))) == (["0", "1"], ["2"], [])
    settle(conn, first[0])
    assert names(limited(conn)) == ["3"]


def test_a_token_of_a_job_given_back_unstarted_is_spent(conn: Conn) -> None:
    rated(conn, burst=1)
    (held,) = limited(conn)
    jobs.release(conn, {held.id: held.token})
    assert limited(conn) == []
    pass_(conn, 2)
    assert [claim.id for claim in limited(conn)] == [held.id]


def test_a_bucket_that_somebody_has_locked_holds_up_no_other_job(conn: Conn, database_url: str) -> None:
    rated(conn, "first", burst=2)
    assert names(limited(conn)) == ["first"]
    rated(conn, "second", burst=2)
    add(conn, "other", limit_key="k", limit=1)
    conn.execute("SET lock_timeout = '5s'")
    with connect(database_url, name="psql") as other, other.transaction():
        other.execute("SELECT FROM posthouse.buckets FOR UPDATE")
        assert names(limited(conn)) == ["other"]
    assert names(limited(conn)) == ["second"]


def test_a_clock_that_was_set_back_empties_no_bucket_for_hours(conn: Conn) -> None:
    """F65."""
    for _ in range(2):
        rated(conn, burst=1)
    assert len(limited(conn)) == 1
    pass_(conn, -7_200)
    assert len(limited(conn)) == 1


def test_many_who_claim_at_once_take_no_more_than_the_tokens(database_url: str, conn: Conn) -> None:
    for _ in range(40):
        rated(conn, rate_per_s=0.001, burst=20)
    taken: list[Claim] = []

    def work(_: int) -> None:
        with connect(database_url, name="claimer") as own:
            for _ in range(20):
                taken.extend(limited(own, 3))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(taken) == 20


def test_full_buckets_are_pruned_and_no_others(conn: Conn) -> None:
    rated(conn, key="slow", rate_per_s=0.001)
    rated(conn, key="quick", rate_per_s=999_999)
    assert len(limited(conn)) == 2
    assert controls.prune_buckets(conn) == 1
    assert [bucket["key"] for bucket in conn.execute("SELECT key FROM posthouse.buckets")] == ["slow"]


@pytest.mark.parametrize(
    "columns",
    [
        "limit_key = 'k'",
        "limit_running = 1",
        "limit_key = 'k', limit_running = 0",
        "limit_key = '', limit_running = 1",
        "limit_key = 'k', rate_per_s = 1",
        "limit_key = 'k', rate_per_s = 0, rate_burst = 1",
        "limit_key = 'k', rate_per_s = 'NaN', rate_burst = 1",
        "limit_key = 'k', limit_running = 1, rate_burst = 1",
    ],
)
def test_the_table_takes_no_half_limit(conn: Conn, columns: str) -> None:
    add(conn)
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute(f"UPDATE dramatiq.queue SET {columns}".encode())


# Looks that cost little.


def test_a_job_due_later_or_of_another_queue_is_not_taken_and_wakes_in_time(conn: Conn) -> None:
    """F80 (b); line 13."""
    add(conn, "later", delay_s=3_600, priority=-9)
    add(conn, "keyed later", delay_s=60, limit_key="k", limit=1)
    add(conn, "elsewhere", queue="r", limit_key="k", limit=1)
    assert (limited(conn), claim(conn)) == ([], [])
    (due_in,) = jobs.next_due(conn, ["q"]).values()
    assert 50 < due_in <= 60


def test_a_job_due_later_hides_nobody_of_its_key(conn: Conn) -> None:
    add(conn, "later", delay_s=3_600, priority=-9, limit_key="k", limit=1)
    add(conn, "now", limit_key="k", limit=1)
    assert names(limited(conn)) == ["now"]


def test_a_claim_says_in_which_queues_jobs_with_a_key_wait(conn: Conn) -> None:
    add(conn)
    add(conn, queue="r", limit_key="k", limit=1, delay_s=60)
    wanted = {"q": 1, "r": 1, "nobody": 1}
    assert jobs.settle_and_claim(conn, [], wanted, worker_id=WORKER, lease_s=9).keyed == {"r"}
    assert claim_limited(conn, wanted, worker_id=WORKER, lease_s=9).keyed == {"r"}


def test_thousands_of_keys_have_their_turn_one_after_the_other(conn: Conn) -> None:
    many = controls.STEPS + 20
    jobs.enqueue_many(
        conn,
        [
            NewJob(queue="q", actor="a", args=["blocked"], limit_key=f"a{number:05}", rate_per_s=0.001, rate_burst=1)
            for number in range(many)
        ],
    )
    conn.execute(
        "INSERT INTO posthouse.buckets SELECT limit_key, 0, now(), now() + interval '1 hour' FROM dramatiq.queue"
    )
    add(conn, "last", limit_key="z", limit=1)
    assert [names(limited(conn)) for _ in range(3)] == [[], ["last"], []]


def test_a_hundred_thousand_jobs_of_a_full_key_slow_nobody(conn: Conn) -> None:
    add(conn, limit_key="full", limit=1)
    limited(conn)
    conn.execute(
        """
        INSERT INTO dramatiq.queue (
            message_id, queue_name, message, priority, available_at, created_at, limit_key, limit_running
        )
        SELECT gen_random_uuid(), 'q', '{"actor_name": "a"}', -9, now(), now(), 'full', 1
        FROM generate_series(1, 100000)
        """
    )
    conn.execute("ANALYZE dramatiq.queue")
    for number in range(40):
        add(conn, "free")
        add(conn, limit_key=f"k{number % 4}", limit=3)
    jobs.tune(conn)
    keyed = {"step_queues": ["q"], "step_keys": ["k1"], "step_priorities": [0], "step_rooms": [3]}
    claiming = {"queues": ["q"], "limits": [4], "worker_id": WORKER, "lease_s": 9, "random": "r"}
    looking = {"queues": ["q"], "limits": [4], "after": [""], "steps": 500, "spare": 8, "missed_s": 0.01}
    told: dict[str, dict[str, Any]] = {
        "lock_keys": looking,
        "claim_limited": {**keyed, **claiming},
        "settle_and_claim": ledger.CLAIMING,
    }
    for name, given in told.items():
        read, blocks = reads(conn, sql(controls.__file__, name), given)
        assert read <= 50, name
        assert blocks < 500, name


def reads(conn: Conn, statement: str, given: dict[str, Any]) -> tuple[float, int]:
    """The most rows of the queue that a scan of *statement* reads, and its blocks."""
    (found,) = conn.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}".encode(), given).fetchall()
    plan = found["QUERY PLAN"][0]["Plan"]
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "queue"]
    read = [(node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"] for node in scans]
    return max(read), plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for part in plan.get("Plans", []) for node in nodes(part))]
