"""`cli.py up` as a terminal, a supervisor and a careless person see it; its programs are stand-ins."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import cli
from outbox import embedded
from tests.conftest import DATA_DIR

CLI = Path(__file__).parent.parent / "cli.py"
READY = "Posthouse is ready"

WEB = """
import http.server, json, os, signal, sys, time
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"pid": os.getpid()}).encode())
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(float(os.environ.get("WEB_DELAY", 0)))
print("the page listens", flush=True)
http.server.HTTPServer(("127.0.0.1", int(os.environ["WEB_PORT"])), Page).serve_forever()
"""
SLEEPS = "import time; print('works', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
FAMILY = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('works', flush=True); time.sleep(600)"
)


class Up:
    """A run of `cli.py up` on stand-in programs, with its output in a file."""

    def __init__(self, folder: Path, programs: dict[str, str], to: int | None, environment: dict[str, str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.port = environment.get("WEB_PORT") or str(free_port())
        self.data_dir = folder / "data"
        lines = []
        for name, program in {"web": WEB, **programs}.items():
            (folder / f"{name}.py").write_text(program)
            lines.append(f"{name}: python {name}.py")
        (folder / "Procfile").write_text("\n".join(lines) + "\n")
        self.environment = clean_environment(
            **{"MARK": self.mark, "DATA_DIR": str(self.data_dir), "WEB_PORT": self.port, **environment}
        )
        self.output = folder / "output"
        self.process = self.start(self.output, to)

    def start(self, output: Path, to: int | None = None) -> subprocess.Popen[bytes]:
        """Start it (again), with what it says in *output*, or in the file descriptor *to*."""
        command = [sys.executable, str(CLI), "up", "--procfile", str(self.folder / "Procfile")]
        with output.open("ab") as file:
            said = file if to is None else to
            return subprocess.Popen(command, env=self.environment, stdout=said, stderr=said, start_new_session=True)

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, words: str, times: int = 1, within_s: float = 30) -> None:
        until(lambda: self.said.count(words) >= times, within_s, lambda: f"no {words!r} in:\n{self.said}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(35)

    def left(self) -> list[str]:
        """Whoever has our mark in its environment: `up` and all that came of it, Postgres too."""
        return [process.info["name"] for process in psutil.process_iter(["name"]) if self.is_ours(process)]

    def is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("MARK") == self.mark
        except psutil.Error:
            return False

    def end(self) -> None:
        for process in psutil.process_iter():
            if self.is_ours(process):
                process.kill()
        self.process.wait(5)


@pytest.fixture
def up(database_url: str) -> Iterator[Callable[..., Up]]:
    """Starts `up`, on the test's database unless told `DATABASE_URL=""`."""
    # Not pytest's `tmp_path`: whoever else runs pytest closes its parent to Postgres's user again.
    folder = Path(tempfile.mkdtemp(dir=DATA_DIR))
    runs = []

    def start(programs: dict[str, str], to: int | None = None, **environment: str) -> Up:
        runs.append(Up(folder, programs, to, {"DATABASE_URL": database_url, **environment}))
        return runs[-1]

    yield start
    for each in runs:
        each.end()
    shutil.rmtree(folder)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CLI), *arguments]
    return subprocess.run(command, env=clean_environment(**environment), capture_output=True, text=True, timeout=30)


def clean_environment(**extra: str) -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ} | extra


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(true: Callable[[], bool], within_s: float, otherwise: Callable[[], str] = lambda: "") -> None:
    give_up = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < give_up, otherwise()
        time.sleep(0.05)


def one_line(text: str) -> bool:
    return text.count("\n") == 1 and "Traceback" not in text


def test_workers_start_once_the_page_answers_and_then_it_is_ready(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS}, WEB_DELAY="1")
    service.until(READY)
    service.until("works")
    assert service.said.index("the page listens") < service.said.index("works")
    assert f"http://127.0.0.1:{service.port}" in service.said


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_everything_and_leaves_nothing(up: Callable[..., Up], how: signal.Signals) -> None:
    service = up({"work": FAMILY, "more": SLEEPS})
    service.until(READY)
    service.until("works", times=2)
    assert service.stop(how) == 0
    assert service.left() == []
    assert "\033[" not in service.said
    assert service.said.index("work has stopped") < service.said.index("web has stopped")


