"""When a scheduled function is due: cron expressions with five fields, in a time zone.

cronsim parses fields, names, ranges, steps, `L` and `#`, and follows Debian's cron. If a clock is
put forward, a due time that does not exist is due at the next existing time. If a clock is put
back, a due time that occurs twice is due once; schedules that repeat by the hour or minute
continue. `App.schedule` checks expressions; the invocation service of a compute node asks for due
times.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from indilog.base.deployed import ScheduleSpec

_FIELDS: Final = 5
_RANGES: Final = (
    "its fields are minute (0-59), hour (0-23), day of month (1-31 or L), month (1-12 or jan-dec), "
    "day of week (0-7 or sun-sat; 0 and 7 are Sunday)"
)


def check_schedule(spec: ScheduleSpec) -> ScheduleSpec:
    """Return `spec` if it is valid.

    Raises:
        ValueError: `spec` is not valid; one sentence that says why.
    """
    if len(spec.expression.split()) != _FIELDS:
        raise ValueError(
            f"A schedule has five fields (minute, hour, day of month, month, day of week), such as "
            f"'*/5 * * * *', not {spec.expression!r}."
        )
    try:
        CronSim(spec.expression, datetime.now(UTC))
    except CronSimError as error:
        raise ValueError(f"{spec.expression!r} is no schedule: {_why(spec, error)}") from error
    _zone(spec.timezone)
    if spec.catch_up not in ("none", "last", "all"):
        raise ValueError(f"catch_up is none, last or all, not {spec.catch_up!r}.")
    return spec


def _why(spec: ScheduleSpec, error: CronSimError) -> str:
    """Return what is wrong with an expression that has five fields, as the end of a sentence."""
    cause = str(error).lower()
    minute, hour, day, _, weekday = spec.expression.split()
    with suppress(CronSimError):
        CronSim(f"{minute} {hour} {day} * {weekday}", datetime.now(UTC))
        if cause == "bad day-of-month":
            return "it is never due, no month that it names has such a day."
    return f"{cause}; {_RANGES}."


def next_due(spec: ScheduleSpec, after: float) -> float | None:
    """Return the first due time after `after` (seconds since 1970); None: it is never due again."""
    found = next(CronSim(spec.expression, _local(spec, after)), None)
    return found.timestamp() if found is not None else None


def due_between(spec: ScheduleSpec, after: float, until: float, *, most: int) -> list[float]:
    """Return the due times after `after` up to `until`, ascending: the last `most` of them."""
    found: list[float] = []
    # cronsim begins with the time before its start, but `until` itself may be due
    backwards = CronSim(spec.expression, _local(spec, until + 60), reverse=True)
    while len(found) < most and (time := next(backwards, None)) is not None:
        if time.timestamp() <= after:
            break
        if time.timestamp() <= until:
            found.append(time.timestamp())
    return found[::-1]


def _local(spec: ScheduleSpec, time: float) -> datetime:
    return datetime.fromtimestamp(time, _zone(spec.timezone))


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"{name!r} is no time zone that this machine knows; take a name such as UTC or "
            "Europe/Berlin."
        ) from error
