"""Celery on Redis, set up as its guide says for many short tasks. Its workers are the `celery worker` command."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import redis
from celery import Celery

from bench.peers import program

app = Celery("bench", broker=os.environ["REDIS_URL"])
app.conf.update(
    task_default_queue="bench",
    worker_prefetch_multiplier=128,
    task_ignore_result=True,
    worker_send_task_events=False,
)


@app.task(name="noop")
def noop(number: int) -> None:
    """Nothing."""


@app.task(name="mark")
def mark(number: int) -> None:
    program.mark(number)


@app.task(name="sleep")
def sleep(number: int) -> None:
    program.mark_and_sleep(number)


class Producer:
    def send(self, kind: str, number: int) -> None:
        app.tasks[kind].delay(number)

    def fill(self, count: int, later: int) -> None:
        """Copies of a message that Celery itself sent. The right end is read first: what is due is behind the rest."""
        client = redis.Redis.from_url(os.environ["REDIS_URL"])
        noop.delay(0)
        message = json.loads(client.lpop("bench"))
        _put(client, message, count)
        message["headers"]["eta"] = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        _put(client, message, later)


def _put(client: redis.Redis, message: dict[str, dict[str, str]], count: int) -> None:
    text, name, tag = json.dumps(message), message["headers"]["id"], message["properties"]["delivery_tag"]
    for numbers in program.portions(count):
        client.rpush("bench", *[text.replace(name, str(uuid.uuid4())).replace(tag, str(uuid.uuid4())) for _ in numbers])


@contextmanager
def producer() -> Iterator[Producer]:
    yield Producer()
