"""What happened reaches each endpoint that asks for it, signed, one at a time, whatever the endpoint does."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, LiteralString

import psycopg
import pytest
import standardwebhooks

import settings
from actors import deliveries, drafts, endpoints, envelope, sealing, signing, webhooks
from actors.drafts import Draft, Problem, Refused
from actors.effects.addresses import Policy
from actors.effects.http import Client
from actors.effects.resolver import Resolver
from actors.sealing import CannotOpen, NoSealKey, Vault, parse_keys
from broker import installed, transaction
from middleware import context
from middleware.failures import Discard, Snooze
from outbox import catalogue, events
from outbox.catalogue import WEBHOOK, EventType
from outbox.db import Conn, Database
from tests.receivers import OK, Names, Receiver, receiving

KEY = base64.b64encode(b"k" * 32).decode()
OTHER_KEY = base64.b64encode(b"o" * 32).decode()

for name in ("parcel.sent", "parcel.returned"):
    catalogue.declare(EventType(name, "for tests", "a parcel", WEBHOOK))
catalogue.declare(EventType("parcel.weighed", "for tests", "a parcel"))


def status(code: int, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {code} Said", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Settings for a test: loopback is exempt, there is a key; more by keyword."""

    def tell(**environment: str) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings.load.cache_clear()

    tell(OUTBOUND_ALLOW="*=127.0.0.1/32:*", SEAL_KEYS=KEY)
    return tell


@pytest.fixture
def house(db: Database, told: Callable[..., None]) -> Database:
    """The process's pool is the test's."""
    installed().database = db
    return db


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


def add(receiver: Receiver | str, **wishes: Any) -> endpoints.Created:
    url = receiver if isinstance(receiver, str) else receiver.url
    created, _ = endpoints.add(Draft(url, **wishes))
    return created


def happen(type: str = "parcel.sent", subject: str = "p-1", data: dict[str, Any] | None = None) -> str:
    with transaction() as conn:
        event_id = events.record(conn, type, subject, data or {})
    webhooks.fanout(event_id)
    return event_id


def waiting(conn: Conn) -> list[str]:
    return [row["id"] for row in conn.execute("SELECT id::text FROM posthouse.deliveries ORDER BY created_at, id")]


def one(conn: Conn, statement: LiteralString) -> dict[str, Any]:
    row = conn.execute(statement).fetchone()
    assert row is not None
    return dict(row)


def delivery(conn: Conn) -> dict[str, Any]:
    return one(conn, "SELECT * FROM posthouse.deliveries")


def endpoint(conn: Conn) -> dict[str, Any]:
    return one(conn, "SELECT * FROM posthouse.endpoints")


def attempts(conn: Conn) -> list[dict[str, Any]]:
    return conn.execute("SELECT * FROM posthouse.delivery_attempts ORDER BY attempt_no").fetchall()


def sent_once(receiver: Receiver, conn: Conn, **wishes: Any) -> endpoints.Created:
    """Add an endpoint, let something happen, make the delivery's first attempt."""
    created = add(receiver, **wishes)
    happen()
    webhooks.deliver(waiting(conn)[0])
    return created


# Fan-out


