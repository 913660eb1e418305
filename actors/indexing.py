"""Bring one changed document, and those that changed with it, into the index, under a fenced lease a subject.

Two holders could let an old read overwrite a newer document or revive a deleted one, hence the leases
(specs/integrations.md 2.3). The engine is called between transactions, never inside one.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from actors.effects.search import (
    Document,
    Done,
    Failed,
    MissingIndex,
    Receipt,
    Refused,
    Search,
    Waiting,
    document,
)
from middleware.failures import Discard, Snooze
from outbox.db import Conn, Row, sql
from outbox.jobs import NewJob, enqueue_many

#: Above the actor's time limit, so that a lease outlives its holder's attempt.
LEASE_S = 45
OTHERS = 199
OTHERS_BYTES = 8 * 1024 * 1024
POLL_FIRST_S, POLL_MOST_S, POLL_TOTAL_S = 0.01, 1.0, 10.0
WAIT_MOST_S = 30.0

Begin = Callable[[], AbstractContextManager[Conn]]


@dataclass
class Lease:
    """The *subjects* in our hands until *token* is taken over; *subject* is the job's own."""

    token: str
    subject: str
    subjects: list[str]
    task: int | None
    waits: int
    rejected: dict[str, str] = field(default_factory=dict)
    waiting: bool = False


def index(begin: Begin, search: Search, subject: str, *, job: str = "") -> None:
    """Make the index say what the row of *subject* says; nothing when it does already.

    Raises Snooze while another job holds the subject or the engine still works on it, Discard when the engine
    will never take this document, and what the engine raises.
    """
    with begin() as conn:
        known = state(conn, subject)
    if known is not None:
        if known.rejected:
            raise Discard(known.rejected)
        return
    lease = take(begin, subject)
    if lease is None:
        raise Snooze(random.uniform(1, 2))
    run = _Run(begin, search, lease, job)
    try:
        if lease.task is not None:
            run.settle_open_task(lease.task)
        if not lease.waiting:
            run.bring()
    finally:
        with begin() as conn:
            release(conn, lease.token)
    if reason := lease.rejected.get(lease.subject):
        raise Discard(reason)
    if lease.waiting:
        raise Snooze(min(2.0 * 2 ** min(lease.waits, 10), WAIT_MOST_S))


@dataclass(frozen=True)
class Current:
    """The index holds what the row says, or has *rejected* it for that reason."""

    rejected: str | None


def state(conn: Conn, subject: str) -> Current | None:
    """Whether the index is known to be right about *subject*; None when it is behind, or nobody knows."""
    row = conn.execute(sql(__file__, "state"), {"subject": subject}).fetchone()
    return Current(row["rejected"]) if row and row["is_current"] else None


def take(begin: Begin, subject: str) -> Lease | None:
    """Lease *subject* for 45 s, None when somebody has it; and up to 199 free ones that changed later.

    A deleted subject comes with others that were deleted, one with an open task with those of that task.
    """
    token = str(uuid.uuid4())
    given = {"subject": subject, "token": token, "lease_s": LEASE_S}
    with begin() as conn:
        conn.execute(sql(__file__, "take_turn"))
        own = conn.execute(sql(__file__, "take"), given).fetchone()
        if own is None:
            return None
        limits = {"task": own["task_uid"], "limit": OTHERS, "most_bytes": OTHERS_BYTES}
        others = conn.execute(sql(__file__, _companions(own)), {**given, **limits})
        subjects = [subject, *(row["subject"] for row in others)]
    return Lease(token, subject, subjects, own["task_uid"], own["waits"])


def _companions(own: Row) -> str:
    if own["task_uid"] is not None:
        return "take_task"
    return "take_others" if own["has_row"] else "take_gone"


def release(conn: Conn, token: str) -> None:
    """Let go of whatever *token* still holds."""
    conn.execute(sql(__file__, "release"), {"token": token})


