"""The ledger: each transition, what guards it, and who wins when two want the same row."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outbox import jobs
from outbox.db import Conn, connect
from outbox.jobs import Claim, RetryRefused, Settlement
from tests import emptied
from tests.ledger import (
    WORKER,
    add,
    claim,
    claimed,
    count,
    expire,
    fail,
    in_state,
    lose,
    new,
    plan_of_a_claim,
    row,
    settle,
    shown,
)

shared_url, database_url = emptied.shared_url, emptied.database_url


# Claim.


def test_jobs_are_claimed_by_priority_then_due_time_then_age(conn: Conn) -> None:
    expected = ["urgent", "early", "late", "older", "newer", "patient"]
    due = {"early": -20, "late": -10}
    for name, priority in [("patient", 9), ("late", 1), ("early", 1), ("older", 2), ("newer", 2), ("urgent", -3)]:
        job_id = add(conn, args=[name], priority=priority)
        if name in due:
            conn.execute(
                "UPDATE dramatiq.queue SET available_at = now() + %s * interval '1 s' WHERE message_id = %s",
                [due[name], job_id],
            )
    assert [job.message["args"][0] for job in claim(conn, 3) + claim(conn, 9)] == expected


def test_an_urgent_job_is_next_though_two_thousand_wait(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(2_000)])
    urgent = add(conn, priority=-1)
    assert claim(conn, 2)[0].id == urgent


def test_a_delayed_job_is_not_early_and_hides_nobody(conn: Conn) -> None:
    later = add(conn, delay_s=0.3, priority=-5)
    due = add(conn)
    assert [job.id for job in claim(conn, 9)] == [due]
    time.sleep(0.3)
    assert [job.id for job in claim(conn, 9)] == [later]


def test_a_claim_takes_as_many_as_asked_of_each_queue(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new(queue=queue, priority=n % 3) for queue in "qrs" for n in range(6)])
    taken = jobs.claim(conn, {"q": 4, "r": 1, "s": 0, "nobody": 3}, worker_id=WORKER, lease_s=9)
    assert sorted(job.queue for job in taken) == ["q"] * 4 + ["r"]
    assert jobs.claim(conn, {}, worker_id=WORKER, lease_s=9) == []


def test_a_claim_counts_the_attempt_and_leases_the_job(conn: Conn) -> None:
    held = claimed(conn)
    now = row(conn, held.id)
    assert (held.attempt, now["attempt"], now["state"], str(now["worker_id"])) == (1, 1, "consumed", WORKER)
    assert 19 < (now["lease_until"] - now["claimed_at"]).total_seconds() <= 20
    assert str(now["lease_token"]) == held.token
    assert claim(conn) == []


def test_claimers_never_take_the_same_job_and_never_wait_for_each_other(database_url: str, conn: Conn) -> None:
    jobs.enqueue_many(conn, [new(priority=number % 4) for number in range(1_000)])
    taken: list[str] = []

    def take(_: int) -> None:
        with connect(database_url, name="claimer") as own:
            while batch := claim(own, 7):
                taken.extend(job.id for job in batch)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(take, range(4)))
    assert len(taken) == len(set(taken)) == 1_000


def test_a_claim_passes_over_rows_that_another_transaction_holds(conn: Conn, database_url: str) -> None:
    first, second = add(conn), add(conn)
    with connect(database_url, name="claimer") as other, other.transaction():
        assert [job.id for job in claim(other)] == [first]
        assert [job.id for job in claim(conn, 9)] == [second]
    assert claim(conn, 9) == []


def test_a_claim_reads_few_rows_among_many_that_are_not_for_it(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new(delay_s=9_999) for _ in range(20_000)])
    conn.execute(
        """
        INSERT INTO dramatiq.queue (message_id, queue_name, state, message, available_at, created_at, finished_at)
        SELECT gen_random_uuid(), 'q', CASE n % 2 WHEN 0 THEN 'done' ELSE 'rejected' END::dramatiq.state,
               '{"actor_name": "a"}', now(), now(), now()
        FROM generate_series(1, 20000) n
        """
    )
    jobs.enqueue_many(conn, [new(priority=number % 2) for number in range(10)])
    conn.execute("ANALYZE dramatiq.queue")
    jobs.tune(conn)
    plan = plan_of_a_claim(conn)
    nodes = list(_nodes(plan))
    scans = [node for node in nodes if node.get("Relation Name") == "queue"]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"}
    assert "queue_due" in {node.get("Index Name") for node in scans}
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in scans) <= 20
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 300


def test_a_claim_does_not_read_the_backlog_behind_it(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(40_000)])
    conn.execute("ANALYZE dramatiq.queue")
    jobs.tune(conn)
    assert len(claim(conn, 4)) == 4
    scans = [node for node in _nodes(plan_of_a_claim(conn)) if node.get("Relation Name") == "queue"]
    assert max(node["Actual Rows"] * node["Actual Loops"] for node in scans) <= 4


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", []):
        yield from _nodes(part)


# Settle, renew, release.


def test_a_claim_whose_answer_got_lost_is_given_back_uncharged(conn: Conn) -> None:
    known, unheard = add(conn), add(conn)
    held = {job.id: job.token for job in claim(conn, 2)}
    with connect(conn.info.dsn, name="psql") as other, other.transaction():
        other.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [unheard])
        assert jobs.release_unheld(conn, WORKER, [held[known]]) == 0
    assert jobs.release_unheld(conn, WORKER, [held[known]]) == 1
    assert [(shown(conn, job)["state"], shown(conn, job)["attempt"]) for job in (known, unheard)] == [
        ("running", 1),
        ("pending", 0),
    ]


def test_a_success_is_on_the_job_and_adds_no_history(conn: Conn) -> None:
    held = claimed(conn)
    assert settle(conn, held, result='{"found":3}')
    job = shown(conn, held.id)
    assert (job["state"], job["result"], job["attempts"], job["last_error"]) == ("completed", {"found": 3}, [], None)
    assert job["claimed_at"] <= job["finished_at"]


def test_history_tells_every_failed_attempt_in_order(conn: Conn) -> None:
    job_id = add(conn, max_attempts=3)
    for turn in range(2):
        assert fail(conn, claim(conn)[0], error=f"no {turn}")
    lost = claim(conn)[0]
    assert shown(conn, job_id)["attempt"] == 3
    assert lose(conn, lost) == "rejected"
    job = shown(conn, job_id)
    assert (job["state"], job["last_error"]) == ("discarded", "worker lost")
    assert [(one["attempt"], one["outcome"], one["error"]) for one in job["attempts"]] == [
        (1, "failed", "no 0"),
        (2, "failed", "no 1"),
        (3, "worker lost", "the lease ran out without an answer"),
    ]
    assert all(str(one["worker_id"]) == WORKER and one["started_at"] for one in job["attempts"])


def test_a_snooze_takes_the_attempt_back_and_adds_up(conn: Conn) -> None:
    held = claimed(conn)
    assert settle(conn, held, "queued", refund=1, delay_s=0, snoozed_s=60)
    again = claim(conn)[0]
    assert (again.attempt, again.snoozed_s) == (1, 60)
    assert settle(conn, again, "queued", refund=1, delay_s=60, snoozed_s=60)
    job = row(conn, held.id)
    assert (job["attempt"], job["snoozed_s"]) == (0, 120)
    assert shown(conn, held.id)["attempts"] == []


def test_many_outcomes_are_written_by_one_statement(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(500)])
    held = claim(conn, 500)
    outcomes = [Settlement(job.id, job.token, random.choice(["done", "queued", "rejected"])) for job in held]
    stale = Settlement(held[0].id, str(uuid.uuid4()), "rejected")
    assert jobs.settle(conn, [*outcomes, stale]) == {job.id for job in held}
    states = {outcome.id: outcome.state for outcome in outcomes}
    assert {job.id: row(conn, job.id)["state"] for job in held} == states


def test_a_stale_token_settles_renews_and_releases_nothing(conn: Conn) -> None:
    old = claimed(conn)
    assert lose(conn, old) == "queued"
    current = claim(conn)[0]
    before = row(conn, old.id)
    assert not settle(conn, old)
    assert jobs.renew(conn, {old.id: old.token}, lease_s=99) == []
    assert jobs.still_held(conn, {old.id: old.token}) == set()
    assert jobs.release(conn, {old.id: old.token}) == 0
    assert row(conn, old.id) == before
    assert settle(conn, current)


def test_an_expired_lease_settles_and_renews_nothing_but_may_be_given_back(conn: Conn) -> None:
    held = claimed(conn)
    expire(conn, held.id)
    assert not settle(conn, held)
    assert not fail(conn, held)
    assert jobs.renew(conn, {held.id: held.token}, lease_s=99) == []
    assert shown(conn, held.id)["attempts"] == []
    assert jobs.release(conn, {held.id: held.token}) == 1


def test_a_job_settles_once(conn: Conn) -> None:
    held = claimed(conn)
    assert settle(conn, held)
    assert not fail(conn, held, "rejected")
    assert shown(conn, held.id)["state"] == "completed"


def test_a_renewal_moves_the_lease_on(conn: Conn) -> None:
    held = claimed(conn)
    before = row(conn, held.id)["lease_until"]
    (renewal,) = jobs.renew(conn, {held.id: held.token}, lease_s=60)
    assert (renewal.id, renewal.cancel_requested) == (held.id, False)
    assert (row(conn, held.id)["lease_until"] - before).total_seconds() > 39


def test_a_renewal_passes_over_a_row_that_is_being_settled(conn: Conn, database_url: str) -> None:
    held = claimed(conn)
    with connect(database_url, name="settler") as other, other.transaction():
        assert settle(other, held)
        assert jobs.renew(conn, {held.id: held.token}, lease_s=60) == []
        assert jobs.still_held(conn, {held.id: held.token}) == {held.id}
    assert jobs.still_held(conn, {held.id: held.token}) == set()


def test_renewals_are_heap_only_updates(conn: Conn) -> None:
    held = claimed(conn)
    query = "SELECT n_tup_upd - n_tup_hot_upd AS moved FROM pg_stat_xact_user_tables WHERE relname = 'queue'"
    with conn.transaction():
        before = conn.execute(query).fetchone()
        for _ in range(5):
            jobs.renew(conn, {held.id: held.token}, lease_s=60)
        assert conn.execute(query).fetchone() == before


def test_a_release_is_not_charged_and_keeps_the_place_in_the_order(conn: Conn) -> None:
    first, second = add(conn), add(conn)
    held = claim(conn)[0]
    assert jobs.release(conn, {held.id: held.token}) == 1
    job = shown(conn, first)
    assert (job["state"], job["attempt"], job["crashes"], job["attempts"]) == ("pending", 0, 0, [])
    assert [job.id for job in claim(conn, 2)] == [first, second]


def test_a_release_with_a_delay_is_due_then(conn: Conn) -> None:
    held = claimed(conn)
    assert jobs.release(conn, {held.id: held.token}, delay_s=10) == 1
    assert claim(conn) == []
    job = row(conn, held.id)
    assert 9 < (job["available_at"] - job["mtime"]).total_seconds() < 11


# Rescue, retry, prune.


def test_a_live_lease_is_not_rescued(conn: Conn) -> None:
    claimed(conn)
    assert jobs.rescue(conn) == []


def test_a_message_that_python_cannot_read_is_claimed_and_shown_without_it(conn: Conn) -> None:
    for text in ('{"args": [1e5000]}', '{"args": ' + "[" * 3_000 + "]" * 3_000 + "}"):
        add(conn)
        conn.execute("UPDATE dramatiq.queue SET message = %s, available_at = now()", [text])
        (held,) = claim(conn)
        assert held.message is None
        assert shown(conn, held.id)["message"] is None
        assert fail(conn, held, "rejected")
        conn.execute("DELETE FROM dramatiq.queue")


def test_a_crash_is_charged_and_the_third_is_the_last(conn: Conn) -> None:
    job_id = add(conn, max_attempts=99)
    for crashes in (1, 2, 3):
        assert lose(conn, claim(conn)[0]) == ("queued" if crashes < 3 else "rejected")
        assert (row(conn, job_id)["attempt"], row(conn, job_id)["crashes"]) == (crashes, crashes)
        conn.execute("UPDATE dramatiq.queue SET available_at = now()")
    job = shown(conn, job_id)
    assert (job["state"], job["last_error"]) == ("discarded", "worker lost")
    assert [one["outcome"] for one in job["attempts"]] == ["worker lost"] * 3


def test_those_who_crashed_together_twice_come_back_one_by_one(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(4)])
    for _ in range(2):
        assert len(claim(conn, 9)) == 4
        conn.execute("UPDATE dramatiq.queue SET lease_until = now()")
        assert len(jobs.rescue(conn)) == 4
    due = [job["available_at"] for job in conn.execute("SELECT available_at FROM dramatiq.queue ORDER BY 1")]
    assert [round((later - due[0]).total_seconds()) for later in due] == [0, 2, 4, 6]


def test_the_crash_of_the_last_attempt_discards(conn: Conn) -> None:
    assert lose(conn, claimed(conn, max_attempts=1)) == "rejected"


def test_a_rescue_takes_a_hundred_at_most_and_the_longest_lost_first(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(150)])
    held = claim(conn, 150)
    conn.execute("UPDATE dramatiq.queue SET lease_until = now()")
    conn.execute("UPDATE dramatiq.queue SET lease_until = now() - interval '1 h' WHERE message_id = %s", [held[77].id])
    rescued = jobs.rescue(conn)
    assert len(rescued) == 100
    assert held[77].id in {job_id for job_id, _, _ in rescued}
    assert len(jobs.rescue(conn)) == 50


def test_whoever_settles_first_wins_over_the_rescue(conn: Conn, database_url: str) -> None:
    held = claimed(conn)
    with connect(database_url, name="settler") as other, other.transaction():
        assert settle(other, held)
        assert jobs.rescue(conn) == []
    expire_if_leased(conn, held.id)
    assert jobs.rescue(conn) == []
    assert shown(conn, held.id)["state"] == "completed"


def expire_if_leased(conn: Conn, job_id: str) -> None:
    conn.execute("UPDATE dramatiq.queue SET lease_until = now() WHERE message_id = %s AND state = 'consumed'", [job_id])


def test_a_settle_that_waits_for_a_rescue_is_refused(conn: Conn, database_url: str) -> None:
    held = claimed(conn)
    expire(conn, held.id)
    # The settle has read the row as its own, with a lease: it waits for the row, and looks again.
    conn.execute("UPDATE dramatiq.queue SET lease_until = clock_timestamp() + interval '0.3 s'")
    with connect(database_url, name="rescuer") as other, ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN")
        other.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [held.id])
        late = pool.submit(settle, conn, held)
        time.sleep(0.35)
        assert [state for _, _, state in jobs.rescue(other)] == ["queued"]
        assert not late.done()
        other.execute("COMMIT")
        assert late.result(5) is False
    job = shown(conn, held.id)
    assert (job["state"], job["crashes"], [one["outcome"] for one in job["attempts"]]) == (
        "retryable", 1, ["worker lost"],
    )  # fmt: skip


def test_a_rescue_passes_over_a_row_that_is_being_settled(conn: Conn, database_url: str) -> None:
    held = claimed(conn)
    conn.execute("UPDATE dramatiq.queue SET lease_until = clock_timestamp() + interval '0.2 s'")
    with connect(database_url, name="settler") as other, other.transaction():
        assert settle(other, held)
        time.sleep(0.25)
        assert jobs.rescue(conn) == []
    assert jobs.rescue(conn) == []
    assert shown(conn, held.id)["state"] == "completed"


def test_two_rescuers_charge_one_crash(conn: Conn, database_url: str) -> None:
    held = claimed(conn)
    expire(conn, held.id)
    with ThreadPoolExecutor(4) as pool:

        def rescue(_: int) -> int:
            with connect(database_url, name="rescuer") as own:
                return len(jobs.rescue(own))

        assert sum(pool.map(rescue, range(4))) == 1
    assert row(conn, held.id)["crashes"] == 1


def test_a_discarded_job_is_retried_afresh_with_its_history(conn: Conn) -> None:
    held = claimed(conn, max_attempts=1)
    fail(conn, held, "rejected")
    jobs.retry(conn, held.id)
    job = shown(conn, held.id)
    assert (job["state"], job["attempt"], job["crashes"], len(job["attempts"])) == ("pending", 0, 0, 1)
    assert settle(conn, claim(conn)[0])


def test_only_a_discarded_job_can_be_retried(conn: Conn) -> None:
    others = [in_state(conn, state) for state in ("pending", "running", "retryable", "completed")]
    for job_id in [*others, str(uuid.uuid4())]:
        with pytest.raises(RetryRefused, match="only a discarded"):
            jobs.retry(conn, job_id)


def test_a_retry_is_refused_while_another_job_has_the_key(conn: Conn) -> None:
    held = claimed(conn, unique_key="k")
    fail(conn, held, "rejected")
    add(conn, unique_key="k")
    with pytest.raises(RetryRefused, match="unique key"):
        jobs.retry(conn, held.id)


def test_what_ended_is_pruned_past_its_time_in_batches_and_nothing_else(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(40)])
    for number, held in enumerate(claim(conn, 30)):
        fail(conn, held, "rejected") if number % 2 else settle(conn, held)
    claim(conn, 5)
    conn.execute("UPDATE dramatiq.queue SET finished_at = now() - interval '1 h' WHERE state IN ('done', 'rejected')")
    assert jobs.prune(conn, completed_s=7_200, failed_s=7_200) == 0
    assert jobs.prune(conn, completed_s=60, failed_s=7_200, limit=10) == 10
    assert jobs.prune(conn, completed_s=60, failed_s=7_200, limit=10) == 5
    assert jobs.prune(conn, completed_s=60, failed_s=60) == 15
    assert count(conn) == 10
    assert conn.execute("SELECT count(*) AS n FROM posthouse.attempts").fetchone() == {"n": 0}


def test_nothing_that_ended_moves_again_but_by_retry(conn: Conn) -> None:
    """Random walks over every verb, under an audit trigger, with stale owners all along."""
    conn.execute(
        """
        CREATE TABLE moves (job uuid, was text, became text);
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO moves VALUES (OLD.message_id, OLD.state, NEW.state);
            RETURN NULL;
        END $$;
        CREATE TRIGGER audit AFTER UPDATE OF state ON dramatiq.queue FOR EACH ROW EXECUTE FUNCTION audit();
        """
    )
    ids = [add(conn, max_attempts=3) for _ in range(12)]
    hands: list[Claim] = []
    verbs: list[Callable[[Claim], object]] = [
        lambda held: settle(conn, held),
        lambda held: fail(conn, held),
        lambda held: fail(conn, held, "rejected"),
        lambda held: settle(conn, held, "queued", refund=1, snoozed_s=1),
        lambda held: jobs.release(conn, {held.id: held.token}),
        lambda held: jobs.renew(conn, {held.id: held.token}, lease_s=20),
        lambda held: expire_if_leased(conn, held.id),
        lambda held: jobs.enqueue(conn, new(id=held.id)),
    ]
    for _ in range(250):
        hands += claim(conn, random.randrange(3))
        if hands:
            random.choice(verbs)(random.choice(hands))
        if random.random() < 0.2:
            jobs.rescue(conn)
            conn.execute("UPDATE dramatiq.queue SET available_at = now() WHERE state = 'queued'")
    moved = conn.execute("SELECT * FROM moves WHERE was IN ('done', 'rejected')").fetchall()
    conn.execute("DROP TABLE moves; DROP FUNCTION audit CASCADE")
    assert moved == []
    assert count(conn) == len(ids)
    for job in map(shown, [conn] * len(ids), ids):
        assert job["crashes"] <= 3


# What people see.


def test_a_job_that_is_not_there_is_none(conn: Conn) -> None:
    for job_id in ("", "x", str(uuid.UUID(int=0)), "1" * 31, "é" * 32, uuid.UUID(int=0).urn):
        assert jobs.load(conn, job_id) is None


def test_a_listing_is_newest_first_and_by_what_is_asked(conn: Conn) -> None:
    first = add(conn, actor="a", queue="q")
    second = add(conn, actor="b", queue="r", event_id=str(uuid.uuid4()))
    assert settle(conn, claim(conn)[0])
    assert [job["id"] for job in jobs.listing(conn)] == [second, first]
    assert [job["id"] for job in jobs.listing(conn, state="completed")] == [first]
    assert [job["id"] for job in jobs.listing(conn, queue="r", actor="b", state="pending")] == [second]
    assert [job["id"] for job in jobs.listing(conn, limit=1)] == [second]
    assert jobs.listing(conn, state="lost") == []
    assert "message" not in jobs.listing(conn)[0]


def test_depths_count_what_waits_and_what_runs(conn: Conn) -> None:
    jobs.enqueue_many(conn, [new() for _ in range(5)] + [new(delay_s=60)])
    held = claim(conn, 2)
    fail(conn, held[0])
    (depth,) = jobs.depths(conn)
    oldest_s = depth.pop("oldest_s")
    assert depth == {"queue": "q", "due": 4, "later": 1, "running": 1, "retryable": 1}
    assert 0 <= oldest_s < 60
