"""The verdict on an attempt, as a table; the delays before a retry, by their bounds."""

from __future__ import annotations

from typing import Any

import pytest
from dramatiq.errors import RateLimitExceeded, Retry
from hypothesis import given
from hypothesis import strategies as st

from middleware.failures import (
    COMPLETED,
    RELEASED,
    Backoff,
    Discard,
    Policy,
    Released,
    Schedule,
    Snooze,
    TimeLimitExceeded,
    Verdict,
    describe,
    judge,
    misjudged,
)

POLICY = Policy(max_attempts=3, backoff=Backoff(first_s=10, factor=2, cap_s=100), throws=(LookupError,))
WEEK_S = 7 * 86_400


def verdict(error: BaseException | None, *, attempt: int = 1, snoozed_s: float = 0) -> Verdict:
    return judge(error, attempt=attempt, snoozed_s=snoozed_s, policy=POLICY, jitter=0)


def failed(delay_s: float, reason: str, outcome: str = "failed") -> Verdict:
    return Verdict("queued", delay_s=delay_s, outcome=outcome, reason=reason)


def discarded(reason: str, outcome: str = "discarded") -> Verdict:
    return Verdict("rejected", outcome=outcome, reason=reason)


def snoozed(seconds: float) -> Verdict:
    return Verdict("queued", delay_s=seconds, charged=False, snoozed_s=seconds)


@pytest.mark.parametrize(
    ("error", "attempt", "expected"),
    [
        (None, 1, COMPLETED),
        (None, 3, COMPLETED),
        (Released(), 3, RELEASED),
        (Discard("no such address"), 1, discarded("no such address")),
        (Snooze(60), 3, snoozed(60)),
        (Snooze(0), 1, snoozed(0.1)),
        (Snooze(-5), 1, snoozed(0.1)),
        (Snooze(1e9), 1, snoozed(36_000)),
        (ValueError("no"), 1, failed(10, "ValueError: no")),
        (ValueError("no"), 2, failed(20, "ValueError: no")),
        (ValueError("no"), 3, discarded("attempts exhausted (3): ValueError: no", "failed")),
        (ValueError("no"), 9, discarded("attempts exhausted (9): ValueError: no", "failed")),
        (SystemExit(3), 1, failed(10, "SystemExit: 3")),
        (KeyboardInterrupt(), 1, failed(10, "KeyboardInterrupt: ")),
        (MemoryError(), 1, failed(10, "MemoryError: ")),
        (RecursionError("deep"), 1, failed(10, "RecursionError: deep")),
        (GeneratorExit(), 1, failed(10, "GeneratorExit: ")),
        (RateLimitExceeded("busy"), 1, failed(10, "RateLimitExceeded: busy")),
        (TimeLimitExceeded("ran too long"), 1, failed(10, "ran too long", "timed out")),
        (TimeLimitExceeded(), 3, discarded("attempts exhausted (3): time limit exceeded", "timed out")),
        (Retry("later", delay=5_000), 1, failed(5, "Retry: later")),
        (Retry("now", delay=0), 1, failed(0, "Retry: now")),
        (Retry("whenever"), 2, failed(20, "Retry: whenever")),
        (Retry("never", delay=10**20), 1, failed(365 * 86_400, "Retry: never")),
        (Retry("early", delay=-(10**20)), 1, failed(0, "Retry: early")),
        (Discard(None), 1, discarded("None")),
        (Discard({"code": 5}), 1, discarded("{'code': 5}")),
        (Retry("late", delay=5_000), 3, discarded("attempts exhausted (3): Retry: late", "failed")),
        (KeyError("k"), 1, discarded("KeyError: 'k'")),
        (IndexError("i"), 3, discarded("IndexError: i")),
    ],
)
def test_each_error_has_its_verdict(error: BaseException | None, attempt: int, expected: Verdict) -> None:
    assert verdict(error, attempt=attempt) == expected


def test_a_job_that_has_snoozed_for_a_week_fails_instead() -> None:
    assert verdict(Snooze(60), snoozed_s=WEEK_S - 1) == snoozed(60)
    assert verdict(Snooze(60), snoozed_s=WEEK_S) == failed(10, "Snooze: snoozed for 60 s")


def test_an_error_whose_text_cannot_be_had_is_still_a_failure() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert verdict(Unprintable()) == failed(10, "Unprintable")


@given(st.integers(1, 100_000), st.floats(0, 1_000), st.floats(1, 10), st.floats(0, 100_000))
def test_a_backoff_lies_between_its_first_delay_and_its_cap(
    attempt: int, first_s: float, factor: float, cap_s: float
) -> None:
    delay = Backoff(first_s, factor, cap_s).delay_s(attempt)
    assert min(first_s, cap_s) <= delay <= cap_s
    assert delay <= Backoff(first_s, factor, cap_s).delay_s(attempt + 1)


@given(st.integers(1, 100_000), st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1.0, 20.0]))
def test_jitter_adds_up_to_a_tenth_and_never_undercuts(attempt: int, jitter: float, first_s: float) -> None:
    policy = Policy(max_attempts=1_000_000, backoff=Backoff(first_s=first_s))
    delay = judge(ValueError(), attempt=attempt, snoozed_s=0, policy=policy, jitter=jitter).delay_s
    low = policy.backoff.delay_s(attempt)
    assert low <= delay <= low * 1.1


def test_jobs_that_failed_together_do_not_retry_together() -> None:
    policy = Policy(backoff=Schedule([300]))
    delays = [judge(ValueError(), attempt=1, snoozed_s=0, policy=policy).delay_s for _ in range(500)]
    fullest = max(sum(int(delay) == second for delay in delays) for second in range(300, 331))
    assert fullest <= 75


@pytest.mark.parametrize(("attempt", "delay_s"), [(1, 5), (2, 300), (3, 1_800), (4, 1_800), (100_000, 1_800)])
def test_a_schedule_repeats_its_last_delay(attempt: int, delay_s: float) -> None:
    assert Schedule([5, 300, 1_800]).delay_s(attempt) == delay_s


def test_a_factor_that_overflows_is_capped() -> None:
    assert Backoff(first_s=1.0, factor=1e9).delay_s(100_000) == 900


def test_what_can_mean_no_delay_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match="at least one delay"):
        Schedule(())
    with pytest.raises(ValueError, match="cannot snooze for nan"):
        Snooze(float("nan"))


def test_a_verdict_that_cannot_be_found_ends_the_job_with_that_as_its_reason() -> None:
    assert misjudged(TypeError("no")) == discarded("the outcome could not be judged: TypeError: no", "failed")


def test_a_first_delay_of_zero_is_zero() -> None:
    assert Backoff(first_s=0).delay_s(1) == 0
    assert Backoff(first_s=0).delay_s(50) == 0


def raised(error: Any) -> Any:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_description_fits_its_limits_and_can_be_stored() -> None:
    kind, message, trace = describe(raised(ValueError("x\0\ud800" * 2_000_000)))
    assert kind == "ValueError"
    assert message.startswith("ValueError: x�?x")
    assert len(message.encode()) <= 8_192
    assert len(trace.encode()) <= 32_768
    assert "\0" not in message + trace


def test_a_description_shows_where_and_no_local_variables() -> None:
    secret = "hunter2"  # noqa: F841 - it must not be shown
    _, _, trace = describe(raised(ValueError("no")))
    assert "in raised" in trace
    assert "hunter2" not in trace


def test_an_endless_recursion_is_described_briefly() -> None:
    def deep() -> None:
        deep()

    with pytest.raises(RecursionError) as fault:
        deep()
    assert len(describe(fault.value)[2].encode()) <= 32_768
