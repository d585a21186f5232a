"""The calls of a run whose outcomes the platform holds until the run has recorded them
(docs/decisions/0061).

The platform holds an outcome from the call on, without a time limit. So an execution that repeats
the call gets the outcome, even if the run was stopped for long. When the outcome is a durable
record of the run, no execution makes the call again, and this module releases the outcome.

A crash may leave outcomes held. The next execution releases them when it replays the recorded
calls. After the end of the run, `bokiflow.collecting` releases them. `operations.calls` makes the
calls, and `runner` releases their outcomes at the end of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Final

import structlog

from indilog import Context, IndilogError
from indilog.sdk.runs import holder_of

_TOGETHER: Final = 100
"""Number of recorded outcomes that are released together."""
_RECORDED_MAX: Final = 1000
"""Largest number of recorded outcomes that wait for their release while the platform is
unavailable. Beyond it, the oldest are dropped here, and released only at the end of the run.
"""


class HeldCalls:
    """The calls of one execution.

    Args:
        log_name: name of the log of the run.
        run: id of the run.
        ctx: the context of the function that executes the run; None: the run makes no calls.
        is_durable: tells whether the outcome of an operation is durable, by its number.

    Attributes:
        holder: the name under which the platform holds the outcomes; it names the run.
    """

    def __init__(
        self, log_name: str, run: str, ctx: Context | None, is_durable: Callable[[str], bool]
    ) -> None:
        self.holder = holder_of(log_name, run)
        self._ctx = ctx
        self._is_durable = is_durable
        self._recorded: dict[str, str] = {}
        self._has_called = False

    def note_begun(self) -> None:
        """Note that a call begins. The platform will hold its outcome."""
        self._has_called = True

    def note_decided(self, number: str, key: str) -> None:
        """Note that the outcome of a call is decided, here or in an earlier execution.

        Args:
            number: number of the operation.
            key: idempotency key of the call.
        """
        self._has_called = True
        self._recorded[number] = key
        if len(self._recorded) > _RECORDED_MAX:
            del self._recorded[next(iter(self._recorded))]

    async def release_if_many(self) -> None:
        """Release the recorded outcomes, if there are at least `_TOGETHER` of them."""
        if len(self._recorded) >= _TOGETHER:
            await self.release_recorded()

    async def release_recorded(self) -> None:
        """Release the outcomes that are durable records of the run."""
        durable = filter(self._is_durable, self._recorded)
        keys = {number: self._recorded[number] for number in islice(durable, _RECORDED_MAX)}
        if keys and await self._release(*keys.values()):
            for number in keys:
                self._recorded.pop(number, None)

    async def release_all(self) -> None:
        """Release all outcomes, because the round or the run has ended."""
        if self._has_called and await self._release():
            self._recorded.clear()

    async def _release(self, *keys: str) -> bool:
        if self._ctx is None:
            return False
        try:
            await self._ctx.release_calls(self.holder, keys)
        except IndilogError as error:
            structlog.get_logger().warning(
                "outcomes of calls stay held", holder=self.holder, reason=str(error)
            )
            return False
        return True
