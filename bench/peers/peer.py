"""A job queue that is measured: its program, its workers, and where its jobs are."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import LiteralString, Protocol

from bench.figures import OURS
from bench.peers.environments import Environment
from bench.processes import HOUSE, Command, environment

PROGRAM_S = 300


@dataclass(frozen=True)
class Way:
    """How workers are started: *words* with {processes} are one command for all of them, others a command each."""

    words: str
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Jobs as rows of *name*. A row that its library wrote is copied, with what must be *fresh* (column → SQL, in which
    `new.id` is a new *id*), and what makes a copy due *later*. *empty* and *unfinished* are statements, this one a
    count of those that are due.
    """

    name: LiteralString
    unfinished: LiteralString
    fresh: Mapping[str, LiteralString]
    later: Mapping[str, LiteralString]
    empty: LiteralString
    id: LiteralString = "gen_random_uuid()"


@dataclass(frozen=True)
class Keys:
    """Jobs in Redis: one each in the entries of these lists and hashes; *mixed*: delayed ones look like due ones."""

    lists: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    mixed: bool = False


@dataclass(frozen=True)
class Entry:
    """A job queue as it is listed.

    *fast*: its workers as they drain most; *prompt*: as people wait for them, None where it has no such jobs. *pace*:
    no-op jobs a second that one process has done, by which a run is sized. *job*: the kind that is drained.
    *only_drains*: it is a way of working of another entry.
    """

    name: str
    module: str
    jobs: Table | Keys
    fast: Way
    prompt: Way | None
    pace: int
    environment: Environment | None = None
    job: str = "noop"
    has_bulk: bool = True
    only_drains: bool = False

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)


class Store(Protocol):
    """Where the jobs of one peer are. *told*: what its programs must know to find them."""

    told: dict[str, str]

    def prepare(self, peer: Peer) -> None:
        """Make what it needs, once."""

    def ready(self, peer: Peer, count: int, later: int) -> None:
        """Exactly *count* due jobs and *later* ones due in an hour."""

    def unfinished(self) -> int:
        """How many due jobs have not ended."""

    def connections(self) -> int:
        """Of everybody but this process."""

    def commits(self) -> int | None:
        """So far; None where there is no such thing."""

    def counted(self) -> AbstractContextManager[Callable[[], int]]:
        """For as long as it is open, a function that says how many statements have come in."""


class Peer:
    """An entry that takes part: it has a *store* of its own, and *folder* to write to."""

    def __init__(self, entry: Entry, store: Store, folder: Path) -> None:
        self.entry = entry
        self.store = store
        self.folder = folder
        self.name = entry.name
        self._prepared = False

    def ready(self, count: int = 0, *, later: int = 0) -> None:
        """The same state for every run: these jobs, nothing else, and nothing left to be written out."""
        if not self._prepared:
            self.store.prepare(self)
            self._prepared = True
        self.store.ready(self, count, later)

    def run(self, *words: str) -> str:
        """What its program says to *words*. Raises AssertionError with its last words when it fails."""
        command = self._command(self._program(*words), self.entry.fast.told)
        done = subprocess.run(
            command.words,
            cwd=HOUSE,
            env=command.environment,
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
        )
        assert done.returncode == 0, f"{self.name}, {words[0]}: {done.stderr[-1_000:]}"
        return done.stdout

    def producing(self, *words: str) -> Command:
        """Its program with *words*, to be started."""
        return self._command(self._program(*words), self.entry.fast.told)

    def workers(self, way: Way, processes: int = 1, marks: Path | None = None) -> list[Command]:
        """What works its jobs, which write to *marks*."""
        words = shlex.split(way.words.format(processes=processes, url=self.store.told.get("DATABASE_URL", "")))
        command = self._command(
            words or self._program("worker"), {**way.told, **({"BENCH_MARKS": str(marks)} if marks else {})}
        )
        return [command] * (1 if "{processes}" in way.words else processes)

    def _program(self, *words: str) -> list[str]:
        if self.entry.module.endswith(".mjs"):
            return ["node", f"bench/peers/{self.entry.module}", *words]
        return ["python", "-m", "bench.peers.program", self.entry.module, *words]

    def _command(self, words: list[str], told: Mapping[str, str]) -> Command:
        own = self.entry.environment
        program = Path(sys.executable).parent / words[0] if own is None else own.bin / words[0]
        house = {"PYTHONPATH": str(HOUSE), "DATA_DIR": str(self.folder / "data")}
        node = {"NODE_PATH": str(own.folder / "node_modules")} if own and own.node else {}
        return Command([str(program), *words[1:]], environment(**house, **node, **self.store.told, **told))
