"""The relay: each committed event becomes its jobs, once, whoever else is at it and whenever somebody dies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from middleware.lifecycle import Lifecycle
from middleware.metrics import meter
from middleware.relay import Relay
from outbox import catalogue, events, jobs
from outbox.catalogue import WEBHOOK, EventType
from outbox.db import Conn, Database, connect
from outbox.relay import POISONED_AFTER, Subscription, relay, relay_singly
from tests import emptied
from tests.workers import HOUSE, until

shared_url, database_url = emptied.shared_url, emptied.database_url

INDEX = Subscription("order.*", "index", "q", argument="subject", coalesce=True)
MAIL = Subscription("order.paid", "mail", "q", priority=3, max_attempts=7)


@pytest.fixture(autouse=True)
def _catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_types", {})
    for name in ("order.paid", "order.noted"):
        catalogue.declare(EventType(name, "", "", WEBHOOK))
    catalogue.declare(EventType("audit.looked.at", "", ""))


def record(conn: Conn, count: int = 1, subject: str = "o", type: str = "order.paid") -> list[str]:
    return [events.record(conn, type, f"{subject}-{number}") for number in range(count)]


def made(conn: Conn) -> list[dict[str, Any]]:
    """The jobs there are: who, with what, for which event."""
    return conn.execute(
        "SELECT actor, message -> 'args' ->> 0 AS argument, event_id::text FROM dramatiq.queue ORDER BY created_at"
    ).fetchall()


def waiting(conn: Conn) -> int:
    return int(events.backlog(conn)["waiting"])


@contextmanager
def refusing(conn: Conn, subject: str) -> Iterator[None]:
    """No job can be made for this *subject*."""
    conn.execute(
        f"""
        CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.message -> 'args' ->> 0 = '{subject}' THEN RAISE EXCEPTION 'not this one'; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON dramatiq.queue FOR EACH ROW EXECUTE FUNCTION refuse();
        """.encode()
    )
    yield
    conn.execute("DROP TRIGGER refuse ON dramatiq.queue")


def test_an_event_becomes_one_job_for_each_that_asked(conn: Conn, db: Database) -> None:
    (event_id,) = record(conn)
    assert relay(db.transaction, [INDEX, MAIL]) == 1
    assert sorted(made(conn), key=str) == [
        {"actor": "index", "argument": "o-0", "event_id": event_id},
        {"actor": "mail", "argument": event_id, "event_id": event_id},
    ]
    event = events.load(conn, event_id)
    assert event is not None
    assert event.fanned_out_at is not None
    assert event.jobs == 2
    (mail,) = jobs.listing(conn, actor="mail")
    assert mail["max_attempts"] == 7
    assert relay(db.transaction, [INDEX, MAIL]) == 0


def test_an_event_nobody_asked_for_is_marked_all_the_same(conn: Conn, db: Database) -> None:
    (event_id,) = record(conn, type="audit.looked.at")
    assert relay(db.transaction, [INDEX, MAIL, Subscription("*", "hook", "q")]) == 1
    event = events.load(conn, event_id)
    assert event is not None
    assert (event.fanned_out_at is not None, event.jobs, made(conn)) == (True, 0, [])


def test_a_transaction_that_commits_late_is_not_skipped(conn: Conn, db: Database, database_url: str) -> None:
    with connect(database_url, name="late") as late:
        late.execute("BEGIN")
        (first,) = record(late, subject="late")
        (second,) = record(conn)
        assert relay(db.transaction, [MAIL]) == 1
        assert [job["event_id"] for job in made(conn)] == [second]
        late.execute("COMMIT")
        assert relay(db.transaction, [MAIL]) == 1
        assert [job["event_id"] for job in made(conn)] == [second, first]


def test_a_pass_takes_a_batch_in_order(conn: Conn, db: Database) -> None:
    ids = record(conn, 5)
    assert [relay(db.transaction, [MAIL], batch=2) for _ in range(4)] == [2, 2, 1, 0]
    assert [job["event_id"] for job in made(conn)] == ids


def test_relays_at_the_same_time_never_fan_out_twice(conn: Conn, db: Database) -> None:
    ids = record(conn, 200)

    def passes(_: int) -> int:
        total = 0
        while found := relay(db.transaction, [MAIL, INDEX], batch=7):
            total += found
        return total

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(passes, range(3))) == 200
    assert sorted(str(job["event_id"]) for job in made(conn)) == sorted(ids * 2)
    assert waiting(conn) == 0


def test_a_subject_is_one_job_a_batch_for_its_latest_event_where_that_was_asked(conn: Conn, db: Database) -> None:
    first, other = record(conn, 2)
    last = events.record(conn, "order.noted", "o-0")
    assert relay(db.transaction, [INDEX]) == 3
    found = {job["argument"]: job["event_id"] for job in made(conn)}
    assert found == {"o-0": last, "o-1": other}
    counts = [getattr(events.load(conn, event_id), "jobs", None) for event_id in (first, other, last)]
    assert counts == [0, 1, 1]


def test_a_pass_that_fails_leaves_neither_jobs_nor_marks(conn: Conn, db: Database) -> None:
    record(conn, 3)
    with refusing(conn, "o-1"), pytest.raises(psycopg.errors.RaiseException):
        relay(db.transaction, [INDEX])
    assert (made(conn), waiting(conn)) == ([], 3)


def test_one_bad_event_holds_up_no_other_and_is_poisoned_at_the_fifth_failure(conn: Conn, db: Database) -> None:
    _, bad, _ = record(conn, 3)
    with refusing(conn, "o-1"):
        assert relay_singly(db.transaction, [INDEX]) == 2
        for failures in range(1, POISONED_AFTER + 1):
            event = events.load(conn, bad)
            assert event is not None
            assert (event.failures, event.poisoned_at) == (failures, None) or failures == POISONED_AFTER
            assert relay_singly(db.transaction, [INDEX]) == 0
    event = events.load(conn, bad)
    assert event is not None
    assert event.failures == 5
    assert str(event.last_error).startswith("RaiseException: not this one")
    assert event.poisoned_at is not None
    assert [job["argument"] for job in made(conn)] == ["o-0", "o-2"]
    assert (waiting(conn), events.backlog(conn)["poisoned"]) == (0, 1)
    assert relay(db.transaction, [INDEX]) == 0

    assert events.requeue(conn, bad) is True
    assert events.requeue(conn, bad) is False
    assert relay(db.transaction, [INDEX]) == 1
    assert [job["argument"] for job in made(conn)] == ["o-0", "o-2", "o-1"]


def test_a_relay_killed_in_the_middle_leaves_neither_or_both(conn: Conn, database_url: str, db: Database) -> None:
    ids = record(conn, 40)
    for pause_s in (0.0, 0.01, 0.03):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, database_url], cwd=HOUSE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        process.stdout.readline()
        threading.Event().wait(pause_s)
        process.kill()
        process.communicate()
        until(lambda: not _at_work(conn), what="the server to notice")
        marked = conn.execute("SELECT count(*) AS n FROM posthouse.events WHERE fanned_out_at IS NOT NULL").fetchone()
        assert marked == {"n": len(made(conn))}
    while relay(db.transaction, [MAIL]):
        pass
    assert sorted(str(job["event_id"]) for job in made(conn)) == sorted(ids)


KILLED = """
import sys
from outbox import catalogue, relay
from outbox.db import Database
catalogue.declare(catalogue.EventType("order.paid", "", ""))
db = Database(sys.argv[1], name="killed", max_size=1)
for turn in range(100):
    relay.relay(db.transaction, [relay.Subscription("order.paid", "mail", "q")], batch=1)
    if turn == 0:
        print("at work", flush=True)
