"""The queues at a glance, and the verdict on them in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outbox import controls, events, jobs, workers
from outbox.controls import Pause
from outbox.db import Conn
from settings import QueueSettings, Settings
from web.ages import exact, spoken
from web.models import Backlog, Overview, Queue

#: A job that is due, or an event, should not wait longer than this.
PATIENCE_S = 60


def load(conn: Conn, settings: Settings) -> Overview:
    """All declared queues, and others that hold jobs, in the order of the settings."""
    depths = {row["queue"]: row for row in jobs.depths(conn)}
    ended = {row["queue"]: row for row in jobs.ended(conn)}
    paused = controls.pauses(conn)
    alive = workers.alive(conn, within_s=heard_within_s(settings))
    undeclared = sorted({*depths, *ended, *paused} - {*settings.queues})
    return Overview(
        queues=[
            _queue(name, settings.queues.get(name), depths.get(name, {}), ended.get(name, {}), alive, paused.get(name))
            for name in [*settings.queues, *undeclared]
        ],
        events=Backlog.model_validate(events.backlog(conn)),
    )


def heard_within_s(settings: Settings) -> float:
    """A process that has missed three signs of life does not count as working."""
    return 3 * settings.control_interval_s


def _queue(
    name: str,
    declared: QueueSettings | None,
    depth: Mapping[str, Any],
    ended: Mapping[str, Any],
    alive: Sequence[Mapping[str, Any]],
    paused: Pause | None,
) -> Queue:
    working = [worker["threads"] for worker in alive if name in worker["queues"]]
    most = declared.threads if declared else 0
    return Queue(
        name=name,
        declared=declared is not None,
        processes=len(working),
        wanted_processes=declared.processes if declared else 0,
        capacity=sum(min(threads, most) for threads in working),
        paused=paused,
        **{key: depth.get(key, 0) for key in ("running", "due", "later", "retryable", "oldest_s")},
        **{key: ended.get(key, 0) for key in ("completed", "discarded", "cancelled")},
    )


class Level(StrEnum):
    GOOD = "good"
    NOTICE = "notice"
    BAD = "bad"


@dataclass(frozen=True)
class Verdict:
    """How things stand: the worst first, in sentences."""

    level: Level
    headline: str
    reasons: tuple[str, ...] = ()


def judge(overview: Overview) -> Verdict:
    """The verdict on *overview*: bad when work stands still, notice when somebody should look, else good."""
    bad, notices = list(_standstill(overview)), list(_oddities(overview))
    if not bad and not notices:
        return Verdict(Level.GOOD, _all_is_well(overview))
    worst, *rest = bad + notices
    return Verdict(Level.BAD if bad else Level.NOTICE, worst, tuple(rest))


def _standstill(overview: Overview) -> Iterator[str]:
    declared = [queue for queue in overview.queues if queue.declared]
    idle = [queue.name for queue in declared if not queue.processes]
    due = sum(queue.due for queue in declared if not queue.processes)
    left = f" {counted(due, 'job')} {'waits' if due == 1 else 'wait'} for one." if due else ""
    if idle and len(idle) == len(declared):
        yield f"No worker process has been heard of lately.{left}"
    elif idle:
        yield f"No process works {listed(idle)}.{left}"
    backlog = overview.events
    if backlog.waiting and backlog.oldest_s > PATIENCE_S:
        wait = spoken(backlog.oldest_s)
        yield f"{counted(backlog.waiting, 'event')} not yet turned into jobs, the oldest for {wait}."
    if backlog.poisoned:
        yield f"{counted(backlog.poisoned, 'event')} could not be turned into jobs (poisoned)."


def _oddities(overview: Overview) -> Iterator[str]:
    for queue in overview.queues:
        if queue.paused:
            yield f"{queue.name} is paused {on_whose_word(queue.paused)}"
        elif queue.processes and queue.oldest_s > PATIENCE_S:
            wait = spoken(queue.oldest_s)
            yield f"{queue.name} is behind: {counted(queue.due, 'job')} due, the oldest for {wait}."
        if not queue.declared and (waiting := queue.due + queue.later):
            yield f"{counted(waiting, 'job')} in {queue.name}, a queue that QUEUES does not declare."
    if discarded := sum(queue.discarded for queue in overview.queues):
        yield f"{counted(discarded, 'job')} discarded in the last hour."


def _all_is_well(overview: Overview) -> str:
    running = sum(queue.running for queue in overview.queues)
    due = sum(queue.due for queue in overview.queues)
    return f"All is well: every queue is worked, {counted(running, 'job')} running, {due:,} due."


def on_whose_word(pause: Pause) -> str:
    """By whom, until when, and why."""
    until = f"until {exact(pause.until_at)}" if pause.until_at else "until it is resumed"
    return f"by {pause.paused_by} {until}: {pause.reason}"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """*names* as they are said: a, b and c."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