def test_an_event_becomes_one_delivery_and_one_job_for_each_endpoint_that_asks(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    for globs in (["*"], ["parcel.*"], ["parcel.sent", "parcel.**"], ["parcel.returned"]):
        add(receiver, event_types=globs)
    event_id = happen()
    rows = conn.execute(
        "SELECT q.actor, q.queue_name, q.max_attempts, q.message -> 'args' args, d.id::text, d.event_id::text"
        " FROM posthouse.deliveries d JOIN dramatiq.queue q ON q.message_id = d.job_id"
    ).fetchall()
    assert len(rows) == 3
    for row in rows:
        assert (row["actor"], row["queue_name"], row["max_attempts"]) == ("webhook.deliver", "webhook", 18)
        assert (row["args"], row["event_id"]) == ([row["id"]], event_id)


def test_fanning_out_twice_and_at_once_changes_nothing_the_second_time(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    for _ in range(3):
        add(receiver)
    event_id = happen()
    threads = [threading.Thread(target=webhooks.fanout, args=(event_id,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    webhooks.fanout(event_id)
    counted = "SELECT (SELECT count(*) FROM posthouse.deliveries) d, (SELECT count(*) FROM dramatiq.queue) q"
    assert one(conn, counted) == {"d": 3, "q": 3}


def test_a_fan_out_that_fails_leaves_neither_delivery_nor_job(
    house: Database, conn: Conn, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(receiver)
    monkeypatch.setattr("outbox.jobs.enqueue_many", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        happen()
    assert waiting(conn) == []


def test_two_events_on_one_subject_are_two_deliveries(house: Database, conn: Conn, receiver: Receiver) -> None:
    add(receiver)
    assert happen() != happen()
    assert len(waiting(conn)) == 2


def test_an_endpoint_hears_nothing_from_before_it_or_while_disabled(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    with transaction() as own:
        before = events.record(own, "parcel.sent", "p-1", {})
    add(receiver)
    webhooks.fanout(before)
    conn.execute("UPDATE posthouse.endpoints SET enabled = false, disabled_reason = 'manual', disabled_at = now()")
    happen()
    assert waiting(conn) == []


def test_internal_types_reach_nobody(house: Database, conn: Conn, receiver: Receiver) -> None:
    add(receiver)
    happen("parcel.weighed")
    assert waiting(conn) == []


def test_a_test_event_reaches_its_endpoint_only_whatever_it_asks_for(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    wanted = add(receiver, event_types=["parcel.returned"]).endpoint.id
    add(receiver)
    with transaction() as own:
        event_id = events.record(own, "webhook.test", wanted, {}, endpoint_id=wanted)
    conn.execute("UPDATE posthouse.endpoints SET enabled = false, disabled_reason = 'manual', disabled_at = now()")
    webhooks.fanout(event_id)
    webhooks.deliver(waiting(conn)[0])
    assert (str(delivery(conn)["endpoint_id"]), delivery(conn)["result"]) == (wanted, "delivered")


def test_an_event_that_is_gone_is_discarded(house: Database) -> None:
    with pytest.raises(Discard, match="gone"):
        webhooks.fanout("00000000-0000-4000-8000-000000000001")


# The request


def test_the_request_is_signed_and_says_what_happened(house: Database, conn: Conn, receiver: Receiver) -> None:
    created = add(receiver, headers=[("X-Team", "post\thouse")])
    event_id = happen(data={"n": "é😀", "z": 1, "a": [1, 2]})
    webhooks.deliver(waiting(conn)[0])
    headers, body = receiver.headers(), receiver.body()
    occurred_at = one(conn, "SELECT created_at FROM posthouse.events")["created_at"]
    assert list(json.loads(body)) == ["id", "type", "subject", "occurred_at", "data"]
    assert json.loads(body)["data"] == {"n": "é😀", "z": 1, "a": [1, 2]}
    assert datetime.fromisoformat(json.loads(body)["occurred_at"]) == occurred_at.replace(
        microsecond=occurred_at.microsecond // 1_000 * 1_000
    )
    assert "é😀".encode() in body
    assert b": " not in body
    assert headers["webhook-id"] == event_id
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("Posthouse-Webhooks/")
    assert (headers["accept-encoding"], headers["connection"]) == ("identity", "close")
    assert (headers["posthouse-attempt"], headers["x-team"]) == ("1", "post\thouse")
    assert standardwebhooks.Webhook(created.secret).verify(body, headers) == json.loads(body)
    signing.verify(headers, body, [created.secret], time.time())


def test_every_attempt_sends_the_same_bytes_signed_anew(house: Database, conn: Conn, receiver: Receiver) -> None:
    receiver.reply = status(500)
    created = add(receiver)
    happen(data={"n": "é😀"})
    for _ in range(3):
        conn.execute("SELECT pg_sleep(ceil(s) - s) FROM extract(epoch FROM clock_timestamp()) s")
        with pytest.raises(webhooks.DeliveryFailed):
            webhooks.deliver(waiting(conn)[0])
    sent = [receiver.headers(index) for index in range(3)]
    assert len({receiver.body(index) for index in range(3)}) == 1
    assert len({headers["webhook-id"] for headers in sent}) == 1
    assert len({headers["webhook-timestamp"] for headers in sent}) == 3
    assert len({headers["webhook-signature"] for headers in sent}) == 3
    assert [headers["posthouse-attempt"] for headers in sent] == ["1", "2", "3"]
    for index, headers in enumerate(sent):
        standardwebhooks.Webhook(created.secret).verify(receiver.body(index), headers)


def test_both_schemes_sign_v1_first_and_each_verifies_with_its_own_key(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    created = sent_once(receiver, conn, signing="both")
    secret = created.secret.split(" ")[0]
    public_key = created.endpoint.public_key or ""
    headers, body = receiver.headers(), receiver.body()
    assert [entry.split(",")[0] for entry in headers["webhook-signature"].split(" ")] == ["v1", "v1a"]
    for key in (secret, public_key):
        signing.verify(headers, body, [key], time.time())


def test_an_old_secret_signs_until_it_expires(house: Database, conn: Conn, receiver: Receiver) -> None:
    created = add(receiver)
    old = signing.make_shared_secret()
    sealed = sealing.vault().seal(old, owner=created.endpoint.id, purpose="secret")
    happen()
    happen()
    for hours in (1, -1):
        expires_at = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
        entry = [{"sealed": base64.b64encode(sealed).decode(), "expires_at": expires_at}]
        conn.execute("UPDATE posthouse.endpoints SET old_secrets = %s::jsonb", [json.dumps(entry)])
        webhooks.deliver(waiting(conn)[0 if hours > 0 else 1])
    assert [receiver.headers(index)["webhook-signature"].count("v1,") for index in (0, 1)] == [2, 1]
    signing.verify(receiver.headers(0), receiver.body(0), [old], time.time())
    with pytest.raises(signing.SignatureError):
        signing.verify(receiver.headers(1), receiver.body(1), [old], time.time())


@pytest.mark.parametrize("name", ["Webhook-Signature", "Host", "X-Forwarded-For", "posthouse-attempt", "Cookie"])
def test_a_reserved_header_planted_by_sql_is_dropped(
    house: Database, conn: Conn, receiver: Receiver, name: str
) -> None:
    created = add(receiver)
    planted = sealing.vault().seal("planted", owner=created.endpoint.id, purpose=f"header {name.lower()}")
    entry = [{"name": name, "sealed": base64.b64encode(planted).decode()}]
    conn.execute("UPDATE posthouse.endpoints SET headers = %s::jsonb", [json.dumps(entry)])
    happen()
    webhooks.deliver(waiting(conn)[0])
    assert b"planted" not in receiver.requests[0]


@pytest.mark.parametrize(
    ("microsecond", "expected"),
    [(0, "2026-10-21T07:28:00Z"), (5_999, "2026-10-21T07:28:00.005Z"), (999, "2026-10-21T07:28:00Z")],
)
def test_the_time_of_an_event_is_utc_to_the_millisecond(microsecond: int, expected: str) -> None:
    at = datetime(2026, 10, 21, 9, 28, 0, microsecond, tzinfo=UTC) - timedelta(hours=2)
    body = envelope.render("e", "parcel.sent", "", at, {})
    assert json.loads(body)["occurred_at"] == expected


def test_a_body_over_20_000_bytes_is_not_rendered() -> None:
    at = datetime(2026, 10, 21, tzinfo=UTC)
    empty = len(envelope.render("e", "parcel.sent", "", at, {"x": ""}))
    assert len(envelope.render("e", "parcel.sent", "", at, {"x": "y" * (20_000 - empty)})) == 20_000
    with pytest.raises(envelope.BodyTooLarge):
        envelope.render("e", "parcel.sent", "", at, {"x": "y" * (20_001 - empty)})


# What comes of it


def test_a_delivery_that_arrived_is_logged_and_never_sent_again(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    receiver.reply = status(200, "X-Request-Id: r-1", "Set-Cookie: a=b", body=b"ok\x00\xff")
    sent_once(receiver, conn)
    webhooks.deliver(waiting(conn)[0])
    (logged,) = attempts(conn)
    assert len(receiver.requests) == 1
    assert (delivery(conn)["result"], delivery(conn)["attempts"]) == ("delivered", 1)
    assert (logged["status"], logged["outcome"], logged["error_class"]) == (200, "delivered", None)
    assert (logged["charged"], logged["stale"], str(logged["remote_ip"])) == (False, False, "127.0.0.1")
    assert logged["response_headers"] == {"content-length": "4", "x-request-id": "r-1"}
    assert logged["response_body"] == "ok\ufffd\ufffd"
    assert (endpoint(conn)["lease_token"], endpoint(conn)["failures_in_row"]) == (None, 0)


@pytest.mark.parametrize(
    ("reply", "raised", "result", "error_class", "failures"),
    [
        (status(500), webhooks.DeliveryFailed, None, "http_error", 1),
        (status(302, "Location: http://127.0.0.1/"), webhooks.DeliveryFailed, None, "moved", 1),
        (b"not http\r\n\r\n", webhooks.DeliveryFailed, None, "protocol_error", 1),
        (status(404), Discard, "refused: 404", "refused", 1),
        (status(422), Discard, "refused: 422", "refused", 0),
        (status(429, "Retry-After: 30"), Snooze, None, "rate_limited", 1),
    ],
)
def test_each_outcome_is_raised_logged_and_charged(
    house: Database,
    conn: Conn,
    receiver: Receiver,
    reply: bytes,
    raised: type[Exception],
    result: str | None,
    error_class: str,
    failures: int,
) -> None:
    receiver.reply = reply
    with pytest.raises(raised):
        sent_once(receiver, conn)
    (logged,) = attempts(conn)
    assert (delivery(conn)["result"], logged["error_class"]) == (result, error_class)
    assert logged["charged"] is bool(failures)
    assert (logged["next_at"] is None) is (raised is Discard)
    assert endpoint(conn)["failures_in_row"] == failures
    assert (endpoint(conn)["failing_since"] is None) is (failures == 0)


def test_the_twentieth_refusal_in_a_row_is_charged(house: Database, conn: Conn, receiver: Receiver) -> None:
    receiver.reply = status(422)
    add(receiver)
    conn.execute("UPDATE posthouse.endpoints SET refusals_in_row = 18")
    for index in range(2):
        happen()
        with pytest.raises(Discard):
            webhooks.deliver(waiting(conn)[index])
        assert endpoint(conn)["failures_in_row"] == index


def test_a_2xx_clears_the_health_of_the_endpoint(house: Database, conn: Conn, receiver: Receiver) -> None:
    receiver.reply = status(500)
    with pytest.raises(webhooks.DeliveryFailed):
        sent_once(receiver, conn)
    receiver.reply = OK
    webhooks.deliver(waiting(conn)[0])
    state = endpoint(conn)
    assert (state["failures_in_row"], state["failing_since"], state["not_before"]) == (0, None, None)
    assert [logged["outcome"] for logged in attempts(conn)] == ["retry", "delivered"]


def test_429_with_retry_after_pauses_every_delivery_of_the_endpoint(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    receiver.reply = status(429, "Retry-After: 30")
    add(receiver)
    happen()
    happen()
    first, second = waiting(conn)
    with pytest.raises(Snooze) as named:
        webhooks.deliver(first)
    with pytest.raises(Snooze) as parked:
        webhooks.deliver(second)
    assert named.value.seconds == 30
    assert 29 < parked.value.seconds <= 32
    assert len(receiver.requests) == 1
    rows = conn.execute("SELECT attempts, parked_at FROM posthouse.deliveries ORDER BY created_at, id").fetchall()
    assert [(row["attempts"], row["parked_at"] is None) for row in rows] == [(1, True), (0, False)]


def test_retry_after_0_for_ever_is_asked_ever_more_rarely(house: Database, conn: Conn, receiver: Receiver) -> None:
    receiver.reply = status(429, "Retry-After: 0")
    add(receiver)
    happen()
    delays = []
    for _ in range(5):
        conn.execute("UPDATE posthouse.endpoints SET not_before = NULL")
        with pytest.raises(Snooze) as snoozed:
            webhooks.deliver(waiting(conn)[0])
        delays.append(snoozed.value.seconds)
    assert delays == [1, 2, 4, 8, 16]


def test_410_disables_the_endpoint_and_says_so(house: Database, conn: Conn, receiver: Receiver) -> None:
    receiver.reply = status(410)
    with pytest.raises(Discard, match="gone"):
        sent_once(receiver, conn)
    state = endpoint(conn)
    assert (state["enabled"], state["disabled_reason"]) == (False, "gone")
    told_of = one(conn, "SELECT subject, data FROM posthouse.events WHERE type = 'webhook.endpoint_disabled'")
    assert told_of == {"subject": str(state["id"]), "data": {"reason": "gone"}}


def test_an_endpoint_disabled_or_deleted_meanwhile_gets_no_request(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    add(receiver)
    happen()
    (waits,) = waiting(conn)
    conn.execute("UPDATE posthouse.endpoints SET enabled = false, disabled_reason = 'manual', disabled_at = now()")
    with pytest.raises(Discard, match="endpoint disabled"):
        webhooks.deliver(waits)
    assert (delivery(conn)["result"], delivery(conn)["attempts"]) == ("endpoint disabled", 0)
    conn.execute("DELETE FROM posthouse.endpoints")
    with pytest.raises(Discard, match="endpoint deleted"):
        webhooks.deliver(waits)
    assert (waiting(conn), receiver.requests) == ([], [])


def test_a_delivery_open_for_seven_days_expires(house: Database, conn: Conn, receiver: Receiver) -> None:
    add(receiver)
    happen()
    conn.execute("UPDATE posthouse.deliveries SET opened_at = opened_at - interval '604801 seconds'")
    with pytest.raises(Discard, match="expired"):
        webhooks.deliver(waiting(conn)[0])
    assert receiver.requests == []


def test_a_name_that_points_inward_is_discarded_uncharged(
    house: Database, conn: Conn, receiver: Receiver, told: Callable[..., None]
) -> None:
    add(receiver)
    happen()
    told(OUTBOUND_ALLOW="elsewhere.example=127.0.0.1/32:*", WEBHOOK_ALLOW_HTTP="true")
    conn.execute("UPDATE posthouse.endpoints SET url = replace(url, 'http:', 'https:')")
    conn.execute("UPDATE posthouse.endpoints SET url = regexp_replace(url, ':[0-9]+/', '/')")
    with pytest.raises(Discard, match="blocked: address"):
        webhooks.deliver(waiting(conn)[0])
    assert (endpoint(conn)["failures_in_row"], receiver.requests) == (0, [])


def test_a_secret_that_cannot_be_opened_is_our_fault_and_waits_for_its_key(
    house: Database, conn: Conn, receiver: Receiver, told: Callable[..., None]
) -> None:
    add(receiver)
    happen()
    told(SEAL_KEYS=OTHER_KEY)
    for expected in (30, 60):
        with pytest.raises(Snooze) as snoozed:
            webhooks.deliver(waiting(conn)[0])
        assert snoozed.value.seconds == expected
    assert (endpoint(conn)["failures_in_row"], receiver.requests) == (0, [])
    told(SEAL_KEYS=f"{OTHER_KEY},{KEY}")
    webhooks.deliver(waiting(conn)[0])
    assert delivery(conn)["result"] == "delivered"


@pytest.mark.parametrize(("attempt", "result", "is_last"), [(17, None, False), (18, "attempts exhausted", True)])
def test_the_eighteenth_failure_ends_the_delivery(
    house: Database, conn: Conn, receiver: Receiver, attempt: int, result: str | None, is_last: bool
) -> None:
    receiver.reply = status(500)
    context.enter(SimpleNamespace(claim=SimpleNamespace(attempt=attempt)))
    try:
        with pytest.raises(webhooks.DeliveryFailed):
            sent_once(receiver, conn)
    finally:
        context.leave()
    (logged,) = attempts(conn)
    assert delivery(conn)["result"] == result
    assert (logged["next_at"] is None) is is_last


def test_a_lost_database_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise psycopg.OperationalError("server closed the connection")

    monkeypatch.setattr(webhooks, "transaction", lost)
    with pytest.raises(Snooze) as snoozed:
        webhooks.deliver("00000000-0000-4000-8000-000000000001")
    assert snoozed.value.seconds == 30


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OUTBOUND_ALLOW", "*=0.0.0.0/0:*"),
        ("OUTBOUND_BLOCK", "10.0.0.1/8"),
        ("OUTBOUND_CA_FILE", "/nowhere.pem"),
        ("SEAL_KEYS", "c2hvcnQ="),
    ],
)
def test_an_outbound_setting_that_cannot_be_read_stops_the_boot_in_one_line(
    told: Callable[..., None], capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    told(**{name: value})
    with pytest.raises(SystemExit) as ended:
        webhooks._check_settings()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (78, 1)
    assert name in said.upper()


# One at a time


def test_a_busy_endpoint_parks_the_next_delivery_for_a_moment(house: Database, conn: Conn, receiver: Receiver) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(connection: Any) -> None:
        entered.set()
        leave.wait(5)
        connection.sendall(OK)

    receiver.reply = hold
    add(receiver)
    happen()
    happen()
    first, second = waiting(conn)
    holder = threading.Thread(target=webhooks.deliver, args=(first,))
    holder.start()
    entered.wait(5)
    with pytest.raises(Snooze) as parked:
        webhooks.deliver(second)
    leave.set()
    holder.join()
    assert 0 <= parked.value.seconds <= 2
    receiver.reply = OK
    webhooks.deliver(second)
    assert (len(receiver.requests), receiver.most_in_flight) == (2, 1)


def test_many_at_once_never_have_two_requests_in_flight(house: Database, conn: Conn, receiver: Receiver) -> None:
    def take_a_moment(connection: Any) -> None:
        time.sleep(0.005)
        connection.sendall(OK)

    receiver.reply = take_a_moment
    add(receiver)
    for _ in range(8):
        happen()

    def work() -> None:
        for delivery_id in waits:
            while True:
                try:
                    webhooks.deliver(delivery_id)
                    break
                except Snooze:
                    time.sleep(0.002)

    waits = waiting(conn)
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (len(receiver.requests), receiver.most_in_flight) == (8, 1)


def test_a_killed_holder_is_succeeded_by_the_same_id_and_the_next_attempt(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    add(receiver)
    event_id = happen()
    (waits,) = waiting(conn)
    with transaction() as own:
        deliveries.take(own, waits, lease_s=20)
    with pytest.raises(Snooze):
        webhooks.deliver(waits)
    conn.execute("UPDATE posthouse.endpoints SET lease_until = clock_timestamp()")
    webhooks.deliver(waits)
    assert receiver.headers()["webhook-id"] == event_id
    assert receiver.headers()["posthouse-attempt"] == "2"


def test_a_result_after_the_lease_passed_on_is_logged_and_touches_nothing(
    house: Database, conn: Conn, receiver: Receiver
) -> None:
    other = "00000000-0000-4000-8000-000000000001"

    def outlast(connection: Any) -> None:
        conn.execute("UPDATE posthouse.endpoints SET lease_token = %s", [other])
        connection.sendall(status(500))

    receiver.reply = outlast
    with pytest.raises(Snooze):
        sent_once(receiver, conn)
    (logged,) = attempts(conn)
    assert (logged["stale"], logged["charged"], logged["status"]) == (True, False, 500)
    state = endpoint(conn)
    assert (str(state["lease_token"]), state["failures_in_row"]) == (other, 0)
    assert delivery(conn)["result"] is None


def test_a_url_changed_during_an_attempt_is_not_charged_for_it(house: Database, conn: Conn, receiver: Receiver) -> None:
    def change(connection: Any) -> None:
        conn.execute("UPDATE posthouse.endpoints SET version = version + 1")
        connection.sendall(status(404))

    receiver.reply = change
    with pytest.raises(Discard):
        sent_once(receiver, conn)
    state = endpoint(conn)
    assert (state["failures_in_row"], state["lease_token"]) == (0, None)
    assert delivery(conn)["result"] == "refused: 404"


def test_a_free_endpoint_wakes_the_delivery_parked_longest(house: Database, conn: Conn, receiver: Receiver) -> None:
    add(receiver)
    for _ in range(3):
        happen()
    first, second, third = waiting(conn)
    conn.execute("UPDATE dramatiq.queue SET available_at = clock_timestamp() + interval '1 hour'")
    with transaction() as own:
        taken = deliveries.take(own, first, lease_s=20)
    for parked in (third, second):
        with pytest.raises(Snooze):
            webhooks.deliver(parked)
    assert isinstance(taken, deliveries.Turn)
    conn.execute("UPDATE posthouse.endpoints SET lease_until = clock_timestamp()")
    webhooks.deliver(first)
    due = conn.execute(
        "SELECT d.id::text FROM posthouse.deliveries d JOIN dramatiq.queue q ON q.message_id = d.job_id"
        " WHERE q.available_at <= clock_timestamp()"
    ).fetchall()
    assert [row["id"] for row in due] == [third]


# Endpoints


def checked(draft: Draft, **names: list[str]) -> tuple[Draft, str | None]:
    answers = {name.replace("_", "."): addresses for name, addresses in names.items()}
    client = Client(Policy(), resolver=Resolver(Names(answers)))
    return drafts.check(draft, client, allow_http=False)


def problems(draft: Draft, **names: list[str]) -> list[Problem]:
    with pytest.raises(Refused) as refused:
        checked(draft, **names)
    return refused.value.problems


def test_all_problems_of_a_draft_are_reported_together() -> None:
    found = problems(
        Draft(
            "http://user@example.com/",
            description="a\nb",
            event_types=["parcel.sent", "parcle.*", "parcel.weighed", "**.sent", "Parcel.sent", "parcel.sen"],
            headers=[
                ("Host", "x"),
                ("X-A", "1"),
                ("x-a", "2"),
                ("X B", "3"),
                ("X-C", "é"),
                ("X-D", "a\r\nb"),
            ],
            signing="v2",
            secret="whsec_short",
        )
    )
    assert [(problem.code, problem.field) for problem in found] == [
        ("invalid_url", "url"),
        ("invalid_value", "description"),
        ("invalid_value", "signing"),
        ("invalid_event_types", "event_types[1]"),
        ("invalid_event_types", "event_types[2]"),
        ("invalid_event_types", "event_types[3]"),
        ("invalid_event_types", "event_types[4]"),
        ("invalid_event_types", "event_types[5]"),
        ("reserved_header", "headers.Host"),
        ("invalid_header", "headers.x-a"),
        ("invalid_header", "headers[3]"),
        ("invalid_header", "headers.X-C"),
        ("invalid_header", "headers.X-D"),
        ("invalid_secret", "secret"),
    ]


@pytest.mark.parametrize("glob", ["*", "parcel.*", "parcel.**", "parcel.sent", "*.sent"])
def test_a_glob_that_matches_a_sent_type_is_accepted(glob: str) -> None:
    kept, _ = checked(Draft("https://example.com/", event_types=[glob, glob]), example_com=["8.8.8.8"])
    assert kept.event_types == (glob,)


@pytest.mark.parametrize("globs", [[], [f"parcel.{number}" for number in range(51)]])
def test_an_endpoint_asks_for_1_to_50_types(globs: list[str]) -> None:
    found = problems(Draft("https://example.com/", event_types=globs), example_com=["8.8.8.8"])
    assert Problem("invalid_event_types", "event_types", "1 to 50 event types") in found


def test_headers_are_counted_and_measured() -> None:
    many = [(f"X-{number}", "v") for number in range(21)]
    assert [fault[0] for fault in envelope.faults(many)] == ["invalid_header"]
    assert envelope.faults(many[:20]) == []
    assert envelope.faults([("X-A", "v" * 4_096)]) == []
    for name, value in [
        ("X-A", "v" * 4_097),
        ("X-A", "\0"),
        ("", "v"),
        ("-a", "v"),
        ("a" * 65, "v"),
        ("A:", "v"),
    ]:
        assert [fault[0] for fault in envelope.faults([(name, value)])] == ["invalid_header"]


RESERVED = """
host content-length content-type content-encoding content-language content-location connection keep-alive te
trailer trailers transfer-encoding upgrade http2-settings expect date user-agent accept accept-encoding cookie
set-cookie forwarded via age cache-control clear-site-data expires pragma warning www-authenticate webhook-x
posthouse-x svix-x x-svix-x x-forwarded-x proxy-x x-amz-x x-amzn-x x-google x-googlex x-goog-x x-gfe x-azure-x
x-fd-x
"""


@pytest.mark.parametrize("name", RESERVED.split())
def test_every_reserved_name_is_refused_without_case(name: str) -> None:
    assert [fault[:2] for fault in envelope.faults([(name.upper(), "v")])] == [
        ("reserved_header", f"headers.{name.upper()}")
    ]


def test_a_host_that_points_inward_is_blocked_and_an_unknown_one_warned_of() -> None:
    assert [problem.code for problem in problems(Draft("https://in.example/"), in_example=["8.8.8.8", "10.0.0.1"])] == [
        "blocked_address"
    ]
    kept, warning = checked(Draft("https://Unknown.Example."))
    assert (kept.url, warning) == ("https://unknown.example/", "the host does not resolve now")


def test_a_stored_endpoint_shows_no_secret_and_no_header_value(house: Database, conn: Conn, receiver: Receiver) -> None:
    created = add(receiver, headers=[("X-Token", "s3cret-value")])
    with transaction() as own:
        (listed,) = endpoints.listing(own)
    assert listed == created.endpoint
    assert (listed.header_names, listed.enabled) == (["X-Token"], True)
    draft = Draft("u", headers=[("a", "s3cret-value")], secret=created.secret)
    row = one(conn, "SELECT e::text AS shown FROM posthouse.endpoints e")
    shown = [repr(created), repr(listed), row["shown"], repr(draft)]
    for text in shown:
        assert "s3cret-value" not in text
        assert created.secret not in text
        assert created.secret.removeprefix("whsec_") not in text


def test_there_are_never_more_endpoints_than_the_setting(
    house: Database, receiver: Receiver, told: Callable[..., None]
) -> None:
    told(WEBHOOK_MAX_ENDPOINTS="1")
    add(receiver)
    with pytest.raises(Refused) as refused:
        add(receiver)
    assert [problem.code for problem in refused.value.problems] == ["too_many_endpoints"]


def test_a_given_secret_is_used_as_it_is(house: Database, conn: Conn, receiver: Receiver) -> None:
    secret = signing.make_shared_secret()
    assert sent_once(receiver, conn, secret=secret).secret == secret
    signing.verify(receiver.headers(), receiver.body(), [secret], time.time())


def test_an_event_that_a_delivery_refers_to_cannot_be_deleted(house: Database, conn: Conn, receiver: Receiver) -> None:
    add(receiver)
    happen()
    with pytest.raises(psycopg.IntegrityError):
        conn.execute("DELETE FROM posthouse.events")
    conn.execute("DELETE FROM posthouse.endpoints")
    conn.execute("DELETE FROM posthouse.events")


# Sealing


def test_what_is_sealed_opens_for_its_row_and_purpose_only() -> None:
    vault = Vault(parse_keys([KEY]))
    sealed = vault.seal("word", owner="a", purpose="secret")
    assert vault.open(sealed, owner="a", purpose="secret") == "word"
    assert sealed != vault.seal("word", owner="a", purpose="secret")
    for owner, purpose in (("b", "secret"), ("a", "header x")):
        with pytest.raises(CannotOpen):
            vault.open(sealed, owner=owner, purpose=purpose)
    for damaged in (b"", sealed[:10], sealed[:-1], sealed[:-1] + bytes([sealed[-1] ^ 1])):
        with pytest.raises(CannotOpen):
            vault.open(damaged, owner="a", purpose="secret")


def test_the_first_key_seals_and_every_key_opens() -> None:
    sealed = Vault(parse_keys([KEY])).seal("word", owner="a", purpose="secret")
    both = Vault(parse_keys([OTHER_KEY, KEY]))
    assert both.open(sealed, owner="a", purpose="secret") == "word"
    resealed = both.seal("word", owner="a", purpose="secret")
    assert Vault(parse_keys([OTHER_KEY])).open(resealed, owner="a", purpose="secret") == "word"


def test_a_key_of_the_wrong_shape_is_refused_without_being_shown() -> None:
    for text in ("", "short", KEY[:-4], "!" * 44):
        with pytest.raises(ValueError, match="key 2 is not") as refused:
            parse_keys([KEY, text])
        assert not text or text not in str(refused.value)


def test_without_a_key_nothing_is_sealed() -> None:
    with pytest.raises(NoSealKey, match="SEAL_KEYS"):
        sealing.Vault([]).seal("word", owner="a", purpose="secret")