"""


def _at_work(conn: Conn) -> bool:
    return bool(conn.execute("SELECT FROM pg_stat_activity WHERE application_name = 'killed'").fetchone())


def test_the_thread_relays_at_the_bell_and_at_the_sweep_and_ends_with_the_process(conn: Conn, db: Database) -> None:
    lifecycle = Lifecycle()
    thread = Relay(db.transaction, [MAIL], lifecycle, meter(), batch=2, sweep_s=0.2)
    record(conn, 5)
    lifecycle.spawn("relay", thread.run)
    until(lambda: waiting(conn) == 0)
    record(conn)
    thread.ring()
    until(lambda: waiting(conn) == 0)
    record(conn)
    until(lambda: waiting(conn) == 0, what="the sweep")
    lifecycle.stop()
    thread.ring()
    assert lifecycle.join(5) == []
    assert lifecycle.panics == 0


def test_the_thread_backs_off_when_a_pass_fails_and_goes_on_singly(conn: Conn, db: Database) -> None:
    class Hasty(Lifecycle):
        """Waits for nobody, and tells how long it should have."""

        def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            return self.stopping

    pauses: list[float] = []
    lifecycle = Hasty()
    thread = Relay(db.transaction, [INDEX], lifecycle, meter(), batch=10, sweep_s=0.05)
    record(conn, 3)
    with refusing(conn, "o-1"):
        lifecycle.spawn("relay", thread.run)
        until(lambda: events.backlog(conn)["poisoned"] == 1)
    lifecycle.stop()
    thread.ring()
    assert lifecycle.join(5) == []
    assert pauses == [2.0] * 5
    assert [job["argument"] for job in made(conn)] == ["o-0", "o-2"]
