"""Procrastinate. Its workers are the `procrastinate` command on this module's `app`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import procrastinate

from bench.peers import program
from bench.peers.program import URL, portions

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))


@app.task(name="noop", queue="bench")
async def noop(number: int) -> None:
    """Nothing."""


@app.task(name="mark", queue="bench")
async def mark(number: int) -> None:
    program.mark(number)


@app.task(name="sleep", queue="bench")
async def sleep(number: int) -> None:
    await program.mark_and_sleep_async(number)


def schema() -> None:
    sync = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=URL))
    with sync.open():
        sync.schema_manager.apply_schema()


class Producer:
    async def send(self, kind: str, number: int) -> None:
        await app.tasks[kind].defer_async(number=number)

    async def bulk(self, count: int) -> None:
        for numbers in portions(count):
            await noop.batch_defer_async(*[{"number": number} for number in numbers])


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    async with app.open_async():
        yield Producer()
