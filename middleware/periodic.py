"""When periodic jobs are due: cron expressions, read by cronsim, in the form that periodiq's scheduler asks them."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from cronsim import CronSim, CronSimError

_TICKS = uuid.UUID("4f1e9f0e-2c37-5d62-9d8c-6a9ddc8d4a55")
_NAMED = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MINUTE = timedelta(minutes=1)


class Cron:
    """A cron expression in UTC, as periodiq's option `periodic` wants one.

    periodiq's own class skips some ticks of `15,45 9 * * *`, never ticks on `@weekly` and takes `61 * * * *` for good:
    only its scheduler is used, and the dates are cronsim's.
    """

    def __init__(self, expression: str) -> None:
        fields = _NAMED.get(expression, expression)
        if len(fields.split()) != 5:
            raise ValueError(f"cron {expression!r}: five fields are wanted: minute, hour, day, month, weekday")
        self._expression, self._fields = expression, fields
        try:
            self._next(datetime(2026, 1, 1, tzinfo=UTC))
        except CronSimError as error:
            raise ValueError(f"cron {expression!r}: {error}") from None
        except StopIteration:
            raise ValueError(f"cron {expression!r}: it never comes") from None

    def __str__(self) -> str:
        return self._expression

    def _next(self, after: datetime) -> datetime:
        return next(CronSim(self._fields, after.astimezone(UTC)))

    def validate(self, date: datetime) -> bool:
        """Whether the minute of *date* is a tick."""
        minute = date.astimezone(UTC).replace(second=0, microsecond=0)
        return self._next(minute - _MINUTE) == minute

    def next_valid_date(self, last: datetime) -> Any:
        """The first tick after *last*, as the scheduler's kind of date."""
        import pendulum

        return pendulum.instance(self._next(last))


def cron(expression: str) -> Cron:
    """*expression*: five fields, or @daily and the like, in UTC. Raises ValueError when malformed or never due."""
    return Cron(expression)


def tick_id(actor: str, scheduled_at: str) -> str:
    """The job id of an actor's tick: equal for every scheduler that sends the tick of that minute."""
    at = datetime.fromisoformat(scheduled_at).astimezone(UTC)
    return str(uuid.uuid5(_TICKS, f"{actor} {at.replace(second=0, microsecond=0).isoformat()}"))
