"""Oban for Python. Its workers are the `oban start` command, which is told to import this module."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from oban import Oban
from oban import worker as worked_by
from psycopg_pool import AsyncConnectionPool

from bench.peers import program
from bench.peers.program import URL, portions


@worked_by(queue="bench")
class Noop:
    async def process(self, job: Any) -> None:
        """Nothing."""


@worked_by(queue="bench")
class Mark:
    async def process(self, job: Any) -> None:
        program.mark(job.args["number"])


@worked_by(queue="bench")
class Sleep:
    async def process(self, job: Any) -> None:
        await program.mark_and_sleep_async(job.args["number"])


WORKERS: dict[str, Any] = {"noop": Noop, "mark": Mark, "sleep": Sleep}


def schema() -> None:
    subprocess.run([Path(sys.executable).with_name("oban"), "install", "--dsn", URL], check=True)


class Producer:
    def __init__(self, oban: Any) -> None:
        self._oban = oban

    async def send(self, kind: str, number: int) -> None:
        await self._oban.enqueue(_job(kind, number))

    async def bulk(self, count: int) -> None:
        for numbers in portions(count):
            await self._oban.enqueue_many([_job("noop", number) for number in numbers])


def _job(kind: str, number: int) -> Any:
    return WORKERS[kind].new({"number": number})


@asynccontextmanager
async def producer() -> AsyncIterator[Producer]:
    async with AsyncConnectionPool(URL, min_size=1, max_size=10, open=False) as pool:
        yield Producer(Oban(pool=pool))
