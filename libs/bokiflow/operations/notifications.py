"""How an operation of a workflow waits: for something in the log of its run, or for a time.

All that a waiting workflow must hear of (signals, a cancellation, the end of a child, another
executor) is a record of its run, so one read waits for all of it, and nobody polls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution, OperationOutcome
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.records import StepDecided, run_tag
from bokiflow.runs.run_log import read_own_run
from indilog.sdk import SeqNum

_ValueT = TypeVar("_ValueT")
WAIT_S_MAX: Final = 300.0
"""One read waits this long at most, then a new one begins."""


def _ignore_count(by: int) -> None:
    """Nobody asks how many runs rest."""


RESTS: Final[ContextVar[Callable[[int], None]]] = ContextVar("rests", default=_ignore_count)
"""Told that one more (1), or one less (-1), operation of the run waits."""


class Woken(Exception):  # noqa: N818 - it never leaves an operation
    """The run is to be cancelled while an operation waits."""


async def wait_for_record(
    execution: Execution,
    ends: float,
    found: Callable[[], Awaitable[_ValueT | None]],
    *,
    wakes: bool = True,
) -> _ValueT | None:
    """Return what `found` gives as soon as it gives something, None once it is `ends`.

    It is asked again after each further record of the run.

    Args:
        execution: whose operation waits.
        ends: seconds since 1970, by the time of the run's log.
        found: gives a value that is there, or None.
        wakes: whether a cancellation ends the waiting.

    Raises:
        Woken: the run is to be cancelled.
        Stopped: this execution must not go on.
    """
    rests, clock = RESTS.get(), log_clock(execution.log)
    rests(1)
    try:
        has_looked = False
        while True:
            end = execution.run.end  # another branch may read further while this one looks
            if (value := await found()) is not None:
                return value
            if wakes and execution.is_cancel_asked:
                raise Woken
            left_s = ends - clock.now()
            if left_s <= 0 and has_looked:
                return None
            await _wait_for_record_at(execution, end, max(0.0, min(left_s, WAIT_S_MAX)))
            has_looked = True
    finally:
        rests(-1)


async def _wait_for_record_at(execution: Execution, end: SeqNum, wait_s: float) -> None:
    """Return when the run has a record at `end` or later, or after `wait_s`; read all."""

    async def look() -> None:
        await execution.log.read_next(run_tag(execution.id), end, wait=wait_s)
        await execution.catch_up()

    await read_own_run(look)


async def run_unless_cancelled(
    execution: Execution, asked: Coroutine[Any, Any, _ValueT]
) -> _ValueT:
    """Return what `asked` gives; where there is an event loop, a cancellation ends it at once.

    Raises:
        Woken: the run is to be cancelled; `asked` has ended, with or without its effect.
    """
    if not waiting.has_loop():
        return await asked
    asking, branch = waiting.start_task(asked), execution.branch

    def wake() -> None:
        if execution.is_cancel_asked_in(branch):
            asking.cancel()

    execution.on_cancel.append(wake)
    wake()
    try:
        await waiting.wait_done(asking)
    finally:  # also when this execution stops
        execution.on_cancel.remove(wake)
        asking.cancel()
    if asking.cancelled() and execution.is_cancel_asked:
        raise Woken
    return asking.result()


async def decide_waiting(
    execution: Execution,
    number: str,
    name: str,
    kind: str,
    produce: Callable[[], Awaitable[OperationOutcome]],
) -> StepDecided:
    """As `Execution.decide`, for what waits: a cancellation in the middle is decided instead."""
    while True:
        with suppress(Woken):
            return await execution.decide(number, name, kind, produce, may_wait=True)
