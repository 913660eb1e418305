"""A thread that stands still: its connection is cut first, then its process ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from middleware.watchdog import EXIT_STUCK, Watchdog


@dataclass
class Thread:
    """A thread that makes turns when it is told to, and a watchdog that looks at it twice a second.

    It is cut off after 20 s and ended after 60.
    """

    ticked_at: float = 100.0
    told: list[object] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.watchdog = Watchdog("consumer", self, 20, 60, self.told.append)
        self.watchdog.look(self.now)

    def sever(self) -> None:
        self.told.append("severed")

    def stand_still(self, seconds: float) -> list[object]:
        """What has happened by then."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.watchdog.look(self.now)
        return self.told

    def turn(self) -> None:
        self.ticked_at = self.now


@pytest.fixture
def thread() -> Thread:
    return Thread()


def test_a_thread_that_makes_its_turns_is_left_alone(thread: Thread) -> None:
    for _ in range(20):
        thread.stand_still(19)
        thread.turn()
    assert thread.told == []


def test_a_thread_that_stands_still_is_cut_off_and_then_takes_the_process_with_it(thread: Thread) -> None:
    assert thread.stand_still(19) == []
    assert thread.stand_still(1) == ["severed"]
    assert thread.stand_still(19) == ["severed"]
    assert thread.stand_still(20) == ["severed", "severed"]
    assert thread.stand_still(1) == ["severed", "severed", EXIT_STUCK]


def test_a_thread_that_goes_on_once_it_is_cut_off_has_all_its_time_again(thread: Thread) -> None:
    thread.stand_still(59)
    thread.turn()
    assert thread.stand_still(19.5) == ["severed", "severed"]


def test_a_process_that_was_stopped_or_slept_is_not_blamed_for_it(thread: Thread) -> None:
    thread.stand_still(5)
    thread.now += 86_400
    assert thread.stand_still(10) == []
    assert thread.stand_still(10) == ["severed"]
