"""The broker: Dramatiq's actors on the ledger. The only module that knows dramatiq_pg."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

import dramatiq
import dramatiq_pg
import structlog
from dramatiq.broker import Consumer as BaseConsumer
from dramatiq.errors import QueueJoinTimeout, QueueNotFound
from dramatiq.middleware import CurrentMessage, MiddlewareError
from dramatiq_pg.schema import generate_init_sql

from middleware import boot, context, declarations, lifecycle, shutdown
from middleware.batches import perform_batch
from middleware.composition import Composition
from middleware.consumer import Work
from middleware.failures import Backoff, Policy, Released, Schedule
from middleware.keeper import Kind
from middleware.perform import Job, perform
from middleware.periodic import Cron, tick_id
from middleware.rate_limits import RateLimits
from middleware.results import LedgerResults, ReadResults
from middleware.time_limits import guard, guarded
from middleware.waiting import wait_for
from middleware.worker import WorkerProcess
from outbox import backlog, embedded, jobs, migrations
from outbox.db import Conn, Database, limit_statements
from outbox.enqueue import unique_by_args
from outbox.jobs import Claim, Settlement
from outbox.newjob import BadJob, NewJob, check
from outbox.relay import Subscription
from settings import Settings, load, refuse

log = structlog.get_logger("posthouse.jobs")

EXIT_BOOT = 70
STOPPING_S = 0.1
#: The limit itself comes first, so that a statement it ends is told as "timed out".
STATEMENT_GRACE_S = 0.3
#: Options of an actor and of a message that a job has as columns.
LIMITS = ("limit_key", "limit", "rate_per_s", "rate_burst")


class Errand:
    """What is put on Dramatiq's work queue: *work* for a thread, which goes on with what is next until none is.

    A message to Dramatiq's worker, for an actor that only the broker knows; its hooks never hear of it.
    """

    actor_name = "posthouse.errand"
    message_id = "-"
    kwargs: ClassVar[dict[str, Any]] = {}
    options: ClassVar[dict[str, Any]] = {}
    failed = False

    def __init__(self, work: Work) -> None:
        #: Emptied by the thread that takes it: it goes on with other work for hours, say.
        self.args = ([work],)
        self.queue_name = work.lane.name

    def stuff_exception(self, error: BaseException) -> None:
        """Nothing: `perform` lets none through but the interpreter's own."""

    def clear_exception(self) -> None:
        """Nothing to clear."""

    def __lt__(self, other: object) -> bool:
        return False


class Actor(dramatiq.Actor[Any, Any]):
    """An actor whose call is guarded by its time limit, and which can say what a job for it looks like."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        job = context.current()
        if not isinstance(job, Job) or cast(object, job.actor) is not self or guarded():
            return self.fn(*args, **kwargs)
        if lifecycle.process.stopping:
            raise Released
        return guard(self.time_limit_s, self.fn, args, kwargs)

    @cached_property
    def policy(self) -> Policy:
        return cast(Policy, self.options.get("policy") or Policy())

    @cached_property
    def batch(self) -> int:
        """How many jobs one call takes at most."""
        return int(self.options.get("batch") or 1)

    @cached_property
    def time_limit_s(self) -> float:
        return float(self.options.get("time_limit_s") or load().queues[self.queue_name].time_limit_s)

    def job(self, *args: Any, **kwargs: Any) -> NewJob:
        """A job for this actor, to be handed to `outbox.jobs.enqueue` in the transaction that wants it done."""
        return NewJob(
            queue=self.queue_name,
            actor=self.actor_name,
            args=args,
            kwargs=kwargs,
            priority=self.priority,
            max_attempts=self.policy.max_attempts,
            unique_key=self.unique_key(args, kwargs),
            **self.limits(),
        )

    def unique_key(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """What makes a job with these arguments unique; None for an actor without `unique`. Raises jobs.BadJob."""
        return unique_by_args(self.actor_name, args, kwargs) if self.options.get("unique") else None

    def limits(self, **asked: Any) -> dict[str, Any]:
        """The limits of a job as NewJob has them: the actor's, and over them what was *asked* for this one."""
        return _limits(self.actor_name, {**self.options.get("limits", {}), **asked})

    def send_with_options(self, *, scheduled_at: str | None = None, **options: Any) -> dramatiq.Message[Any]:
        """Dramatiq's own; with *scheduled_at* (the scheduler's) it is a tick, which exists once however often sent."""
        if scheduled_at is None:
            return super().send_with_options(**options)
        message = self.message_with_options(scheduled_at=scheduled_at)
        tick = message.copy(message_id=tick_id(self.actor_name, scheduled_at))
        cast(PostgresBroker, self.broker).enqueue_tick(self, tick)
        return tick


