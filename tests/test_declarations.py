"""What an actor's decorator refuses: in one line, by the actor's name, when its file is read."""

from __future__ import annotations

from typing import Any

import pytest

from middleware.declarations import faults
from middleware.failures import Backoff, Schedule
from middleware.periodic import cron


@pytest.mark.parametrize(
    "told",
    [
        {"batch": 0},
        {"batch": -1},
        {"batch": 10_001},
        {"batch": "a"},
        {"batch": True},
        {"time_limit_s": 0},
        {"time_limit_s": 86_401},
        {"time_limit_s": "30"},
        {"backoff": 3},
        {"throws": 3},
        {"throws": ValueError},
        {"throws": (3,)},
        {"periodic": "7 * * * *"},
        {"unique": "foo"},
        {"unique": True},
        {"argument": "foo"},
    ],
)
def test_what_cannot_be_is_named_with_its_value(told: dict[str, Any]) -> None:
    ((name, value),) = told.items()
    (fault,) = faults(**told)
    assert fault.startswith((f"{name}={value!r} is not", f"{name}={value!r} is neither"))


def test_what_can_be_is_not_refused() -> None:
    assert [*faults()] == []
    told = {
        "batch": 10_000,
        "time_limit_s": 0.5,
        "backoff": Schedule([1, 2]),
        "throws": (ValueError, SystemExit),
        "periodic": cron("7 * * * *"),
        "unique": "args",
        "argument": "subject",
    }
    assert [*faults(**told)] == []
    assert [*faults(backoff=Backoff())] == []
