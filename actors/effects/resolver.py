"""Look names up without letting a dead name server hold the caller, or the process at its end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from middleware import lifecycle

THREADS = 16
FREE_THREAD_WAIT_S = 1.0

Lookup = Callable[[str], list[str]]


class NameNotFound(Exception):
    """The name has no address, or the name servers did not say in time."""


class NoCapacity(Exception):
    """This process is out of threads or file handles: our own fault, never the other side's."""


@dataclass
class _Query:
    """One lookup under way; everybody who asks for the same name meanwhile shares it."""

    done: threading.Event = field(default_factory=threading.Event)
    addresses: list[str] = field(default_factory=list)
    error: Exception | None = None


class Resolver:
    """At most 16 lookups at a time, one a name, in daemon threads that the end of the process ignores.

    *lookup* returns the addresses of a name, or raises OSError or UnicodeError; tests script it.
    """

    def __init__(self, lookup: Lookup | None = None) -> None:
        self._lookup = lookup or _system_lookup
        self._slots = threading.BoundedSemaphore(THREADS)
        self._lock = threading.Lock()
        self._pending: dict[str, _Query] = {}

    def resolve(self, host: str, wait_s: float) -> list[str]:
        """Return every address of *host*, in *wait_s* seconds at most. Raises NameNotFound or NoCapacity."""
        give_up = time.monotonic() + wait_s
        with self._lock:
            query = self._pending.get(host)
            is_first = query is None
            if query is None:
                query = self._pending[host] = _Query()
        if is_first:
            self._start(host, query, min(wait_s, FREE_THREAD_WAIT_S))
        if not query.done.wait(max(give_up - time.monotonic(), 0)):
            raise NameNotFound("the name servers did not answer in time")
        if query.error:
            raise query.error.with_traceback(None)
        return query.addresses

    def _start(self, host: str, query: _Query, wait_s: float) -> None:
        """Give *query* a thread; whatever keeps it from one ends the query, so that no name is stuck."""
        if not self._slots.acquire(timeout=wait_s):
            self._finish(host, query, error=NoCapacity("no thread is free for a name lookup"))
            return
        try:
            lifecycle.spawn("dns", lambda: self._look_up(host, query), joined=False)
        except BaseException:
            self._slots.release()
            self._finish(host, query, error=NoCapacity("no thread could be started for a name lookup"))
            raise

    def _look_up(self, host: str, query: _Query) -> None:
        addresses: list[str] = []
        error: Exception | None = NoCapacity("the name lookup broke off")
        try:
            addresses = self._lookup(host)
            error = None if addresses else NameNotFound("the name has no address")
        except socket.gaierror as fault:
            error = NameNotFound(fault.strerror or "the name has no address")
        except OSError as fault:
            error = NoCapacity(f"name lookup: {fault.strerror}")
        except UnicodeError:
            error = NameNotFound("the name cannot be encoded")
        finally:
            self._slots.release()
            self._finish(host, query, addresses, error)

    def _finish(self, host: str, query: _Query, addresses: Sequence[str] = (), error: Exception | None = None) -> None:
        query.addresses, query.error = list(addresses), error
        with self._lock:
            if self._pending.get(host) is query:
                del self._pending[host]
        query.done.set()


def _system_lookup(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
