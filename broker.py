"""The broker: Dramatiq's actors on the ledger. The only module that knows dramatiq_pg."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import dramatiq
import dramatiq_pg
import structlog
from dramatiq.broker import Consumer as BaseConsumer
from dramatiq.broker import MessageProxy
from dramatiq.middleware import Callbacks, CurrentMessage, Pipelines
from dramatiq_pg.schema import generate_init_sql

from middleware import boot, context, lifecycle, shutdown
from middleware.consumer import UndecodableMessage, UnknownActor
from middleware.failures import Backoff, Policy, Released, Schedule, Verdict, describe, judge, misjudged
from middleware.metrics import meter
from middleware.periodic import Cron, tick_id
from middleware.time_limits import Guard
from middleware.worker import WorkerProcess
from outbox import embedded, jobs, migrations
from outbox.db import Conn, Database, limit_statements
from outbox.jobs import Claim, NewJob, Settlement
from outbox.payload import clean, encode
from outbox.relay import Subscription
from settings import Settings, load, refuse

log = structlog.get_logger("posthouse.jobs")

MAX_RESULT_BYTES = 262_144
EXIT_BOOT = 70
STOPPING_S = 0.1
#: The limit itself comes first, so that a statement it ends is told as "timed out".
STATEMENT_GRACE_S = 0.3
_sequence = itertools.count()


class Job(MessageProxy):
    """A claimed job on its way through Dramatiq's worker. It prints as its name, never as its arguments."""

    def __init__(self, message: dramatiq.Message[Any], claim: Claim, actor: Actor) -> None:
        super().__init__(message)
        self.claim = claim
        self.actor = actor
        self.order = next(_sequence)
        self.began = time.monotonic()
        self.result: Any = None
        self.verdict: Verdict | None = None

    def __str__(self) -> str:
        return f"{self.claim.id} of {self.actor.actor_name}"

    def __repr__(self) -> str:
        return f"<Job {self}>"

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Job) and self.order < other.order

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Actor(dramatiq.Actor[Any, Any]):
    """An actor whose call is guarded by its time limit, and which can say what a job for it looks like."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        job = context.current()
        if not isinstance(job, Job) or job.actor is not self:
            return self.fn(*args, **kwargs)
        if lifecycle.process.stopping:
            raise Released
        process = cast(PostgresBroker, self.broker).working
        guard = process.guards[job.claim.token] = Guard(self.time_limit_s)
        job.began = time.monotonic()
        try:
            return guard.run(self.fn, *args, **kwargs)
        finally:
            process.guards.pop(job.claim.token, None)

    @property
    def policy(self) -> Policy:
        return cast(Policy, self.options.get("policy") or Policy())

    @property
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
        )

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
        return {"policy", "time_limit_s", "subscriptions", "periodic", "throws"}

    def before_worker_boot(self, broker: PostgresBroker, worker: dramatiq.Worker) -> None:
        try:
            broker.boot(worker)
        except Exception as error:
            log.critical("boot.failed", exc_info=True)
            refuse(f"this process could not start: {type(error).__name__}", EXIT_BOOT)

    def before_worker_shutdown(self, broker: PostgresBroker, worker: dramatiq.Worker) -> None:
        if broker.process is not None and (code := shutdown.stop(broker.process)):
            raise SystemExit(code)

    def before_process_message(self, broker: PostgresBroker, message: Job) -> None:
        context.enter(message)

    def after_process_message(
        self, broker: PostgresBroker, message: Job, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        context.leave()
        message.result = result
        message.verdict = _judged(message, exception)
        if message.verdict.state == "rejected":
            message.fail()

    after_skip_message = after_process_message


def _judged(job: Job, error: BaseException | None) -> Verdict:
    policy = job.actor.policy
    if job.claim.max_attempts is not None:
        policy = replace(policy, max_attempts=job.claim.max_attempts)
    return judge(error, attempt=job.claim.attempt, snoozed_s=job.claim.snoozed_s, policy=policy)


class Consumer(BaseConsumer):
    """A queue's consumer as Dramatiq wants one. Jobs come by the claim loop, so it only waits; it hands in verdicts."""

    def __init__(self, process: WorkerProcess, timeout_s: float) -> None:
        self._process = process
        self._timeout_s = timeout_s

    def __next__(self) -> None:
        # Dramatiq asks on until it stops its consumers, which is after the running jobs' grace.
        if self._process.lifecycle.wait(self._timeout_s):
            time.sleep(STOPPING_S)

    def ack(self, message: Job) -> None:
        try:
            verdict = message.verdict or _judged(message, message._exception)
            settlement = _settlement(message, verdict)
        except Exception as error:  # noqa: BLE001 - a job whose end cannot be told must end all the same
            verdict = misjudged(error)
            settlement = _settlement(message, verdict)
        seconds = time.monotonic() - message.began
        self._process.loop.finish(settlement)
        meter().attempt(message.claim.queue, message.actor.actor_name, settlement.outcome or verdict.state, seconds)
        _tell(message, verdict, settlement, seconds)

    nack = ack

    def requeue(self, messages: object) -> None:
        """Nothing: the claim loop has given back what was not started."""

    def close(self) -> None:
        """Nothing: the connection is the claim loop's."""


