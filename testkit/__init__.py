"""Test your actors on the real ledger, in a real database, without a worker process.

```python
import pytest

import actors  # your actors, and the broker they are declared on
import testkit
from broker import actor, transaction
from middleware.failures import Backoff
from outbox import jobs

kit = testkit.fixture()  # this line goes to conftest.py: a fixture for every test


@actor(name="guests.greet", queue="tasks", attempts=3, backoff=Backoff(first_s=60))
def greet(name: str) -> str:
    if not name:
        raise ValueError("nobody to greet")
    return f"Good evening, {name}!"


def arrive(name):
    with transaction() as conn:  # and the application's own statements
        jobs.enqueue(conn, greet.job(name))


def test_a_guest_who_arrives_is_greeted(kit):
    arrive("Ann")
    kit.assert_enqueued(greet, "Ann")
    [ran] = kit.drain(raising=True)
    assert (ran.outcome, ran.result) == ("completed", "Good evening, Ann!")


def test_a_greeting_that_fails_is_tried_three_times(kit):
    arrive("")
    assert [ran.outcome for ran in kit.drain()] == ["retryable"]
    assert kit.drain() == []  # the second attempt is not due yet
    kit.clock.advance(70)
    kit.drain()
    kit.clock.advance(140)
    [ran] = kit.drain()
    assert (ran.attempt, ran.outcome) == (3, "discarded")
    assert ran.error == "attempts exhausted (3): ValueError: nobody to greet"


def test_a_greeting_survives_the_death_of_its_worker(kit):
    arrive("Ann")
    with kit.crash_before_settle():
        assert [ran.outcome for ran in kit.drain()] == ["crashed"]
    kit.clock.advance(30)  # its lease is over
    assert [(ran.attempt, ran.outcome) for ran in kit.drain()] == [(2, "completed")]


def test_where_jobs_run_at_once(kit):
    with kit.inline(raising=True):
        arrive("Ann")
    assert kit.enqueued(greet)[0].state == "completed"
```

**The database.** `fixture()` works in the application's own database's neighbour: `DATABASE_URL`, or the embedded one
of a running `make run`, with `_test` behind its name. Any other is given by its URL, and has "test" in its name. It is
made when it is missing, brought up to date once a process, and emptied before each test: of jobs, events, documents,
endpoints. Tables of your own are yours to make and to empty; `kit.conn` is a connection for that, in autocommit.

**Running.** `drain(queue=None)` turns recorded events into jobs and runs what is due, in the thread of the test, until
nothing is: through the same claim, middleware, actor, verdict and settle as a worker's, one job or one batch at a time.
It returns what ran, in order, with outcome, result and error. `drain(raising=True)` raises at the first failure, from
what the actor raised. Time limits hold. In `inline()`, a drain follows each commit of this process's pool, that is of
`transaction()` and of Dramatiq's `send`; a commit on a connection of your own is not seen.

**What was asked for.** `enqueued(actor)` lists arguments, queue, priority, keys, due time and state, also of what has
run. `assert_enqueued(actor, *args, **kwargs)` returns the first with these arguments, `job(id)` one with its history.

**The clock.** `kit.clock.advance(seconds)` and `move_to(moment)` move all that is stored about time into the past:
due times, leases, deadlines, pauses, limits and retention follow it. What an actor asks its own process, as in
`datetime.now()`, does not.

**Faults** meet the next attempt in their block: `lost_lease()`, its end is refused; `crash_before_settle()`, its end is
never written; `lost_connection()`, every session ends before its end is written. A block that nothing met fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from testkit.clock import Clock
from testkit.database import NotATestDatabase
from testkit.facts import Asked, Endless, JobFailed, Ran
from testkit.kit import Kit

__all__ = ["Asked", "Clock", "Endless", "JobFailed", "Kit", "NotATestDatabase", "Ran", "fixture"]


def fixture(url: str | None = None, *, name: str = "kit") -> Callable[..., Any]:
    """A pytest fixture called *name*: each test that asks for it gets a `Kit` on *url*, emptied. For a conftest.py."""
    import pytest

    @pytest.fixture(name=name)
    def kit() -> Iterator[Kit]:
        with Kit(url) as opened:
            yield opened

    return kit
