"""A clock that can be moved: what is stored moves into the past, since a server's own clock stands still for nobody."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from outbox.db import Conn, sql


class Clock:
    """Time as the ledger sees it. Due times, leases, deadlines, pauses, limits and retention follow it.

    What an actor asks its own process (`datetime.now()`), and the limit of a running attempt, do not.
    """

    def __init__(self, conn: Conn) -> None:
        self._conn = conn
        self._ahead = timedelta()

    def now(self) -> datetime:
        """This process's time and all that the clock has been moved by, in UTC."""
        return datetime.now(UTC) + self._ahead

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass. Nothing runs by it: `drain` does. Raises ValueError for a step back."""
        if seconds < 0:
            raise ValueError(f"time does not go back, not by {-seconds:g} s either")
        self._conn.execute(sql(__file__, "advance_clock"), {"seconds": seconds})
        self._ahead += timedelta(seconds=seconds)

    def move_to(self, moment: datetime) -> None:
        """Let time pass until *moment*, which has a time zone. Raises ValueError when it is past, or has none."""
        if moment.tzinfo is None:
            raise ValueError("a moment has a time zone: datetime(2030, 1, 1, tzinfo=UTC)")
        self.advance((moment - self.now()).total_seconds())
