"""Cron expressions are read as everybody reads them, by the scheduler too, and a tick exists once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pendulum
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware.periodic import cron, tick_id


@pytest.mark.parametrize(
    "expression",
    [
        "0 0 30 2 *",  # never comes
        "61 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * * *",
        "* * * *",
        "*/0 * * * *",
        "5-1 * * * *",
        "a b c d e",
        "",
        "@reboot",
        "@never",
        "hourly",
    ],
)
def test_what_nobody_can_read_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="cron"):
        cron(expression)


@pytest.mark.parametrize(
    ("expression", "after", "following"),
    [
        ("* * * * *", "2026-01-01T00:00:10", "2026-01-01T00:01:00"),
        ("7 * * * *", "2026-01-01T00:07:00", "2026-01-01T01:07:00"),
        ("*/15 * * * *", "2026-01-01T00:46:00", "2026-01-01T01:00:00"),
        ("30 3 * * *", "2026-12-31T04:00:00", "2027-01-01T03:30:00"),
        ("@hourly", "2026-01-01T00:59:59", "2026-01-01T01:00:00"),
        ("@daily", "2026-02-28T12:00:00", "2026-03-01T00:00:00"),
        ("@monthly", "2026-01-02T00:00:00", "2026-02-01T00:00:00"),
        # What periodiq itself misreads (FAILURES F66).
        ("@weekly", "2026-01-01T00:00:00", "2026-01-04T00:00:00"),
        ("0 0 * * 7", "2026-01-01T00:00:00", "2026-01-04T00:00:00"),
        ("15,45 9 * * *", "2026-01-01T08:20:00", "2026-01-01T09:15:00"),
        ("15,45 9 * * *", "2026-01-01T09:15:00", "2026-01-01T09:45:00"),
        ("0 0 29 2 *", "2026-01-01T00:00:00", "2028-02-29T00:00:00"),
    ],
)
def test_a_tick_comes_when_it_should(expression: str, after: str, following: str) -> None:
    tick = cron(expression).next_valid_date(datetime.fromisoformat(f"{after}+00:00"))
    assert tick == datetime.fromisoformat(f"{following}+00:00")
    assert cron(expression).validate(tick)
    assert not cron(expression).validate(tick + timedelta(minutes=1)) or expression == "* * * * *"


def test_times_are_utc_wherever_the_scheduler_runs() -> None:
    at = pendulum.datetime(2026, 1, 1, 23, 4, tz="Asia/Kolkata")
    assert cron("0 3 * * *").next_valid_date(at) == pendulum.datetime(2026, 1, 2, 3, 0, tz="UTC")
    assert (cron("0 3 * * *").next_valid_date(at) - at).total_seconds() == (9 * 60 + 26) * 60


FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def _fields(low: int, high: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(low, high), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    minutes=_fields(0, 59),
    hours=_fields(0, 23),
    days=st.none() | _fields(1, 28),
    weekdays=st.none() | _fields(0, 6),
    start=st.timedeltas(timedelta(0), timedelta(days=1_000)).map(lambda later: FIRST + later),
)
def test_every_tick_is_the_first_minute_that_matches(
    minutes: frozenset[int],
    hours: frozenset[int],
    days: frozenset[int] | None,
    weekdays: frozenset[int] | None,
    start: datetime,
) -> None:
    words = [",".join(map(str, sorted(given))) if given else "*" for given in (minutes, hours, days)]
    expression = f"{' '.join(words)} * {','.join(map(str, sorted(weekdays))) if weekdays else '*'}"
    at = start.replace(second=0, microsecond=0) + timedelta(minutes=1)
    while not (
        at.minute in minutes and at.hour in hours and _day_matches(at, days, weekdays)
    ):  # at most a month of minutes
        at += timedelta(minutes=1) if at.hour in hours else timedelta(hours=1) - timedelta(minutes=at.minute)
    assert cron(expression).next_valid_date(start) == at


def _day_matches(at: datetime, days: frozenset[int] | None, weekdays: frozenset[int] | None) -> bool:
    wanted = [at.day in days] if days else []
    wanted += [at.isoweekday() % 7 in weekdays] if weekdays else []
    return any(wanted) or not wanted


def test_a_tick_has_one_id_however_often_and_from_wherever_it_is_sent() -> None:
    at = "2026-03-29T03:30:00+02:00"
    assert tick_id("a", at) == tick_id("a", "2026-03-29T01:30:07.5+00:00")
    assert len({tick_id("a", at), tick_id("b", at), tick_id("a", "2026-03-29T03:31:00+02:00")}) == 3
