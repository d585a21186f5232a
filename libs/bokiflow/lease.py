"""A process's hold on the runs that it executes, by its own clock (see `bokiflow.presence`)."""

from __future__ import annotations

from typing import Final

from bokiflow import waiting

_SURE: Final = 0.5


class Lease:
    """This process's hold on its runs, by its own clocks: a clock that is set back makes it no
    longer, nor does a machine that slept.

    Attributes:
        name: under which it is known; never used again once its lease has ended.
    """

    def __init__(self, lease_s: float) -> None:
        self.name = waiting.new_name()
        self._lease_s = lease_s
        self._renewed_at: waiting.Moment | None = None

    def renewed(self, asked_at: waiting.Moment) -> None:
        """The log holds a sign of life that was sent off at `asked_at`."""
        if self._renewed_at is None or asked_at.steady_s > self._renewed_at.steady_s:
            self._renewed_at = asked_at

    @property
    def renewed_at(self) -> waiting.Moment | None:
        """When its last sign of life that counts was sent off."""
        return self._renewed_at

    def is_sure(self) -> bool:
        """See `bokiflow.execution.Lease`."""
        at = self._renewed_at
        return at is not None and at.age_s() < self._lease_s * _SURE

    def has_ended(self) -> bool:
        """Whether others may have given its runs to somebody else."""
        at = self._renewed_at
        return at is not None and at.age_s() >= self._lease_s
