"""How much of each queue a process may hold."""

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from middleware.capacity import BRIEF_S, Lane, next_look, wanted


def lane(name: str = "q", threads: int = 4, **known: Any) -> Lane[int]:
    return Lane(name, threads, 1.0, **known)


@pytest.mark.parametrize(
    ("threads", "mean_s", "stock"),
    [
        (4, None, 0),
        (4, 30.0, 0),
        (4, 0.3, 0),
        (4, 0.05, 4),
        (4, 0.01, 20),
        (4, 0.000001, 128),
        (1, 0.0, 32),
    ],
)
def test_the_stock_is_what_the_threads_finish_in_fifty_milliseconds(
    threads: int, mean_s: float | None, stock: int
) -> None:
    assert lane(threads=threads, mean_s=mean_s).stock_target == stock


def test_a_queue_is_asked_for_its_free_threads_only() -> None:
    assert wanted([lane(running=1)], total=4, now=0) == {"q": 3}
    assert wanted([lane(running=4)], total=4, now=0) == {}
    assert wanted([lane(running=3, stock=deque([1]))], total=4, now=0) == {}


def test_a_full_process_asks_for_nothing() -> None:
    assert wanted([lane("a", running=2), lane("b")], total=2, now=0) == {}


def test_a_full_process_looks_again_in_a_second_unless_a_job_ends() -> None:
    assert next_look([lane("a", threads=2, running=2), lane("b")], 2, now=5) == 1
    quiet = lane("b", poll_at=5.5, hungry=False)
    assert next_look([lane("a", threads=2, running=2), quiet], 3, now=5) == 0.5


def test_a_stock_that_is_not_worth_topping_up_is_no_reason_to_look() -> None:
    stocked = lane(threads=1, mean_s=0.001, running=1, stock=deque(range(18)))
    assert stocked.room == 14
    assert next_look([stocked], 1, now=5) == 1


@pytest.mark.parametrize("total", [1, 2, 3])
def test_queues_that_share_too_few_threads_take_turns(total: int) -> None:
    lanes = [lane(name, threads=2) for name in "abcd"]
    running: deque[Lane[int]] = deque()
    served: Counter[str] = Counter()
    for turn in range(1, 200):
        for name, count in wanted(lanes, total, now=0).items():
            (taken,) = (one for one in lanes if one.name == name)
            taken.looked(turn, found=count, asked=count)
            taken.running += count
            running.extend([taken] * count)
            served[name] += count
        running.popleft().running -= 1
    assert min(served[name] for name in "abcd") > 40


def test_a_queue_that_had_nothing_is_asked_again_at_its_poll() -> None:
    quiet = lane(hungry=False, poll_at=10)
    assert wanted([quiet], total=4, now=9) == {}
    assert next_look([quiet], 4, 9) == 1
    assert wanted([quiet], total=4, now=10) == {"q": 4}


def test_claims_come_in_batches_once_jobs_are_short() -> None:
    short = lane(mean_s=0.001, running=4)
    short.stock.extend(range(70))
    assert wanted([short], total=4, now=0) == {}
    for _ in range(30):
        short.stock.popleft()
    assert wanted([short], total=4, now=0) == {"q": 66}


def test_a_claim_is_for_half_of_the_stock_so_that_threads_have_the_other_half_meanwhile() -> None:
    short = lane(mean_s=0.001)
    assert (short.capacity, wanted([short], total=4, now=0)) == (132, {"q": 66})
    short.stock.extend(range(62))
    short.running = 4
    assert wanted([short], total=4, now=0) == {"q": 66}
    batched = lane(batch=100)
    assert wanted([batched], total=4, now=0) == {"q": 400}


@pytest.mark.parametrize(("brief", "longer", "is_brief"), [(20, 0, True), (19, 1, True), (18, 2, False), (0, 3, False)])
def test_a_queue_is_brief_while_nearly_all_of_its_last_runs_were(brief: int, longer: int, is_brief: bool) -> None:
    short = lane()
    for seconds in [BRIEF_S / 2] * brief + [BRIEF_S * 2] * longer:
        short.measured(seconds)
    short.weighed()
    assert short.brief is is_brief


def test_runs_are_weighed_together_so_that_one_that_waited_for_the_interpreter_does_not_end_the_stock() -> None:
    short = lane()
    for _ in range(3):
        for seconds in [0.0001] * 60 + [0.01] + [0.0001] * 60:
            short.measured(seconds)
        short.weighed()
    assert short.mean_s == pytest.approx((120 * 0.0001 + 0.01) / 121)


def test_one_slow_job_ends_the_stock() -> None:
    measured = lane(mean_s=0.001)
    measured.measured(30)
    measured.weighed()
    assert measured.stock_target == 0


lanes = st.lists(
    st.builds(
        lambda threads, running, stock, mean: lane(
            threads=threads, running=min(running, threads), stock=deque(range(stock)), mean_s=mean
        ),
        st.integers(1, 8),
        st.integers(0, 8),
        st.integers(0, 20),
        st.none() | st.floats(0, 60),
    ),
    min_size=1,
    max_size=6,
)


@given(lanes, st.integers(1, 20))
def test_no_queue_is_asked_for_more_than_its_room(queues: list[Lane[int]], total: int) -> None:
    for number, queue in enumerate(queues):
        queue.name = str(number)
    asked = wanted(queues, total, now=0)
    assert all(0 < count <= queues[int(name)].room for name, count in asked.items())
    in_hand = sum(queue.running + len(queue.stock) for queue in queues)
    assert sum(asked.values()) <= max(0, total + max(queue.stock_target for queue in queues) - in_hand)
