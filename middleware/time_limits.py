"""A time limit for every attempt: an asynchronous exception that can hit the actor and nothing else."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from middleware.failures import Released, TimeLimitExceeded

#: Code that catches the exception and goes on gets it again after so long.
REPEAT_S = 1.0

_STOPS = (TimeLimitExceeded, Released)

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc

_standing: dict[int, Guard] = {}


def guard(limit_s: float, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the actor in this thread, for *limit_s* at most. Raises TimeLimitExceeded and what the actor raises."""
    thread = threading.get_ident()
    standing = _standing[thread] = Guard(limit_s)
    try:
        return standing.run(call, *args, **kwargs)
    finally:
        _standing.pop(thread, None)


def guarded() -> Guard | None:
    """The guard around this thread's call of an actor; None outside one."""
    return _standing.get(threading.get_ident())


def standing() -> list[Guard]:
    """The guards of every running call."""
    return list(_standing.values())


class Guard:
    """Stands around one call of an actor. `expire` and `release` raise in it; leaving clears a pending exception.

    Raising and leaving take the same lock, so the exception reaches neither the framework nor the thread's next job.
    """

    __slots__ = ("_due", "_inside", "_lock", "_thread", "expired", "limit_s", "released")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.expired = self.released = False
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._inside = False
        self._due = time.monotonic() + limit_s

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the actor; raises TimeLimitExceeded when its time ran out, also if it swallowed the exception."""
        try:
            try:
                with self._lock:
                    self._inside = True
                result = call(*args, **kwargs)
            finally:
                self._leave()
        except _STOPS as stop:
            self._leave()
            raise (self._time_out() if self.expired else stop) from None
        except BaseException as error:
            # What the actor's own cleanup made of our exception is not its failure.
            if self.expired:
                raise self._time_out() from error
            if self.released:
                raise Released from error
            raise
        if self.expired:
            raise self._time_out()
        return result

    def _time_out(self) -> TimeLimitExceeded:
        return TimeLimitExceeded(f"ran longer than its limit of {self.limit_s:g} s")

    def _leave(self) -> None:
        # `with`, in a loop: the exception may still land between two of these lines, and must not leave the lock taken.
        while True:
            try:
                with self._lock:
                    self._inside = False
                    _set_async_exc(self._thread, None)
                return
            except _STOPS:
                continue

    @property
    def left_s(self) -> float:
        """Seconds until the limit; not above 0 when it has passed."""
        return self._due - time.monotonic()

    def expire(self, now: float) -> bool:
        """Raise in the actor when it is due at *now* (monotonic) and still inside; True the first time."""
        if now < self._due:
            return False
        with self._lock:
            if not self._inside:
                return False
            first, self.expired = not self.expired, True
            self._due = now + REPEAT_S
            _set_async_exc(self._thread, ctypes.py_object(TimeLimitExceeded))
        return first

    def release(self) -> None:
        """Raise Released in the actor, if it is still inside: the process is stopping and its grace is over."""
        with self._lock:
            if self._inside:
                self.released = True
                _set_async_exc(self._thread, ctypes.py_object(Released))
