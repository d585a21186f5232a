"""The time of a log between its records, estimated (decision 0025).

What is due is decided by the `ordered_at` of records. When to look is estimated: the newest
`ordered_at` that was read, plus what has passed since by a steady clock. No wall clock takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from indilog.base.log import Log


class LogClock:
    """Estimates the time of a log; nothing is decided by it.

    The estimate is what the log said of its time last (`Log.now`), or the newest record if that is
    later, plus what has passed since. It is ahead of the log only after a start of the primary that
    counted no time for its absence, until the log is asked again.

    Args:
        steady: seconds that nothing sets and that pass while the machine sleeps, too.

    Attributes:
        has_begun: whether the log was asked.
    """

    __slots__ = ("_offset_s", "_steady", "has_begun")

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._offset_s = -math.inf
        """What is to be added to the steady clock."""
        self.has_begun = False

    async def begin(self, log: Log) -> None:
        """Ask `log` for the time, once: the records that are read may be old."""
        if not self.has_begun:
            await self.ask(log)

    async def ask(self, log: Log) -> None:
        """Take over what `log` says, also if it is before the estimate."""
        time = await log.now()
        self._offset_s, self.has_begun = time - self._steady(), True

    def read(self, ordered_at: float) -> None:
        """Take note of the time of a record that was just read: it is that time or later."""
        self._offset_s = max(self._offset_s, ordered_at - self._steady())

    def now(self) -> float:
        """Return the estimate, seconds since 1970; before anything was read, -inf."""
        return self._offset_s + self._steady()
