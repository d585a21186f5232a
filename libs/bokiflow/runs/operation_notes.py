"""Notes in a run's log about an operation that takes long, so that any process can show it.

An operation that ends within `NOTED_AFTER_S` costs no append. A longer operation is noted once, and
again when another of its attempts has failed. The pauses between its notes double, up to an hour. A
note decides nothing, and replays ignore it. `execution` makes an `OperationInProgress` for each
operation; `operations.attempts` reports attempts to it, and `inspection` shows the notes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final

from bokiflow.runs import waiting
from bokiflow.runs.records import OperationNoted
from indilog import IndilogError

NOTED_AFTER_S: Final = 2.0
"""Seconds after which an operation is noted for the first time, unless its kind has a time of its
own.
"""
_PAUSE_S_MAX: Final = 3600.0
_ERROR_CHARACTERS_MAX: Final = 500


class OperationInProgress:
    """An operation that an execution performs.

    Args:
        epoch: epoch of the execution.
        number: number of the operation.
        name: name of the operation.
        kind: kind of the operation.
        append: appends a note. If it raises an `IndilogError`, a later note has the content.
        clock: returns the time of the run's log, in seconds since 1970.
        noted_after_s: seconds after which the operation is noted for the first time; `math.inf`:
            it is never noted.

    Attributes:
        name: name of the operation.
        kind: kind of the operation.
        attempt: number of the last attempt that began, from 1; 0: no attempt has begun.
        failed: number of failed attempts.
        error: the error of the last failed attempt; None: no attempt has failed.
        began: when the operation began, in seconds of `waiting.monotonic_now`.
    """

    __slots__ = (
        "_append", "_clock", "_due", "_epoch", "_has_changed", "_next_at", "_noted_after_s",
        "_noting", "_number", "_timer", "attempt", "began", "error", "failed", "kind", "name",
    )  # fmt: skip

    def __init__(
        self,
        epoch: int,
        number: str,
        name: str,
        kind: str,
        append: Callable[[OperationNoted], Awaitable[object]],
        clock: Callable[[], float],
        *,
        noted_after_s: float = NOTED_AFTER_S,
    ) -> None:
        self.name = name
        self.kind = kind
        self.attempt = 0
        self.failed = 0
        self.error: str | None = None
        self.began = waiting.monotonic_now()
        self._epoch = epoch
        self._number = number
        self._append = append
        self._clock = clock
        self._next_at: float | None = None
        self._noted_after_s = noted_after_s
        self._due = self.began + noted_after_s
        self._has_changed = True
        self._noting: waiting.Task[None] | None = None
        self._timer: waiting.Timer | None = None
        self._note_after(noted_after_s)

    @property
    def duration_ms(self) -> int:
        """Milliseconds since the operation began."""
        return max(0, round(1000 * (waiting.monotonic_now() - self.began)))

    @property
    def note(self) -> OperationNoted:
        """A note with the current facts about the operation."""
        passed, now = waiting.monotonic_now(), self._clock()
        next_at = None if self._next_at is None else now + self._next_at - passed
        since = now + self.began - passed
        return OperationNoted(
            self._epoch, self._number, self.name, self.kind, since, self.failed, self.error, next_at
        )

    def begin_attempt(self, attempt: int) -> None:
        """Note that attempt number `attempt` (from 1) begins."""
        self.attempt, self._next_at = attempt, None

    def fail_attempt(self, error: str, pause_s: float) -> None:
        """Note that the last attempt failed, and that the next attempt begins after a pause."""
        now = waiting.monotonic_now()
        self.failed, self._next_at = self.attempt, now + pause_s
        self.error = " ".join(error.split())[:_ERROR_CHARACTERS_MAX]
        self._has_changed = True
        if self._noting is not None:
            return  # when the append in flight ends, `_append_note` sets the timer
        if self._next_at >= self._due:
            self._note()
        elif self._timer is None:
            self._note_after(self._due - now)

    def end(self) -> None:
        """Stop noting the operation, because it has ended."""
        self._stop_timer()
        if self._noting is not None:
            self._noting.cancel()

    def _note_after(self, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = waiting.call_later(seconds, self._note)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note(self) -> None:
        """Append a note in a separate task, so that the operation does not wait for the log."""
        self._stop_timer()
        if self._noting is None and waiting.has_loop():
            self._has_changed = False
            self._noting = waiting.start_task(self._append_note())

    async def _append_note(self) -> None:
        try:
            await self._append(self.note)
        except IndilogError:
            self._has_changed = True  # a later note has the content
        now = waiting.monotonic_now()
        self._due = now + min(max(self._noted_after_s, now - self.began), _PAUSE_S_MAX)
        self._noting = None
        if self._has_changed:
            self._note_after(self._due - now)
