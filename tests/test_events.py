"""Facts: written with the change they tell of, by Python and by SQL, and nothing undeclared or oversize."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import psycopg2
import pytest

from outbox import catalogue, events
from outbox.catalogue import INTERNAL, WEBHOOK, EventType
from outbox.db import Conn
from tests import emptied

shared_url, database_url = emptied.shared_url, emptied.database_url


@pytest.fixture(autouse=True)
def _catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of two types, whatever else this process has declared."""
    monkeypatch.setattr(catalogue, "_types", {})
    catalogue.declare(EventType("order.paid", "An order was paid", "the order's number", WEBHOOK))
    catalogue.declare(EventType("order.noted", "An order was noted", "the order's number"))


@pytest.fixture
def published(conn: Conn) -> Conn:
    events.publish_types(conn)
    return conn


@pytest.fixture(params=[psycopg.connect, psycopg2.connect], ids=["psycopg", "psycopg2"])
def application(request: pytest.FixtureRequest, database_url: str) -> Iterator[Any]:
    """The connection of a caller, who has begun a transaction."""
    with closing(request.param(database_url)) as opened:
        yield opened


def test_a_fact_commits_with_its_change(application: Any, conn: Conn) -> None:
    event_id = events.record(application, "order.paid", "o-1", {"total": 3})
    assert events.load(conn, event_id) is None
    application.commit()
    event = events.load(conn, event_id)
    assert event is not None
    assert (event.type, event.subject, event.data, event.jobs) == ("order.paid", "o-1", {"total": 3}, 0)
    assert (event.fanned_out_at, event.poisoned_at, event.body) == (None, None, None)


def test_a_rollback_leaves_no_fact(application: Any, conn: Conn) -> None:
    events.record(application, "order.paid", "o-1")
    application.rollback()
    assert events.recent(conn) == []


def test_sql_records_the_same_fact(published: Conn) -> None:
    made = published.execute("SELECT posthouse.record_event('order.paid', 'o-1', '{\"total\": 3}')").fetchone()
    assert made is not None
    event = events.load(published, str(made["record_event"]))
    assert event is not None
    assert (event.type, event.subject, event.data) == ("order.paid", "o-1", {"total": 3})


def test_recording_rings_an_empty_bell(published: Conn) -> None:
    published.execute("LISTEN posthouse_events")
    events.record(published, "order.paid", "o-1")
    published.execute("SELECT posthouse.record_event('order.paid', 'o-2')")
    assert [notice.payload for notice in published.notifies(timeout=5, stop_after=2)] == ["", ""]


def test_a_type_nobody_declared_is_refused_in_both_languages(published: Conn) -> None:
    with pytest.raises(ValueError, match=r"order\.lost"):
        events.record(published, "order.lost", "o-1")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=r"order\.lost"):
        published.execute("SELECT posthouse.record_event('order.lost', 'o-1')")
    assert events.recent(published) == []


def test_a_fact_of_16_kib_is_recorded_and_one_byte_more_is_refused(published: Conn) -> None:
    largest = {"k": "x" * (16_384 - len('{"k":""}'))}
    events.record(published, "order.paid", "o-1", largest)
    with pytest.raises(ValueError, match=r"16,385 bytes"):
        events.record(published, "order.paid", "o-1", {"k": largest["k"] + "x"})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="at most 16384"):
        published.execute(
            "SELECT posthouse.record_event('order.paid', 'o-1', jsonb_build_object('k', repeat('x', 16384)))"
        )


@pytest.mark.parametrize(
    ("subject", "data", "said"),
    [
        ("o\0", {}, "subject"),
        ("\ud800", {}, "subject"),
        ("x" * 2_100, {}, "subject"),
        ("o", {"k": float("nan")}, r"data\.k"),
        ("o", {"k": [b"x"]}, r"data\.k\[0\]"),
        ("o", [1], "must be a dict"),
        ("o", [], "must be a dict"),
        ("o", 0, "must be a dict"),
        ("o", "text", "must be a dict"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(published: Conn, subject: str, data: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        events.record(published, "order.paid", subject, data)
    assert events.recent(published) == []


def test_sql_refuses_data_that_is_no_object(published: Conn) -> None:
    for data in ("'[]'", "'1'", "'null'", "NULL"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="must be a JSON object"):
            published.execute(f"SELECT posthouse.record_event('order.paid', 'o-1', {data})".encode())


def test_what_is_no_longer_declared_can_no_longer_be_recorded(published: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_types", {})
    catalogue.declare(EventType("order.paid", "Said better", "the order's number", INTERNAL))
    events.publish_types(published)
    rows = published.execute("SELECT name, description, exposure FROM posthouse.event_types").fetchall()
    assert rows == [{"name": "order.paid", "description": "Said better", "exposure": "internal"}]


def test_an_unknown_event_is_none_and_cannot_be_requeued(conn: Conn) -> None:
    missing = str(uuid.uuid4())
    assert events.load(conn, missing) is None
    assert events.requeue(conn, missing) is False


def test_only_events_fanned_out_long_ago_are_pruned_in_batches(published: Conn) -> None:
    for number in range(9):
        events.record(published, "order.paid", f"o-{number}")
    published.execute("UPDATE posthouse.events SET created_at = now() - interval '9 d'")
    published.execute("UPDATE posthouse.events SET fanned_out_at = now() - interval '8 d' WHERE seq <= 5")
    published.execute("UPDATE posthouse.events SET fanned_out_at = now() - interval '6 d' WHERE seq = 6")
    assert events.prune(published, older_than_days=7, limit=3) == 3
    assert events.prune(published, older_than_days=7, limit=3) == 2
    assert [event["subject"] for event in events.recent(published)] == ["o-8", "o-7", "o-6", "o-5"]
    assert (events.backlog(published)["waiting"], events.backlog(published)["poisoned"]) == (3, 0)


@pytest.mark.parametrize(
    "name",
    ["", "paid", "Order.paid", "order.", ".paid", "order..paid", "a.b.c.d.e.f", "order.paid\n", "a." + "b" * 127],
)
def test_a_malformed_type_cannot_be_declared(name: str) -> None:
    with pytest.raises(ValueError, match="event type"):
        catalogue.declare(EventType(name, "", ""))


def test_a_type_is_declared_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        catalogue.declare(EventType("order.paid", "", ""))


@pytest.mark.parametrize(
    ("glob", "covered"),
    [
        ("order.paid", ["order.paid"]),
        ("order.*", ["order.paid"]),
        ("order.**", ["order.paid", "order.paid.late"]),
        ("*.paid", ["order.paid"]),
        ("*.*.late", ["order.paid.late"]),
        ("**", ["order.paid", "order.paid.late"]),
        ("order.paid.**", ["order.paid.late"]),
        ("order.pa*", []),
        ("ORDER.paid", []),
        ("order", []),
        ("", []),
        ("order.paid.late.**", []),
    ],
)
def test_a_glob_covers_whole_segments(glob: str, covered: list[str]) -> None:
    names = ["order.paid", "order.paid.late"]
    assert [name for name in names if catalogue.matches(glob, name)] == covered


def test_a_lone_star_covers_what_may_leave_the_house() -> None:
    assert [found.name for found in catalogue.covered("*", catalogue.declared())] == ["order.paid"]
