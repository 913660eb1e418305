"""The ledger against a model of it: whatever happens in whatever order, the table says what the model says (line 63).

The model is the contract in plain Python. It walks beside a real database, under several workers of which some crash,
freeze, lose an answer or come back late; time passes by moving every stored time, a tick at once. After each step the
whole table is compared; at the end of each walk everything that may still end must be brought to its end.

By hand, for long: `MODEL_EXAMPLES=5000 MODEL_STEPS=200 python -m pytest tests/test_model.py`.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, LiteralString, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outbox import controls, jobs, keeping
from outbox.controls import claim_limited
from outbox.db import Conn, connect
from outbox.jobs import MAX_CRASHES, Claim, NewJob, RetryRefused, Settlement
from tests import emptied

shared_url, database_url = emptied.shared_url, emptied.database_url

T = TypeVar("T")

#: So long that the seconds which a walk really takes do not matter.
TICK_S = 1_000.0
LEASE_TICKS = 1.5
LEASE_S = LEASE_TICKS * TICK_S
#: Tokens are counted in tenths, as whole numbers.
TENTHS = 10


@dataclass(frozen=True)
class Key:
    """What a limit's key allows: jobs at once; tenths of a token a tick, tokens at most."""

    limit: int | None = None
    rate: int | None = None
    burst: int | None = None


KEYS = {"one": Key(limit=1), "two": Key(limit=2), "slow": Key(rate=4, burst=2), "both": Key(limit=2, rate=7, burst=3)}


