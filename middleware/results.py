"""Dramatiq's `get_result` on the ledger: the job's own row says how it ended, so nothing is stored a second time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from dramatiq.middleware import Middleware
from dramatiq.results import ResultBackend, ResultFailure, ResultMissing, Results, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT

from middleware.waiting import wait_for
from outbox.db import Conn, sql


class ReadResults(Results):
    """By which a message finds its backend; it has nothing to store, so no job's end asks it."""

    after_process_message = Middleware.after_process_message
    after_skip_message = Middleware.after_skip_message
    after_nack = Middleware.after_nack


class LedgerResults(ResultBackend):
    """Reads what settle wrote."""

    def __init__(self, transaction: Callable[[], AbstractContextManager[Conn]]) -> None:
        super().__init__()
        self._transaction = transaction

    def get_result(self, message: Any, *, block: bool = False, timeout: int | None = None) -> Any:
        """What the job of *message* returned, once it has completed; *timeout* in milliseconds, 10 s by default.

        Raises ResultMissing, or with *block* ResultTimeout, while it has not ended (a failed attempt that will be
        retried is no end), was never enqueued, or is past its retention; ResultFailure when it ended discarded or
        cancelled.
        """
        within_ms = (DEFAULT_TIMEOUT if timeout is None else timeout) if block else 0
        ended = wait_for(lambda: self._ended(message.message_id), within_ms / 1_000)
        name = f"{message.message_id} of {message.actor_name}"
        if ended is None:
            # Named by its id: Dramatiq's own text would have the arguments in it.
            raise ResultTimeout(f"{name}: no end within {within_ms} ms") if block else ResultMissing(name)
        if ended["state"] == "rejected":
            raise _failure(**ended)
        return None if ended["result"] is None else json.loads(ended["result"])

    def _ended(self, message_id: str) -> dict[str, Any] | None:
        with self._transaction() as conn:
            return conn.execute(sql(__file__, "get_result"), {"id": message_id}).fetchone()


def _failure(*, stop_cause: str | None, last_error: str | None, error_class: str | None, **_: Any) -> ResultFailure:
    if stop_cause is not None:
        return ResultFailure(f"job was cancelled: {stop_cause}", "Cancelled", stop_cause)
    said = re.sub(r"^attempts exhausted \(\d+\): ", "", last_error or "")
    if not error_class:
        return ResultFailure(f"job was discarded: {said}", "", said)
    name = error_class.rpartition(".")[2]
    said = said.removeprefix(f"{name}: ")
    return ResultFailure(f"actor raised {name}: {said}", name, said)
