"""Real processes for a while: started with an environment we know, watched, and in any case ended."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from settings import Settings

HOUSE = Path(__file__).parent.parent
START_S = 60
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Command:
    words: list[str]
    environment: dict[str, str]


def environment(**told: str) -> dict[str, str]:
    """This shell's environment without what it says to Posthouse or libpq, and with *told*."""
    ours = {name.upper() for name in Settings.model_fields} | {"PROMETHEUS_MULTIPROC_DIR"}
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("PG")}
    return kept | told


@dataclass
class Running:
    """A started command, with the processes that came of it."""

    process: subprocess.Popen[bytes]
    environment: dict[str, str]
    log: Path
    _born: dict[int, psutil.Process] = field(default_factory=dict)

    def lives(self) -> bool:
        """True; fails with its last words when it has ended."""
        assert self.process.poll() is None, f"{self.process.args!r} ended:\n{self._said()[-2_000:]}"
        return True

    def says(self, words: str) -> bool:
        """Whether *words* are in its log; fails when it has ended."""
        return self.lives() and words in self._said()

    def _said(self) -> str:
        return self.log.read_text(errors="replace")

    def _family(self) -> list[psutil.Process]:
        """It and its descendants."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            self._born |= {each.pid: each for each in (first, *first.children(recursive=True))}
        return [each for each in self._born.values() if each.is_running()]

    def memory_mb(self) -> float:
        """Resident, of its largest process."""
        sizes = [0]
        for each in self._family():
            with suppress(psutil.NoSuchProcess):
                sizes.append(each.memory_info().rss)
        return max(sizes) / 1e6

    def cpu_s(self) -> float:
        """What its living processes have spent."""
        spent = 0.0
        for each in self._family():
            with suppress(psutil.NoSuchProcess):
                spent += sum(each.cpu_times()[:2])
        return spent

    def has(self, pid: int) -> bool:
        return any(each.pid == pid for each in self._family())

    def stop(self, within_s: float) -> None:
        """Ask it to stop, and wait for it."""
        self._family()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)

    def kill(self) -> None:
        """End it and whatever came of it at once."""
        for each in self._family():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


@contextmanager
def running(command: Command, log: Path) -> Iterator[Running]:
    """*command*, in the root of the checkout and with its output in *log*; killed at the end of the block."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.words, cwd=HOUSE, env=command.environment, stdout=out, stderr=out, start_new_session=True
        )
    started = Running(process, command.environment, log)
    try:
        yield started
    finally:
        started.kill()


@contextmanager
def all_running(commands: Sequence[Command], folder: Path) -> Iterator[list[Running]]:
    """Several of them at once."""
    with ExitStack() as stack:
        yield [stack.enter_context(running(command, folder / f"process-{next(_numbers)}.log")) for command in commands]


def until(true: Callable[[], object], within_s: float, pause_s: float = 0.02) -> bool:
    """Wait until *true*; False when it was not in time."""
    give_up = time.monotonic() + within_s
    while not true():
        if time.monotonic() > give_up:
            return False
        time.sleep(pause_s)
    return True
