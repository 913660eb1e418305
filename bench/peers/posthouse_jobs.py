"""Ours: what its producers call. Its workers are the `dramatiq` command on `bench.actors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dramatiq_pg import generate_init_sql

from bench.peers.program import URL, portions
from outbox import migrations
from outbox.db import Conn, connect
from outbox.enqueue import enqueue, enqueue_many
from outbox.newjob import NewJob


def schema() -> None:
    migrations.migrate(URL, migrations.steps(generate_init_sql()))


class Producer:
    def __init__(self, conn: Conn) -> None:
        self._conn = conn

    def send(self, kind: str, number: int) -> None:
        enqueue(self._conn, NewJob(queue="bench", actor=f"bench.{kind}", args=[number]))

    def bulk(self, count: int) -> None:
        for numbers in portions(count):
            enqueue_many(self._conn, [NewJob(queue="bench", actor="bench.noop", args=[number]) for number in numbers])


@contextmanager
def producer() -> Iterator[Producer]:
    with connect(URL, name="bench") as conn:
        yield Producer(conn)
