"""The only owner of threads: named, retained, with one stop signal that every wait of theirs hears."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger("posthouse.lifecycle")


class Lifecycle:
    """The threads of one process. The stop signal is level-triggered: once set it stays, whoever looks and when."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[tuple[threading.Thread, bool]] = []
        self._lock = threading.Lock()
        self.panics = 0
        self.on_panic: Callable[[str], None] = lambda name: None

    def spawn(self, name: str, run: Callable[[], None], *, joined: bool = True) -> threading.Thread:
        """Start *run* in a thread called *name*. *joined*: a stop waits for it, else it may stay in a system call."""
        thread = threading.Thread(target=self._guard, args=(name, run), name=name, daemon=True)
        with self._lock:
            self._threads = [(known, joined) for known, joined in self._threads if known.is_alive() or joined]
            self._threads.append((thread, joined))
        thread.start()
        return thread

    def _guard(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException:
            self.panics += 1
            log.critical("thread.panicked", thread=name, exc_info=True)
            self.on_panic(name)

    def stop(self) -> None:
        """Set the stop signal; safe to repeat, from a signal handler too."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep up to *seconds*, or until the stop signal; True when it is set."""
        return self._stop.wait(seconds)

    def join(self, budget_s: float) -> list[str]:
        """Wait for every joined thread, *budget_s* for all of them together; the names of those that did not end."""
        give_up = time.monotonic() + budget_s
        with self._lock:
            threads = [thread for thread, joined in self._threads if joined]
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0, give_up - time.monotonic()))
        return [thread.name for thread in threads if thread.is_alive() and thread is not threading.current_thread()]


#: This process's own.
process = Lifecycle()
spawn = process.spawn