class Hooks(dramatiq.Middleware):
    """Where Dramatiq calls us. It swallows what a hook raises, so nothing that must happen lives in one but the boot,
    whose refusals (SystemExit) pass."""

    @property
    def actor_options(self) -> set[str]:
        return {"policy", "time_limit_s", "subscriptions", "periodic", "throws", "batch", "unique", "limits"}

    def before_worker_boot(self, broker: PostgresBroker, worker: dramatiq.Worker) -> None:
        try:
            broker.boot(worker)
        except Exception as error:
            log.critical("boot.failed", exc_info=True)
            refuse(f"this process could not start: {type(error).__name__}", EXIT_BOOT)

    def before_worker_shutdown(self, broker: PostgresBroker, worker: dramatiq.Worker) -> None:
        if broker.process is not None and (code := shutdown.stop(broker.process)):
            raise SystemExit(code)


class Consumer(BaseConsumer):
    """A queue's consumer as Dramatiq wants one. Jobs come by the claim loop and end there, so it only waits."""

    def __init__(self, lifecycle: lifecycle.Lifecycle, timeout_s: float) -> None:
        self._lifecycle = lifecycle
        self._timeout_s = timeout_s

    def __next__(self) -> None:
        # Dramatiq asks on until it stops its consumers, which is after the running jobs' grace.
        if self._lifecycle.wait(self._timeout_s):
            time.sleep(STOPPING_S)

    def ack(self, message: object) -> None:
        """Nothing: an errand has handed in its settlements."""

    nack = ack

    def requeue(self, messages: object) -> None:
        """Nothing: the claim loop has given back what was not started."""

    def close(self) -> None:
        """Nothing: the connection is the claim loop's."""


