"""A process's lease on the runs that it executes, by a steady clock (see
`bokiflow.takeover.heartbeat`).
"""

from __future__ import annotations

from typing import Final

from bokiflow.runs import waiting

_SURE: Final = 0.5


class Lease:
    """This process's lease on its runs, by a clock that cannot be set and that counts while the
    machine sleeps (`waiting.passed_now`).

    Attributes:
        name: of the executor; never used again once its lease has ended.
    """

    def __init__(self, lease_s: float) -> None:
        self.name = waiting.new_name()
        self._lease_s = lease_s
        self._renewed_at: float | None = None

    def renewed(self, asked_at: float) -> None:
        """Renew the lease: the log holds a heartbeat that was sent at `asked_at`."""
        if self._renewed_at is None or asked_at > self._renewed_at:
            self._renewed_at = asked_at

    @property
    def renewed_at(self) -> float | None:
        """When its last effective heartbeat was sent; None: none yet."""
        return self._renewed_at

    def is_sure(self) -> bool:
        """See `bokiflow.runs.execution.LeaseCheck`."""
        at = self._renewed_at
        return at is not None and waiting.passed_now() - at < self._lease_s * _SURE

    def has_ended(self) -> bool:
        """Whether other processes may have taken over its runs."""
        at = self._renewed_at
        return at is not None and waiting.passed_now() - at >= self._lease_s
