"""LISTEN on a connection, and what has rung on it. A notification is a doorbell: its payload is never read."""

from __future__ import annotations

import secrets
import select
from collections.abc import Iterable

import psycopg
from psycopg import Notify
from psycopg import sql as identifiers

from outbox.db import Conn

#: A session hears its own ring with the answer to the statement that rings; so long is more than enough.
PROBE_WITHIN_S = 3.0


class Deaf(psycopg.OperationalError):
    """The session answers, but no longer hears what it listens to: it is of no use, and is to be opened anew."""


def readable(*files: int, within_s: float) -> bool:
    """Wait until one of *files* can be read; False after *within_s*. Not `select`: it takes no number above 1023."""
    poller = select.poll()
    for file in files:
        poller.register(file, select.POLLIN)
    return bool(poller.poll(max(0.0, within_s) * 1_000))


class Bells:
    """The *channels* a connection listens to; without any it never rings. What rings during a statement is kept too."""

    def __init__(self, conn: Conn, channels: Iterable[str], *, probe_every_s: float = 30) -> None:
        self._conn = conn
        self._rung: set[str] = set()
        self._channels = list(channels)
        self._probe = f"posthouse_probe_{secrets.token_hex(8)}"
        self._probe_every_s = probe_every_s
        self._probe_at = float("-inf")
        self._probed_at: float | None = None
        conn.add_notify_handler(self._ring)
        for channel in [*self._channels, self._probe] if self._channels else []:
            conn.execute(identifiers.SQL("LISTEN {}").format(identifiers.Identifier(channel)))

    def _ring(self, notice: Notify) -> None:
        self._heard(notice.channel)

    def _heard(self, channel: str) -> None:
        if channel == self._probe:
            self._probed_at = None
        else:
            self._rung.add(channel)

    def probe(self, now: float) -> None:
        """Ring for ourselves every *probe_every_s* of monotonic *now*. Raises Deaf when that was not heard in time."""
        if not self._channels:
            return
        if self._probed_at is not None:
            if now - self._probed_at > PROBE_WITHIN_S:
                raise Deaf("a notification to itself has not come back")
        elif now >= self._probe_at:
            self._probed_at, self._probe_at = now, now + self._probe_every_s
            self._conn.execute(identifiers.SQL("NOTIFY {}").format(identifiers.Identifier(self._probe)))

    def take(self) -> set[str]:
        """The channels that have rung since the last look; drains the socket, never waits. Raises OperationalError."""
        self._conn.pgconn.consume_input()
        self._collect()
        rung, self._rung = self._rung, set()
        return rung

    def _collect(self) -> None:
        while (notice := self._conn.pgconn.notifies()) is not None:
            self._heard(notice.relname.decode())

    def sleep(self, seconds: float, wake_fd: int | None = None) -> None:
        """Sleep up to *seconds*, until something rings, or until *wake_fd* is readable; not at all if it has rung."""
        # What came with a statement's answer is no longer in the socket.
        self._collect()
        if not self._rung:
            readable(self._conn.fileno(), *([] if wake_fd is None else [wake_fd]), within_s=seconds)

    def close(self) -> None:
        if self._channels:
            self._conn.execute("UNLISTEN *")
