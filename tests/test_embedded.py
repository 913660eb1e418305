"""The embedded Postgres, as processes and signals see it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import psycopg2
import pytest

from outbox import embedded
from outbox.embedded_wheel import binaries
from tests.conftest import DATA_DIR

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def tmp() -> Iterator[Path]:
    """Not pytest's `tmp_path`: whoever else runs pytest closes its parent to the server's user again."""
    path = Path(tempfile.mkdtemp(dir=DATA_DIR))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def empty(tmp: Path) -> Iterator[Path]:
    """A data folder that is not there yet."""
    data_dir = tmp / "data"
    yield data_dir
    embedded.stop(data_dir)


@pytest.fixture(scope="module")
def stopped() -> Path:
    data_dir = Path(tempfile.mkdtemp(dir=DATA_DIR))
    embedded.start(data_dir)
    embedded.stop(data_dir)
    return data_dir


@pytest.fixture
def folder(empty: Path, stopped: Path) -> Path:
    """A data folder that has been used before; its server is stopped."""
    subprocess.run(["cp", "-a", str(stopped), str(empty)], check=True)
    return empty


def ask(url: str, query: str) -> object:
    with psycopg.connect(url) as conn:
        cursor = conn.execute(query.encode())  # bytes: to mypy the queries of this file are not literals
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def postmaster(data_dir: Path) -> int:
    return int((data_dir / "postgres" / "postmaster.pid").read_text().split()[0])


def kill_server(data_dir: Path) -> None:
    """kill -9 of the server, and wait until its sessions have noticed."""
    server = psutil.Process(postmaster(data_dir))
    family = [server, *server.children()]
    server.kill()
    psutil.wait_procs(family, timeout=5)


def test_a_started_server_answers_both_drivers_with_our_settings(empty: Path) -> None:
    url = embedded.start(empty)
    with psycopg2.connect(url) as conn:
        assert conn.info.server_version >= 180000
    conn.close()
    wanted = {
        "max_connections": "200",
        "autovacuum_naptime": "10s",
        "listen_addresses": "",
        "TimeZone": "UTC",
        "fsync": "on",
        "server_encoding": "UTF8",
        "idle_in_transaction_session_timeout": "5min",
    }
    assert {name: ask(url, f"SHOW {name}") for name in wanted} == wanted


def test_text_search_knows_letters_beyond_ascii(folder: Path) -> None:
    found = ask(embedded.start(folder), "SELECT to_tsvector('simple', 'ÉCOLE, 東京')::text")
    assert found == "'école':1 '東京':2"


def test_only_the_server_s_user_may_reach_the_socket(folder: Path) -> None:
    host = parse_qs(urlsplit(embedded.start(folder)).query)["host"][0]
    assert stat.S_IMODE(Path(host).stat().st_mode) == 0o700


def test_running_url_tells_and_starts_nothing(empty: Path) -> None:
    assert embedded.running_url(empty) is None
    assert not empty.exists()
    url = embedded.start(empty)
    assert embedded.running_url(empty) == url
    assert embedded.stop(empty)
    assert embedded.running_url(empty) is None


def test_a_second_start_uses_the_running_server(folder: Path) -> None:
    first, pid = embedded.start(folder), postmaster(folder)
    assert (embedded.start(folder), postmaster(folder)) == (first, pid)


def test_two_starts_at_once_end_with_one_server(empty: Path) -> None:
    script = "import sys, pathlib; from outbox import embedded; print(embedded.start(pathlib.Path(sys.argv[1])))"
    starts = [
        subprocess.Popen([sys.executable, "-c", script, str(empty)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    urls = {start.communicate(timeout=30)[0].strip() for start in starts}
    assert urls == {embedded.running_url(empty)}


def test_data_is_kept_between_runs(folder: Path) -> None:
    ask(embedded.start(folder), "CREATE TABLE kept AS SELECT 7 AS n")
    assert embedded.stop(folder)
    assert ask(embedded.start(folder), "SELECT n FROM kept") == 7


def test_an_open_session_does_not_hold_up_a_stop(folder: Path) -> None:
    with closing(psycopg.connect(embedded.start(folder))) as conn:
        conn.execute("SELECT 1")
        began = time.monotonic()
        assert embedded.stop(folder)
        assert time.monotonic() - began < 5


def test_a_server_killed_hard_recovers_with_its_data(folder: Path) -> None:
    ask(embedded.start(folder), "CREATE TABLE kept AS SELECT 7 AS n")
    kill_server(folder)
    assert embedded.running_url(folder) is None
    assert ask(embedded.start(folder), "SELECT n FROM kept") == 7


def test_revive_starts_a_dead_server_once_and_leaves_a_living_one(folder: Path) -> None:
    embedded.start(folder)
    assert not embedded.revive(folder)
    kill_server(folder)
    assert [embedded.revive(folder) for _ in range(3)] == [True, False, False]
    assert ask(embedded.start(folder), "SELECT 1") == 1


def test_revive_makes_no_new_database_where_the_data_is_gone(empty: Path) -> None:
    with pytest.raises(embedded.EmbeddedError, match="is gone"):
        embedded.revive(empty)
    assert not (empty / "postgres").exists()


def test_a_set_up_that_was_cut_short_begins_anew(empty: Path) -> None:
    (empty / "postgres.new" / "base").mkdir(parents=True)
    assert ask(embedded.start(empty), "SELECT 1") == 1


def test_a_path_too_long_for_a_socket_gets_a_private_folder_elsewhere(tmp: Path) -> None:
    data_dir = tmp / ("deep" * 30)
    try:
        url = embedded.start(data_dir)
        host = Path(parse_qs(urlsplit(url).query)["host"][0])
        assert ask(url, "SELECT 1") == 1
        assert stat.S_IMODE(host.stat().st_mode) == 0o700
    finally:
        embedded.stop(data_dir)
    host.rmdir()


def test_a_path_with_a_space_and_a_quote_works(tmp: Path) -> None:
    data_dir = tmp / "it's a path"
    try:
        assert ask(embedded.start(data_dir), "SELECT 1") == 1
    finally:
        embedded.stop(data_dir)


@pytest.mark.parametrize("name", ["$HOME", 'say "hi"', "a`b"])
def test_a_path_that_a_shell_would_read_is_refused(tmp: Path, name: str) -> None:
    with pytest.raises(embedded.EmbeddedError, match="its name has one of"):
        embedded.start(tmp / name)


def test_another_major_version_is_refused_and_left_alone(empty: Path) -> None:
    pgdata = empty / "postgres"
    pgdata.mkdir(parents=True)
    (pgdata / "PG_VERSION").write_text("17\n")
    with pytest.raises(embedded.EmbeddedError, match="written by Postgres 17"):
        embedded.start(empty)
    assert [path.name for path in pgdata.iterdir()] == ["PG_VERSION"]


def test_a_folder_that_is_not_postgres_data_is_refused(empty: Path) -> None:
    (empty / "postgres").mkdir(parents=True)
    (empty / "postgres" / "letters.txt").write_text("mine")
    with pytest.raises(embedded.EmbeddedError, match="no Postgres data folder"):
        embedded.start(empty)


def test_a_server_that_cannot_start_says_why_in_its_own_words(folder: Path) -> None:
    embedded.start(folder)
    assert embedded.stop(folder)
    with (folder / "postgres" / "postgresql.auto.conf").open("a") as conf:
        conf.write("shared_buffers = '1 furlong'\n")
    with pytest.raises(embedded.EmbeddedError, match=r"postgresql.auto.conf"):
        embedded.start(folder)


def test_the_log_is_bounded(folder: Path) -> None:
    embedded.start(folder)
    log = folder / "postgres" / "server.log"
    with log.open("a") as file:
        file.write("x" * (embedded.LOG_MAX_BYTES + 1))
    embedded.revive(folder)
    assert log.stat().st_size < embedded.LOG_MAX_BYTES


@as_root
def test_root_opens_the_folders_above_for_passing_through_only(tmp: Path) -> None:
    closed = tmp / "closed"
    closed.mkdir(mode=0o700)
    (closed / "wide").mkdir(mode=0o755)
    data_dir = closed / "wide" / "data"
    try:
        embedded.start(data_dir)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (closed, closed / "wide", data_dir)]
        assert modes == [0o701, 0o755, 0o701]
    finally:
        embedded.stop(data_dir)


@as_root
def test_somebody_who_is_not_root_needs_no_root(nobody_s: Path) -> None:
    def run() -> object:
        try:
            return ask(embedded.start(nobody_s), "SELECT 1"), psutil.Process(postmaster(nobody_s)).uids().real
        finally:
            embedded.stop(nobody_s)

    assert as_nobody(run) == repr((1, NOBODY))


@as_root
def test_a_pid_that_another_program_got_after_a_crash_does_not_matter(nobody_s: Path) -> None:
    def run() -> object:
        embedded.start(nobody_s)
        kill_server(nobody_s)
        with subprocess.Popen(["sleep", "60"]) as other:
            for name in ("postmaster.pid", ".s.PGSQL.5432.lock"):
                stale = nobody_s / "postgres" / name
                stale.write_text("\n".join([str(other.pid), *stale.read_text().split("\n")[1:]]))
            try:
                assert embedded.running_url(nobody_s) is None
                assert embedded.stop(nobody_s)
                found = ask(embedded.start(nobody_s), "SELECT 1"), other.poll()
            finally:
                embedded.stop(nobody_s)
                other.kill()
        return found

    assert as_nobody(run) == repr((1, None))


@as_root
def test_root_runs_the_server_of_somebody_s_data_as_that_somebody(nobody_s: Path) -> None:
    def run() -> object:
        embedded.start(nobody_s)
        return embedded.stop(nobody_s)

    assert as_nobody(run) == "True"
    try:
        embedded.start(nobody_s)
        assert psutil.Process(postmaster(nobody_s)).uids().real == NOBODY
    finally:
        embedded.stop(nobody_s)


@as_root
def test_data_of_another_user_is_refused_in_one_line(folder: Path) -> None:
    embedded.start(folder)
    folder.chmod(0o755)

    def run() -> object:
        try:
            return embedded.running_url(folder)
        except embedded.EmbeddedError as error:
            return str(error)

    assert "belongs to another user" in as_nobody(run)


@pytest.fixture
def nobody_s(tmp: Path) -> Iterator[Path]:
    """A data folder that the user nobody owns and can reach."""
    for above in [tmp, *tmp.parents]:
        above.chmod(stat.S_IMODE(above.stat().st_mode) | stat.S_IXOTH)
    data_dir = tmp / "nobody"
    data_dir.mkdir()
    os.chown(data_dir, NOBODY, NOBODY)
    yield data_dir
    embedded.stop(data_dir)


def as_nobody(run: Callable[[], object]) -> str:
    """The repr of what *run* returns in a child of this process that has become the user nobody."""
    binaries()  # the wheel is imported while we may still read it
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, repr(run()).encode())
        except BaseException as error:  # noqa: BLE001 - this child must end here, whatever happens
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        said = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return said.removeprefix("'").removesuffix("'")