def test_with_nothing_set_it_brings_postgres_and_takes_it_along(up: Callable[..., Up]) -> None:
    tells = "import json, os, time; print('ENV' + json.dumps(dict(os.environ)), flush=True); time.sleep(600)"
    service = up({"work": tells}, DATABASE_URL="", MAIL_FROM="me@example.org")
    service.until("ENV")
    told = json.loads(service.said.split("ENV")[1].split("\n")[0])
    metrics = Path(told["PROMETHEUS_MULTIPROC_DIR"])
    assert told["DATABASE_URL"] == embedded.running_url(service.data_dir)
    assert told["DATA_DIR"] == str(service.data_dir)
    assert told["MAIL_FROM"] == "me@example.org"
    assert told["OUTBOUND_ALLOW"] == "127.0.0.1=127.0.0.1/32:8401"
    assert told["SEAL_KEYS"] == (service.data_dir / "seal.key").read_text()
    assert stat.S_IMODE((service.data_dir / "seal.key").stat().st_mode) == 0o600
    assert (list(metrics.iterdir()), stat.S_IMODE(metrics.stat().st_mode)) == ([], 0o700)
    again = run("migrate", DATA_DIR=str(service.data_dir))
    assert (again.returncode, again.stdout) == (0, "nothing to do\n")
    assert service.stop() == 0
    assert service.left() == []


def test_with_a_database_given_nothing_is_embedded(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS})
    service.until(READY)
    assert not (service.data_dir / "postgres").exists()
    assert not (service.data_dir / "seal.key").exists()


def test_after_kill_9_nobody_stays_but_postgres_which_the_next_run_uses(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS}, DATABASE_URL="")
    service.until(READY)
    service.process.kill()
    service.process.wait(5)
    until(lambda: set(service.left()) == {"postgres"}, 5, lambda: str(service.left()))
    pid = (service.data_dir / "postgres" / "postmaster.pid").read_text().split()[0]
    service.process = service.start(service.output)
    service.until(READY, times=2)
    assert (service.data_dir / "postgres" / "postmaster.pid").read_text().split()[0] == pid
    assert service.stop() == 0
    assert service.left() == []


def test_a_killed_postgres_is_started_again(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS}, DATABASE_URL="")
    service.until(READY)
    os.kill(int((service.data_dir / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    service.until("Postgres had died and starts again")
    until(lambda: embedded.running_url(service.data_dir) is not None, 10)
    assert service.stop() == 0


def test_a_second_run_says_who_is_there_already(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS})
    service.until(READY)
    second = service.start(service.folder / "second").wait(35)
    said = (service.folder / "second").read_text()
    assert second == 75
    assert one_line(said)
    assert str(service.process.pid) in said
    assert f"http://127.0.0.1:{service.port}" in said


def test_a_process_that_ends_unasked_starts_again_after_a_growing_pause(up: Callable[..., Up]) -> None:
    service = up({"work": "import sys; print('tried', flush=True); sys.exit(3)"})
    service.until("work ended with exit code 3; it starts again in 2 s")
    service.until("work ended with exit code 3; it starts again in 4 s")
    assert "again in 1 s" in service.said
    assert service.stop() == 0


def test_a_configuration_fault_stops_everything_with_its_code(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS, "wrong": "import sys, time; time.sleep(0.5); sys.exit(78)"})
    assert service.process.wait(35) == 78
    assert "wrong ended with exit code 78: stopping" in service.said
    assert service.left() == []


def test_a_page_that_cannot_bind_ends_it_before_any_worker_starts(up: Callable[..., Up]) -> None:
    service = up({"web": "import sys; sys.exit(73)", "work": SLEEPS})
    assert service.process.wait(35) == 73
    assert "works" not in service.said


def test_another_program_on_the_port_is_not_taken_for_the_page(up: Callable[..., Up]) -> None:
    port = str(free_port())
    environment = clean_environment(WEB_PORT=port)
    other = subprocess.Popen([sys.executable, "-c", WEB], env=environment, stdout=subprocess.DEVNULL)
    try:
        service = up({"web": SLEEPS, "work": "print('started too soon')"}, WEB_PORT=port)
        service.until("works")
        time.sleep(0.5)
        assert READY not in service.said
        assert "too soon" not in service.said
        assert service.stop() == 0
    finally:
        other.kill()
        other.wait()


def test_what_does_not_stop_in_time_is_killed_and_named(up: Callable[..., Up]) -> None:
    service = up({"work": SLEEPS, "stubborn": DEAF}, SHUTDOWN_TOTAL_S="4", SHUTDOWN_GRACE_S="0")
    service.until("deaf")
    service.until(READY)
    began = time.monotonic()
    assert service.stop() == 1
    assert time.monotonic() - began < 6
    assert "killed: stubborn" in service.said
    assert service.left() == []


def test_a_second_ctrl_c_at_once_is_the_same_and_a_later_one_kills(up: Callable[..., Up]) -> None:
    service = up({"stubborn": DEAF})
    service.until("deaf")
    service.until(READY)
    for pause in (0.2, 1.2, 0):
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGINT)
        time.sleep(pause)
    assert service.process.wait(5) == 1
    assert "killed: stubborn" in service.said
    assert service.left() == []


def test_a_killed_master_s_family_is_asked_to_stop(up: Callable[..., Up]) -> None:
    service = up({"work": FAMILY})
    service.until("works")
    until(lambda: len(service.left()) == 4, 5)
    [master] = [each for each in psutil.Process(service.process.pid).children() if "work.py" in each.cmdline()]
    [child] = master.children()
    master.kill()
    child.wait(5)
    assert service.stop() == 0


