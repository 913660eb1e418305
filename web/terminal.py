"""Jobs and queues in a terminal: the page's words, in tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outbox.explain import Explanation
from web import ages, story
from web.models import Job, JobLine, Overview, Queue, State
from web.overview import Level, Verdict, on_whose_word

if TYPE_CHECKING:
    # Importing the actors makes this process one that works jobs; whoever has something found has done so.
    from actors.corpus import Found

#: Whoever reads a pipe cuts it to their own measure.
PIPE_COLUMNS = 240
#: With fewer columns a list shows no errors.
ROOM_FOR_ERRORS = 120

_STATE_STYLES = {
    State.RUNNING: "blue",
    State.COMPLETED: "green",
    State.RETRYABLE: "yellow",
    State.DISCARDED: "red",
    State.CANCELLED: "dim",
}
_LEVEL_STYLES = {Level.GOOD: "bold green", Level.NOTICE: "bold yellow", Level.BAD: "bold red"}


def show_jobs(lines: Sequence[JobLine]) -> None:
    """*lines* as a table; the id comes whole, to be copied."""
    console = _console()
    if not lines:
        console.print("no such jobs")
        return
    with_errors = console.width >= ROOM_FOR_ERRORS
    table = _table("job", "state", "actor", "attempt", "age", *(["last error"] if with_errors else []))
    now = datetime.now(UTC)
    for line in lines:
        cells = [Text(line.id), _state(line.state), _text(line.actor or "no message"), _tries(line)]
        cells += [Text(ages.spoken((now - line.created_at).total_seconds()))]
        if with_errors:
            cells += [_text(" ".join((line.last_error or "").split()))]
        table.add_row(*cells)
    console.print(table)


def show_job(job: Job) -> None:
    """All there is to know of *job*."""
    console, now = _console(), datetime.now(UTC)
    console.print(Text.assemble(_text(job.actor or "no message", "bold"), "  ", _state(job.state)))
    console.print(Text(story.tell(job, now)))
    console.print()
    moments = [(name, f"{ages.exact(at)}, {ages.relative(at, now)}") for name, at in story.timeline(job)]
    for name, told in [*_facts(job), *moments]:
        console.print(Text.assemble((f"{name:<22}", "dim"), _text(told)), soft_wrap=True)
    for attempt in job.attempts:
        console.print()
        console.print(Text(f"attempt {attempt.attempt} {attempt.outcome}", style="bold"))
        console.print(_text("\n".join(filter(None, (story.blame(attempt), attempt.traceback)))), soft_wrap=True)


def show_status(overview: Overview, verdict: Verdict) -> None:
    """The verdict, and a line a queue."""
    console = _console()
    console.print(_text(verdict.headline, _LEVEL_STYLES[verdict.level]))
    for reason in verdict.reasons:
        console.print(_text(f"  {reason}"))
    table = _table("queue", "running", "due", "oldest", "later", "retry", "done/h", "discarded/h", "procs")
    for column in table.columns[1:]:
        column.justify = "right"
    for queue in overview.queues:
        oldest = ages.spoken(queue.oldest_s) if queue.due else "-"
        numbers = (queue.later, queue.retryable, queue.completed, queue.discarded)
        table.add_row(
            _named(queue),
            f"{queue.running} of {queue.capacity}",
            f"{queue.due:,}",
            oldest,
            *(f"{number:,}" for number in numbers),
            f"{queue.processes} of {queue.wanted_processes}",
        )
    console.print()
    console.print(table)
    backlog = overview.events
    console.print()
    console.print(Text(f"events: {backlog.waiting:,} not yet turned into jobs, {backlog.poisoned:,} poisoned"))


def show_pauses(queues: Sequence[Queue]) -> None:
    """Each queue, whether it is paused, and on whose word."""
    table = _table("queue", "due", "state")
    table.columns[1].justify = "right"
    for queue in queues:
        state = f"paused {on_whose_word(queue.paused)}" if queue.paused else "open"
        table.add_row(_text(queue.name), f"{queue.due:,}", _text(state, "yellow" if queue.paused else ""))
    _console().print(table)


def show_explanation(explanation: Explanation) -> None:
    """The reasons, the decisive one first."""
    for reason in explanation.reasons:
        _console().print(Text.assemble((f"{reason.code:<18}", "bold"), _text(reason.sentence)), soft_wrap=True)


def _named(queue: Queue) -> Text:
    marks = [*([] if queue.declared else ["not declared"]), *(["paused"] if queue.paused else [])]
    return _text(f"{queue.name} ({', '.join(marks)})" if marks else queue.name)


def _facts(job: Job) -> list[tuple[str, str]]:
    facts = {
        "id": job.id,
        "queue": job.queue,
        "attempt": _tries(job).plain,
        "crashes": job.crashes or None,
        "unique key": job.unique_key,
        "limit key": job.limit_key,
        "event": job.event_id,
        "worker": job.worker_id,
        "cancelled by": job.cancel_requested_by,
        "message": json.dumps(job.message, ensure_ascii=False),
        "result": None if job.result is None else json.dumps(job.result, ensure_ascii=False),
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def show_found(found: Sequence[Found]) -> None:
    """What a search found, best first."""
    table = _table("title", "where")
    table.columns[0].min_width = min(40, max(len(one.title or one.id) for one in found))
    for one in found:
        table.add_row(_text(one.title or one.id), _text(one.snippet))
    _console().print(table)


#: What is cut last when the terminal is narrow: ids to copy, and the name of a queue.
_MIN_WIDTHS = {"job": 36, "queue": 11, "discarded/h": 11}


def _console() -> Console:
    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis", min_width=_MIN_WIDTHS.get(heading))
    return table


def _state(state: State) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _tries(line: JobLine) -> Text:
    return Text(f"{line.attempt} of {line.max_attempts}" if line.max_attempts else str(line.attempt))


def _text(told: str, style: str = "") -> Text:
    """*told* without what would move the cursor or turn the writing round: it may come from anywhere."""
    return Text("".join(sign if sign.isprintable() or sign in "\n\t" else "�" for sign in told), style=style)


def as_json(value: Any) -> str:
    """*value* for programs, as the API writes it."""
    return json.dumps(value, indent=2, ensure_ascii=False)
