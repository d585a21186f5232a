"""A process's lease on the runs that it executes, by a monotonic clock (see
`bokiflow.takeover.heartbeat`). The lease counts from when a heartbeat was sent, not from its
acknowledgement, so it ends here before it ends for any other process.
"""

from __future__ import annotations

from typing import Final

from bokiflow.runs import waiting

_SURE: Final = 0.5
"""Fraction of the lease. Until this much has passed since a heartbeat, no other process can have
taken over, even if its clock runs twice as fast.
"""


class Lease:
    """This process's lease on its runs. Its clock cannot be set, and counts while the machine
    sleeps (`waiting.passed_now`).

    Attributes:
        name: name of the executor. When its lease has ended, create a new `Lease`, because names
            are not reused.
    """

    def __init__(self, lease_s: float) -> None:
        self.name = waiting.new_name()
        self._lease_s = lease_s
        self._renewed_at: float | None = None

    def renew(self, sent_at: float) -> None:
        """Renew the lease, because the heartbeat that was sent at `sent_at` is in the log now."""
        if self._renewed_at is None or sent_at > self._renewed_at:
            self._renewed_at = sent_at

    @property
    def renewed_at(self) -> float | None:
        """When the latest heartbeat in the log was sent; None if there is none yet."""
        return self._renewed_at

    def is_sure(self) -> bool:
        """Whether no other process can have taken over (`bokiflow.runs.execution.LeaseCheck`).

        False before the first heartbeat.
        """
        at = self._renewed_at
        return at is not None and waiting.passed_now() - at < self._lease_s * _SURE

    def has_ended(self) -> bool:
        """Whether the lease has ended, so that other processes may have taken over its runs.

        False before the first heartbeat.
        """
        at = self._renewed_at
        return at is not None and waiting.passed_now() - at >= self._lease_s
