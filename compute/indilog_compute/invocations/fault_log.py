"""Limits how often a persistent fault is logged: after pauses that double (ARCHITECTURE 11).

`InvocationService` and `Applications` (`workers.applications`) use it in their loops.
"""

from __future__ import annotations

from typing import Final

import structlog

from indilog.base.errors import IndilogError

PAUSE_S_MAX: Final = 60.0
"""Longest pause between two log lines about a persistent fault, in seconds."""


class FaultLog:
    """Logs a persistent fault at once, again after `pause_s` seconds, and then after pauses that
    double up to `PAUSE_S_MAX` (60 s).
    """

    __slots__ = ("_due", "_first_s", "_pause_s")

    def __init__(self, pause_s: float) -> None:
        self._first_s = self._pause_s = pause_s
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether a log line is due at `now` (seconds); if so, the caller must log the
        fault.
        """
        if now < self._due:
            return False
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return True

    def log_if_due(self, what: str, error: Exception, now: float) -> None:
        """Log a fault if a log line is due. An `IndilogError` is logged with its message, any other
        exception with its traceback.
        """
        if not self.is_due(now):
            return
        if isinstance(error, IndilogError):
            structlog.get_logger().warning(what, reason=str(error))
        else:
            structlog.get_logger().error(what, exc_info=error)

    def end(self) -> None:
        """Note that the fault has ended; the next fault is logged at once."""
        self._due, self._pause_s = 0.0, self._first_s
