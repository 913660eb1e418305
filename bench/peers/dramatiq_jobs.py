"""Dramatiq with others' brokers, BENCH_VARIANT says whose: dramatiq-pg, dramatiq-postgres, Redis. Each at its fastest:
no results, no metrics. Its workers are the `dramatiq` command on this module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.middleware import Retries, ShutdownNotifications, TimeLimit

from bench.peers import program
from bench.peers.program import URL, VARIANT

LEAN = [TimeLimit(), ShutdownNotifications(), Retries()]


def _broker() -> Any:
    match VARIANT:
        case "dramatiq-pg":
            from dramatiq_pg import PostgresBroker

            return PostgresBroker(url=URL, results=False, middleware=LEAN)
        case "dramatiq-postgres":
            from dramatiq_postgres import PostgresBroker

            return PostgresBroker(url=URL, results=False, middleware=LEAN)
        case _:
            from dramatiq.brokers.redis import RedisBroker

            return RedisBroker(url=os.environ["REDIS_URL"], middleware=LEAN)


broker = _broker()
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="bench")
def noop(number: int) -> None:
    """Nothing."""


@dramatiq.actor(queue_name="bench")
def mark(number: int) -> None:
    program.mark(number)


@dramatiq.actor(queue_name="bench")
def sleep(number: int) -> None:
    program.mark_and_sleep(number)


ACTORS = {"noop": noop, "mark": mark, "sleep": sleep}


def schema() -> None:
    if VARIANT == "dramatiq-postgres":
        command = Path(sys.executable).with_name("dramatiq-postgres")
        subprocess.run([command, "--dsn", URL, "init"], check=True, stdout=subprocess.DEVNULL)
        return
    import psycopg2
    from dramatiq_pg import generate_init_sql

    with psycopg2.connect(URL) as conn, conn.cursor() as cursor:
        cursor.execute(generate_init_sql())


class Producer:
    def send(self, kind: str, number: int) -> None:
        ACTORS[kind].send(number)

    def fill(self, count: int, later: int) -> None:
        """Into Redis as its broker would: messages in a hash, ids in a list; delayed ones in a queue of theirs."""
        eta = int(time.time() * 1_000) + 3_600_000
        self._put("bench", count, {})
        self._put("bench.DQ", later, {"eta": eta})

    def _put(self, queue: str, count: int, options: dict[str, Any]) -> None:
        for numbers in program.portions(count):
            pipe = broker.client.pipeline(transaction=False)
            for number in numbers:
                message = noop.message(number).copy(queue_name=queue)
                told = {**message.asdict(), "options": {"redis_message_id": (name := str(uuid.uuid4())), **options}}
                pipe.hset(f"dramatiq:{queue}.msgs", name, json.dumps(told))
                pipe.rpush(f"dramatiq:{queue}", name)
            pipe.execute()


@contextmanager
def producer() -> Iterator[Producer]:
    yield Producer()
