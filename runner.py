"""The processes of `cli.py up`: started, shown, started again and stopped in order, by one loop in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from honcho.colour import get_colours

from outbox import embedded
from settings import EXIT_CONFIG, Settings

#: Between a process's unasked end and its next start: doubling, back to the first after HEALTHY_S of work.
FIRST_PAUSE_S, LONGEST_PAUSE_S, HEALTHY_S = 1.0, 30.0, 60.0
#: A further signal so soon is the same Ctrl-C: a terminal, make and a container's runtime may all pass it on.
SAME_SIGNAL_S = 1.0
#: The page stops last, in what is left of the time to stop; then whatever still runs is killed.
PAGE_STOP_S, LAST_MOMENT_S = 3.0, 0.5
#: How often the embedded Postgres is looked after.
POSTGRES_LOOK_S = 5.0
LONGEST_LINE_BYTES = 64 * 1024
#: What a worker process of Dramatiq logs when it has booted and claims jobs.
WORKER_READY = "Worker process is ready for action"
EXIT_INCOMPLETE = 1


@dataclass(frozen=True)
class Plan:
    """What `up` runs: programs by name, in which folder, with which environment."""

    programs: dict[str, list[str]]
    folder: Path
    environment: dict[str, str]
    settings: Settings


class Process(Protocol):
    """A process that was started; *returncode* is filled in by whoever reaps it."""

    pid: int
    returncode: Any

    def terminate(self) -> None: ...


#: Starts a command as the plan says, with both outputs into a pipe's end; only cli.py may.
Spawn = Callable[[list[str], Plan, int], Process]


@dataclass(eq=False)
class Child:
    """A line of the Procfile, and the process it has just now."""

    name: str
    command: list[str]
    process: Process | None = None
    started_at: float = 0
    pause_s: float = FIRST_PAUSE_S
    workers_ready: int = 0

    @property
    def workers(self) -> int:
        """How many worker processes it has, each of which says when it is ready."""
        if Path(self.command[0]).name != "dramatiq":
            return 0
        return int(self.command[self.command.index("--processes") + 1]) if "--processes" in self.command else 1

    @property
    def ready(self) -> bool:
        return self.process is not None and self.workers_ready >= self.workers


class Runner:
    """Starts the page, then the rest; starts again what ends unasked; stops all. One thread, one loop."""

    def __init__(self, plan: Plan, screen: Screen, spawn: Spawn, revive: Callable[[], bool] | None) -> None:
        self.plan = plan
        self.spawn = spawn
        self.screen = screen
        self.revive = revive
        self.children = [Child(name, command) for name, command in plan.programs.items()]
        self.web = [child for child in self.children if child.name == "web"]
        self.rest = [child for child in self.children if child.name != "web"]
        self.page_was_up = False
        self.orphans: dict[int, str] = {}
        self.code: int | None = None
        self.asked_at = 0.0
        self.kill_now = False
        self.cut_short = False
        self.changed = asyncio.Event()

    async def run(self) -> int:
        """Until a signal, or a fault that does not heal by itself; returns the exit code of `up`."""
        loop = asyncio.get_running_loop()
        for name in stop_signals():
            loop.add_signal_handler(name, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        await self._start_all(self.web, self._page_answers)
        self.page_was_up = True
        await self._start_all(self.rest, lambda: all(child.ready for child in self.children))
        if self.code is None:
            self.screen.tell(f"Posthouse is ready: {page(self.plan.settings)} (Ctrl-C stops it)")
        while self.code is None:
            self._look_after_postgres()
            await self._pause(POSTGRES_LOOK_S)
        await self._stop()
        hear_no_more_signals()
        return self.code or (EXIT_INCOMPLETE if self.cut_short else 0)

    async def _start_all(self, children: list[Child], done: Callable[[], bool]) -> None:
        for child in children:
            self._start(child)
        while self.code is None and not done():
            await self._pause(0.1)

    def _start(self, child: Child) -> None:
        if self.code is not None:
            return
        reader, writer = os.pipe()
        try:
            child.process = self.spawn(child.command, self.plan, writer)
        except OSError as error:
            self._halt(EXIT_CONFIG, f"{child.name} cannot be started: {error.strerror}")
        finally:
            os.close(writer)
        child.started_at, child.workers_ready = time.monotonic(), 0
        self._read(child, reader)

    def _read(self, child: Child, reader: int) -> None:
        """Show what *child* prints, line by line, until everybody who can print there is gone."""
        loop = asyncio.get_running_loop()
        lines = Lines()

        def read() -> None:
            data = os.read(reader, LONGEST_LINE_BYTES)
            for line in lines.feed(data):
                child.workers_ready += WORKER_READY in line
                self.screen.show(child.name, line)
            if not data:
                loop.remove_reader(reader)
                os.close(reader)

        loop.add_reader(reader, read)

    def _page_answers(self) -> bool:
        """Whether our own page answers on its address: it might be another program's."""
        settings = self.plan.settings
        return all(
            child.process is not None and child.process.pid == _pid_at(settings.web_host, settings.web_port)
            for child in self.web
        )

    def _reap(self) -> None:
        """Take note of what has ended: our children and, as process 1 of a container, all orphans."""
        running = {child.process.pid: child for child in self.children if child.process}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in running:
                    self._ended(running[pid], pid, os.waitstatus_to_exitcode(status))
        self.changed.set()

    def _ended(self, child: Child, pid: int, code: int) -> None:
        if child.process:
            child.process.returncode = code
        child.process = None
        # A master that was killed leaves its workers behind.
        if _signal_group(pid, signal.SIGTERM):
            self.orphans[pid] = child.name
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if self.code is not None:
            self.cut_short |= code > 0
            self.screen.tell(f"{child.name} has stopped" + (f" with {how}" if code > 0 else ""))
        elif code == EXIT_CONFIG or (child in self.web and not self.page_was_up):
            self._halt(code if code > 0 else EXIT_INCOMPLETE, f"{child.name} ended with {how}")
        else:
            self._start_again(child, how)

    def _start_again(self, child: Child, how: str) -> None:
        if time.monotonic() - child.started_at >= HEALTHY_S:
            child.pause_s = FIRST_PAUSE_S
        self.screen.tell(f"{child.name} ended with {how}; it starts again in {child.pause_s:g} s")
        asyncio.get_running_loop().call_later(child.pause_s, self._start, child)
        child.pause_s = min(2 * child.pause_s, LONGEST_PAUSE_S)

    def _look_after_postgres(self) -> None:
        try:
            if self.revive and self.revive():
                self.screen.tell("Postgres had died and starts again")
        except embedded.EmbeddedError as error:
            self.screen.tell(str(error))

    def _asked_to_stop(self) -> None:
        if self.code is None:
            self._halt(0, "asked to stop")
        elif time.monotonic() - self.asked_at > SAME_SIGNAL_S:
            self.kill_now = True
            self.changed.set()

    def _halt(self, code: int, reason: str) -> None:
        """Begin to stop; the first reason counts."""
        if self.code is None:
            self.code, self.asked_at = code, time.monotonic()
            self.screen.tell(f"{reason}: stopping, at most {self.plan.settings.shutdown_total_s:g} s")
            self.changed.set()

    async def _stop(self) -> None:
        """Everything but the page at once, then the page; what is left at the end is killed and named."""
        end = self.asked_at + self.plan.settings.shutdown_total_s
        _terminate(self.rest)
        await self._until_gone(self.rest, end - PAGE_STOP_S)
        _terminate(self.web)
        await self._until_gone(self.children, end + LAST_MOMENT_S)
        left = {child.process.pid: child.name for child in self.children if child.process} | self.orphans
        for pid in left:
            _signal_group(pid, signal.SIGKILL)
        if left:
            self.screen.tell(f"killed: {', '.join(sorted(set(left.values())))}")
            self.cut_short, self.kill_now = True, False
            await self._until_gone(self.children, time.monotonic() + 2)

    async def _until_gone(self, children: list[Child], end: float) -> None:
        while time.monotonic() < end and not self.kill_now:
            self.orphans = {pid: name for pid, name in self.orphans.items() if _signal_group(pid, 0)}
            if not self.orphans and not any(child.process for child in children):
                return
            await self._pause(0.1)

    async def _pause(self, longest_s: float) -> None:
        """Until something has changed, or *longest_s*."""
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), longest_s)


