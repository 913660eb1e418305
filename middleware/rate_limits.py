"""Dramatiq's rate limiters and barriers on Postgres: a counter a key, every change one statement under its row's lock.

A key whose time is over, on the database's clock, counts as absent; `prune` takes it away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from dramatiq.rate_limits import RateLimiterBackend

from middleware.waiting import wait_for
from outbox.db import Conn, rows, sql

Transaction = Callable[[], AbstractContextManager[Conn]]


class RateLimits(RateLimiterBackend):
    """For `ConcurrentRateLimiter`, `WindowRateLimiter`, `BucketRateLimiter` and `Barrier`; times are milliseconds.

    A slot that a killed process held is free again after its *ttl*. Windows and buckets are cut by the host's clock,
    as Dramatiq has it.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def add(self, key: str, value: int, ttl: int) -> bool:
        """Set *key*, unless it is there."""
        return self._changed("add_rate_limit", key=key, value=value, ttl_s=ttl / 1_000)

    def incr(self, key: str, amount: int, maximum: int, ttl: int) -> bool:
        """Add to *key*, which is 0 when absent, unless that takes it above *maximum*."""
        return self._changed("incr_rate_limit", key=key, amount=amount, maximum=maximum, ttl_s=ttl / 1_000)

    def decr(self, key: str, amount: int, minimum: int, ttl: int) -> bool:
        """Take from *key*, unless it is absent or that takes it below *minimum*."""
        return self._changed("decr_rate_limit", key=key, amount=amount, minimum=minimum, ttl_s=ttl / 1_000)

    def incr_and_sum(
        self, key: str, keys: Callable[[], Sequence[str]] | Sequence[str], amount: int, maximum: int, ttl: int
    ) -> bool:
        """Add to *key*, unless that takes the sum of *keys* above *maximum*. Before the last @ is their family."""
        with self._transaction() as conn:
            _lock(conn, family=key.rpartition("@")[0] or key)
            # Only now: the window moves on while others hold the lock.
            summed = list(keys() if callable(keys) else keys)
            given = {"key": key, "keys": summed, "amount": amount, "maximum": maximum, "ttl_s": ttl / 1_000}
            return bool(rows(conn, sql(__file__, "incr_and_sum_rate_limit"), given))

    def wait(self, key: str, timeout: int | None) -> bool:
        """Whether `wait_notify` of *key* comes within *timeout*; None waits for ever. Holds no connection meanwhile."""
        seconds = None if timeout is None else timeout / 1_000
        return bool(wait_for(lambda: self._changed("wait_rate_limit", key=key) or None, seconds))

    def wait_notify(self, key: str, ttl: int) -> None:
        """Let everybody go on who waits for *key*, or will within *ttl*."""
        self.add(key, 1, ttl)

    def _changed(self, name: str, **given: Any) -> bool:
        with self._transaction() as conn:
            return bool(rows(conn, sql(__file__, name), given))


def _lock(conn: Conn, family: str) -> None:
    conn.execute(sql(__file__, "lock_rate_limits"), {"family": family})


def arrive(conn: Conn, barrier: str, member: str, *, ttl_s: float) -> int | None:
    """Count *member* in at *barrier*, once however often it comes; how many are still missing, None without a barrier.

    The barrier, `Barrier.create(parties)`, lives for *ttl_s* seconds from now on, expired or not.
    """
    given = {"barrier": barrier, "member": member, "ttl_s": ttl_s}
    found = rows(conn, sql(__file__, "arrive"), given)
    return int(found[0][0]) if found else None


def prune(conn: Conn, *, limit: int = 1_000) -> int:
    """Delete up to *limit* counters whose time is over; how many went."""
    return conn.execute(sql(__file__, "prune_rate_limits"), {"limit": limit}).rowcount
