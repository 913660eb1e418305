"""What the answer of a receiver means for the delivery and for its endpoint (specs/webhooks.md 8 and 9)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from actors.effects.http import Answer, Failure

#: Seconds before the second, third … attempt; the last repeats: 5.3 days in all.
SCHEDULE_S = (5, 300, 1_800, 7_200, 18_000, 36_000)
ATTEMPTS = 18

#: Seconds after which a delivery that has not ended is given up.
EXPIRY_S = 604_800

_RETRY_AFTER_MAX_S = 36_000
_FLOOR_MAX_S = 300
_INTERNAL_FIRST_S, _INTERNAL_MAX_S = 30, 900

_REFUSES_THIS_PAYLOAD = frozenset({400, 409, 413, 415, 422})
_RETRYABLE = frozenset({408, 425, 429})
_MAY_NAME_A_TIME = frozenset({429, 503})

_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_DAYS, _LONG_DAYS = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)", "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_MONTH, _TIME = f"(?P<month>{'|'.join(_MONTHS)})", "(?P<h>[0-9]{2}):(?P<m>[0-9]{2}):(?P<s>[0-9]{2})"
_HTTP_DATES = (
    re.compile(f"{_DAYS}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT"),
    re.compile(f"{_LONG_DAYS}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT"),
    re.compile(f"{_DAYS} {_MONTH} (?P<day>[ 0-9][0-9]) {_TIME} (?P<year>[0-9]{{4}})"),
)


class Verdict(StrEnum):
    """What becomes of the delivery's job."""

    DELIVERED = "delivered"
    RETRY = "retry"
    SNOOZE = "snooze"
    DISCARD = "discard"


class Charge(StrEnum):
    """What the result says about the endpoint. REFUSAL is charged only from the 20th in a row."""

    CLEAR = "clear"
    CHARGED = "charged"
    REFUSAL = "refusal"
    NONE = "none"


@dataclass(frozen=True)
class Outcome:
    """*reason* is for people; *delay_s* is set for a snooze; *pauses* and *gone* change the endpoint."""

    verdict: Verdict
    charge: Charge
    error_class: str | None = None
    reason: str = ""
    delay_s: float = 0
    pauses: bool = False
    gone: bool = False


def classify(
    result: Answer | Failure, now: datetime, *, snoozes: int = 0, retry_statuses: Collection[int] = ()
) -> Outcome:
    """Decide by the table of specs/webhooks.md 8; exactly one row fits any result.

    *snoozes* is how often in a row this delivery has been snoozed before; *retry_statuses* are further 4xx
    that a person wants retried.
    """
    if isinstance(result, Failure):
        return _of_failure(result, snoozes)
    status = result.status
    if status in _MAY_NAME_A_TIME:
        delay_s = retry_after_s(result.header("retry-after"), now)
        if delay_s is not None:
            return _pause(status, max(delay_s, snooze_floor_s(snoozes + 1)))
    if status in retry_statuses:
        return _retry("refused", f"refused: {status}")
    return _of_status(result)


def retry_after_s(value: str | None, now: datetime) -> float | None:
    """Seconds asked for, within 1 to 36,000; None when absent or in no form of RFC 9110 10.2.3."""
    text = (value or "").strip(" \t")
    if re.fullmatch("[0-9]+", text):
        seconds = float(text)
    else:
        date = _http_date(text, now)
        if date is None:
            return None
        seconds = (date - now).total_seconds()
    return min(max(seconds, 1.0), float(_RETRY_AFTER_MAX_S))


def snooze_floor_s(nth: int) -> float:
    """The least delay of the *nth* snooze in a row, so that `Retry-After: 0` for ever is no polling."""
    return float(min(2 ** min(nth - 1, 16), _FLOOR_MAX_S))


def _of_failure(failure: Failure, snoozes: int) -> Outcome:
    match failure.error_class:
        case "blocked":
            return Outcome(Verdict.DISCARD, Charge.NONE, "blocked", f"blocked: {failure.message}")
        case "internal_error":
            delay_s = float(min(_INTERNAL_FIRST_S * 2 ** min(snoozes, 16), _INTERNAL_MAX_S))
            return Outcome(Verdict.SNOOZE, Charge.NONE, "internal_error", failure.message, delay_s)
        case error_class:
            return _retry(error_class, f"{error_class}: {failure.message}")


def _of_status(answer: Answer) -> Outcome:
    status = answer.status
    if 200 <= status < 300:
        return Outcome(Verdict.DELIVERED, Charge.CLEAR)
    if 300 <= status < 400:
        return _retry("moved", f"moved: {status}")
    if status in _RETRYABLE or 500 <= status < 600:
        return _retry("http_error", f"answered {status}")
    if status == 410:
        return Outcome(Verdict.DISCARD, Charge.NONE, "gone", "gone", gone=True)
    if 400 <= status < 500:
        charge = Charge.REFUSAL if status in _REFUSES_THIS_PAYLOAD else Charge.CHARGED
        return Outcome(Verdict.DISCARD, charge, "refused", f"refused: {status}")
    return _retry("protocol_error", f"protocol_error: status {status}")


def _pause(status: int, delay_s: float) -> Outcome:
    reason = f"answered {status}, asks for {delay_s:.0f} s"
    return Outcome(Verdict.SNOOZE, Charge.CHARGED, "rate_limited", reason, delay_s, pauses=True)


def _retry(error_class: str, reason: str) -> Outcome:
    return Outcome(Verdict.RETRY, Charge.CHARGED, error_class, reason)


def _http_date(text: str, now: datetime) -> datetime | None:
    found = next((match for form in _HTTP_DATES if (match := form.fullmatch(text))), None)
    if found is None:
        return None
    year = int(found["year"]) if len(found["year"]) == 4 else _full_year(int(found["year"]), now)
    month = _MONTHS.index(found["month"]) + 1
    day, hour, minute, second = (int(found[part]) for part in ("day", "h", "m", "s"))
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None


def _full_year(year: int, now: datetime) -> int:
    """RFC 9110 5.6.7: two digits more than 50 years ahead mean the past."""
    full = now.year - now.year % 100 + year
    return full - 100 if full > now.year + 50 else full
