"""Lets a workflow's operations wait for a record of its run, or for a time.

All events that end a wait (a signal, a cancellation, the end of a child, a takeover) are records of
the run. So one read waits for all of them, without polling. Signals, timers, children, locks and
attempts wait through this module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution, OperationOutcome
from bokiflow.runs.log_time import log_clock
from bokiflow.runs.operation_notes import NOTED_AFTER_S
from bokiflow.runs.records import StepDecided, run_tag
from bokiflow.runs.run_log import read_own_run
from indilog.sdk import SeqNum

_ValueT = TypeVar("_ValueT")
WAIT_S_MAX: Final = 300.0
"""Longest wait of one read in seconds. After it, the next read begins."""


def _ignore_count(by: int) -> None:
    """Do nothing: the default of `WAIT_COUNTER` outside of a runner."""


WAIT_COUNTER: Final[ContextVar[Callable[[int], None]]] = ContextVar(
    "wait_counter", default=_ignore_count
)
"""Called with 1 when an operation of the run begins to wait, and with -1 when it stops waiting."""


class Woken(Exception):  # noqa: N818 - it never leaves an operation
    """Raised in a waiting operation when a cancellation is requested."""


async def wait_for_record(
    execution: Execution,
    ends: float,
    found: Callable[[], Awaitable[_ValueT | None]],
    *,
    wakes: bool = True,
    look_s: float = WAIT_S_MAX,
) -> _ValueT | None:
    """Wait until `found` returns a value, and return the value; None: the time `ends` was reached.

    `found` is called at once, after each new record of the run, and after `look_s` seconds without
    one.

    Args:
        execution: execution of the waiting operation.
        ends: when to stop waiting, by the time of the run's log, seconds since 1970.
        found: returns the value if it is available, else None.
        wakes: whether a cancellation ends the wait.
        look_s: longest time between two calls of `found`, in seconds.

    Raises:
        Woken: a cancellation is requested.
        Stopped: this execution must not continue.
    """
    rests, clock = WAIT_COUNTER.get(), log_clock(execution.log)
    rests(1)
    wait = object()
    execution.waits[wait] = (ends, waiting.current_task(), execution.is_in_main_branch)
    try:
        has_looked = False
        while True:
            end = execution.run.end  # another branch may read further records meanwhile
            if (value := await found()) is not None:
                return value
            if wakes and execution.is_cancel_asked:
                raise Woken
            left_s = ends - clock.now()
            if left_s <= 0 and has_looked:
                return None
            await _wait_for_record_at(execution, end, max(0.0, min(left_s, look_s)))
            has_looked = True
    finally:
        del execution.waits[wait]
        rests(-1)


async def _wait_for_record_at(execution: Execution, end: SeqNum, wait_s: float) -> None:
    """Wait up to `wait_s` seconds for a record of the run at seqnum `end` or later. Then apply all
    new records.
    """

    async def look() -> None:
        await execution.log.read_next(run_tag(execution.id), end, wait=wait_s)
        await execution.catch_up()

    await read_own_run(look)


async def run_unless_cancelled(
    execution: Execution, asked: Coroutine[Any, Any, _ValueT]
) -> _ValueT:
    """Return the result of `asked`. With an event loop, a cancellation of the run ends `asked` at
    once.

    Raises:
        Woken: a cancellation is requested. `asked` has ended, and may have taken effect.
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
    *,
    noted_after_s: float = NOTED_AFTER_S,
) -> StepDecided:
    """Do the same as `Execution.decide` for an operation that waits. If a cancellation is requested
    during the wait, the cancellation is decided instead.
    """
    while True:
        with suppress(Woken):
            return await execution.decide(
                number, name, kind, produce, may_wait=True, noted_after_s=noted_after_s
            )
