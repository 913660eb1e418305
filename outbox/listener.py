"""LISTEN on a connection, and what has rung on it. A notification is a doorbell: its payload is never read."""

from __future__ import annotations

import select
from collections.abc import Iterable

from psycopg import Notify
from psycopg import sql as identifiers

from outbox.db import Conn


def readable(*files: int, within_s: float) -> bool:
    """Wait until one of *files* can be read; False after *within_s*. Not `select`: it takes no number above 1023."""
    poller = select.poll()
    for file in files:
        poller.register(file, select.POLLIN)
    return bool(poller.poll(max(0.0, within_s) * 1_000))


class Bells:
    """The *channels* a connection listens to. Rings that arrive while it runs a statement are kept too."""

    def __init__(self, conn: Conn, channels: Iterable[str]) -> None:
        self._conn = conn
        self._rung: set[str] = set()
        conn.add_notify_handler(self._ring)
        for channel in channels:
            conn.execute(identifiers.SQL("LISTEN {}").format(identifiers.Identifier(channel)))

    def _ring(self, notice: Notify) -> None:
        self._rung.add(notice.channel)

    def take(self) -> set[str]:
        """The channels that have rung since the last look; drains the socket, never waits. Raises OperationalError."""
        self._conn.pgconn.consume_input()
        while (notice := self._conn.pgconn.notifies()) is not None:
            self._rung.add(notice.relname.decode())
        rung, self._rung = self._rung, set()
        return rung

    def sleep(self, seconds: float, wake_fd: int | None = None) -> None:
        """Sleep up to *seconds*, until something rings, or until *wake_fd* is readable; not at all if it has rung."""
        if not self._rung:
            readable(self._conn.fileno(), *([] if wake_fd is None else [wake_fd]), within_s=seconds)

    def close(self) -> None:
        self._conn.execute("UNLISTEN *")