@dataclass
class Job:
    """A job as the contract has it; times in ticks."""

    id: str
    queue: str
    priority: int
    key: str | None
    unique: str | None
    max_attempts: int | None
    due: float
    state: str = "queued"
    attempt: int = 0
    crashes: int = 0
    snoozed: float = 0
    history: list[tuple[int, str]] = field(default_factory=list)
    token: str | None = None
    worker: str = ""
    lease: float = 0
    ended: float = 0
    cancelled: float | None = None
    deadline: float | None = None
    stop_cause: str | None = None

    @property
    def unfinished(self) -> bool:
        return self.state in ("queued", "consumed")

    def overdue(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now


@dataclass(frozen=True)
class Hand:
    """What a worker believes to hold."""

    id: str
    token: str
    worker: str
    attempt: int


def later(ticks: int) -> float:
    """Half a tick before that tick, so that it is over by then and not before."""
    return ticks - 0.5 if ticks else 0


QUEUES = st.sampled_from(["q", "q", "r"])
WANTED = st.dictionaries(QUEUES, st.integers(1, 3), min_size=1)
WORKERS = st.integers(0, 2)
PICK = st.integers(0, 30)
PICKS = st.lists(PICK, min_size=1, max_size=5)
VERDICTS = st.sampled_from(["done", "told", "fail", "fail", "discard", "discard", "snooze", "put back"])
WISHES = st.fixed_dictionaries(
    {
        "queue": QUEUES,
        "priority": st.sampled_from([0, 0, 1]),
        "delay": st.sampled_from([0, 0, 1]),
        "key": st.sampled_from([None, None, None, "one", *KEYS]),
        "unique": st.sampled_from([None, None, "u", "v"]),
        "max_attempts": st.sampled_from([None, 1, 2, 3]),
    }
)


#: Limits with more live leases than places, jobs with more attempts or crashes than they may have, keys held twice.
EXCEEDED: LiteralString = """
    SELECT limit_key
    FROM dramatiq.queue
    JOIN unnest(%(keys)s::text[], %(limits)s::integer[]) AS allowed (limit_key, places) USING (limit_key)
    WHERE state = 'consumed' AND lease_until > clock_timestamp()
    GROUP BY limit_key
    HAVING count(*) > min(places)
    UNION ALL
    SELECT message_id::text
    FROM dramatiq.queue
    WHERE attempt > max_attempts OR crashes > %(crashes)s
    UNION ALL
    SELECT unique_key
    FROM dramatiq.queue
    WHERE state IN ('queued', 'consumed') AND unique_key IS NOT NULL
    GROUP BY unique_key
    HAVING count(*) > 1
"""


class Ledger(RuleBasedStateMachine):
    """Walks over every verb."""

    def __init__(self, conn: Conn) -> None:
        super().__init__()
        self.conn = conn
        self.now = 0
        self.made = 0
        self.jobs: dict[str, Job] = {}
        self.hands: list[Hand] = []
        self.stale: list[Hand] = []
        self.workers = [str(uuid.uuid4()) for _ in range(3)]
        self.dead: list[str] = []
        self.paused: dict[str, float | None] = {}
        self.buckets: dict[str, tuple[int, int]] = {}
        controls._after.clear()
        conn.execute("DELETE FROM dramatiq.queue")
        conn.execute("TRUNCATE posthouse.pauses, posthouse.buckets")

    # Producers.

    @initialize(wishes=st.lists(WISHES, min_size=3, max_size=8))
    def begin(self, wishes: list[dict[str, Any]]) -> None:
        self.enqueue(wishes, None)

    @rule(wishes=st.lists(WISHES, min_size=1, max_size=5), again=st.none() | PICK)
    def enqueue(self, wishes: list[dict[str, Any]], again: int | None) -> None:
        """Some that are new, and *again* one that is there."""
        new = [self._new(**wish) for wish in wishes]
        answers = jobs.enqueue_many(self.conn, [job for job, _ in new])
        for (asked, job), answer in zip(new, answers, strict=True):
            first = self._holder(job.unique)
            assert (answer.id, answer.duplicate_of) == (asked.id, first and first.id)
            if first is None:
                self.jobs[job.id] = job
        if again is not None and self.jobs:
            known = self._pick(self.jobs.values(), again)
            answer = jobs.enqueue(self.conn, NewJob(id=known.id, queue="r", actor="b", priority=-9))
            assert (answer.id, answer.duplicate_of) == (known.id, known.id)

    def _new(
        self, queue: str, priority: int, delay: int, key: str | None, unique: str | None, max_attempts: int | None
    ) -> tuple[NewJob, Job]:
        allowed = KEYS[key] if key else Key()
        # Ids in order: rows of one statement come in theirs, and a walk must be the same when it is walked again.
        self.made += 1
        asked = NewJob(
            id=str(uuid.UUID(int=self.made)),
            queue=queue,
            actor="a",
            priority=priority,
            delay_s=later(delay) * TICK_S,
            unique_key=unique,
            max_attempts=max_attempts,
            limit_key=key,
            limit=allowed.limit,
            rate_per_s=None if allowed.rate is None else allowed.rate / TENTHS / TICK_S,
            rate_burst=allowed.burst,
        )
        return asked, Job(asked.id, queue, priority, key, unique, max_attempts, self.now + later(delay))

    def _holder(self, unique: str | None) -> Job | None:
        """The unfinished job that has the key."""
        return next((job for job in self.jobs.values() if unique and job.unique == unique and job.unfinished), None)

    # Claims.

    @rule(worker=WORKERS, wanted=WANTED, heard=st.sampled_from([True, True, True, False]))
    def claim(self, worker: int, wanted: dict[str, int], heard: bool) -> None:
        """Not *heard*: the session broke once it had committed, and the worker does not know what it holds."""
        expected, before = self._plain(wanted), list(self.hands)
        self._took(worker, expected, jobs.claim(self.conn, wanted, worker_id=self.workers[worker], lease_s=LEASE_S))
        if not heard:
            self.hands = before

    @rule(worker=WORKERS, queue=QUEUES, count=st.integers(1, 4))
    def claim_with_keys(self, worker: int, queue: str, count: int) -> None:
        expected = self._limited(queue, count)
        found = claim_limited(self.conn, {queue: count}, worker_id=self.workers[worker], lease_s=LEASE_S)
        self._took(worker, expected, found.claims)

    @rule(worker=WORKERS, count=st.integers(1, 4))
    def claim_with_keys_of_all_queues(self, worker: int, count: int) -> None:
        """Which queue gets the last place of a key that both want is not told; that nothing is exceeded is."""
        wanted = {"q": count, "r": count}
        most = {queue: self._limited(queue, count) for queue in wanted}
        found = claim_limited(self.conn, wanted, worker_id=self.workers[worker], lease_s=LEASE_S)
        self._took(worker, None, found.claims)
        taken = Counter(claim.queue for claim in found.claims)
        assert all(taken[queue] <= len(expected) for queue, expected in most.items())
        assert bool(found.claims) == any(most.values())

    @rule(worker=WORKERS, picks=PICKS, verdicts=st.lists(VERDICTS, min_size=5, max_size=5), wanted=WANTED)
    def settle_and_claim(self, worker: int, picks: list[int], verdicts: list[str], wanted: dict[str, int]) -> None:
        ends = list(zip(self._picked(picks), verdicts, strict=False))
        # The claim sees what waited before: what is put back now is the next one's.
        expected = self._plain(wanted)
        waiting = {job.queue for job in self.jobs.values() if job.state == "queued" and job.key}
        settlements, written = self._settled(ends)
        turn = jobs.settle_and_claim(self.conn, settlements, wanted, worker_id=self.workers[worker], lease_s=LEASE_S)
        assert turn.settled == written
        assert turn.keyed == {queue for queue in wanted if queue in waiting and not self._is_paused(queue)}
        self._took(worker, expected, turn.claims)

    def _plain(self, wanted: dict[str, int]) -> list[Job]:
        """What a claim without keys takes."""
        waiting = self._waiting()
        return [
            job
            for queue, count in wanted.items()
            for job in [job for job in waiting if job.queue == queue and job.key is None][:count]
        ]

    def _limited(self, queue: str, count: int) -> list[Job]:
        """What a claim with keys takes of one queue."""
        taken: list[Job] = []
        running = Counter(job.key for job in self.jobs.values() if job.state == "consumed" and job.lease > self.now)
        started = Counter[str]()
        for job in self._waiting():
            if job.queue != queue or len(taken) == count:
                continue
            if job.key is not None:
                allowed = KEYS[job.key]
                if allowed.limit is not None and running[job.key] >= allowed.limit:
                    continue
                if allowed.rate is not None and self._tokens(job.key) < (started[job.key] + 1) * TENTHS:
                    continue
                running[job.key] += 1
                started[job.key] += 1
            taken.append(job)
        return taken

    def _waiting(self) -> list[Job]:
        """The due jobs in claim order, by the times that the table has."""
        times = self._all("SELECT message_id::text AS id, available_at, created_at FROM dramatiq.queue")
        at = {row["id"]: (row["available_at"], row["created_at"]) for row in times}
        due = [
            job
            for job in self.jobs.values()
            if job.state == "queued"
            and job.due <= self.now
            and not job.overdue(self.now)
            and not self._is_paused(job.queue)
        ]
        return sorted(due, key=lambda job: (job.priority, *at[job.id]))

    def _is_paused(self, queue: str) -> bool:
        return queue in self.paused and ((until := self.paused[queue]) is None or until > self.now)

    def _tokens(self, key: str) -> int:
        allowed = KEYS[key]
        most = (allowed.burst or 0) * TENTHS
        tokens, at = self.buckets.get(key, (most, 0))
        return min(most, tokens + (self.now - at) * (allowed.rate or 0))

    def _took(self, worker: int, expected: Sequence[Job] | None, claims: list[Claim]) -> None:
        if expected is not None:
            assert {claim.id for claim in claims} == {job.id for job in expected}
        assert claims == sorted(claims, key=jobs.in_order)
        for claim in claims:
            job = self.jobs[claim.id]
            assert job.state == "queued"
            assert job.due <= self.now
            assert not self._is_paused(job.queue)
            job.state, job.token, job.worker = "consumed", claim.token, self.workers[worker]
            job.lease = self.now + LEASE_TICKS
            job.attempt += 1
            assert (claim.queue, claim.actor, claim.priority) == (job.queue, "a", job.priority)
            assert (claim.attempt, claim.max_attempts) == (job.attempt, job.max_attempts)
            assert claim.snoozed_s == job.snoozed
            self.hands.append(Hand(job.id, claim.token, job.worker, job.attempt))
            if job.key and KEYS[job.key].rate is not None:
                self.buckets[job.key] = (self._tokens(job.key) - TENTHS, self.now)

    # Owners, true ones and late ones.

    @precondition(lambda self: self.hands)
    @rule(picks=PICKS, verdicts=st.lists(VERDICTS, min_size=5, max_size=5))
    def settle(self, picks: list[int], verdicts: list[str]) -> None:
        settlements, written = self._settled(list(zip(self._picked(picks), verdicts, strict=False)))
        assert jobs.settle(self.conn, settlements) == written

    @precondition(lambda self: self.stale)
    @rule(pick=PICK, verdict=VERDICTS, how=st.sampled_from(["complete", "settle", "renew", "release"]))
    def come_late(self, pick: int, verdict: str, how: str) -> None:
        """With what was answered, refused or taken away long ago; what still is its own may at least be given back."""
        again = [hand for hand in self.stale if (job := self.jobs.get(hand.id)) and job.state == "consumed"]
        late = self._pick(again or self.stale, pick)
        match how:
            case "complete":
                assert jobs.settle(self.conn, [self._settlement(late, "done")]) == set()
            case "settle":
                assert jobs.settle(self.conn, [self._settlement(late, verdict)]) == set()
            case "renew":
                assert jobs.renew(self.conn, {late.id: late.token}, lease_s=LEASE_S) == []
            case "release":
                mine = self._owns(late)
                assert jobs.release(self.conn, {late.id: late.token}) == mine
                if mine:
                    self._given_back(self.jobs[late.id])

    def _settled(self, ends: list[tuple[Hand, str]]) -> tuple[list[Settlement], set[str]]:
        """The settlements that say so, and the ids of those that are to be written."""
        settlements = [self._settlement(hand, verdict) for hand, verdict in ends]
        written = set()
        for (hand, verdict), settlement in zip(ends, settlements, strict=True):
            if self._owns(hand) and self.jobs[hand.id].lease > self.now:
                written.add(hand.id)
                self._end(self.jobs[hand.id], verdict, settlement)
            self._answered(hand)
        return settlements, written

    def _settlement(self, hand: Hand, verdict: str) -> Settlement:
        job = self.jobs.get(hand.id)
        told: dict[str, Any] = {"error_class": "ValueError", "error": "no", "traceback": "t"}
        match verdict:
            case "done":
                return Settlement(hand.id, hand.token, "done")
            case "told":
                return Settlement(hand.id, hand.token, "done", result="[1]")
            case "discard":
                return Settlement(hand.id, hand.token, "rejected", outcome="discarded", **told)
            case "snooze":
                seconds = later(1) * TICK_S
                return Settlement(hand.id, hand.token, "queued", refund=1, delay_s=seconds, snoozed_s=seconds)
            case "put back":
                return Settlement(hand.id, hand.token, "queued", refund=1, delay_s=later(1) * TICK_S)
        last = job is not None and hand.attempt >= (job.max_attempts or 10)
        delay_s = 0 if last else later(hand.attempt % 3) * TICK_S
        state = "rejected" if last else "queued"
        return Settlement(hand.id, hand.token, state, delay_s=delay_s, outcome="failed", **told)

    def _end(self, job: Job, verdict: str, settlement: Settlement) -> None:
        if settlement.outcome:
            job.history.append((job.attempt, settlement.outcome))
        job.state, job.token, job.ended = settlement.state, None, self.now
        if job.state == "queued":
            job.due = self.now + settlement.delay_s / TICK_S
        job.attempt -= settlement.refund
        job.snoozed += settlement.snoozed_s

    @precondition(lambda self: self.hands)
    @rule(picks=PICKS)
    def renew(self, picks: list[int]) -> None:
        hands = {hand.id: hand for hand in self._picked(picks)}
        mine = {hand.id for hand in hands.values() if self._owns(hand) and self.jobs[hand.id].lease > self.now}
        held = {hand.id: hand.token for hand in hands.values()}
        renewed = jobs.renew(self.conn, held, lease_s=LEASE_S)
        expected = {job_id: self.jobs[job_id].cancelled is not None for job_id in mine}
        assert {renewal.id: renewal.cancel_requested for renewal in renewed} == expected
        assert jobs.still_held(self.conn, held) == {hand.id for hand in hands.values() if self._owns(hand)}
        for job_id in mine:
            self.jobs[job_id].lease = self.now + LEASE_TICKS

    @precondition(lambda self: self.hands)
    @rule(picks=PICKS, delay=st.sampled_from([0, 0, 1]))
    def release(self, picks: list[int], delay: int) -> None:
        hands = {hand.id: hand for hand in self._picked(picks)}
        mine = [self.jobs[hand.id] for hand in hands.values() if self._owns(hand)]
        held = {hand.id: hand.token for hand in hands.values()}
        assert jobs.release(self.conn, held, delay_s=later(delay) * TICK_S) == len(mine)
        for job in mine:
            self._given_back(job)
            job.due = self.now + later(delay) if delay else job.due
        for hand in hands.values():
            self._answered(hand)

    def _given_back(self, job: Job) -> None:
        job.state, job.token = "queued", None
        job.attempt -= 1

    def _owns(self, hand: Hand) -> bool:
        job = self.jobs.get(hand.id)
        return job is not None and job.state == "consumed" and job.token == hand.token

    def _picked(self, picks: list[int]) -> list[Hand]:
        """Some of what is in hand, and of what was until lately."""
        there = [*self.hands, *self.stale[-4:]]
        return list({there[pick % len(there)]: None for pick in picks}) if there else []

    def _answered(self, hand: Hand) -> None:
        if hand in self.hands:
            self.hands.remove(hand)
            self.stale.append(hand)

    # What goes wrong, and who sets it right.

    @rule(ticks=st.integers(1, 3))
    def time_passes(self, ticks: int) -> None:
        """Who is slow is frozen: its leases run out, and it comes back with what it had."""
        self.now += ticks
        times = {
            "dramatiq.queue": (
                "available_at", "created_at", "mtime", "lease_until", "claimed_at", "started_at", "finished_at",
                "deadline_at", "cancel_requested_at",
            ),
            "posthouse.pauses": ("until_at",),
            "posthouse.buckets": ("refilled_at", "full_at"),
        }  # fmt: skip
        for table, columns in times.items():
            moved = ", ".join(f"{column} = {column} - {ticks * TICK_S} * interval '1 s'" for column in columns)
            self.conn.execute(f"UPDATE {table} SET {moved}".encode())
        controls.prune_buckets(self.conn)

    @rule(known=st.booleans())
    def rescue(self, known: bool) -> None:
        """With what a keeper knows of the dead, or by the leases alone."""
        dead = self.dead if known else []
        lost = [
            job
            for job in self.jobs.values()
            if job.state == "consumed" and (job.lease <= self.now or job.worker in dead)
        ]
        rescued = jobs.rescue(self.conn, dead=dead)
        for job in lost:
            self._rescued(job)
        assert sorted(rescued) == sorted((job.id, job.queue, job.state) for job in lost)

    def _rescued(self, job: Job) -> None:
        job.history.append((job.attempt, "worker lost"))
        job.crashes += 1
        job.token = None
        asked = job.cancelled is not None
        if asked and (job.deadline is None or (job.cancelled or 0) <= job.deadline):
            job.stop_cause = "cancel_requested"
        elif job.overdue(self.now):
            job.stop_cause = "deadline_exceeded"
        elif asked:
            job.stop_cause = "cancel_requested"
        spent = job.max_attempts is not None and job.attempt >= job.max_attempts
        if job.stop_cause or spent or job.crashes >= MAX_CRASHES:
            job.state, job.ended = "rejected", self.now
        else:
            # From the second crash on they come back a few seconds apart.
            job.state, job.due = "queued", self.now + (0.3 if job.crashes > 1 else 0)

    @precondition(lambda self: any(job.state == "consumed" for job in self.jobs.values()))
    @rule(worker=WORKERS, to=WORKERS, what=st.sampled_from(["crash", "reconnect", "take over", "take over late"]))
    def befall(self, worker: int, to: int, what: str) -> None:
        match what:
            case "crash":
                self._crash(worker)
            case "reconnect":
                self._reconnect(worker)
            case _:
                self._take_over(worker, to, late=what == "take over late")

    def _crash(self, worker: int) -> None:
        """A process ends with all that it had in hand; another one takes its place."""
        self.dead.append(self.workers[worker])
        self.hands = [hand for hand in self.hands if hand.worker != self.workers[worker]]
        self.workers[worker] = str(uuid.uuid4())

    def _reconnect(self, worker: int) -> None:
        """What this worker has claimed and never heard of is given back."""
        name = self.workers[worker]
        known = {hand.token for hand in [*self.hands, *self.stale] if hand.worker == name}
        unheard = [
            job
            for job in self.jobs.values()
            if job.state == "consumed" and job.worker == name and job.token not in known
        ]
        assert jobs.release_unheld(self.conn, name, known) == len(unheard)
        for job in unheard:
            self._given_back(job)

    def _take_over(self, worker: int, to: int, late: bool) -> None:
        """A keeper wants one job of a process, and gets all of them or none; *late*: that job has just ended."""
        name = self.workers[worker]
        held = [job for job in self.jobs.values() if job.state == "consumed" and job.worker == name]
        alive = [job for job in held if job.lease > self.now]
        reason = [str(uuid.uuid4())] if late or not held else [str(held[0].token)]
        expected = alive if reason[0] in {job.token for job in alive} else []
        taken = keeping.take_over(self.conn, name, tokens=reason, to=self.workers[to], lease_s=LEASE_S)
        assert sorted(kept.id for kept in taken) == sorted(job.id for job in expected)
        for kept in taken:
            job = self.jobs[kept.id]
            for hand in [hand for hand in self.hands if hand.id == job.id]:
                self._answered(hand)
            job.token, job.worker, job.lease = kept.token, self.workers[to], self.now + LEASE_TICKS
            assert (kept.attempt, kept.max_attempts, kept.worker_id) == (job.attempt, job.max_attempts, job.worker)
            assert kept.stopping == (job.cancelled is not None or job.overdue(self.now))
            self.hands.append(Hand(job.id, kept.token, job.worker, job.attempt))

    # People.

    @rule(queue=QUEUES, ticks=st.sampled_from([None, 1, 2]))
    def pause(self, queue: str, ticks: int | None) -> None:
        """One that is not paused; the other way round one that is."""
        if self._is_paused(queue):
            self.resume(queue)
            return
        until_s = None if ticks is None else later(ticks) * TICK_S
        controls.pause(self.conn, queue, by="ana", reason="why not", until_s=until_s)
        self.paused[queue] = None if ticks is None else self.now + later(ticks)

    def resume(self, queue: str) -> None:
        assert controls.resume(self.conn, queue) == self._is_paused(queue)
        self.paused.pop(queue, None)

    @precondition(lambda self: self.jobs)
    @rule(picks=PICKS)
    def retry(self, picks: list[int]) -> None:
        """One of all, and some of the discarded."""
        rejected = [job for job in self.jobs.values() if job.state == "rejected"]
        chosen = [self._pick(self.jobs.values(), picks[0])]
        chosen += [self._pick(rejected, pick) for pick in picks[1:] if rejected]
        for job in chosen:
            if job.state == "rejected" and job.stop_cause is None and not self._holder(job.unique):
                jobs.retry(self.conn, job.id)
                job.state, job.attempt, job.crashes, job.snoozed = "queued", 0, 0, 0
                job.due, job.cancelled = self.now, None
            else:
                self._refused(job)

    def _refused(self, job: Job) -> None:
        with pytest.raises(RetryRefused):
            jobs.retry(self.conn, job.id)

    @rule(pick=PICK, ticks=st.none() | st.integers(1, 2))
    def stop(self, pick: int, ticks: int | None) -> None:
        """By a request, as one for a running job is stored, or by a deadline in so many *ticks*."""
        running = [job for job in self.jobs.values() if job.state == "consumed"]
        if ticks is None and running:
            job = self._pick(running, pick)
            job.cancelled = self.now
            query = "UPDATE dramatiq.queue SET cancel_requested_at = clock_timestamp() WHERE message_id = %s"
            self.conn.execute(query, [job.id])
        endless = [job for job in self.jobs.values() if job.unfinished and job.deadline is None]
        if ticks is not None and endless:
            job = self._pick(endless, pick)
            job.deadline = self.now + later(ticks)
            query = "UPDATE dramatiq.queue SET deadline_at = clock_timestamp() + %s WHERE message_id = %s"
            self.conn.execute(query, [f"{later(ticks) * TICK_S} s", job.id])

    @rule(completed=st.integers(1, 2), failed=st.integers(1, 3), limit=st.sampled_from([1, 2, 1_000]))
    def prune(self, completed: int, failed: int, limit: int) -> None:
        old = {
            job.id
            for job in self.jobs.values()
            if (job.state == "done" and job.ended + later(completed) < self.now)
            or (job.state == "rejected" and job.ended + later(failed) < self.now)
        }
        completed_s, failed_s = later(completed) * TICK_S, later(failed) * TICK_S
        gone = jobs.prune(self.conn, completed_s=completed_s, failed_s=failed_s, limit=limit)
        assert gone == min(limit, len(old))
        left = {row["id"] for row in self._all("SELECT message_id::text AS id FROM dramatiq.queue")}
        assert self.jobs.keys() - left <= old
        self.jobs = {job_id: job for job_id, job in self.jobs.items() if job_id in left}

    # What must be true.

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        found = {
            row.pop("id"): row
            for row in self._all(
                """
                SELECT message_id::text AS id, state::text AS state, attempt, crashes, snoozed_s, stop_cause,
                       lease_token::text AS token, lease_until > clock_timestamp() AS alive,
                       CASE WHEN state = 'consumed' THEN worker_id::text END AS worker,
                       CASE WHEN state = 'queued' THEN available_at <= clock_timestamp() END AS due,
                       finished_at IS NOT NULL AS ended
                FROM dramatiq.queue
                """
            )
        }
        assert found == {job.id: self._row(job) for job in self.jobs.values()}
        told: dict[str, list[tuple[int, str]]] = {}
        for row in self._all("SELECT job_id::text, attempt, outcome FROM posthouse.attempts ORDER BY id"):
            told.setdefault(row["job_id"], []).append((row["attempt"], row["outcome"]))
        assert told == {job.id: job.history for job in self.jobs.values() if job.history}

    def _row(self, job: Job) -> dict[str, Any]:
        held = job.state == "consumed"
        return {
            "state": job.state,
            "attempt": job.attempt,
            "crashes": job.crashes,
            "snoozed_s": job.snoozed,
            "stop_cause": job.stop_cause,
            "token": job.token,
            "alive": job.lease > self.now if held else None,
            "worker": job.worker if held else None,
            "due": job.due <= self.now if job.state == "queued" else None,
            "ended": not job.unfinished,
        }

    @invariant()
    def nothing_is_exceeded(self) -> None:
        """Said without the model, which might be wrong in the same way."""
        limits = {"keys": list(KEYS), "limits": [key.limit for key in KEYS.values()], "crashes": MAX_CRASHES}
        assert self._all(EXCEEDED, limits) == []

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.everything_ends()

    def everything_ends(self) -> None:
        """No job is lost: from wherever a walk has led, each comes to its end, but for those past their deadline."""
        for queue in ("q", "r"):
            self.resume(queue)
        for _ in range(60):
            self.rescue(known=True)
            for queue in ("q", "r"):
                self.claim_with_keys(0, queue, 50)
            self.settle_all()
            if not self._endable():
                return
            self.time_passes(3)
        assert self._endable() == []

    def settle_all(self) -> None:
        settlements, written = self._settled([(hand, "done") for hand in list(self.hands)])
        assert jobs.settle(self.conn, settlements) == written
        self.the_table_says_what_the_model_says()

    def _endable(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.unfinished and not (job.state == "queued" and job.deadline)]

    # Odds and ends.

    def _pick(self, among: Iterable[T], pick: int) -> T:
        there = list(among)
        return there[pick % len(there)]

    def _all(self, query: LiteralString, given: Mapping[str, Any] = MappingProxyType({})) -> list[dict[str, Any]]:
        return self.conn.execute(query, given).fetchall()


@pytest.fixture
def ledger_conn(database_url: str) -> Iterator[Conn]:
    """A session as the claim loop has it."""
    with connect(database_url, name="posthouse model", session=jobs.SESSION) as conn:
        yield conn


def test_the_ledger_does_what_the_contract_says_in_every_order(ledger_conn: Conn) -> None:
    # By hand it looks for the shortest walk; in the suite a failure is told as it was found, before the time limit.
    phases = set(Phase) if "MODEL_EXAMPLES" in os.environ else set(Phase) - {Phase.shrink, Phase.explain}
    run_state_machine_as_test(
        lambda: Ledger(ledger_conn),  # type: ignore[arg-type] # it makes one for each walk
        settings=settings(
            max_examples=int(os.environ.get("MODEL_EXAMPLES", "80")),
            stateful_step_count=int(os.environ.get("MODEL_STEPS", "60")),
            deadline=None,
            phases=phases,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
