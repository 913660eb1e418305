"""Real `dramatiq` processes on the trial actors: started, watched, signalled, and in any case ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

HOUSE = Path(__file__).parent.parent

#: The shipped queues made small, so that the trial's own fit the budget.
QUEUES: dict[str, Any] = {
    **{name: {"threads": 1} for name in ("index", "notify", "webhook", "maintenance", "fetch", "tasks")},
    "quick": {"threads": 4, "time_limit_s": 30, "awaited": True},
    "single": {"threads": 1, "time_limit_s": 30, "awaited": True},
}
#: Leases short enough to wait for.
HASTE = {"LEASE_S": "2", "CONTROL_INTERVAL_S": "0.5", "RESCUE_INTERVAL_S": "0.5", "POLL_INTERVAL_S": "0.2"}


def until(true: Callable[[], Any], seconds: float = 15, what: str = "") -> Any:
    """The first true answer of *true*, asked every 20 ms; fails after *seconds*."""
    give_up = time.monotonic() + seconds
    while not (answer := true()):
        assert time.monotonic() < give_up, f"not within {seconds:g} s: {what or true}"
        time.sleep(0.02)
    return answer


@dataclass
class Worker:
    """A `dramatiq` command: its master process and what it said."""

    process: subprocess.Popen[bytes]
    log: Path
    born: list[psutil.Process] = field(default_factory=list)

    def said(self) -> list[dict[str, Any]]:
        """The log lines that are JSON."""
        lines = []
        for line in self.log.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict)]

    def says(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.said() if line.get("event") == event]

    def up(self, processes: int = 1) -> Worker:
        """Wait until the claim loop of each child listens."""
        until(lambda: len(self.says("consumer.listening")) >= processes or self.process.poll() is not None, 30)
        assert self.process.poll() is None, self.log.read_text()
        self.children()
        return self

    def children(self) -> list[psutil.Process]:
        """The master's child processes that live; they are remembered, to be ended when it is gone."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if child not in self.born and "tracker" not in " ".join(child.cmdline()):
                    self.born.append(child)
        return [child for child in self.born if alive(child)]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self, seconds: float = 15) -> int:
        """Wait for the command's end; its exit code."""
        return self.process.wait(seconds)

    def stop(self, seconds: float = 15) -> int:
        self.signal(signal.SIGTERM)
        return self.ends(seconds)

    def kill(self) -> None:
        """SIGKILL to master and children at once, and wait until they are gone."""
        self.children()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        until(lambda: not self.children(), 10)


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


@dataclass
class Crew:
    """The workers of one database; what their jobs write goes to *folder*."""

    database_url: str
    folder: Path
    workers: list[Worker] = field(default_factory=list)

    def start(
        self,
        *queues: str,
        threads: int = 4,
        processes: int = 1,
        wait: bool = True,
        told: Mapping[str, str] = MappingProxyType({}),
        actors: str = "tests.trial_actors",
    ) -> Worker:
        """Start `dramatiq` on *queues* (all that are declared when none is named), with the settings *told*."""
        command = [sys.executable, "-m", "dramatiq", actors]
        command += ["--processes", str(processes), "--threads", str(threads)]
        command += ["--queues", *queues] if queues else []
        worker = self._run(command, told)
        return worker.up(processes) if wait else worker

    def start_relay(self, told: Mapping[str, str] = MappingProxyType({})) -> Worker:
        """Start the stand-alone relay, with the keeper in it; it knows the queues, and none of the trial actors."""
        relay = self._run([sys.executable, "cli.py", "relay"], told)
        until(lambda: relay.says("relay.started") or relay.process.poll() is not None, 30)
        assert relay.process.poll() is None, relay.log.read_text()
        return relay

    def _run(self, command: list[str], told: Mapping[str, str]) -> Worker:
        log = self.folder / f"worker-{len(self.workers)}.log"
        environment = {
            **os.environ,
            **HASTE,
            "DATABASE_URL": self.database_url,
            "DATA_DIR": str(self.folder),
            "PROMETHEUS_MULTIPROC_DIR": str(self.folder / "metrics"),
            "QUEUES": json.dumps(QUEUES),
            "TRIAL_DIR": str(self.folder),
            **told,
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=HOUSE, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        worker = Worker(process, log)
        self.workers.append(worker)
        return worker

    def start_all(self, *sets: Sequence[str]) -> list[Worker]:
        """Start one command for each set of queues, at once, and wait for all of them."""
        started = [self.start(*queues, wait=False) for queues in sets]
        return [worker.up() for worker in started]

    def lines(self, name: str) -> list[str]:
        """What the jobs called *name* wrote."""
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def starts(self, name: str) -> list[str]:
        """The pids of the processes that started the job called *name*, in order."""
        return [line.split()[1] for line in self.lines(name) if line.startswith("start")]

    def ends(self, name: str) -> list[str]:
        return [line.split()[1] for line in self.lines(name) if line.startswith("end")]

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()


@contextmanager
def crew(database_url: str, folder: Path) -> Iterator[Crew]:
    """Workers on a database; none outlives the block."""
    hired = Crew(database_url, folder)
    try:
        yield hired
    finally:
        hired.close()
