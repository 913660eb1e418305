"""Times as people say them."""

from __future__ import annotations

from datetime import datetime

_UNITS = ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (120, 60, "min"), (1, 1, "s"))


def spoken(seconds: float) -> str:
    """*seconds* in one unit: 12 s, 119 s, 4 min, 5 h, 3 d."""
    for least, size, unit in _UNITS:
        if seconds >= least:
            return f"{int(seconds // size):,} {unit}"
    return "under 1 s"


def relative(at: datetime, now: datetime) -> str:
    """*at* as seen from *now*: 4 min ago, in 5 h, just now."""
    seconds = (at - now).total_seconds()
    if abs(seconds) < 1:
        return "just now"
    return f"in {spoken(seconds)}" if seconds > 0 else f"{spoken(-seconds)} ago"


def exact(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
