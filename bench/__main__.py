"""`python -m bench [TEST …]`: measure, show tables or JSON, keep the answer in bench/results/."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial

import typer
from rich.console import Console

from bench import drain, enqueue, idle, latency, recovery, relay, report, results, service
from bench.contest import Contest, contest
from bench.figures import FULL, SMALL, Figure, Size
from bench.peers import environments
from bench.peers.every import BUILT_IN, OTHERS
from bench.peers.peer import Entry
from bench.places import server
from bench.processes import HOUSE


class Test(StrEnum):
    """What can be measured; `all` is everything, `setup` only makes the peers' environments."""

    DRAIN = "drain"
    ENQUEUE = "enqueue"
    LATENCY = "latency"
    BACKLOG = "backlog"
    DELAYED = "delayed"
    RECOVERY = "recovery"
    IDLE = "idle"
    RELAY = "relay"
    IMPORT = "import"
    READY = "ready"
    ALL = "all"
    SETUP = "setup"


OF_THE_QUEUE: dict[Test, Callable[[Contest], list[Figure]]] = {
    Test.DRAIN: drain.drain,
    Test.ENQUEUE: enqueue.enqueue,
    Test.LATENCY: latency.latency,
    Test.BACKLOG: drain.backlog,
    Test.DELAYED: drain.delayed,
    Test.RECOVERY: recovery.recovery,
    Test.IDLE: idle.idle,
    Test.RELAY: relay.relay,
}
OF_THE_SERVICE: dict[Test, Callable[[Size, int], list[Figure]]] = {
    Test.IMPORT: service.import_folder,
    Test.READY: service.ready,
}
Measured = dict[str, tuple[str, list[Figure]]]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
progress = Console(stderr=True)


@app.command()
def main(
    tests: list[Test] = typer.Argument(None, help="what to measure; all when none is named"),
    as_json: bool = typer.Option(False, "--json", help="print JSON instead of tables"),
    peers: bool = typer.Option(False, "--peers", help="others' queues as well; their environments are made if need be"),
    runs: int = typer.Option(3, min=1, help="so many runs of each; medians are shown"),
    small: bool = typer.Option(False, "--small", help="tiny sizes, to see that it works; the answer is not kept"),
    publish: bool = typer.Option(
        False, "--publish", help="write the table and the plot that are committed, and README"
    ),
) -> None:
    """Measure Posthouse on an embedded Postgres of its own, beside others in the same run."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if tests == [Test.SETUP]:
        _set_up()
        return
    if small and publish:
        raise typer.BadParameter("what is tiny is not published")
    wanted = [*OF_THE_QUEUE, *OF_THE_SERVICE] if not tests or Test.ALL in tests else tests
    entries = [*BUILT_IN, *(OTHERS if peers else [])]
    header = report.header(entries, runs)
    measured, absent, failed = _measured(wanted, entries, SMALL if small else FULL, runs)
    answer = report.answer(header, measured, absent)
    if not small:
        results.keep(answer)
    if publish:
        results.publish(answer)
        results.put_into(HOUSE / "README.md", answer)
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
    else:
        report.show(answer, judging=not small)
    raise typer.Exit(1 if failed else 0)


def _set_up() -> None:
    with progress.status("") as status:
        missing = environments.make([entry.environment for entry in OTHERS if entry.environment], status.update)
    for entry in OTHERS:
        assert entry.environment
        typer.echo(f"{entry.name}: {missing.get(entry.environment.name, entry.environment.version)}")


def _measured(wanted: list[Test], entries: list[Entry], size: Size, runs: int) -> tuple[Measured, dict[str, str], bool]:
    """What each test measures and its figures; who was left out and why; whether a test failed. The others go on."""
    measured: Measured = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        status = stack.enter_context(progress.status("starting"))
        deeds: dict[Test, Callable[[], list[Figure]]] = {
            test: partial(measure, size, runs) for test, measure in OF_THE_SERVICE.items()
        }
        if any(test in OF_THE_QUEUE for test in wanted):
            place = stack.enter_context(server())
            measuring = stack.enter_context(contest(place, entries, size, runs, status.update))
            absent = measuring.absent
            deeds |= {test: partial(measure, measuring) for test, measure in OF_THE_QUEUE.items()}
        for test in wanted:
            status.update(f"{test}: {runs} runs")
            try:
                measured[test] = ({**OF_THE_QUEUE, **OF_THE_SERVICE}[test].__doc__ or "", deeds[test]())
            except Exception:  # noqa: BLE001 - what the other tests have found in half an hour is not thrown away
                progress.print_exception()
    return measured, absent, len(measured) < len(set(wanted))


if __name__ == "__main__":
    app()
