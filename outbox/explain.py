"""Why a job is not running: every true reason, the decisive one first. Contract: DESIGN.md 4, "Explain"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from outbox.db import Conn, sql
from outbox.newjob import is_uuid

#: Jobs before this one are counted up to here.
COUNT_TO = 1_000
SHOWN_HOLDERS = 10
ERROR_CHARACTERS = 200
_NEVER = datetime.max.replace(tzinfo=UTC)


class Code(StrEnum):
    """What there is to say about a job, for programs."""

    COMPLETED = "completed"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"
    UNIQUE_KEY_TAKEN = "unique_key_taken"
    RUNNING = "running"
    LEASE_EXPIRED = "lease_expired"
    DEADLINE_PASSED = "deadline_passed"
    PAUSED = "paused"
    NO_WORKER = "no_worker"
    UNKNOWN_ACTOR = "unknown_actor"
    BACKING_OFF = "backing_off"
    NOT_DUE = "not_due"
    TARGET_BUSY = "target_busy"
    LIMIT_REACHED = "limit_reached"
    RATE_REACHED = "rate_reached"
    WAITS_ITS_TURN = "waits_its_turn"


@dataclass(frozen=True)
class Reason:
    """*until*: when it passes by itself; None where something must happen first, or nothing will. *details* by code."""

    code: Code
    sentence: str
    until: datetime | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """Why the job called *id* is not running, or that it is; at least one reason, the decisive first."""

    id: str
    state: str
    reasons: tuple[Reason, ...]


def explain(conn: Conn, job_id: str, *, heard_within_s: float = 15) -> Explanation | None:
    """The reasons at this moment; None for an id that is unknown, malformed or pruned.

    A worker counts as working when it was heard of in the last *heard_within_s* seconds.
    """
    if not is_uuid(job_id):
        return None
    given = {"id": job_id, "heard_within_s": heard_within_s, "count_to": COUNT_TO}
    facts = conn.execute(sql(__file__, "explain"), given).fetchone()
    if facts is None:
        return None
    full = facts["raw_state"] == "queued" and _is_full(facts)
    return Explanation(
        facts["id"], facts["state"], tuple(judge(facts, _holders(conn, facts["limit_key"]) if full else []))
    )


def _holders(conn: Conn, key: str) -> list[dict[str, Any]]:
    return conn.execute(sql(__file__, "holders"), {"key": key, "limit": SHOWN_HOLDERS}).fetchall()


def _is_full(facts: Mapping[str, Any]) -> bool:
    return facts["limit_running"] is not None and facts["held"] >= facts["limit_running"]


def judge(facts: Mapping[str, Any], holders: list[dict[str, Any]]) -> list[Reason]:
    """The reasons that *facts*, a line of explain.sql, hold; *holders* have the job's key."""
    match facts["raw_state"]:
        case "queued":
            return _waiting(facts, holders)
        case "consumed":
            return [_running(facts)]
        case _:
            return list(_ended(facts))


def _ended(facts: Mapping[str, Any]) -> Iterator[Reason]:
    code = Code(facts["state"])
    when = {"finished_at": facts["finished_at"], "attempt": facts["attempt"]}
    at = _moment(facts["finished_at"])
    match code:
        case Code.COMPLETED:
            yield Reason(code, f"It completed at {at}.", details=when)
        case Code.CANCELLED:
            cause = {"stop_cause": facts["stop_cause"]}
            yield Reason(code, f"It was stopped at {at}: {_spoken(facts['stop_cause'])}.", details=when | cause)
        case _:
            error = {"error": facts["last_error"]}
            sentence = f"It was given up at {at} after attempt {facts['attempt']}{_blame(facts)}."
            yield Reason(code, sentence, details=when | error)
    if code == Code.DISCARDED and (rival := facts["unique_rival"]):
        sentence = f"It cannot be retried while job {rival}, which has its unique key, is unfinished."
        yield Reason(Code.UNIQUE_KEY_TAKEN, sentence, details={"job_id": rival})


def _running(facts: Mapping[str, Any]) -> Reason:
    names = ("worker_id", "host", "pid", "claimed_at", "lease_until", "attempt")
    details = {name: facts[name] for name in names}
    until = _moment(facts["lease_until"])
    if facts["lease_until"] > facts["now"]:
        return Reason(Code.RUNNING, f"It runs on {_worker(facts)}, which leases it until {until}.", details=details)
    sentence = f"The lease of {_worker(facts)} ran out at {until}: the next rescue puts it back or gives it up."
    return Reason(Code.LEASE_EXPIRED, sentence, details=details)


