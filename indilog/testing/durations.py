"""Durations that a test lets pass at once, for `MemoryLogs.skip` and `Cluster.skip`."""

from __future__ import annotations

import math


def seconds_of(days: float, hours: float, minutes: float, seconds: float) -> float:
    """Return a duration in seconds.

    Raises:
        ValueError: the duration is negative or no number.
    """
    total = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    if not 0 <= total < math.inf:
        raise ValueError(f"A test can let 0 or more seconds pass, not {total}.")
    return total