def _settlement(job: Job, verdict: Verdict) -> Settlement:
    error = job._exception
    error_class, text, trace = describe(error) if error is not None and verdict.outcome else (None, None, None)
    return Settlement(
        job.claim.id,
        job.claim.token,
        verdict.state,
        delay_s=verdict.delay_s,
        refund=0 if verdict.charged else 1,
        snoozed_s=verdict.snoozed_s,
        result=_result(job) if verdict.state == "done" else None,
        outcome=verdict.outcome,
        error_class=error_class,
        error=clean(verdict.reason, 8_192) if verdict.outcome else text,
        traceback=trace,
    )


def _result(job: Job) -> str | None:
    if job.result is None:
        return None
    try:
        return encode(job.result, where="result", max_bytes=MAX_RESULT_BYTES)
    except Exception as fault:  # noqa: BLE001 - a value of the actor's own types may raise what it likes
        return encode({"error": f"the result could not be stored: {fault}"}, where="result")


def _tell(job: Job, verdict: Verdict, settlement: Settlement, seconds: float) -> None:
    told = {"job_id": job.claim.id, "actor": job.actor.actor_name, "attempt": job.claim.attempt}
    if verdict.outcome:
        told |= {"outcome": verdict.outcome, "error_class": settlement.error_class}
    match verdict:
        case Verdict(state="done"):
            log.debug("job.completed", **told, seconds=round(seconds, 3))
        case Verdict(state="rejected"):
            log.error("job.discarded", **told)
        case Verdict(outcome=None):
            log.info("job.put_back", **told, due_in_s=round(verdict.delay_s, 1))
        case _:
            log.warning("job.failed", **told, due_in_s=round(verdict.delay_s, 1))