class PostgresBroker(dramatiq_pg.PostgresBroker):
    """dramatiq-pg's table and messages, with our own consumer: see `middleware.consumer`."""

    def __init__(self, settings: Settings) -> None:
        self._heard: dict[tuple[str, str], tuple[int, list[Callable[..., None]]]] = {}
        #: For Dramatiq's rate limiters: `ConcurrentRateLimiter(broker.rate_limits, "printer", limit=1)`.
        self.rate_limits = RateLimits(self._transaction)
        super().__init__(
            pool=object(),
            results=False,
            middleware=[
                CurrentMessage(),
                Composition(self.rate_limits, self._transaction),
                ReadResults(backend=LedgerResults(self._transaction)),
                Hooks(),
            ],
        )
        self.settings = settings
        self.process: WorkerProcess | None = None
        #: What must be true, by queue, before a process works it; may refuse the boot.
        self.boot_checks: dict[str, Callable[[], None]] = {}
        self._database: Database | None = None

    # Producing.

    @property
    def database(self) -> Database:
        """The process's pool; opened when first used."""
        if self._database is None:
            self._database = Database(database_url(self.settings), name="posthouse", max_size=3)
        return self._database

    @database.setter
    def database(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def working_with(self, database: Database, *middleware: dramatiq.Middleware) -> Iterator[None]:
        """For the block, *database* is the process's pool, and *middleware* listens too; for the test kit."""
        former, self._database = self._database, database
        self.middleware.extend(middleware)
        self._heard.clear()
        try:
            yield
        finally:
            self._database = former
            for each in middleware:
                self.middleware.remove(each)
            self._heard.clear()

    def _transaction(self) -> AbstractContextManager[Conn]:
        return self.database.transaction()

    def declare_actor(self, actor: Actor) -> None:
        """Ends the process (78) for an actor without limits of its own, or on a queue that QUEUES does not declare."""
        if not isinstance(actor, Actor):
            refuse(f"actor {actor.actor_name} is declared by dramatiq.actor; declare it by broker.actor")
        if actor.queue_name not in self.settings.queues:
            refuse(f"actor {actor.actor_name} is on queue {actor.queue_name!r}, which QUEUES does not declare")
        super().declare_actor(actor)

    def declare_queue(self, queue_name: str) -> None:
        """Known by name only: the rows are in one table. No delay queues, the table holds delayed jobs until due."""
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = True
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: dramatiq.Message[Any], *, delay: int | None = None) -> dramatiq.Message[Any]:
        """Add *message* in a transaction of its own, due *delay* milliseconds from now. Raises jobs.BadJob.

        When its id or unique key was there already, the answer is a message that has the id of the job that was first,
        which its option `duplicate_of` says too.
        """
        self.emit_before("enqueue", message, delay)
        with self.database.transaction() as conn:
            first = jobs.enqueue(conn, self._job(message, delay)).duplicate_of
        self.emit_after("enqueue", message, delay)
        return message.copy(message_id=first, options={"duplicate_of": first}) if first else message

    def enqueue_tick(self, actor: Actor, tick: dramatiq.Message[Any]) -> None:
        """Add a periodic run, unless that tick is there already or its predecessor has not ended."""
        with self.database.transaction() as conn:
            job = replace(self._job(tick, None), unique_key=f"periodic:{actor.actor_name}")
            if not jobs.enqueue(conn, job).inserted:
                log.info("tick.skipped", actor=actor.actor_name)

    def _job(self, message: dramatiq.Message[Any], delay_ms: int | None) -> NewJob:
        if message.queue_name not in self.settings.queues:
            raise BadJob(f"{message.actor_name}: queue {message.queue_name!r} is not declared in QUEUES")
        actor = self.actors.get(message.actor_name)
        options = {name: value for name, value in message.options.items() if name != "duplicate_of"}
        asked = {name: options.pop(name) for name in LIMITS if name in options}
        unique_key = options.pop("unique_key", None) or (actor and actor.unique_key(message.args, message.kwargs))
        return NewJob(
            id=message.message_id,
            queue=message.queue_name,
            actor=message.actor_name,
            args=message.args,
            kwargs=message.kwargs,
            priority=options.pop("priority", actor.priority if actor else 0),
            unique_key=unique_key,
            options=options,
            delay_s=(delay_ms or 0) / 1000,
            max_attempts=actor.policy.max_attempts if actor else None,
            **(actor.limits(**asked) if actor else _limits(message.actor_name, asked)),
        )

    # In tests, as Dramatiq's users write them.

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """Wait until no job of the queue waits, is delayed or runs; *timeout* in milliseconds, None: for ever.

        The workers are other processes, so there is no `worker.join()`. Without workers use `testkit`. Raises
        dramatiq.errors.QueueNotFound, QueueJoinTimeout.
        """
        self._declared(queue_name)
        seconds = None if timeout is None else timeout / 1_000
        if not wait_for(lambda: not self._unfinished(queue_name) or None, seconds):
            raise QueueJoinTimeout(queue_name)

    def flush(self, queue_name: str) -> None:
        """Delete every job of the queue that waits or is delayed; what runs goes on. Raises QueueNotFound."""
        self._declared(queue_name)
        with self.database.transaction() as conn:
            backlog.flush(conn, queue_name)

    def flush_all(self) -> None:
        """`flush` each queue that has an actor here."""
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def _unfinished(self, queue_name: str) -> bool:
        with self.database.transaction() as conn:
            return backlog.unfinished(conn, queue_name)

    def _declared(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)

    # Consuming.

    def boot(self, worker: dramatiq.Worker) -> None:
        """Check what must be true, then start this process's threads. Raises SystemExit (69, 78) with one line."""
        queues = sorted(worker.consumer_whitelist or self.queues)
        if unknown := [name for name in queues if name not in self.settings.queues]:
            refuse(f"queue {unknown[0]!r} is not declared in QUEUES; declared: {', '.join(self.settings.queues)}")
        url = database_url(self.settings)
        boot.check(self.settings, url, self.subscriptions())
        self.database = Database(url, name="posthouse", max_size=worker.worker_threads + 1)
        for name in queues:
            self.boot_checks.get(name, lambda: None)()
            self.declare_queue(name)
        listen_url = self.settings.database_listen_url
        self.process = WorkerProcess(
            settings=self.settings,
            url=url,
            listen_url=listen_url.get_secret_value() if listen_url else url,
            listens=boot.listens(self.settings, url),
            queues=queues,
            actors=sorted(self.actors),
            threads=worker.worker_threads,
            database=self.database,
            lifecycle=lifecycle.process,
            subscriptions=self.subscriptions(),
            batch_of=self.batch_of,
            batches=self.batches(),
            deliver=lambda work: worker.work_queue.put((0, Errand(work))),
        )
        self.process.start()

    def time_left_s(self) -> float | None:
        """Seconds to the time limit of this thread's job; None outside a job."""
        return None if (standing := guarded()) is None else standing.left_s

    @property
    def working(self) -> WorkerProcess:
        """The process that `boot` started. Raises RuntimeError before."""
        if self.process is None:
            raise RuntimeError("this process works no queue: the broker has not booted")
        return self.process

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        return Consumer(self.working.lifecycle, timeout / 1000)

    def kind(self, actor_name: str | None, queue: str) -> Kind | None:
        """Time limit and policy of a job: its actor's, or its queue's when the actor is unknown; None when both are."""
        if actor := self.actors.get(actor_name):
            return Kind(actor.time_limit_s, actor.policy)
        known = self.settings.queues.get(queue)
        return Kind(known.time_limit_s, Policy()) if known else None

    def subscriptions(self) -> list[Subscription]:
        return [wish for actor in self.actors.values() for wish in actor.options.get("subscriptions", ())]

    def _run(self, errand: list[Work]) -> None:
        """An errand: *work*, and what comes after it, in the thread that Dramatiq lends."""
        finish = self.working.loop.finish
        work: Work | None = errand.pop()
        while work is not None:
            work = finish(work, self.perform(work.claims))

    def perform(self, claims: Sequence[Claim]) -> list[Settlement]:
        """Run a job, or a batch of one actor's, in this thread; how each attempt ended. Raises nothing."""
        if self.batch_of(claims[0].actor) > 1:
            return perform_batch(self, claims)
        return [perform(self, claims[0])]

    def batch_of(self, actor_name: str | None) -> int:
        """How many jobs one call of that actor takes; 0 for one that is unknown."""
        actor = self.actors.get(actor_name)
        return 0 if actor is None else actor.batch

    def batches(self) -> dict[str, int]:
        """By queue, the most jobs that one call of its actors takes."""
        sizes: dict[str, int] = {}
        for actor in self.actors.values():
            sizes[actor.queue_name] = max(actor.batch, sizes.get(actor.queue_name, 1))
        return sizes

    def get_actor(self, actor_name: str) -> Any:
        return self._run if actor_name == Errand.actor_name else super().get_actor(actor_name)

    # Dramatiq asks every middleware at every signal; here only those are asked that have something to say.

    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if args and type(args[0]) is Errand:
            return
        for hook in self._hooks("before_", signal):
            try:
                hook(self, *args, **kwargs)
            except MiddlewareError:
                raise
            except Exception:
                self.logger.critical("Unexpected failure in before_%s.", signal, exc_info=True)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if args and type(args[0]) is Errand:
            return
        for hook in reversed(self._hooks("after_", signal)):
            try:
                hook(self, *args, **kwargs)
            except Exception:
                self.logger.critical("Unexpected failure in after_%s.", signal, exc_info=True)

    def emit_ending(self, signal: str, job: Any) -> None:
        """A message's acknowledgement, ack or nack, before and after; mostly nobody listens."""
        if self._hooks("before_", signal) or self._hooks("after_", signal):
            self.emit_before(signal, job)
            self.emit_after(signal, job)

    def _hooks(self, when: str, what: str) -> list[Callable[..., None]]:
        known = self._heard.get((when, what))
        if known is None or known[0] != len(self.middleware):
            signal = when + what
            silent = getattr(dramatiq.Middleware, signal, None)
            hooks = [
                getattr(each, signal)
                for each in self.middleware
                if getattr(type(each), signal, silent) is not silent or signal in vars(each)
            ]
            known = self._heard[when, what] = (len(self.middleware), hooks)
        return known[1]


