"""The clock that stamps metalog entries (`NewRecords.time_us`, decision 0025).

At its start, `Primary` creates an `EntryClock`. The clock reads the wall clock once, to learn how
much time passed since the last stamp. After that the time advances with the monotonic clock, even
if the wall clock is set. If the wall clock shows a time before the last stamp, or more than
`gap_s_max` after the last stamp, it counts as wrong: the time then continues from the last stamp.
Neither the time nor a stamp ever decreases.
"""

from __future__ import annotations

import structlog

from indilog.base.ids import Instant

_US: int = 1_000_000


class EntryClock:
    """Microseconds since 1970 that only grow, at the pace of the monotonic clock.

    Args:
        last_us: the last known stamp; 0: there is none, and the wall clock is accepted.
        now: the wall clock at the start, advanced by the monotonic clock since
            (`indilog.runtime.node.Clock`).
        gap_s_max: largest plausible time since the last stamp, in seconds.

    Attributes:
        now_us: the time of this iteration, in microseconds since 1970.
        behind_s: seconds by which the time lagged the wall clock at the start; negative: the time
            was ahead of the wall clock.
    """

    __slots__ = ("_offset_us", "behind_s", "now_us")

    def __init__(self, last_us: int, now: Instant, gap_s_max: float) -> None:
        wall_us = int(now * _US)
        is_believed = last_us == 0 or 0 <= wall_us - last_us <= gap_s_max * _US
        self._offset_us = 0 if is_believed else last_us - wall_us
        self.now_us = wall_us + self._offset_us
        self.behind_s = -self._offset_us / _US
        if self.behind_s > 0:
            structlog.get_logger().warning(
                "wall clock not believed: no time is counted since the last record",
                gap_s=round(self.behind_s),
                clock_gap_s_max=gap_s_max,
            )

    def advance(self, now: Instant) -> None:
        """Advance to the time of an iteration."""
        self.now_us = max(self.now_us, int(now * _US) + self._offset_us)
