"""The host's keeper, turn by turn beside real processes; in the relay, beside workers: test_keeper_relay."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from psycopg.errors import CheckViolation

from middleware.failures import Backoff, Policy
from middleware.keeper import Keeper, Kind
from middleware.metrics import meter
from outbox import jobs, keeping, processes, workers
from outbox.db import Conn, connect, transaction
from outbox.jobs import Claim, NewJob
from outbox.workers import Worker
from tests import emptied
from tests.workers import until

shared_url = emptied.shared_url
database_url = emptied.database_url

LEASE_S, LIMIT_S, PATIENCE_S, SILENT_S = 60.0, 30.0, 10.0, 10.0
LONG_AGO_S = 3_600.0


# Turn by turn.


class Puppet:
    """A process that sleeps, registered as a worker; what it would do, the test does in its name."""

    def __init__(self, conn: Conn, **told: Any) -> None:
        self.conn = conn
        self.process = subprocess.Popen(["sleep", "600"])
        worker = Worker(("q",), 1, pid=self.process.pid, pid_started=started(self.process.pid))
        self.worker = replace(worker, **told)
        workers.register(conn, self.worker, running=0)

    def claims(self, lease_s: float = LEASE_S, age_s: float = 0, **given: Any) -> Claim:
        """A new job in its hands, claimed *age_s* ago."""
        jobs.enqueue(self.conn, NewJob(**{"queue": "q", "actor": "a", "max_attempts": 10, **given}))
        queue = given.get("queue", "q")
        (claim,) = jobs.claim(self.conn, {queue: 1}, worker_id=self.worker.id, lease_s=lease_s)
        age = "UPDATE dramatiq.queue SET claimed_at = claimed_at - %s * interval '1 second' WHERE message_id = %s"
        self.conn.execute(age, [age_s, claim.id])
        return claim

    def falls_silent(self, seconds: float = LONG_AGO_S) -> None:
        query = "UPDATE posthouse.workers SET seen_at = clock_timestamp() - %s * interval '1 second' WHERE id = %s"
        self.conn.execute(query, [seconds, self.worker.id])

    def dies(self) -> None:
        """It stays a zombie: nobody waits for it before the test is over."""
        self.process.kill()
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_ZOMBIE)

    def stops(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    @property
    def registered(self) -> bool:
        return self.conn.execute("SELECT FROM posthouse.workers WHERE id = %s", [self.worker.id]).rowcount == 1


class Stage:
    """Puppets and keepers on one database."""

    def __init__(self, conn: Conn) -> None:
        self.conn = conn
        self.puppets: list[Puppet] = []

    def puppet(self, **told: Any) -> Puppet:
        self.puppets.append(Puppet(self.conn, **told))
        return self.puppets[-1]

    def keeper(self, **told: Any) -> Keeper:
        """One that looks at each turn, and knows actor `a` and queue `q`."""
        worker = Worker((), 0)
        workers.register(self.conn, worker, running=0)
        known: dict[str, Any] = {
            "kind": lambda actor, queue: Kind(LIMIT_S, Policy(backoff=Backoff(first_s=60))) if queue == "q" else None,
            "lease_s": LEASE_S,
            "silent_after_s": SILENT_S,
            "patience_s": PATIENCE_S,
            "look_every_s": 0,
            "silent_looks": 1,
        }
        return Keeper(meter=meter(), **{"worker_id": worker.id, **known, **told})

    def close(self) -> None:
        for puppet in self.puppets:
            puppet.process.kill()
            puppet.process.wait(5)


@pytest.fixture
def stage(conn: Conn) -> Iterator[Stage]:
    set_up = Stage(conn)
    yield set_up
    set_up.close()


def started(pid: int) -> int:
    """In clock ticks since the boot."""
    return int(Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[19])


def job(conn: Conn, claim: Claim) -> dict[str, Any]:
    return jobs.load(conn, claim.id) or {}


def state(conn: Conn, claim: Claim) -> str:
    return str(job(conn, claim)["state"])


def lease_left_s(conn: Conn, claim: Claim) -> float:
    query = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 AS s FROM dramatiq.queue"
    found = conn.execute(f"{query} WHERE message_id = %s", [claim.id]).fetchone()
    assert found is not None
    return float(found["s"])


def test_the_jobs_of_a_process_that_is_gone_are_rescued_at_once_and_charged_as_a_crash(
    stage: Stage, conn: Conn
) -> None:
    keeper, puppet, other = stage.keeper(), stage.puppet(), stage.puppet()
    lost, kept = puppet.claims(), other.claims()
    keeper.turn(conn)
    puppet.dies()
    keeper.turn(conn)
    found = job(conn, lost)
    assert (found["state"], found["attempt"], found["crashes"]) == ("retryable", 1, 1)
    assert [(one["outcome"], one["error"]) for one in found["attempts"]] == [("worker lost", "its process died")]
    assert (puppet.registered, other.registered, state(conn, kept)) == (False, True, "running")


def test_more_jobs_than_a_page_are_rescued_in_one_turn(stage: Stage, conn: Conn) -> None:
    keeper, puppet = stage.keeper(), stage.puppet()
    jobs.enqueue_many(conn, [NewJob(queue="q", actor="a") for _ in range(jobs.PAGE + 5)])
    jobs.claim(conn, {"q": jobs.PAGE + 5}, worker_id=puppet.worker.id, lease_s=LEASE_S)
    keeper.turn(conn)
    puppet.dies()
    keeper.turn(conn)
    assert conn.execute("SELECT FROM dramatiq.queue WHERE state = 'consumed'").fetchall() == []


def test_a_process_that_left_the_register_is_watched_to_its_end(stage: Stage, conn: Conn) -> None:
    """F12: a registry emptied by hand."""
    keeper, puppet = stage.keeper(), stage.puppet()
    lost = puppet.claims()
    keeper.turn(conn)
    conn.execute("DELETE FROM posthouse.workers")
    keeper.turn(conn)
    puppet.dies()
    keeper.turn(conn)
    assert state(conn, lost) == "retryable"


def test_an_absent_process_that_was_never_seen_is_believed_to_be_gone_only_when_it_has_been_silent(
    stage: Stage, conn: Conn
) -> None:
    keeper, puppet = stage.keeper(), stage.puppet()
    claim = puppet.claims()
    puppet.dies()
    keeper.turn(conn)
    assert (state(conn, claim), puppet.registered) == ("running", True)
    puppet.falls_silent()
    keeper.turn(conn)
    assert (state(conn, claim), puppet.registered) == ("retryable", False)


def test_a_pid_that_is_used_again_is_not_taken_for_the_process_that_had_it(stage: Stage, conn: Conn) -> None:
    """Neither for alive nor for one to be killed."""
    puppet = stage.puppet()
    reused = replace(puppet.worker, id=Worker((), 0).id, pid_started=started(puppet.process.pid) - 1)
    former = Puppet.__new__(Puppet)
    former.conn, former.worker = conn, reused
    workers.register(conn, reused, running=0)
    claim = former.claims(age_s=LONG_AGO_S)
    former.falls_silent()
    stage.keeper().turn(conn)
    assert (state(conn, claim), former.registered) == ("retryable", False)
    assert (puppet.lives, puppet.registered) == (True, True)


def test_processes_of_another_pid_space_and_those_that_do_not_tell_theirs_are_left_to_their_leases(
    stage: Stage, conn: Conn
) -> None:
    strange = [stage.puppet(pid_space="another boot"), stage.puppet(pid_space=None, pid_started=None)]
    held = [puppet.claims(lease_s=10, age_s=LONG_AGO_S) for puppet in strange]
    keeper = stage.keeper()
    keeper.turn(conn)
    strange[0].falls_silent()
    strange[1].falls_silent()
    keeper.turn(conn)
    assert [puppet.lives for puppet in strange] == [True, True]
    strange[0].dies()
    strange[1].dies()
    keeper.turn(conn)
    assert [state(conn, claim) for claim in held] == ["running", "running"]
    assert max(lease_left_s(conn, claim) for claim in held) <= 10


def test_where_nothing_tells_processes_apart_the_keeper_leaves_all_to_the_leases(stage: Stage, conn: Conn) -> None:
    puppet = stage.puppet()
    claim = puppet.claims(lease_s=10)
    puppet.falls_silent()
    puppet.dies()
    stage.keeper(pid_space=None).turn(conn)
    assert (state(conn, claim), puppet.registered) == ("running", True)


def test_a_worker_tells_all_that_identifies_its_process_or_nothing(conn: Conn) -> None:
    workers.register(conn, Worker((), 0), running=0)
    (told,) = conn.execute("SELECT pid, pid_space, pid_started FROM posthouse.workers").fetchall()
    assert told == {"pid": os.getpid(), "pid_space": processes.pid_space(), "pid_started": started(os.getpid())}
    with pytest.raises(CheckViolation):
        workers.register(conn, replace(Worker((), 0), pid_space=None), running=0)


def test_the_leases_of_a_silent_process_that_lives_are_renewed_in_their_second_half(stage: Stage, conn: Conn) -> None:
    puppet, keeper = stage.puppet(), stage.keeper()
    late, early = puppet.claims(lease_s=LEASE_S / 2 - 1), puppet.claims(lease_s=LEASE_S / 2 + 5)
    keeper.turn(conn)
    assert lease_left_s(conn, late) < LEASE_S / 2
    puppet.falls_silent(SILENT_S + 1)
    keeper.turn(conn)
    assert lease_left_s(conn, late) > LEASE_S - 5
    assert lease_left_s(conn, early) <= LEASE_S / 2 + 5
    assert jobs.still_held(conn, {late.id: late.token}) == {late.id}


def test_a_lease_that_ran_out_is_not_revived(stage: Stage, conn: Conn) -> None:
    puppet = stage.puppet()
    claim = puppet.claims(lease_s=0)
    puppet.falls_silent()
    stage.keeper().turn(conn)
    assert lease_left_s(conn, claim) <= 0


def test_a_stopped_process_is_left_to_its_leases(stage: Stage, conn: Conn) -> None:
    puppet = stage.puppet()
    claim = puppet.claims(lease_s=10, age_s=LONG_AGO_S)
    puppet.stops()
    puppet.falls_silent()
    stage.keeper().turn(conn)
    assert (puppet.lives, state(conn, claim)) == (True, "running")
    assert lease_left_s(conn, claim) <= 10


def test_a_job_without_a_known_limit_is_left_to_its_lease(stage: Stage, conn: Conn) -> None:
    puppet = stage.puppet()
    claim = puppet.claims(queue="nowhere", lease_s=10, age_s=LONG_AGO_S)
    puppet.falls_silent()
    stage.keeper().turn(conn)
    assert (puppet.lives, state(conn, claim)) == (True, "running")
    assert lease_left_s(conn, claim) <= 10


def test_the_process_of_a_job_far_past_its_limit_is_killed_and_the_job_has_timed_out(stage: Stage, conn: Conn) -> None:
    puppet, keeper = stage.puppet(), stage.keeper()
    overdue = puppet.claims(age_s=LIMIT_S + PATIENCE_S + 1)
    beside = puppet.claims(age_s=LIMIT_S)
    puppet.falls_silent()
    keeper.turn(conn)
    assert puppet.process.wait(5) == -signal.SIGKILL
    found = job(conn, overdue)
    assert (found["state"], found["attempt"], found["crashes"]) == ("retryable", 1, 0)
    assert (found["available_at"] - found["claimed_at"]).total_seconds() > 60
    (attempt,) = found["attempts"]
    assert (attempt["outcome"], attempt["error_class"]) == ("timed out", "middleware.failures.TimeLimitExceeded")
    assert f"process {puppet.process.pid} was killed" in attempt["error"]
    found = job(conn, beside)
    assert (found["state"], found["attempt"], found["crashes"], found["attempts"]) == ("pending", 0, 0, [])
    keeper.turn(conn)
    assert not puppet.registered


def test_a_job_that_always_overruns_ends_when_its_attempts_do(stage: Stage, conn: Conn) -> None:
    """F28."""
    puppet = stage.puppet()
    claim = puppet.claims(age_s=LONG_AGO_S, max_attempts=1)
    puppet.falls_silent()
    stage.keeper().turn(conn)
    found = job(conn, claim)
    assert (found["state"], len(found["attempts"])) == ("discarded", 1)
    assert found["last_error"].startswith("attempts exhausted (1): ran longer than its limit of 30 s")


def test_an_overdue_job_that_is_to_be_cancelled_is_cancelled(stage: Stage, conn: Conn) -> None:
    puppet = stage.puppet()
    claim = puppet.claims(age_s=LONG_AGO_S)
    conn.execute("UPDATE dramatiq.queue SET cancel_requested_at = clock_timestamp(), cancel_requested_by = 'me'")
    puppet.falls_silent()
    stage.keeper().turn(conn)
    assert puppet.process.wait(5) == -signal.SIGKILL
    assert state(conn, claim) == "cancelled"


@pytest.mark.parametrize(("silent_s", "silent_looks"), [(SILENT_S - 5, 1), (LONG_AGO_S, 2)])
def test_a_process_that_was_heard_lately_or_found_silent_only_once_is_not_killed(
    stage: Stage, conn: Conn, silent_s: float, silent_looks: int
) -> None:
    """After the database hung everybody is silent, at the first look."""
    puppet = stage.puppet()
    claim = puppet.claims(age_s=LONG_AGO_S)
    puppet.falls_silent(silent_s)
    stage.keeper(silent_looks=silent_looks).turn(conn)
    assert (puppet.lives, state(conn, claim)) == (True, "running")


def test_a_sign_of_life_between_two_silent_looks_counts(stage: Stage, conn: Conn) -> None:
    puppet, keeper = stage.puppet(), stage.keeper(silent_looks=2)
    puppet.claims(age_s=LONG_AGO_S)
    for silent_s in (LONG_AGO_S, 0, LONG_AGO_S):
        puppet.falls_silent(silent_s)
        keeper.turn(conn)
    assert puppet.lives
    keeper.turn(conn)
    assert puppet.process.wait(5) == -signal.SIGKILL


def test_an_overdue_job_of_another_users_process_is_left_to_its_lease(
    stage: Stage, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    puppet = stage.puppet()
    overdue, healthy = puppet.claims(lease_s=10, age_s=LONG_AGO_S), puppet.claims(lease_s=10)
    puppet.falls_silent()
    monkeypatch.setattr(os, "kill", refuse)
    stage.keeper().turn(conn)
    monkeypatch.undo()
    assert (puppet.lives, state(conn, overdue)) == (True, "running")
    assert lease_left_s(conn, overdue) <= 10 < lease_left_s(conn, healthy)


def test_a_process_is_not_killed_for_a_job_that_cannot_change_hands_just_now(stage: Stage, conn: Conn) -> None:
    """Somebody has it open in psql, or another keeper was first."""
    puppet = stage.puppet()
    overdue = puppet.claims(age_s=LONG_AGO_S)
    beside = puppet.claims()
    puppet.falls_silent()
    with connect(conn.info.dsn, name="posthouse test") as elsewhere, transaction(elsewhere):
        elsewhere.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [overdue.id])
        stage.keeper().turn(conn)
    assert puppet.lives
    assert jobs.still_held(conn, {one.id: one.token for one in (overdue, beside)}) == {overdue.id, beside.id}


def test_a_keeper_does_not_keep_itself(stage: Stage, conn: Conn) -> None:
    puppet = stage.puppet()
    claim = puppet.claims(lease_s=10)
    puppet.falls_silent()
    stage.keeper(worker_id=puppet.worker.id).turn(conn)
    assert lease_left_s(conn, claim) <= 10


def test_jobs_change_hands_once_all_of_them_or_none(stage: Stage, conn: Conn) -> None:
    puppet, first, second = stage.puppet(), Worker((), 0).id, Worker((), 0).id
    stranger = stage.puppet()
    foreign = stranger.claims()
    reason, other = puppet.claims(), puppet.claims()
    asked: dict[str, Any] = {"tokens": [reason.token], "lease_s": LEASE_S}
    with transaction(conn):
        conn.execute("SELECT FROM dramatiq.queue WHERE message_id = %s FOR UPDATE", [reason.id])
        with connect(conn.info.dsn, name="posthouse test") as elsewhere:
            assert keeping.take_over(elsewhere, puppet.worker.id, to=first, **asked) == []
    taken = keeping.take_over(conn, puppet.worker.id, to=first, **asked)
    assert {one.id for one in taken} == {reason.id, other.id}
    assert [one.id for one in keeping.kept_by(conn, [stranger.worker.id])] == [foreign.id]
    assert {one.id for one in keeping.kept_by(conn, [first])} == {reason.id, other.id}
    assert keeping.take_over(conn, puppet.worker.id, to=second, **asked) == []
    assert jobs.still_held(conn, {reason.id: reason.token, other.id: other.token}) == set()
    assert jobs.still_held(conn, {one.id: one.token for one in taken}) == {reason.id, other.id}


def test_a_job_of_the_dead_that_somebody_has_locked_keeps_the_process_on_the_register(stage: Stage, conn: Conn) -> None:
    keeper, puppet = stage.keeper(), stage.puppet()
    claim = puppet.claims()
    keeper.turn(conn)
    puppet.dies()
    with connect(conn.info.dsn, name="posthouse test") as elsewhere, transaction(elsewhere):
        elsewhere.execute("SELECT FROM dramatiq.queue FOR UPDATE")
        keeper.turn(conn)
        assert (state(conn, claim), puppet.registered) == ("running", True)
    keeper.turn(conn)
    assert (state(conn, claim), puppet.registered) == ("retryable", False)


def test_a_register_that_somebody_has_locked_does_not_keep_the_jobs_of_the_dead(stage: Stage, conn: Conn) -> None:
    keeper, puppet = stage.keeper(), stage.puppet()
    claim = puppet.claims()
    keeper.turn(conn)
    puppet.dies()
    conn.execute("SET lock_timeout = '50ms'")
    with connect(conn.info.dsn, name="posthouse test") as elsewhere, transaction(elsewhere):
        elsewhere.execute("LOCK TABLE posthouse.workers")
        keeper.turn(conn)
        assert state(conn, claim) == "retryable"


def test_a_process_is_told_running_from_stopped_and_both_from_gone_and_hidden(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet = stage.puppet()
    pid, since = puppet.process.pid, started(puppet.process.pid)
    seen = [processes.look(pid, since), processes.look(pid, since + 1)]
    puppet.stops()
    seen.append(processes.look(pid, since))
    monkeypatch.setattr(processes, "_stat", lambda pid: None)
    seen.append(processes.look(pid, since))
    monkeypatch.undo()
    puppet.dies()
    seen.append(processes.look(pid, since))
    puppet.process.wait(5)
    seen.append(processes.look(pid, since))
    assert seen == ["running", "gone", "stopped", "hidden", "gone", "gone"]