def test_a_signal_at_any_moment_of_the_boot_leaves_nothing(up: Callable[..., Up]) -> None:
    for moment in (0.6, 1.1, 1.6, 2.1):
        service = up({"work": SLEEPS}, DATABASE_URL="")
        time.sleep(moment)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(35) in (0, -signal.SIGTERM)
        assert service.left() == []
        assert "Traceback" not in service.said


def test_lines_stay_whole_and_long_ones_are_cut(up: Callable[..., Up]) -> None:
    prints = "import time\nfor n in range(300): print('{}', n, flush=True)\nprint('y' * 200_000)\nprint('end')\n"
    sleeps = "import sys; sys.stdout.flush(); time.sleep(600)"
    service = up({"a": prints.format("from a") + sleeps, "b": prints.format("from b") + sleeps})
    service.until("| end", times=2)
    assert service.stop() == 0
    lines = service.said.splitlines()
    for name in "ab":
        mine = [line for line in lines if re.match(rf"{name} +\| ", line)]
        assert [line.split("| ")[1] for line in mine[:300]] == [f"from {name} {n}" for n in range(300)]
        assert [len(line) < 66_000 and line.endswith("yyy […]") for line in mine[300:301]] == [True]


def test_a_closed_output_does_not_end_it(up: Callable[..., Up]) -> None:
    reader, writer = os.pipe()
    service = up({"work": "import time\nwhile True: print('chatter', flush=True); time.sleep(0.01)"}, to=writer)
    os.close(writer)
    until(lambda: len(service.left()) == 3, 20)
    os.close(reader)
    time.sleep(0.3)
    assert service.process.poll() is None
    assert service.stop() == 0
    assert service.left() == []


def test_a_reader_that_stopped_reading_does_not_hold_it_up(up: Callable[..., Up]) -> None:
    reader, writer = os.pipe()
    service = up({"work": "import time\nwhile True: print('x' * 1000, flush=True); time.sleep(0.0005)"}, to=writer)
    os.close(writer)
    until(lambda: len(service.left()) == 3, 20)
    time.sleep(1.5)
    assert service.stop() == 0
    os.close(reader)


def test_names_have_colours_on_a_terminal(up: Callable[..., Up]) -> None:
    terminal, far_end = pty.openpty()
    service = up({"work": SLEEPS}, to=far_end)
    os.close(far_end)
    shown = b""
    while b"works" not in shown:
        shown += os.read(terminal, 4096)
    assert re.search(rb"\033\[\d+mwork +\| \033\[0mworks", shown)
    assert service.stop() == 0
    os.close(terminal)


@pytest.mark.parametrize(
    ("procfile", "said"),
    [
        ("web: python x.py\nweb: python y.py\n", "two processes have the same name"),
        ("web python x.py\n", "each line must be NAME: COMMAND"),
        ("", "each line must be NAME: COMMAND"),
        ("web: no-such-program --fast\n", "there is no program no-such-program"),
        ("web: python 'x.py\n", "No closing quotation"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_procfile_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], procfile: str | None, said: str
) -> None:
    if procfile is not None:
        (tmp_path / "Procfile").write_text(procfile)
    with pytest.raises(SystemExit) as ended:
        cli.up(tmp_path / "Procfile")
    shown = capsys.readouterr().err
    assert (ended.value.code, one_line(shown), said in shown) == (78, True, True), shown


@pytest.mark.parametrize(
    ("command", "url", "code"),
    [
        ("up", "postgresql://me:s3cret@127.0.0.1:1/app", 69),
        ("migrate", "postgresql://me:s3cret@127.0.0.1:1/app", 69),
        ("up", "postgresql://me:s3cret@[::1/app", 78),
        ("up", "mysql://me:s3cret@127.0.0.1/app", 78),
    ],
)
def test_a_database_out_of_reach_is_one_line_without_its_password(
    tmp_path: Path, command: str, url: str, code: int
) -> None:
    result = run(command, DATABASE_URL=url, DB_START_WAIT_S="1", DATA_DIR=str(tmp_path / "data"))
    assert (result.returncode, one_line(result.stderr)) == (code, True), result.stderr
    assert "s3cret" not in result.stderr + result.stdout


def test_a_command_without_a_database_says_how_to_get_one(tmp_path: Path) -> None:
    result = run("migrate", DATA_DIR=str(tmp_path))
    assert (result.returncode, one_line(result.stderr)) == (69, True)
    assert "make run" in result.stderr


def test_a_port_in_use_is_one_line(database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("web", DATABASE_URL=database_url, WEB_PORT=str(taken.getsockname()[1]))
    assert (result.returncode, one_line(result.stderr)) == (73, True), result.stderr
    assert "WEB_PORT" in result.stderr


def test_a_data_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("up", DATA_DIR=str(tmp_path / "file" / "data"))
    assert (result.returncode, one_line(result.stderr)) == (73, True), result.stderr
