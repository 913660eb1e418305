"""Chancy. BENCH_VARIANT: `threads` (8 of them) or `async` (1,000 at once), both with eager polling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from chancy import Chancy, Queue, Worker, job

from bench.peers import program
from bench.peers.program import URL, VARIANT, portions

if VARIANT == "async":
    EXECUTOR, AT_ONCE = Chancy.Executor.Async, 1_000

    @job(queue="bench")
    async def noop(*, number: int) -> None:
        """Nothing."""

    @job(queue="bench")
    async def mark(*, number: int) -> None:
        program.mark(number)

    @job(queue="bench")
    async def sleep(*, number: int) -> None:
        await program.mark_and_sleep_async(number)

else:
    EXECUTOR, AT_ONCE = Chancy.Executor.Threaded, 8

    @job(queue="bench")
    def noop(*, number: int) -> None:
        """Nothing."""

    @job(queue="bench")
    def mark(*, number: int) -> None:
        program.mark(number)

    @job(queue="bench")
    def sleep(*, number: int) -> None:
        program.mark_and_sleep(number)


JOBS = {"noop": noop, "mark": mark, "sleep": sleep}


async def schema() -> None:
    async with Chancy(URL) as chancy:
        await chancy.migrate()


def worker() -> None:
    asyncio.run(_work())


async def _work() -> None:
    async with Chancy(URL) as chancy:
        queue = Queue("bench", concurrency=AT_ONCE, executor=str(EXECUTOR), eager_polling=True)
        await chancy.declare(queue, upsert=True)
        async with Worker(chancy) as working:
            await working.wait_for_shutdown()


class Producer:
    def __init__(self, chancy: Any) -> None:
        self._chancy = chancy

    async def send(self, kind: str, number: int) -> None:
        await self._chancy.push(_job(kind, number))

    async def bulk(self, count: int) -> None:
        for numbers in portions(count):
            async for _ in self._chancy.push_many([_job("noop", number) for number in numbers]):
                pass


def _job(kind: str, number: int) -> Any:
    return JOBS[kind].job.with_kwargs(number=number)


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    async with Chancy(URL) as chancy:
        yield Producer(chancy)
