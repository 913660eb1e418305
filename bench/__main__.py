"""`python -m bench [TEST …]`: measure, show tables or JSON, keep the answer in bench/results/latest.json."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from enum import StrEnum

import typer
from rich.console import Console

from bench import queue, report, service
from bench.figures import FULL, SMALL, Figure, Size
from bench.places import Place, server


class Test(StrEnum):
    """What can be measured; `all` is everything."""

    DRAIN = "drain"
    ENQUEUE = "enqueue"
    RELAY = "relay"
    LATENCY = "latency"
    IMPORT = "import"
    IDLE = "idle"
    READY = "ready"
    ALL = "all"


OF_THE_QUEUE: dict[Test, Callable[[Place, Size, int], list[Figure]]] = {
    Test.DRAIN: queue.drain,
    Test.ENQUEUE: queue.enqueue,
    Test.RELAY: queue.relay,
    Test.LATENCY: queue.latency,
}
OF_THE_SERVICE: dict[Test, Callable[[Size, int], list[Figure]]] = {
    Test.IMPORT: service.import_folder,
    Test.IDLE: service.idle,
    Test.READY: service.ready,
}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    tests: list[Test] = typer.Argument(None, help="what to measure; all when none is named"),
    as_json: bool = typer.Option(False, "--json", help="print JSON instead of tables"),
    runs: int = typer.Option(3, min=1, help="so many runs of each; medians are shown"),
    small: bool = typer.Option(False, "--small", help="tiny sizes, to see that it works; the answer is not kept"),
) -> None:
    """Measure Posthouse on an embedded Postgres of its own, beside others in the same run."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    wanted = [*OF_THE_QUEUE, *OF_THE_SERVICE] if not tests or Test.ALL in tests else tests
    progress = Console(stderr=True)
    header = report.header()
    size = SMALL if small else FULL
    measured: dict[str, tuple[str, list[Figure]]] = {}
    for test in wanted:
        with progress.status(f"{test}: {runs} runs"):
            measured[test] = _measured(test, size, runs)
    answer = report.answer(header, measured)
    if not small:
        report.keep(answer)
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
    else:
        report.show(answer)


def _measured(test: Test, size: Size, runs: int) -> tuple[str, list[Figure]]:
    """What *test* measures, and its figures."""
    if of_the_service := OF_THE_SERVICE.get(test):
        return of_the_service.__doc__ or "", of_the_service(size, runs)
    with server() as place:
        return OF_THE_QUEUE[test].__doc__ or "", OF_THE_QUEUE[test](place, size, runs)


if __name__ == "__main__":
    app()
