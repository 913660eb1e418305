"""The whole service measured, as `make run` starts it: import, idle, ready. A function a test."""

from __future__ import annotations

import random
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench.figures import OURS, Figure, Size
from bench.places import folder
from bench.processes import HOUSE, START_S, Command, Running, environment, running, until
from outbox import embedded
from outbox.db import connect

READY = "Posthouse is ready"
STOP_S = 40
SEARCHABLE_S = 300
BODY_BYTES = 2_000


def import_folder(size: Size, runs: int) -> list[Figure]:
    """Seconds from the start of `cli.py import` to its end, and until every file of the folder is found."""
    imported, searchable = (Figure(f"{size.files:,} files {state}", OURS, "s") for state in ("imported", "searchable"))
    for _ in range(runs):
        with folder() as made, _up(made) as service:
            _write_files(made / "notes", size.files)
            began = time.perf_counter()
            said = _cli(service, "import", str(made / "notes"))
            imported.values.append(time.perf_counter() - began)
            assert f"{size.files} added" in said, said
            _until_indexed(made / "data", size.files)
            searchable.values.append(time.perf_counter() - began)
            assert "1 found" in _cli(service, "search", _word(size.files - 1))
    return [imported, searchable]


def _write_files(into: Path, count: int) -> None:
    into.mkdir()
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghilmnoprstuv", k=chance.randint(3, 9))) for _ in range(3_000)]
    for number in range(count):
        text = ""
        while len(text) < BODY_BYTES:
            text += " ".join(chance.choices(words, k=12)) + ".\n"
        note = f"---\ntitle: Note {number}\ntags: [bench]\n---\n\n# Note {number}\n\n{_word(number)}\n\n{text}"
        (into / f"note-{number}.md").write_text(note)


def _word(number: int) -> str:
    """What only the file of that number has in it."""
    return f"qz{number}qz"


INDEXED = """
SELECT count(*) AS n
FROM posthouse.search_entries
JOIN posthouse.search_state ON generation = live_generation
"""


def _until_indexed(data_dir: Path, count: int) -> None:
    url = embedded.running_url(data_dir)
    assert url
    with connect(url, name="bench") as conn:
        assert until(lambda: conn.execute(INDEXED).fetchone() == {"n": count}, SEARCHABLE_S, 0.1)


def idle(size: Size, runs: int) -> list[Figure]:
    """CPU time in % of one core, of the whole service and of each of its processes, while there is nothing to do."""
    figures: dict[str, Figure] = {}
    for _ in range(runs):
        with folder() as made, _up(made) as service:
            time.sleep(size.settle_s)
            before, began = _cpu_s(service, made / "data"), time.perf_counter()
            time.sleep(size.idle_s)
            after, seconds = _cpu_s(service, made / "data"), time.perf_counter() - began
        spent = {name: (after[name] - before[name]) / seconds * 100 for name in after}
        for name, percent in {"whole service": sum(spent.values()), **spent}.items():
            figures.setdefault(name, Figure("CPU", f"{OURS}: {name}", "%")).values.append(percent)
    return list(figures.values())


def _cpu_s(service: Running, data_dir: Path) -> dict[str, float]:
    """CPU seconds so far: of `up`, of each line of the Procfile with its descendants, of Postgres with its own."""
    up = psutil.Process(service.process.pid)
    own = up.cpu_times()
    spent = {"up": own.user + own.system}
    spent |= {_name(child): _tree_cpu_s(child) for child in up.children()}
    postmaster = (data_dir / "postgres" / "postmaster.pid").read_text().splitlines()[0]
    return {**spent, "Postgres": _tree_cpu_s(psutil.Process(int(postmaster)))}


def _name(child: psutil.Process) -> str:
    """The name that the Procfile gives to this command."""
    words = child.cmdline()
    for line in (HOUSE / "Procfile").read_text().splitlines():
        name, _, command = line.partition(":")
        arguments = shlex.split(command)[1:]
        if arguments and words[-len(arguments) :] == arguments:
            return name
    raise AssertionError(f"no line of the Procfile starts {words}")


def _tree_cpu_s(process: psutil.Process) -> float:
    """Of a process, its descendants, and those of them that have ended."""
    spent = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            spent += sum(each.cpu_times()[:4])
    return spent


def ready(size: Size, runs: int) -> list[Figure]:
    """Seconds from the start of `cli.py up` to its word that it is ready."""
    new, used = Figure("new data folder", OURS, "s"), Figure("used data folder", OURS, "s")
    for _ in range(runs):
        with folder() as made:
            for figure in (new, used):
                began = time.perf_counter()
                with _up(made):
                    figure.values.append(time.perf_counter() - began)
    return [new, used]


@contextmanager
def _up(made: Path) -> Iterator[Running]:
    """The whole service, ready, with its data in *made*."""
    told = environment(DATA_DIR=str(made / "data"), WEB_PORT=str(_free_port()), LOG_FORMAT="json")
    command = Command([sys.executable, "cli.py", "up"], told)
    with running(command, made / "up.log") as service:
        try:
            assert until(lambda: service.says(READY), START_S), service.log.read_text()[-2_000:]
            yield service
        finally:
            # Postgres is no descendant: it would outlive an `up` that had to be killed.
            service.stop(STOP_S)
            embedded.stop(made / "data")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cli(service: Running, *words: str) -> str:
    """What `cli.py` says with *words*, told the same as *service*."""
    command = [sys.executable, "cli.py", *words]
    done = subprocess.run(
        command, cwd=HOUSE, env=service.environment, capture_output=True, text=True, timeout=SEARCHABLE_S, check=True
    )
    return done.stdout
