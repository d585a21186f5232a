"""Limits how often the same lasting fault is logged: at pauses that double (ARCHITECTURE 11)."""

from __future__ import annotations

from typing import Final

import structlog

from indilog.base.errors import IndilogError

PAUSE_S_MAX: Final = 60.0
"""Longest pause between two log lines about a lasting fault, in seconds."""


class Notices:
    """Logs a fault at once, then after `pause_s`, doubled each time, up to `PAUSE_S_MAX`."""

    __slots__ = ("_due", "_first_s", "_pause_s")

    def __init__(self, pause_s: float) -> None:
        self._first_s = self._pause_s = pause_s
        self._due = 0.0

    def is_due(self, now: float) -> bool:
        """Tell whether to log the fault at `now`; True counts as logged."""
        if now < self._due:
            return False
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return True

    def tell(self, what: str, error: Exception, now: float) -> None:
        """Log a fault, if that is due: an error of the platform with its sentence, any other with
        its traceback.
        """
        if not self.is_due(now):
            return
        if isinstance(error, IndilogError):
            structlog.get_logger().warning(what, reason=str(error))
        else:
            structlog.get_logger().error(what, exc_info=error)

    def over(self) -> None:
        """Note that the fault has ended; the next one is logged at once."""
        self._due, self._pause_s = 0.0, self._first_s