@dataclass
class _Run:
    """One job's work on its lease. Each step is written down, under the token, as soon as it is known."""

    begin: Begin
    search: Search
    lease: Lease
    job: str

    def settle_open_task(self, task: int) -> None:
        """End what an earlier attempt posted, before anything is posted anew."""
        if self._follow(Receipt(task), self.lease.subjects) is None and not self.lease.waiting:
            with self.begin() as conn:
                behind = state(conn, self.lease.subject) is None
            self.lease.subjects = [self.lease.subject] if behind else []

    def bring(self) -> None:
        """Post what the rows say now: visible ones in, the others out."""
        if not self.lease.subjects:
            return
        with self.begin() as conn:
            documents, hidden = load(conn, self.lease.subjects)
        if documents:
            self._post(documents)
        if hidden:
            self._delete(hidden)

    def _post(self, documents: Sequence[Document]) -> None:
        try:
            receipt = self.search.upsert(documents, job=self.job)
        except Refused as error:
            self._halve(documents, error)
            return
        self._reject({one: receipt.rejected[one.id] for one in documents if one.id in receipt.rejected})
        taken = [one for one in documents if one.id not in receipt.rejected]
        self._note(receipt, {one.id: one.version for one in taken})
        if fault := self._follow(receipt, [one.id for one in taken]):
            self._halve(taken, fault)

    def _halve(self, documents: Sequence[Document], error: Refused) -> None:
        """Find the documents at fault: halves in order, until each of them stands alone."""
        if len(documents) == 1:
            self._reject({documents[0]: str(error)})
            return
        middle = len(documents) // 2
        self._post(documents[:middle])
        self._post(documents[middle:])

    def _delete(self, versions: dict[str, int]) -> None:
        receipt = self.search.delete(list(versions), job=self.job)
        self._note(receipt, versions)
        if error := self._follow(receipt, list(versions)):
            raise error

    def _note(self, receipt: Receipt, versions: dict[str, int]) -> None:
        given = {"ids": list(versions), "versions": list(versions.values()), "task": receipt.task}
        with self.begin() as conn:
            conn.execute(sql(__file__, "note"), {"token": self.lease.token, **given})

    def _follow(self, receipt: Receipt, ids: Sequence[str]) -> Refused | None:
        """Wait for *receipt* and write down what became of *ids*; the error when some are at fault."""
        match _wait(self.search, receipt):
            case Done():
                self._complete(ids)
            case Waiting():
                self._postpone(ids)
            case Failed(error=error):
                self._forget_task(ids)
                if isinstance(error, Refused):
                    return error
                if isinstance(error, MissingIndex):
                    self.search.ensure()
                raise error
        return None

    def _complete(self, ids: Sequence[str]) -> None:
        given = {"token": self.lease.token, "ids": ids}
        with self.begin() as conn:
            conn.execute(sql(__file__, "complete"), given)
            behind = conn.execute(sql(__file__, "complete_behind"), given).fetchall()
            enqueue_many(conn, [_again(row["subject"]) for row in behind])
            conn.execute(sql(__file__, "complete_deleted"), given)

    def _postpone(self, ids: Sequence[str]) -> None:
        self.lease.waiting = self.lease.waiting or self.lease.subject in ids
        with self.begin() as conn:
            conn.execute(sql(__file__, "postpone"), {"token": self.lease.token, "ids": ids})

    def _forget_task(self, ids: Sequence[str]) -> None:
        with self.begin() as conn:
            conn.execute(sql(__file__, "forget_task"), {"token": self.lease.token, "ids": ids})

    def _reject(self, reasons: dict[Document, str]) -> None:
        if not reasons:
            return
        self.lease.rejected |= {one.id: reason for one, reason in reasons.items()}
        given = {
            "token": self.lease.token,
            "ids": [one.id for one in reasons],
            "versions": [one.version for one in reasons],
            "reasons": [reason[:1_000] for reason in reasons.values()],
        }
        with self.begin() as conn:
            conn.execute(sql(__file__, "reject"), given)


def _wait(search: Search, receipt: Receipt) -> Done | Waiting | Failed:
    """Poll at 10 ms, doubling to 1 s, for 10 s at most. A wait that runs out is not a failure."""
    pause, give_up = POLL_FIRST_S, time.monotonic() + POLL_TOTAL_S
    while isinstance(outcome := search.settle(receipt), Waiting) and time.monotonic() < give_up:
        time.sleep(pause)
        pause = min(pause * 2, POLL_MOST_S)
    return outcome


def _again(subject: str) -> NewJob:
    return NewJob(queue="index", actor="corpus.index", args=[subject], unique_key=f"corpus.index:{subject}")


def load(conn: Conn, ids: Sequence[str]) -> tuple[list[Document], dict[str, int]]:
    """What the index should hold of *ids*: the visible documents; versions of the others, 0 for no row."""
    rows = conn.execute(sql(__file__, "load_documents"), {"ids": ids}).fetchall()
    others = dict.fromkeys(ids, 0) | {row["id"]: row["version"] for row in rows}
    documents = [document(**row) for row in rows if row.pop("visible")]
    for one in documents:
        del others[one.id]
    return documents, others
