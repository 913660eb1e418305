"""PgQueuer, on asyncpg and uvloop. BENCH_VARIANT is the size of its batches; unset: its default."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pgqueuer
import uvloop
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.peers import program
from bench.peers.program import URL, VARIANT, portions


async def schema() -> None:
    conn = await asyncpg.connect(URL)
    await Queries(AsyncpgDriver(conn)).install()
    await conn.close()


def worker() -> None:
    """What its `pgq run` does."""
    batches = {"batch_size": int(VARIANT)} if VARIANT else {}
    uvloop.run(pgqueuer.run(_application, **batches))


@asynccontextmanager
async def _application() -> AsyncIterator[pgqueuer.PgQueuer]:
    conn = await asyncpg.connect(URL)
    application = pgqueuer.PgQueuer(AsyncpgDriver(conn))

    @application.entrypoint("noop")
    async def noop(job: Job) -> None:
        """Nothing."""

    @application.entrypoint("mark")
    async def mark(job: Job) -> None:
        program.mark(int(job.payload))

    @application.entrypoint("sleep")
    async def sleep(job: Job) -> None:
        await program.mark_and_sleep_async(int(job.payload))

    yield application
    await conn.close()


class Producer:
    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def send(self, kind: str, number: int) -> None:
        await self._queries.enqueue(kind, _payload(number))

    async def bulk(self, count: int) -> None:
        for numbers in portions(count):
            payloads = [_payload(number) for number in numbers]
            await self._queries.enqueue(["noop"] * len(payloads), payloads, [0] * len(payloads))


def _payload(number: int) -> bytes:
    return str(number).encode()


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    conn = await asyncpg.connect(URL)
    yield Producer(Queries(AsyncpgDriver(conn)))
    await conn.close()
