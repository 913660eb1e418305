"""The time limit hits the actor, all of it and nothing but it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from middleware.failures import Released, TimeLimitExceeded
from middleware.time_limits import Guard


@contextmanager
def watched(guard: Guard) -> Iterator[list[bool]]:
    """The control thread's part: *guard* is asked to expire every 10 ms; what it answers."""
    over, told = threading.Event(), list[bool]()

    def watch() -> None:
        while not over.wait(0.01):
            told.append(guard.expire(time.monotonic()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()


def spin() -> None:
    while True:
        pass


def swallow(seconds: float) -> str:
    """Python that takes every exception and goes on, for a while."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        try:
            while time.monotonic() < give_up:
                pass
        except BaseException:  # noqa: BLE001, S112 - that is the trial
            continue
    return "done"


def test_a_call_within_its_limit_returns_its_value() -> None:
    with watched(guard := Guard(5)):
        assert guard.run(lambda a, b: a + b, 1, b=2) == 3


def test_a_call_passes_its_own_error_on() -> None:
    with watched(guard := Guard(5)), pytest.raises(ZeroDivisionError):
        guard.run(lambda: 1 / 0)


def test_what_the_actors_cleanup_makes_of_a_stop_or_a_limit_is_not_its_failure() -> None:
    def wraps() -> None:
        try:
            spin()
        finally:
            raise RuntimeError("cleanup failed")

    with watched(guard := Guard(0.1)), pytest.raises(TimeLimitExceeded):
        guard.run(wraps)
    guard = Guard(60)
    stop = threading.Timer(0.1, guard.release)
    stop.start()
    with pytest.raises(Released):
        guard.run(wraps)
    stop.join()


def test_a_loop_in_python_ends_at_the_limit() -> None:
    began = time.monotonic()
    with watched(guard := Guard(0.2)), pytest.raises(TimeLimitExceeded, match=r"longer than its limit of 0\.2 s"):
        guard.run(spin)
    assert 0.2 <= time.monotonic() - began < 1


def test_a_call_that_swallowed_its_limit_is_over_it_all_the_same() -> None:
    with watched(guard := Guard(0.1)), pytest.raises(TimeLimitExceeded):
        guard.run(swallow, 0.3)


def test_who_catches_the_limit_and_goes_on_gets_it_again() -> None:
    hits: list[float] = []

    def stubborn() -> None:
        while len(hits) < 2:
            try:
                spin()
            except TimeLimitExceeded:
                hits.append(time.monotonic())

    with watched(guard := Guard(0.1)), pytest.raises(TimeLimitExceeded):
        guard.run(stubborn)
    assert 0.9 < hits[1] - hits[0] < 2


def test_nobody_is_hit_before_the_limit_or_outside_of_the_call() -> None:
    guard = Guard(10)
    assert guard.run(lambda: guard.expire(time.monotonic() + 9)) is False
    assert guard.expire(time.monotonic() + 11) is False
    assert guard.run(lambda: 1) == 1


def test_expiry_is_told_once() -> None:
    with watched(guard := Guard(0.1)) as told, pytest.raises(TimeLimitExceeded):
        guard.run(swallow, 1.5)
    assert told.count(True) == 1


def test_the_exception_never_escapes_a_call_that_ends_around_its_limit() -> None:
    escaped: list[BaseException] = []
    hits = 0

    def work(guard: Guard, until_s: float) -> None:
        nonlocal hits
        try:
            guard.run(_busy, until_s)
        except TimeLimitExceeded:
            hits += 1
        _busy(0.0002)

    def thread() -> None:
        try:
            for turn in range(700):
                guard = Guard(0.001)
                guards.append(guard)
                work(guard, 0.0008 + turn % 7 * 0.0001)
        except BaseException as error:  # noqa: BLE001 - the trial is whether there is one
            escaped.append(error)

    guards: list[Guard] = []
    worker = threading.Thread(target=thread)
    worker.start()
    while worker.is_alive():
        for guard in guards[-2:]:
            guard.expire(time.monotonic())
    assert escaped == []
    assert 0 < hits < 700


def _busy(seconds: float) -> Any:
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        pass
