"""Limits repeated log lines: the first lines of a kind are written, further lines are counted.

A kind is an event of one logger at one level; the fields do not matter. A client may cause a line
with each request, and a fault may cause a line with each iteration. The limit keeps these lines
from filling the disk and from hiding other lines. `indilog.base.telemetry` installs the limit
in each process.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - part of the shell: a timer writes counts
import time  # noqa: TID251 - clock of the process's log
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

import structlog

LINES_MAX: Final = 100
"""Largest number of lines of a kind that are written in one window."""
WINDOW_S: Final = 60.0
"""Length of a window in seconds, from the first line of the kind."""
KINDS_MAX: Final = 1_000
"""Largest number of kinds with counts. Beyond it the oldest kind is dropped, so its next line
counts as the first.
"""
_LEFT_OUT: Final = "log lines left out"

_is_limited_elsewhere: ContextVar[bool] = ContextVar("is_limited_elsewhere", default=False)


@contextmanager
def limited_elsewhere() -> Iterator[None]:
    """Exempt the lines that are logged in the block; the caller limits them itself."""
    token = _is_limited_elsewhere.set(True)
    try:
        yield
    finally:
        _is_limited_elsewhere.reset(token)


class _Kind(NamedTuple):
    logger: str
    level: str
    event: str


class _Window:
    """The lines of a kind since `start` (seconds of the clock)."""

    __slots__ = ("left_out", "lines", "start")

    def __init__(self, start: float) -> None:
        self.start = start
        self.lines = 0
        self.left_out = 0


class Repeats:
    """Passes lines of a kind up to a limit; then one line says how many were omitted.

    The first line of a kind is never dropped. The count is written when the window has ended: by a
    timer of the event loop, or with the next line if no loop runs.

    Args:
        tell: writes the line with the count.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        tell: Callable[..., object],
        *,
        lines_max: int | None = None,
        window_s: float = WINDOW_S,
        kinds_max: int = KINDS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._lines_max = LINES_MAX if lines_max is None else lines_max
        self._window_s = window_s
        self._kinds_max = kinds_max
        self._clock = clock
        self._windows: dict[_Kind, _Window] = {}
        """Windows by kind, in the order of their starts."""
        self._left_out_from: float | None = None
        """Start of the oldest window with dropped lines."""

    def __call__(
        self, _logger: object, method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Return the line of a structlog logger; a structlog processor.

        Raises:
            structlog.DropEvent: the line is omitted.
        """
        text = str(event.get("event"))
        if text != _LEFT_OUT and not self.is_written("", method, text):
            raise structlog.DropEvent
        return event

    def is_written(self, logger: str, level: str, event: str) -> bool:
        """Count a line, and return whether it is written."""
        if _is_limited_elsewhere.get():
            return True
        now = self._clock()
        if self._left_out_from is not None and now >= self._left_out_from + self._window_s:
            self.log_ended()
        kind = _Kind(logger, level, event)
        window = self._windows.get(kind)
        if window is None or now >= window.start + self._window_s:
            self._windows.pop(kind, None)
            window = self._windows[kind] = _Window(now)
            if len(self._windows) > self._kinds_max:
                self._forget(next(iter(self._windows)))
        window.lines += 1
        if window.lines <= self._lines_max:
            return True
        if window.left_out == 0:
            self._wait(window)
        window.left_out += 1
        return False

    def log_ended(self) -> None:
        """Log the count of each window that has ended."""
        over_from = self._clock() - self._window_s
        left = [(kind, w) for kind, w in list(self._windows.items()) if w.left_out]
        for kind, window in left:
            if window.start <= over_from:
                self._forget(kind)
        self._left_out_from = min((w.start for _, w in left if w.start > over_from), default=None)

    # --- internal

    def _wait(self, window: _Window) -> None:
        """Write the count of a window when it has ended."""
        if self._left_out_from is None or window.start < self._left_out_from:
            self._left_out_from = window.start
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the next line writes the count
        loop.call_later(window.start + self._window_s - self._clock(), self.log_ended)

    def _forget(self, kind: _Kind) -> None:
        window = self._windows.pop(kind, None)
        if window is not None and window.left_out:
            self._tell(
                _LEFT_OUT,
                count=window.left_out,
                of=kind.event,
                level=kind.level,
                **({"logger": kind.logger} if kind.logger else {}),
                within_s=self._window_s,
            )
