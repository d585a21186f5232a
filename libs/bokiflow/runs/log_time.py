"""Estimates the time of a log in this process. Timers end by the time of their run's log, not by
the clock of the process that executes the run.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from bokiflow.runs import waiting
from indilog import Log
from indilog.sdk import LogClock

_CLOCKS: Final[WeakKeyDictionary[object, LogClock]] = WeakKeyDictionary()


def log_clock(log: Log) -> LogClock:
    """Return the clock that all logs of a platform share in this process (`Log.scope`)."""
    clock = _CLOCKS.get(log.scope)
    if clock is None:
        clock = _CLOCKS[log.scope] = LogClock(lambda: waiting.passed_now())  # noqa: PLW0108 - tests replace it
    return clock
