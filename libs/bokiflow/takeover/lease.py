"""A process's lease on the runs that it executes, by a monotonic clock (see
`bokiflow.takeover.heartbeat`). It counts from when a heartbeat was sent, not from its
acknowledgement: so it ends here before it ends for any other process.
"""

from __future__ import annotations

from typing import Final

from bokiflow.runs import waiting

_SURE: Final = 0.5
"""The share of the lease within which no other process can have taken over, also if its clock runs
twice as fast.
"""


class Lease:
    """This process's lease on its runs, by a clock that cannot be set and that counts while the
    machine sleeps (`waiting.passed_now`).

    Attributes:
        name: of the executor. Once its lease has ended, make a new `Lease`: names are not reused.
    """

    def __init__(self, lease_s: float) -> None:
        self.name = waiting.new_name()
        self._lease_s = lease_s
        self._renewed_at: float | None = None

    def renewed(self, asked_at: float) -> None:
        """Renew the lease when a heartbeat is in the log; it was sent at `asked_at`."""
        if self._renewed_at is None or asked_at > self._renewed_at:
            self._renewed_at = asked_at

    @property
    def renewed_at(self) -> float | None:
        """When the latest heartbeat that is in the log was sent; None: none yet."""
        return self._renewed_at

    def is_sure(self) -> bool:
        """Whether no other process can have taken over (`bokiflow.runs.execution.LeaseCheck`).

        False before the first heartbeat.
        """
        at = self._renewed_at
        return at is not None and waiting.passed_now() - at < self._lease_s * _SURE

    def has_ended(self) -> bool:
        """Whether other processes may have taken over its runs.

        False before the first heartbeat.
        """
        at = self._renewed_at
        return at is not None and waiting.passed_now() - at >= self._lease_s