# What actor files use.


def actor(
    *,
    name: str,
    queue: str,
    on: str | tuple[str, ...] = (),
    argument: Literal["event_id", "subject"] = "event_id",
    coalesce: bool = False,
    time_limit_s: float | None = None,
    attempts: int = 10,
    backoff: Backoff | Schedule | None = None,
    throws: tuple[type[BaseException], ...] = (),
    periodic: Cron | None = None,
    priority: int = 0,
    unique: Literal["args"] | None = None,
    limit: int | None = None,
    rate_per_s: float | None = None,
    rate_burst: int | None = None,
    limit_key: str | None = None,
    batch: int = 1,
    **dramatiq_options: Any,
) -> Callable[[Callable[..., Any]], Actor]:
    """Declare an actor: where it runs, for which events, within which limits, how it fails.

    *batch* above 1: it is called with a list of so many `Item`s at most, and says of each what became of it.

    *on*: globs of event types; for each event one job with its *argument*. *time_limit_s* None: the queue's. *throws*:
    exceptions that are final at once. *dramatiq_options*: `on_success`, `on_failure` (names of actors), `pipe_ignore`;
    ends the process (78) for one that nobody knows, and for a queue that QUEUES does not declare.

    *unique*: no second job with the same arguments while one is unfinished. *limit*: so many run at once, over all
    processes; *rate_per_s*, *rate_burst*: so many start; both among the jobs of one *limit_key*, the actor's name when
    None. A message's options of these names are stronger. Ends the process (78) for what cannot be.
    """
    globs = (on,) if isinstance(on, str) else on
    for fault in declarations.faults(
        batch=batch,
        time_limit_s=time_limit_s,
        backoff=backoff,
        throws=throws,
        periodic=periodic,
        unique=unique,
        argument=argument,
    ):
        refuse(f"actor {name}: {fault}")
    told = {"limit_key": limit_key, "limit": limit, "rate_per_s": rate_per_s, "rate_burst": rate_burst}
    limits = {option: value for option, value in told.items() if value is not None}
    _check(NewJob(queue=queue, actor=name, priority=priority, max_attempts=attempts, **_limits(name, limits)))
    if unique and globs:
        refuse(f"actor {name} is unique and has on=: an event during a run would be lost; use coalesce=True")
    policy = Policy(max_attempts=attempts, backoff=backoff or Backoff(), throws=throws)
    wishes = [
        Subscription(
            glob,
            name,
            queue,
            argument=argument,
            coalesce=coalesce,
            priority=priority,
            max_attempts=attempts,
            limits=_limits(name, limits),
        )
        for glob in globs
    ]
    options = {
        **dramatiq_options,
        "policy": policy,
        "subscriptions": wishes,
        "time_limit_s": time_limit_s,
        "batch": batch,
        "unique": unique,
        "limits": limits,
    }
    if periodic is not None:
        options["periodic"] = periodic

    def declare(function: Callable[..., Any]) -> Actor:
        if inspect.iscoroutinefunction(function):
            refuse(f"actor {name}: async def is not for actors here; its threads run plain functions")
        try:
            return cast(
                Actor,
                dramatiq.actor(
                    function, actor_class=Actor, actor_name=name, queue_name=queue, priority=priority, **options
                ),
            )
        except ValueError as fault:
            refuse(f"actor {name}: {fault}")

    return declare