def _waiting(facts: Mapping[str, Any], holders: list[dict[str, Any]]) -> list[Reason]:
    found = [*_of_the_queue(facts), *_of_the_target(facts), *_of_the_clock(facts)]
    # First what does not pass by itself, then what lasts longest.
    found.sort(key=lambda reason: reason.until or _NEVER, reverse=True)
    return [*found, *_of_the_key(facts, holders)] or [_turn(facts)]


def _of_the_queue(facts: Mapping[str, Any]) -> Iterator[Reason]:
    queue, actor = facts["queue"], facts["actor"]
    if (deadline := facts["deadline_at"]) and deadline <= facts["now"]:
        yield Reason(Code.DEADLINE_PASSED, f"Its deadline was {_moment(deadline)}: it does not start any more.")
    if facts["paused_by"] is not None:
        until = facts["paused_until"]
        how_long = f"until {_moment(until)}" if until else "until it is resumed"
        sentence = f"Queue {queue} is paused by {facts['paused_by']} {how_long}: {facts['pause_reason']}"
        details = {"by": facts["paused_by"], "reason": facts["pause_reason"], "paused_at": facts["paused_at"]}
        yield Reason(Code.PAUSED, sentence, until, details)
    if not facts["working"]:
        yield Reason(Code.NO_WORKER, f"No process that works queue {queue} has been heard of lately.")
    elif not facts["knowing"]:
        sentence = f"No process that works queue {queue} knows actor {actor}."
        yield Reason(Code.UNKNOWN_ACTOR, sentence, details={"actor": actor, "processes": facts["working"]})


def _of_the_clock(facts: Mapping[str, Any]) -> Iterator[Reason]:
    due = facts["available_at"]
    if due <= facts["now"]:
        return
    if facts["state"] == "retryable":
        sentence = f"Attempt {facts['attempt']} did not succeed{_blame(facts)}; the next one is due at {_moment(due)}."
        names = ("attempt", "max_attempts", "last_error")
        yield Reason(Code.BACKING_OFF, sentence, due, {name: facts[name] for name in names})
    else:
        yield Reason(Code.NOT_DUE, f"It is not due until {_moment(due)}.", due)


def _of_the_target(facts: Mapping[str, Any]) -> Iterator[Reason]:
    if facts["waits_for"] and facts["available_at"] > facts["now"]:
        sentence = f"It was put back because {facts['waits_for']} was busy or wanted to be left alone."
        yield Reason(Code.TARGET_BUSY, sentence, details={"waits_for": facts["waits_for"]})


def _of_the_key(facts: Mapping[str, Any], holders: list[dict[str, Any]]) -> Iterator[Reason]:
    key = facts["limit_key"]
    if _is_full(facts):
        who = ", ".join(f"job {holder['id']} on {_worker(holder)}" for holder in holders)
        sentence = f"Of key {key} at most {facts['limit_running']} run at once, and {facts['held']} do: {who}."
        details = {"key": key, "limit": facts["limit_running"], "running": facts["held"], "holders": holders}
        yield Reason(Code.LIMIT_REACHED, sentence, details=details)
    if facts["tokens"] is not None and facts["tokens"] < 1:
        until = facts["now"] + timedelta(seconds=(1 - facts["tokens"]) / facts["rate_per_s"])
        sentence = f"Of key {key} {facts['rate_per_s']:g} start a second: the next may at {_moment(until)}."
        yield Reason(Code.RATE_REACHED, sentence, until, {"key": key, "rate_per_s": facts["rate_per_s"]})


def _turn(facts: Mapping[str, Any]) -> Reason:
    ahead = facts["ahead"]
    number = f"{COUNT_TO:,} or more due jobs come" if ahead >= COUNT_TO else f"{ahead:,} due jobs come"
    number = {0: "no due job comes", 1: "one due job comes"}.get(ahead, number)
    sentence = f"It is due and waits for a free thread; {number} before it in queue {facts['queue']}."
    return Reason(Code.WAITS_ITS_TURN, sentence, details={"ahead": ahead, "processes": facts["working"]})


def _worker(facts: Mapping[str, Any]) -> str:
    where = f"{facts['host']}, process {facts['pid']}" if facts["host"] else "which has signed off"
    return f"worker {facts['worker_id']} ({where})"


def _blame(facts: Mapping[str, Any]) -> str:
    error = " ".join((facts["last_error"] or "").split())
    cut = error if len(error) <= ERROR_CHARACTERS else f"{error[:ERROR_CHARACTERS]}…"
    return f" ({cut})" if cut else ""


def _spoken(code: str | None) -> str:
    return (code or "cancelled").replace("_", " ")


def _moment(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
