"""Durable timers: `await wf.sleep(...)`, and timeouts of other waits.

The end of a timer is decided when the timer starts, so a re-execution waits only for the remaining
time. Timers end by the time of the run's log (`log_time`). `Operations` uses this module.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from bokiflow.operations.notifications import decide_waiting, wait_for_record
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.execution import Execution, OperationOutcome, raise_failure
from bokiflow.runs.log_time import log_clock

TIMER: Final = "timer"
SLEEP: Final = "sleep"
_SECONDS_MAX: Final = 10 * 366 * 86_400.0


def seconds_of(duration: float | timedelta) -> float:
    """Return a duration in seconds.

    Raises:
        FlowSettingsError: the duration is negative, not a number, or longer than ten years.
    """
    seconds: object = duration.total_seconds() if isinstance(duration, timedelta) else duration
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _SECONDS_MAX:
        raise FlowSettingsError(
            f"A duration must be 0 to {_SECONDS_MAX:,.0f} seconds or a timedelta, not "
            f"{duration!r:.40}."
        )
    return float(seconds)


def start_timer(execution: Execution, name: str, duration: float | timedelta) -> float:
    """Start a timer and return its end, in seconds since 1970 by the time of the run's log. The
    first execution decides the end. The operation that waits for the timer needs no note, because
    the decision has the time at which the wait began, and `name`.
    """
    seconds, clock = seconds_of(duration), log_clock(execution.log)
    decided = execution.decide_now(name, TIMER, lambda: b"%r" % (clock.now() + seconds))
    return float(decided.result)


async def sleep(execution: Execution, number: str, ends: float) -> None:
    """Wait until the time of the run's log is `ends`.

    Raises:
        Cancelled: the run was cancelled while waiting.
    """

    async def nothing() -> None:
        return None

    async def slept() -> OperationOutcome:
        await wait_for_record(execution, ends, nothing)
        return OperationOutcome(b"null")

    decided = await decide_waiting(execution, number, SLEEP, SLEEP, slept, noted_after_s=math.inf)
    raise_failure(decided)
