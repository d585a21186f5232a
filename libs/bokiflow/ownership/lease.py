"""A process's lease on the partitions that it owns, by a monotonic clock.

The lease counts from when a heartbeat was sent, not from its acknowledgement. So it ends in this
process before it ends for any other process. `member` renews the `Lease`; `PartitionLease` asks it
for each run.
"""

from __future__ import annotations

import math
from typing import Final

from bokiflow.runs import waiting

_SURE: Final = 0.8
"""Fraction of the lease after a heartbeat in which no other process can have claimed a partition.
This holds even if the other process's clock runs a quarter faster.
"""


class Lease:
    """This process's lease. Its clock cannot be set, and counts while the machine sleeps
    (`waiting.passed_now`).
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._renewed_at = -math.inf

    def renew(self, sent_at: float) -> None:
        """Renew the lease. `sent_at`: when the caller sent a heartbeat that is now in the log. The
        caller has read all records before that heartbeat.
        """
        self._renewed_at = max(self._renewed_at, sent_at)

    def end(self) -> None:
        """End the lease."""
        self._renewed_at = -math.inf

    @property
    def age_s(self) -> float:
        """Seconds since the last heartbeat was sent; infinite if there is none."""
        return waiting.passed_now() - self._renewed_at

    @property
    def left_s(self) -> float:
        """Seconds until this process must stop; 0 or less: it must have stopped."""
        return self.lease_s * _SURE - self.age_s

    def is_sure(self) -> bool:
        """Whether no other process can own a partition of this process yet."""
        return self.left_s > 0

    def has_ended(self) -> bool:
        """Whether another process may own the partitions, so that no body may begin here."""
        return not self.is_sure()
