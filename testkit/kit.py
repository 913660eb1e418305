"""The kit: the worker's own claim loop without its threads, worked step by step in the test's thread."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Self

import dramatiq
import psycopg

from broker import Actor, PostgresBroker, installed
from middleware.capacity import Lane
from middleware.consumer import ClaimLoop, Held, Work
from middleware.lifecycle import Lifecycle
from middleware.metrics import meter
from middleware.time_limits import standing
from outbox import jobs
from outbox.db import Conn, connect, sql
from outbox.jobs import Settlement
from outbox.payload import encode
from outbox.relay import relay
from settings import load
from testkit.clock import Clock
from testkit.database import NAME, TellingDatabase, empty, prepare, url_for_tests
from testkit.facts import Asked, Endless, JobFailed, Ran, called, ran

QUEUE_CONNECTION = "posthouse testkit queue"
#: Time limits are looked at so often, as in a worker.
TICK_S = 0.1

Fault = Callable[[Work, list[Settlement]], list[Ran]]


class _Unstocked(Lane[Held]):
    """Nothing is claimed ahead: while a job runs, its neighbours wait in the table for a test to look at."""

    @property
    def stock_target(self) -> int:
        return 0


class _Witness(dramatiq.Middleware):
    """Keeps what actors raised, as the ledger only has its text."""

    def __init__(self) -> None:
        self.raised: dict[str, BaseException] = {}

    def after_process_message(
        self, broker: dramatiq.Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        if exception is not None:
            self.raised[message.message_id] = exception


class Kit:
    """Actors under test on the installed broker, and an empty ledger in the database at *url*; see `testkit`.

    Without *url* it is the application's own database's, with `_test` behind its name. The database is made when it is
    missing, migrated, and emptied. Raises NotATestDatabase when its name has no "test" in it.
    """

    def __init__(self, url: str | None = None) -> None:
        self.url = url or url_for_tests(load())
        if not isinstance(dramatiq.broker.global_broker, PostgresBroker):
            raise RuntimeError("no broker is installed: import your actors before you make a Kit")
        self._broker = installed()
        self._witness = _Witness()
        self._delivered: deque[Work] = deque()
        self._draining = False
        self._fault: Fault | None = None
        self._queue_conn: Conn | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        prepare(self.url)
        with ExitStack() as opened:
            #: For the test's own statements; in autocommit, rows as dicts.
            self.conn: Conn = opened.enter_context(closing(connect(self.url, name=NAME)))
            empty(self.conn)
            self.clock = Clock(self.conn)
            self._database = TellingDatabase(self.url, name=f"{NAME} pool", max_size=4)
            opened.callback(self._database.close)
            opened.enter_context(self._broker.working_with(self._database, self._witness))
            self._start()
            opened.callback(self._disconnect)
            lifecycle = Lifecycle()
            opened.callback(lifecycle.join, 2.0)
            opened.callback(lifecycle.stop)
            lifecycle.spawn("testkit control", lambda: self._control(lifecycle))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _start(self) -> None:
        """Be a worker process that has just started."""
        sizes = self._broker.batches()
        self._loop = ClaimLoop(
            connect=self._connect,
            lanes=[_Unstocked(name, 1, 0, batch=sizes.get(name, 1)) for name in self._broker.settings.queues],
            threads=1,
            worker_id=str(uuid.uuid4()),
            lease_s=self._broker.settings.lease_s,
            batch_of=self._broker.batch_of,
            deliver=self._delivered.append,
            on_event=lambda: None,
            meter=meter(),
            listens=False,
            probe_every_s=float("inf"),
        )

    def _connect(self) -> Conn:
        self._queue_conn = connect(self.url, name=QUEUE_CONNECTION, session=jobs.SESSION)
        return self._queue_conn

    def _disconnect(self) -> None:
        if self._queue_conn is not None:
            self._queue_conn.close()

    def _control(self, lifecycle: Lifecycle) -> None:
        """What a worker's control thread does for a running attempt: mind its limit, renew its lease."""
        renew_at = 0.0
        while not lifecycle.wait(TICK_S):
            now = time.monotonic()
            for guard in standing():
                guard.expire(now)
            if now >= renew_at and (held := self._loop.held()):
                renew_at = now + self._broker.settings.control_interval_s
                with self._database.transaction() as conn:
                    jobs.renew(conn, held, lease_s=self._broker.settings.lease_s)

    # What was asked for.

    def enqueued(self, actor: Actor | str | None = None) -> list[Asked]:
        """The jobs that were asked for, of *actor* or of all, in order, whatever has become of them."""
        name = actor if actor is None or isinstance(actor, str) else actor.actor_name
        return [Asked(**row) for row in self.conn.execute(sql(__file__, "enqueued"), {"actor": name})]

    def assert_enqueued(self, actor: Actor | str, *args: Any, **kwargs: Any) -> Asked:
        """The first job of *actor* with just these arguments; without one an AssertionError lists what there is."""
        asked = self.enqueued(actor)
        wanted = encode([list(args), kwargs], where="args")
        for one in asked:
            if encode([one.args, one.kwargs], where="args") == wanted:
                return one
        name = actor if isinstance(actor, str) else actor.actor_name
        there = asked or self.enqueued()
        listed = "\n".join(f"  {one}" for one in there[:20]) or "  nothing at all"
        raise AssertionError(f"not enqueued: {called(name, list(args), kwargs)}\nwhat was enqueued:\n{listed}")

    def job(self, job_id: str) -> dict[str, Any]:
        """One job with its attempts, as `outbox.jobs.load` tells it. Raises KeyError for an id there is not."""
        found = jobs.load(self.conn, job_id)
        if found is None:
            raise KeyError(job_id)
        return found

    # Running it.

    def drain(self, queue: str | None = None, *, raising: bool = False, at_most: int = 1_000) -> list[Ran]:
        """Turn events into jobs and run what is due, of *queue* or of all, until nothing is; what ran, in order.

        Jobs due later wait for the clock. *raising*: raise JobFailed at the first attempt that fails. Raises Endless
        after *at_most* attempts.
        """
        if self._draining:
            return []
        self._draining = True
        self._witness.raised.clear()
        done: list[Ran] = []
        try:
            while work := self._next(queue):
                done += self._perform(work)
                if raising:
                    self._raise_failure(done)
                if len(done) >= at_most:
                    raise Endless(f"{len(done)} attempts ran, and more are due; the last one: {done[-1]}")
        finally:
            self._draining = False
        return done

    @contextmanager
    def inline(self, *, raising: bool = False) -> Iterator[None]:
        """In the block jobs run where they are enqueued: `drain` follows each commit of this process's pool."""

        def committed() -> None:
            self.drain(raising=raising)

        self._database.committed = committed
        try:
            yield
        finally:
            self._database.committed = None

    def _next(self, queue: str | None) -> Work | None:
        if self._delivered:
            return self._delivered.popleft()
        while relay(self._broker.database.transaction, self._broker.subscriptions()):
            pass
        self._rescue()
        for name in self._broker.settings.queues if queue is None else [queue]:
            # One at a time: what a queue has due is not claimed before its turn.
            self._loop.step([name])
            if self._delivered:
                return self._delivered.popleft()
        return None

    def _rescue(self) -> None:
        while jobs.rescue(self.conn):
            pass

    def _perform(self, work: Work) -> list[Ran]:
        settlements = self._broker.perform(work.claims)
        fault, self._fault = self._fault, None
        return (fault or self._settle)(work, settlements)

    def _settle(self, work: Work, settlements: list[Settlement], outcome: str | None = None) -> list[Ran]:
        self._finish(work, settlements)
        self._loop.step(())
        return self._told(work, settlements, outcome)

    def _finish(self, work: Work, settlements: list[Settlement]) -> None:
        if upcoming := self._loop.finish(work, settlements):
            self._delivered.append(upcoming)

    def _told(self, work: Work, settlements: list[Settlement], outcome: str | None) -> list[Ran]:
        pairs = zip(work.claims, settlements, strict=True)
        return [ran(claim, end, jobs.load(self.conn, claim.id), outcome) for claim, end in pairs]

    def _raise_failure(self, done: list[Ran]) -> None:
        for one in done:
            if one.failed:
                raise JobFailed(str(one)) from self._witness.raised.get(one.id)

    # What may go wrong.

    @contextmanager
    def lost_lease(self) -> Iterator[None]:
        """In the block, the next attempt's lease runs out, and its job is rescued, before its end is written.

        The end is refused, as by any worker that froze for too long: the job is due again, charged as a crash.
        """

        def lose(work: Work, settlements: list[Settlement]) -> list[Ran]:
            self._expire_leases([claim.id for claim in work.claims])
            self._rescue()
            return self._settle(work, settlements, "lost")

        yield from self._once(lose)

    @contextmanager
    def crash_before_settle(self) -> Iterator[None]:
        """In the block, the process dies when the next attempt has run, before its end is written.

        The job stays running under its lease. Once the clock is beyond that (LEASE_S), it is rescued and runs again.
        """

        def crash(work: Work, settlements: list[Settlement]) -> list[Ran]:
            self._disconnect()
            self._delivered.clear()
            self._start()
            return self._told(work, settlements, "crashed")

        yield from self._once(crash)

    @contextmanager
    def lost_connection(self) -> Iterator[None]:
        """In the block, every session of the worker is ended when the next attempt has run, before its end is written.

        A lost session frees and repeats nothing: the end is written over the next one.
        """

        def cut(work: Work, settlements: list[Settlement]) -> list[Ran]:
            self._end_sessions()
            self._finish(work, settlements)
            try:
                self._loop.step(())
            except psycopg.OperationalError:
                self._loop.step(())
            return self._told(work, settlements, None)

        yield from self._once(cut)

    def _expire_leases(self, ids: list[str]) -> None:
        self.conn.execute(sql(__file__, "expire_leases"), {"ids": ids})

    def _end_sessions(self) -> None:
        for name in (QUEUE_CONNECTION, f"{NAME} pool"):
            self.conn.execute(sql(__file__, "end_sessions"), {"name": name})

    def _once(self, fault: Fault) -> Iterator[None]:
        self._fault = fault
        try:
            yield
            if self._fault is not None:
                raise AssertionError("no attempt ended in this block, so nothing went wrong")
        finally:
            self._fault = None
