"""Which job this thread is working on, for the actor and for its log lines."""

from __future__ import annotations

import threading
from typing import Any

_local = threading.local()


def enter(job: Any) -> None:
    _local.job = job


def leave() -> None:
    _local.job = None


def current() -> Any | None:
    """The job of this thread; None outside a worker."""
    return getattr(_local, "job", None)
