"""The time of a log as this process knows it: for timers, which end by the time of the log of their
run and not by the clock of the process that executes it.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from bokiflow.runs import waiting
from indilog import Log
from indilog.sdk import LogClock

_CLOCKS: Final[WeakKeyDictionary[object, LogClock]] = WeakKeyDictionary()


def log_clock(log: Log) -> LogClock:
    """Return the clock that all logs of a platform in this process share (`Log.scope`)."""
    clock = _CLOCKS.get(log.scope)
    if clock is None:
        clock = _CLOCKS[log.scope] = LogClock(lambda: waiting.passed_now())  # noqa: PLW0108 - tests replace it
    return clock
