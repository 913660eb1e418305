"""The outcome table, row by row, and the times receivers ask for."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import accumulate, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.effects.http import Answer, Failure
from actors.outcomes import (
    ATTEMPTS,
    SCHEDULE_S,
    Charge,
    Outcome,
    Verdict,
    classify,
    retry_after_s,
    snooze_floor_s,
)

NOW = datetime(2026, 10, 21, 7, 28, 0, tzinfo=UTC)

NETWORK = [
    "dns_error",
    "connection_refused",
    "connection_reset",
    "network_unreachable",
    "tls_error",
    "timeout",
    "protocol_error",
]


def answer(status: int, **headers: str) -> Answer:
    named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Answer(status, named, b"", complete=True)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
def test_every_2xx_delivers_and_clears_the_endpoints_health(status: int) -> None:
    assert classify(answer(status), NOW) == Outcome(Verdict.DELIVERED, Charge.CLEAR)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308, 399])
def test_a_redirect_is_a_charged_failure_that_a_corrected_url_heals(status: int) -> None:
    outcome = classify(answer(status, location="http://127.0.0.1/"), NOW)
    assert outcome == Outcome(Verdict.RETRY, Charge.CHARGED, "moved", f"moved: {status}")


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_a_passing_trouble_is_retried_and_charged(status: int) -> None:
    outcome = classify(answer(status), NOW)
    assert (outcome.verdict, outcome.charge) == (Verdict.RETRY, Charge.CHARGED)


@pytest.mark.parametrize("status", [429, 503])
def test_a_receiver_that_names_a_time_pauses_its_endpoint(status: int) -> None:
    outcome = classify(answer(status, retry_after="120"), NOW)
    assert (outcome.verdict, outcome.charge, outcome.delay_s, outcome.pauses) == (
        Verdict.SNOOZE,
        Charge.CHARGED,
        120,
        True,
    )


@pytest.mark.parametrize("status", [408, 500, 502])
def test_retry_after_counts_only_on_429_and_503(status: int) -> None:
    assert classify(answer(status, retry_after="120"), NOW).verdict is Verdict.RETRY


def test_an_unreadable_retry_after_is_none() -> None:
    assert classify(answer(429, retry_after="soon"), NOW).verdict is Verdict.RETRY


def test_the_nth_snooze_in_a_row_waits_longer_than_was_asked() -> None:
    delays = [classify(answer(429, retry_after="0"), NOW, snoozes=snoozes).delay_s for snoozes in range(11)]
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_410_discards_and_takes_the_endpoint_out() -> None:
    assert classify(answer(410), NOW) == Outcome(Verdict.DISCARD, Charge.NONE, "gone", "gone", gone=True)


@pytest.mark.parametrize("status", [400, 409, 413, 415, 422])
def test_a_refusal_of_this_payload_is_charged_only_in_a_row(status: int) -> None:
    outcome = classify(answer(status), NOW)
    assert outcome == Outcome(Verdict.DISCARD, Charge.REFUSAL, "refused", f"refused: {status}")


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405, 406, 411, 418, 451, 499])
def test_every_other_4xx_is_refused_and_charged(status: int) -> None:
    outcome = classify(answer(status), NOW)
    assert outcome == Outcome(Verdict.DISCARD, Charge.CHARGED, "refused", f"refused: {status}")


def test_a_status_a_person_listed_is_retried() -> None:
    outcome = classify(answer(403), NOW, retry_statuses={403})
    assert (outcome.verdict, outcome.charge) == (Verdict.RETRY, Charge.CHARGED)


@pytest.mark.parametrize("error_class", NETWORK)
def test_every_network_failure_is_retried_and_charged(error_class: str) -> None:
    outcome = classify(Failure(error_class, "why"), NOW)
    assert outcome == Outcome(Verdict.RETRY, Charge.CHARGED, error_class, f"{error_class}: why")


@pytest.mark.parametrize("status", [100, 101, 199, 600, 999])
def test_a_status_that_is_not_final_http_is_a_protocol_error(status: int) -> None:
    outcome = classify(answer(status), NOW)
    assert (outcome.verdict, outcome.error_class) == (Verdict.RETRY, "protocol_error")


@pytest.mark.parametrize("rule", ["address", "port", "scheme", "invalid_url"])
def test_a_blocked_call_is_discarded_without_charge(rule: str) -> None:
    outcome = classify(Failure("blocked", rule), NOW)
    assert outcome == Outcome(Verdict.DISCARD, Charge.NONE, "blocked", f"blocked: {rule}")


def test_our_own_fault_is_put_off_ever_longer_and_never_charged() -> None:
    outcomes = [classify(Failure("internal_error", "why"), NOW, snoozes=snoozes) for snoozes in range(7)]
    assert [outcome.delay_s for outcome in outcomes] == [30, 60, 120, 240, 480, 900, 900]
    assert {(outcome.verdict, outcome.charge) for outcome in outcomes} == {(Verdict.SNOOZE, Charge.NONE)}


RESULTS = st.one_of(
    st.builds(answer, st.integers(100, 999), retry_after=st.text(max_size=12)),
    st.builds(Failure, st.sampled_from([*NETWORK, "blocked", "internal_error"]), st.text(max_size=20)),
)


@given(RESULTS, st.integers(0, 10_000))
def test_any_result_fits_exactly_one_row(result: Any, snoozes: int) -> None:
    outcome = classify(result, NOW, snoozes=snoozes)
    assert (outcome.charge is Charge.CLEAR) == (outcome.verdict is Verdict.DELIVERED)
    assert (outcome.delay_s >= 1) == (outcome.verdict is Verdict.SNOOZE)
    assert outcome.delay_s <= 36_000
    assert (outcome.error_class is None) == (outcome.verdict is Verdict.DELIVERED)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("120", 120),
        (" \t120\t ", 120),
        ("0", 1),
        ("0007", 7),
        ("36000", 36_000),
        ("36001", 36_000),
        ("99999999999999999999", 36_000),
        ("9" * 5_000, 36_000),
        ("Wed, 21 Oct 2026 07:30:00 GMT", 120),
        ("Wednesday, 21-Oct-26 07:30:00 GMT", 120),
        ("Wed Oct 21 07:30:00 2026", 120),
        ("Tue Dec  1 07:30:00 2026", 36_000),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 1),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 1),
        ("Sun Nov  6 08:49:37 1994", 1),
    ],
)
def test_retry_after_is_read_in_each_of_its_forms(value: str, expected: float) -> None:
    assert retry_after_s(value, NOW) == expected


NOT_RETRY_AFTER = ["", " ", "-5", "1.5", "+120", "1e9", "120, 240", "\uff11\uff12", "12\n", "0x10", "soon"]
NOT_HTTP_DATES = [
    "2026-10-21T07:28:00Z",
    "21 Oct 2026 07:30:00 GMT",
    "Wed, 31 Feb 2026 07:30:00 GMT",
    "Wed, 21 Oct 2026 25:30:00 GMT",
    "Wed, 21 Oct 2026 07:30:00",
    "Wed, 21 Oct 2026 07:30:00 +0000",
    "wed, 21 oct 2026 07:30:00 gmt",
]


@pytest.mark.parametrize("value", [None, *NOT_RETRY_AFTER, *NOT_HTTP_DATES])
def test_any_other_retry_after_is_absent(value: str | None) -> None:
    assert retry_after_s(value, NOW) is None


@given(st.integers(1, 100_000))
def test_the_floor_grows_to_five_minutes_and_no_further(nth: int) -> None:
    assert 1 <= snooze_floor_s(nth) <= snooze_floor_s(nth + 1) <= 300


def test_eighteen_attempts_span_five_days() -> None:
    delays = [*SCHEDULE_S, *repeat(SCHEDULE_S[-1], ATTEMPTS - 1 - len(SCHEDULE_S))]
    assert list(accumulate(delays))[-1] == 459_305