def _limits(actor_name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What is *asked*, and the key when nobody named one: the actor's name."""
    limited = any(asked.get(name) is not None for name in ("limit", "rate_per_s"))
    return {"limit_key": actor_name, **asked} if limited else asked


def _check(job: NewJob) -> None:
    try:
        check([job])
    except BadJob as fault:
        refuse(f"actor {fault}")


@contextmanager
def transaction() -> Iterator[Conn]:
    """One transaction on this process's pool; no network call may be made inside it.

    In a job its statements end with the attempt's time limit (psycopg.errors.QueryCanceled): a thread that waits for
    the database cannot be interrupted otherwise.
    """
    broker = installed()
    with broker.database.transaction() as conn:
        if (left_s := broker.time_left_s()) is not None:
            limit_statements(conn, left_s + STATEMENT_GRACE_S)
        yield conn


def install(settings: Settings) -> PostgresBroker:
    """Make a broker Dramatiq's own, for the actors about to be declared."""
    broker = PostgresBroker(settings)
    dramatiq.set_broker(broker)
    return broker


def installed() -> PostgresBroker:
    return cast(PostgresBroker, dramatiq.get_broker())


def database_url(settings: Settings) -> str:
    """DATABASE_URL, or the embedded server's when that runs; else SystemExit 69 with what to do."""
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    return embedded.running_url(settings.data_dir) or refuse(
        "no database: DATABASE_URL is unset and the embedded Postgres is not running; start it with `make run`",
        boot.EXIT_UNAVAILABLE,
    )


def migration_steps() -> list[migrations.Step]:
    """Every step of the schema, dramatiq-pg's own DDL first."""
    return migrations.steps(generate_init_sql())