def _terminate(children: list[Child]) -> None:
    # The leader only: Dramatiq's master passes it on, and twice would cut its workers short.
    for child in children:
        if child.process:
            child.process.terminate()


def _signal_group(pid: int, number: int) -> bool:
    """Signal whoever is left of the group that *pid* led; whether there was anybody."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group of zombies
        return False
    return True


def _pid_at(host: str, port: int) -> object:
    """What `/healthz` at this address gives as its pid; None when nobody answers, or somebody else does."""
    with contextlib.closing(http.client.HTTPConnection(reachable(host), port, timeout=1)) as connection:
        try:
            connection.request("GET", "/healthz")
            return json.loads(connection.getresponse().read(65_536))["pid"]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return None


class Lines:
    """Cuts what a process prints into lines, and lines that are too long short."""

    def __init__(self) -> None:
        self.rest = b""
        self.skipping = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that *data* completes; b"" completes the last one."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            whole, self.rest = [self.rest], b""
        for line in whole:
            if not self.skipping:
                yield _text(line)
            self.skipping = False
        if len(self.rest) > LONGEST_LINE_BYTES:
            if not self.skipping:
                yield _text(self.rest)
            self.rest, self.skipping = b"", True


def _text(line: bytes) -> str:
    if len(line) > LONGEST_LINE_BYTES:
        return line[:LONGEST_LINE_BYTES].decode("utf-8", "ignore") + " […]"
    return line.decode("utf-8", "replace").rstrip("\r")


class Screen:
    """Standard output: whole lines, each with its process's name; never a reason to wait, or to end."""

    def __init__(self, names: list[str]) -> None:
        self.width = max(len(name) for name in [*names, "posthouse"])
        self.colours = dict(zip(names, get_colours(), strict=False)) if os.isatty(1) else {}
        self.gone = False
        self.unshown = 0

    def tell(self, line: str) -> None:
        """A line of our own."""
        self.show("posthouse", line)

    def show(self, name: str, line: str) -> None:
        prefix = f"{name:<{self.width}} | "
        if name in self.colours:
            prefix = f"\033[{self.colours[name]}m{prefix}\033[0m"
        # Who reads this may have paused (a pager, Ctrl-S): then lines are lost, and the service goes on.
        if self.unshown and not self.gone and _writable(0):
            self._write(f"\n({self.unshown} lines were not shown)\n")
            self.unshown = 0
        if not self.gone and not self.unshown:
            self._write(f"{prefix}{line}\n")
        else:
            self.unshown += 1

    def _write(self, text: str) -> None:
        try:
            data = text.encode("utf-8", "replace")
            while data:
                if not _writable(1):
                    self.unshown += 1
                    return
                data = data[os.write(1, data[: select.PIPE_BUF]) :]
        except OSError:
            self.gone = True


def _writable(longest_s: float) -> bool:
    return bool(select.select([], [1], [], longest_s)[1])


def stop_signals() -> list[signal.Signals]:
    """Ctrl-C, kill, and the end of the terminal, unless `nohup` asked to outlive that."""
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [name for name in wanted if signal.getsignal(name) is not signal.SIG_IGN]


def hear_no_more_signals() -> None:
    """From here it is not far to the end, and nothing may cut it short."""
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def page(settings: Settings) -> str:
    host = reachable(settings.web_host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.web_port}"


def reachable(host: str) -> str:
    """The address at which a server that listens on *host* is called."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - nothing listens here