class PostgresBroker(dramatiq_pg.PostgresBroker):
    """dramatiq-pg's table and messages, with our own consumer: see `middleware.consumer`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(pool=object(), results=False, middleware=[CurrentMessage(), Callbacks(), Pipelines(), Hooks()])
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

    def declare_actor(self, actor: Actor) -> None:
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
        """Add *message* in a transaction of its own, due *delay* milliseconds from now. Raises jobs.BadJob."""
        self.emit_before("enqueue", message, delay)
        with self.database.transaction() as conn:
            jobs.enqueue(conn, self._job(message, delay))
        self.emit_after("enqueue", message, delay)
        return message

    def enqueue_tick(self, actor: Actor, tick: dramatiq.Message[Any]) -> None:
        """Add a periodic run, unless that tick is there already or its predecessor has not ended."""
        with self.database.transaction() as conn:
            job = replace(self._job(tick, None), unique_key=f"periodic:{actor.actor_name}")
            if not jobs.enqueue(conn, job).inserted:
                log.info("tick.skipped", actor=actor.actor_name)

    def _job(self, message: dramatiq.Message[Any], delay_ms: int | None) -> NewJob:
        actor = self.actors.get(message.actor_name)
        options = dict(message.options)
        return NewJob(
            id=message.message_id,
            queue=message.queue_name,
            actor=message.actor_name,
            args=message.args,
            kwargs=message.kwargs,
            priority=options.pop("priority", actor.priority if actor else 0),
            unique_key=options.pop("unique_key", None),
            options=options,
            delay_s=(delay_ms or 0) / 1000,
            max_attempts=actor.policy.max_attempts if actor else None,
        )

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
            queues=queues,
            threads=worker.worker_threads,
            database=self.database,
            lifecycle=lifecycle.process,
            subscriptions=self.subscriptions(),
            prepare=self._prepare,
            deliver=lambda job: worker.work_queue.put((cast(Job, job).claim.priority, job)),
        )
        self.process.start()

    def time_left_s(self) -> float | None:
        """Seconds to the time limit of this thread's job; None outside a job."""
        job = context.current()
        guard = self.process.guards.get(job.claim.token) if self.process and isinstance(job, Job) else None
        return None if guard is None else guard.left_s

    @property
    def working(self) -> WorkerProcess:
        """The process that `boot` started. Raises RuntimeError before."""
        if self.process is None:
            raise RuntimeError("this process works no queue: the broker has not booted")
        return self.process

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Consumer:
        return Consumer(self.working, timeout / 1000)

    def subscriptions(self) -> list[Subscription]:
        return [wish for actor in self.actors.values() for wish in actor.options.get("subscriptions", ())]

    def _prepare(self, claim: Claim) -> Job:
        message = claim.message
        if not isinstance(message, dict):
            raise UndecodableMessage(f"a JSON object is wanted, not {type(message).__name__}")
        for name, kind in (("actor_name", str), ("args", list), ("kwargs", dict), ("options", dict)):
            if not isinstance(message.get(name), kind):
                raise UndecodableMessage(f"{name} is missing or not a {kind.__name__}")
        actor = self.actors.get(message["actor_name"])
        if actor is None:
            raise UnknownActor(message["actor_name"])
        return Job(
            dramatiq.Message(
                queue_name=claim.queue,
                actor_name=message["actor_name"],
                args=tuple(message["args"]),
                kwargs=message["kwargs"],
                # A class does not travel in JSON; Dramatiq would take what is there for one and lose the thread.
                options={name: value for name, value in message["options"].items() if name != "throws"},
                message_id=claim.id,
                message_timestamp=message.get("message_timestamp", 0),
            ),
            claim,
            actor,
        )


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
) -> Callable[[Callable[..., Any]], Actor]:
    """Declare an actor: where it runs, for which events, within which limits, how it fails.

    *on*: globs of event types; for each event one job with its *argument*. *time_limit_s* None: the queue's. *throws*:
    exceptions that are final at once. Ends the process (78) for a queue that QUEUES does not declare.
    """
    globs = (on,) if isinstance(on, str) else on
    policy = Policy(max_attempts=attempts, backoff=backoff or Backoff(), throws=throws)
    wishes = [
        Subscription(glob, name, queue, argument=argument, coalesce=coalesce, priority=priority, max_attempts=attempts)
        for glob in globs
    ]
    options = {"policy": policy, "subscriptions": wishes, "time_limit_s": time_limit_s}
    if periodic is not None:
        options["periodic"] = periodic
    return dramatiq.actor(actor_class=Actor, actor_name=name, queue_name=queue, priority=priority, **options)  # type: ignore[call-overload,no-any-return]


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
