"""Filters of a query as bounds of a read: on `seqnum`, `ordered_at` and `log`.

Spark evaluates every filter again, so a bound may be wider than its filter, but never narrower.
`source` calls `narrowed` if filter pushdown is on.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Final, Protocol, TypeGuard

import msgspec

from indilog_pipeline.spark.options import Bounds

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


class _Comparison(Protocol):
    """The filters of `pyspark.sql.datasource` that compare a column with a value."""

    attribute: tuple[str, ...]
    value: object


def narrowed(bounds: Bounds, filters: Iterable[object]) -> Bounds:
    """Return `bounds`, narrowed by all filters on `seqnum`, `ordered_at` and `log`."""
    for found in filters:
        if _compares(found) and len(found.attribute) == 1:
            kind, column = type(found).__name__, found.attribute[0]
            bounds = _narrowed_by(bounds, kind, column, found.value)
    return bounds


def _compares(found: object) -> TypeGuard[_Comparison]:
    return hasattr(found, "attribute") and hasattr(found, "value")


def _narrowed_by(bounds: Bounds, kind: str, column: str, value: object) -> Bounds:
    if column == "log":
        return _of_logs(bounds, kind, value)
    values = [_number(column, v) for v in (value if isinstance(value, tuple | list) else (value,))]
    numbers = [number for number in values if number is not None]
    if not numbers or len(numbers) < len(values):
        return bounds
    smallest = largest = None
    if kind in {"EqualTo", "EqualNullSafe", "In"}:
        smallest, largest = min(numbers), max(numbers)
    elif kind in {"GreaterThan", "GreaterThanOrEqual"}:
        smallest = numbers[0] + (kind == "GreaterThan")
    elif kind in {"LessThan", "LessThanOrEqual"}:
        largest = numbers[0] - (kind == "LessThan")
    return _between(bounds, column, smallest, largest)


def _between(bounds: Bounds, column: str, smallest: int | None, largest: int | None) -> Bounds:
    """Narrow a column to [smallest, largest]."""
    if column == "seqnum":
        return msgspec.structs.replace(
            bounds,
            start=bounds.start if smallest is None else max(bounds.start, smallest),
            end=bounds.end if largest is None else min(bounds.end, max(largest + 1, 0)),
        )
    start, end = bounds.ordered_start_us, bounds.ordered_end_us
    if smallest is not None:
        start = max(smallest, start or 0)
    if largest is not None:
        end = largest + 1 if end is None else min(largest + 1, end)
    return msgspec.structs.replace(bounds, ordered_start_us=start, ordered_end_us=end)


def _of_logs(bounds: Bounds, kind: str, value: object) -> Bounds:
    if kind not in {"EqualTo", "EqualNullSafe", "In"}:
        return bounds
    named = value if isinstance(value, tuple | list) else (value,)
    logs = frozenset(name for name in named if isinstance(name, str))
    return msgspec.structs.replace(bounds, logs=logs if bounds.logs is None else bounds.logs & logs)


def _number(column: str, value: object) -> int | None:
    """Return a column's value in the unit of bounds; None: no bound follows from this value."""
    if column == "seqnum" and type(value) is int:
        return value
    if column == "ordered_at" and isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.astimezone()
        return (aware - _EPOCH) // _MICROSECOND
    return None
