"""What every peer's program understands, run by that peer's interpreter: `python -m bench.peers.program MODULE WORD …`.

    schema                          make its tables
    worker                          work, where its library has no command for that
    one KIND NUMBER                 enqueue one job: noop, mark, sleep (batch, where there is one)
    single COUNT                    enqueue no-ops one by one; prints the seconds
    bulk COUNT                      the same by its fastest call
    fill COUNT LATER                the same, not measured, and LATER ones due in an hour (Redis only)
    steadily FIRST COUNT PER_SECOND FILE
                                    enqueue marks at that pace; into FILE "NUMBER <seconds since the epoch>" of each

A module has `schema()`, `producer()`, a context manager, and perhaps `worker()`; each may be a coroutine's. It may use
the standard library, its own library, and nothing of Posthouse.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

URL = os.environ.get("DATABASE_URL", "")
VARIANT = os.environ.get("BENCH_VARIANT", "")
MARKS = os.environ.get("BENCH_MARKS", os.devnull)
SLEEP_S = 5.0
A_STATEMENT = 1_000


def mark(number: int) -> None:
    """Leave the line "*number* <seconds since the epoch> <pid>"."""
    began = time.time()
    marks = os.open(MARKS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(marks, f"{number} {began:.6f} {os.getpid()}\n".encode())
    os.close(marks)


def mark_and_sleep(number: int) -> None:
    mark(number)
    time.sleep(SLEEP_S)


async def mark_and_sleep_async(number: int) -> None:
    mark(number)
    await asyncio.sleep(SLEEP_S)


def portions(count: int) -> list[range]:
    """The numbers below *count*, as many at a time as a statement takes."""
    return [range(first, min(count, first + A_STATEMENT)) for first in range(0, count, A_STATEMENT)]


def main(name: str, *words: str) -> None:
    module = import_module(f"bench.peers.{name}")
    if words == ("worker",):
        module.worker()
    else:
        asyncio.run(_do(module, words))


async def _do(module: Any, words: tuple[str, ...]) -> None:
    if words == ("schema",):
        await _awaited(module.schema())
        return
    async with AsyncExitStack() as stack:
        context = module.producer()
        if isinstance(context, AbstractAsyncContextManager):
            producer = await stack.enter_async_context(context)
        else:
            producer = stack.enter_context(context)
        await _enqueue(producer, words)


async def _enqueue(producer: Any, words: tuple[str, ...]) -> None:
    began = time.perf_counter()
    match words:
        case ("one", kind, number):
            await _awaited(producer.send(kind, int(number)))
        case ("single", count):
            for each in range(int(count)):
                await _awaited(producer.send("noop", each))
            print(time.perf_counter() - began)
        case ("bulk", count):
            await _awaited(producer.bulk(int(count)))
            print(time.perf_counter() - began)
        case ("fill", count, later):
            await _awaited(producer.fill(int(count), int(later)))
        case ("steadily", first, count, per_second, file):
            await _steadily(producer, range(int(first), int(first) + int(count)), float(per_second), Path(file))
        case _:
            raise SystemExit(__doc__)


async def _steadily(producer: Any, numbers: range, per_second: float, file: Path) -> None:
    began = time.monotonic()
    sent = []
    for at, number in enumerate(numbers):
        await asyncio.sleep(max(0.0, began + at / per_second - time.monotonic()))
        await _awaited(producer.send("mark", number))
        sent.append(f"{number} {time.time():.6f}\n")
    file.write_text("".join(sent))


async def _awaited(answer: object) -> None:
    if inspect.isawaitable(answer):
        await answer


if __name__ == "__main__":
    main(*sys.argv[1:])
