"""Who is measured: Posthouse, the raw loop as the limit, and the stock dramatiq-pg. A class each, a database each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import LiteralString, Protocol

import dramatiq
from dramatiq_pg import PostgresBroker, generate_init_sql

from bench.figures import OURS
from bench.processes import Command, environment
from outbox import jobs, migrations
from outbox.db import Conn, connect
from outbox.jobs import NewJob

THREADS = 8
A_STATEMENT = 1_000

#: The shipped queues made small, so that the one that is measured fits into the connection budget.
SHIPPED = {name: {"threads": 1} for name in ("index", "notify", "webhook", "maintenance", "fetch", "tasks")}


class Peer(Protocol):
    """A job queue on the database at *url*.

    *times*: it drains so many times the jobs, to work long enough to be timed. *has_bulk*: `fill` is what its users
    would call. *empty* and *unfinished* (a count) are statements; *ended* selects when each completed job did, as "at".
    """

    name: str
    url: str
    times: int
    has_bulk: bool
    empty: LiteralString
    unfinished: LiteralString
    ended: LiteralString

    def fill(self, conn: Conn, count: int) -> None:
        """Put in *count* no-op jobs that are due."""

    def send(self, conn: Conn, count: int) -> None:
        """Enqueue *count* jobs, each in a transaction of its own."""

    def workers(self, folder: Path, processes: int) -> list[Command]:
        """What works its jobs, with *folder* to write to."""


class Posthouse:
    """Ours, through its own functions and the `dramatiq` command."""

    name = OURS
    times = 1
    has_bulk = True
    empty = "TRUNCATE dramatiq.queue, posthouse.attempts, posthouse.events CASCADE"
    unfinished = "SELECT count(*) AS n FROM dramatiq.queue WHERE state IN ('queued', 'consumed')"
    ended = "SELECT finished_at AS at FROM dramatiq.queue WHERE state = 'done'"

    def __init__(self, url: str) -> None:
        self.url = url
        migrations.migrate(url, migrations.steps(generate_init_sql()))

    def fill(self, conn: Conn, count: int) -> None:
        for first in range(0, count, A_STATEMENT):
            numbers = range(first, min(count, first + A_STATEMENT))
            jobs.enqueue_many(conn, [_noop(number) for number in numbers])

    def send(self, conn: Conn, count: int) -> None:
        for number in range(count):
            jobs.enqueue(conn, _noop(number))

    def workers(self, folder: Path, processes: int, *, awaited: bool = False, **told: str) -> list[Command]:
        measured = {"threads": THREADS, "time_limit_s": 30, "awaited": awaited}
        told |= {
            "DATABASE_URL": self.url,
            "DATA_DIR": str(folder / "data"),
            "QUEUES": json.dumps({**SHIPPED, "bench": measured}),
        }
        return [Command(_dramatiq("bench.actors", processes, "--queues", "bench"), environment(**told))]


def _noop(number: int) -> NewJob:
    return NewJob(queue="bench", actor="bench.noop", args=[number])


class Raw:
    """A table, an index, and a loop."""

    name = "raw loop"
    times = 5
    has_bulk = True
    empty = "TRUNCATE job"
    unfinished = "SELECT count(*) AS n FROM job WHERE state <> 'done'"
    ended = "SELECT done_at AS at FROM job WHERE state = 'done'"

    def __init__(self, url: str) -> None:
        self.url = url
        with connect(url, name="bench") as conn:
            conn.execute(
                """
                CREATE TABLE job (
                    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                    state text NOT NULL DEFAULT 'queued',
                    run_at timestamptz NOT NULL DEFAULT now(),
                    claimed_at timestamptz,
                    done_at timestamptz,
                    payload jsonb NOT NULL
                )
                """
            )
            conn.execute("CREATE INDEX job_claim ON job (run_at, id) WHERE state = 'queued'")

    def fill(self, conn: Conn, count: int) -> None:
        for first in range(0, count, A_STATEMENT):
            with conn.cursor().copy("COPY job (payload) FROM STDIN") as copy:
                for number in range(first, min(count, first + A_STATEMENT)):
                    copy.write_row([_payload(number)])

    def send(self, conn: Conn, count: int) -> None:
        for number in range(count):
            conn.execute("INSERT INTO job (payload) VALUES (%s)", [_payload(number)])

    def workers(self, folder: Path, processes: int) -> list[Command]:
        return [Command([sys.executable, "-m", "bench.raw"], environment(DATABASE_URL=self.url))] * processes


def _payload(number: int) -> str:
    return f'{{"name":"noop","number":{number}}}'


class Stock:
    """Dramatiq-pg as it comes, without results and metrics. It has no bulk enqueue."""

    name = "dramatiq-pg"
    times = 1
    has_bulk = False
    empty = "TRUNCATE dramatiq.queue"
    unfinished = "SELECT count(*) AS n FROM dramatiq.queue WHERE state IN ('queued', 'consumed')"
    ended = "SELECT mtime AS at FROM dramatiq.queue WHERE state = 'done'"

    def __init__(self, url: str) -> None:
        self.url = url
        with connect(url, name="bench") as conn:
            conn.execute(generate_init_sql())

    def fill(self, conn: Conn, count: int) -> None:
        messages = [_message(number) for number in range(count)]
        with conn.cursor().copy("COPY dramatiq.queue (queue_name, message_id, state, message) FROM STDIN") as copy:
            for message in messages:
                copy.write_row(["bench", message.message_id, "queued", message.encode().decode()])

    def send(self, conn: Conn, count: int) -> None:
        broker = PostgresBroker(url=self.url, results=False, middleware=[])
        for number in range(count):
            broker.enqueue(_message(number))
        broker.pool.closeall()

    def workers(self, folder: Path, processes: int) -> list[Command]:
        return [Command(_dramatiq("bench.stock", processes, "--skip-logging"), environment(DATABASE_URL=self.url))]


def _message(number: int) -> dramatiq.Message[None]:
    return dramatiq.Message(queue_name="bench", actor_name="noop", args=(number,), kwargs={}, options={})


def _dramatiq(module: str, processes: int, *options: str) -> list[str]:
    counts = ["--processes", str(processes), "--threads", str(THREADS)]
    return [sys.executable, "-m", "dramatiq", module, *counts, *options]
