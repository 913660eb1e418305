"""What this host's kernel says of a process: whether it is the one that is meant, and whether it can go on."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Sign = Literal["running", "stopped", "gone", "hidden"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = (Path("/proc/self/ns/pid"), Path("/proc/self/ns/time"))


@dataclass(frozen=True)
class Stat:
    """Of /proc/PID/stat (proc(5)): *state* a letter, *threads*, *started* in clock ticks since the boot."""

    state: str
    threads: int
    started: int


def pid_space() -> str | None:
    """Where this process's pid means something: the boot and the namespaces. None where there is no /proc for them."""
    try:
        # Of another pid namespace's /proc every pid would be somebody else's.
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return None
        boot = _BOOT.read_text("ascii").strip()
    except OSError:
        return None
    return " ".join([boot, *(str(name.readlink()) for name in _NAMESPACES if name.is_symlink())])


def own_start() -> int | None:
    """When this process started, in clock ticks since the boot; None where `pid_space` is."""
    stat = _stat(os.getpid()) if pid_space() else None
    return stat.started if stat else None


def look(pid: int, started: int) -> Sign:
    """The process of this pid space that had *pid* and *started* then. Hidden: it may be there, and nobody can tell.

    Stopped: it makes no step by itself, by a signal, under a debugger, or half way out. A zombie is gone.
    """
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "gone"
    stat = _stat(pid)
    if stat is None:
        return "hidden"
    if stat.started != started:
        return "gone"
    if stat.state in "ZXx":
        return "gone" if stat.threads <= 1 else "stopped"
    return "stopped" if stat.state in "Tt" else "running"


def _stat(pid: int) -> Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name stands in brackets and may hold brackets itself; the third field follows it.
    fields = text.rpartition(b")")[2].split()
    return Stat(fields[0].decode("ascii"), int(fields[17]), int(fields[19]))
