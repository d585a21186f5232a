"""The limit of a workflow, as its decorator `Flow.workflow` sets it.

`definition` makes a `Limit`, which checks the decorator's arguments and gives each run its
`RunLimit`. `bokiflow.limits.limit_state` applies the limit: the records in the log decide which
runs have their turn.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.records import LimitSettings, RunLimit
from indilog import InvalidArgumentsError

Chosen: TypeAlias = str | Callable[..., object]
"""How a run gets its key or priority: the name of an argument, or a function of the arguments."""
COUNT_MAX: Final = 10_000
"""Largest value of each number in a limit."""
KEY_CHARACTERS_MAX: Final = 256
PRIORITY_MAX: Final = 1_000_000
_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE: Final = re.compile(r"(\d+)\s*/\s*(\d*)\s*(s|min|h|d)")


class WorkflowLimits(NamedTuple):
    """The limits that a decorator sets for a workflow (`Flow.workflow`)."""

    concurrency: int | None = None
    total: int | None = None
    rate: str | None = None
    key: Chosen | None = None
    priority: Chosen | None = None


class Limit:
    """How many runs of a workflow execute at a time, and how many begin in an interval.

    Args:
        name: name of the limit: that of the workflow.
        body: the workflow's function.
        given: the arguments of its decorator.

    Attributes:
        name: name of the limit.
        settings: the numbers of the limit, as each start of a run records them.

    Raises:
        FlowSettingsError: an argument of the decorator is invalid.
    """

    def __init__(self, name: str, body: Callable[..., object], given: WorkflowLimits) -> None:
        concurrency, total, rate, key, priority = given
        if concurrency is None and total is None and rate is None:
            raise FlowSettingsError(
                f"Workflow {name!r} has a key or a priority, so it needs concurrency= or rate=."
            )
        if total is not None and key is None:
            raise FlowSettingsError(
                f"Workflow {name!r}: total= is for all keys together; without key=, write "
                "concurrency=."
            )
        starts, interval_s = (None, 1.0) if rate is None else _rate(name, rate)
        self.name = name
        self.settings = LimitSettings(
            _count(name, "concurrency", concurrency), _count(name, "total", total),
            starts, interval_s,
        )  # fmt: skip
        parameters = list(inspect.signature(body).parameters.values())[1:]
        names = [one.name for one in parameters]
        self._defaults = {
            one.name: one.default for one in parameters if one.default is not one.empty
        }
        self._key = _chosen(name, "key", key, names)
        self._priority = _chosen(name, "priority", priority, names)

    def of(self, arguments: Mapping[str, Any]) -> RunLimit:
        """Return the limit of a run with these arguments.

        Raises:
            InvalidArgumentsError: the key or the priority is invalid.
        """
        key, priority = "", 0
        if self._key is not None:
            key = str(self._value("key", self._key, arguments))
            if not 0 < len(key) <= KEY_CHARACTERS_MAX:
                raise InvalidArgumentsError(
                    f"{self.name} was not started: its key must be 1 to {KEY_CHARACTERS_MAX} "
                    f"characters, not {key!r:.64}."
                )
        if self._priority is not None:
            value = self._value("priority", self._priority, arguments)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgumentsError(
                    f"{self.name} was not started: its priority must be a whole number, "
                    f"not {value!r:.64}."
                )
            priority = max(-PRIORITY_MAX, min(value, PRIORITY_MAX))
        return RunLimit(self.name, self.settings, key, priority)

    def _value(self, what: str, chosen: Chosen, arguments: Mapping[str, Any]) -> object:
        given = {**self._defaults, **arguments}
        if isinstance(chosen, str):
            return given[chosen]
        try:
            return chosen(*(given[name] for name in inspect.signature(chosen).parameters))
        except Exception as error:
            raise InvalidArgumentsError(
                f"{self.name} was not started: its {what} raised {type(error).__name__}: {error}"
            ) from error


def rate_text(settings: LimitSettings) -> str:
    """Return the rate of a limit as text, such as `10/s` or `5/2min`."""
    for unit, seconds in reversed(_UNITS.items()):
        if settings.interval_s >= seconds and settings.interval_s % seconds == 0:
            count = int(settings.interval_s / seconds)
            return f"{settings.starts}/{'' if count == 1 else count}{unit}"
    return f"{settings.starts}/{settings.interval_s:g}s"


def _rate(name: str, rate: object) -> tuple[int, float]:
    match = _RATE.fullmatch(rate.strip()) if isinstance(rate, str) else None
    starts = int(match[1]) if match else 0
    interval_s = float(match[2] or 1) * _UNITS[match[3]] if match else math.nan
    if not (1 <= starts <= COUNT_MAX and 0 < interval_s <= 366 * 86_400):
        raise FlowSettingsError(
            f"Workflow {name!r}: rate is a number of starts (1 to {COUNT_MAX:,}) per interval, "
            f"such as 10/s, 100/min or 5/2h, not {rate!r:.64}."
        )
    return starts, interval_s


def _count(name: str, what: str, count: object) -> int | None:
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= COUNT_MAX:
        raise FlowSettingsError(
            f"Workflow {name!r}: {what} must be 1 to {COUNT_MAX:,} runs, not {count!r:.64}."
        )
    return count


def _chosen(name: str, what: str, chosen: object, there: list[str]) -> Chosen | None:
    """Return the source of the key or the priority. It may take only arguments in `there`."""
    if chosen is None:
        return None
    if isinstance(chosen, str) and chosen in there:
        return chosen
    if callable(chosen) and set(inspect.signature(chosen).parameters) <= set(there):
        return chosen
    raise FlowSettingsError(
        f"Workflow {name!r}: {what} must be the name of an argument, or a function whose "
        f"parameters are arguments, not {chosen!r:.64}; the arguments are: "
        f"{', '.join(there) or 'none'}."
    )
