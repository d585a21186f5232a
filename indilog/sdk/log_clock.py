"""Estimates a log's time between its records (docs/decisions/0025).

The `ordered_at` of records decides what is due. The estimate only tells a program when to read: it
is the newest `ordered_at` that was read, plus the time since then by a monotonic clock. No wall
clock is read. BokiFlow, BokiQueue and the invocation service of a compute node use a `LogClock`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from indilog.base.log import Log


class LogClock:
    """Estimates the time of a log. No decision may depend on the estimate.

    The estimate is the later of the last `Log.now` and the newest record read, plus the time since.
    It is ahead of the log if the primary restarted and the primary's clock did not count the
    downtime. The next `ask` corrects it.

    Args:
        monotonic: a clock in seconds that cannot be set and that counts while the machine sleeps.

    Attributes:
        has_begun: whether `begin` has asked the log for its time.
    """

    __slots__ = ("_monotonic", "_offset_s", "has_begun")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._offset_s = -math.inf
        """Seconds to add to the monotonic clock."""
        self.has_begun = False

    async def begin(self, log: Log) -> None:
        """On the first call, ask `log` for its time, because the records read so far may be old."""
        if not self.has_begun:
            await self.ask(log)

    async def ask(self, log: Log) -> None:
        """Set the estimate to the time of `log`, even if that is earlier."""
        time = await log.now()
        self._offset_s, self.has_begun = time - self._monotonic(), True

    def read(self, ordered_at: float) -> None:
        """Advance the estimate to the time of a record that was just read."""
        self._offset_s = max(self._offset_s, ordered_at - self._monotonic())

    def now(self) -> float:
        """Return the estimate, seconds since 1970; -inf before the first read."""
        return self._offset_s + self._monotonic()
