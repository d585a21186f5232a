"""Limits the number of open recorded invocations, for the platform and for each application
(docs/decisions/0033).

`InvocationService` calls `Admission.admit` before it appends the record of an invocation.
`Schedules` uses only `OpenLimits`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from indilog.base.errors import OverloadedError
from indilog.base.ids import SeqNum
from indilog.config import NodeConfig
from indilog_compute.shares import limit_of_one


class OpenLimits(NamedTuple):
    """Limits on open invocations: those that wait or run.

    Even while an application is the only one, it gets only the fraction `share` of the places. An
    invocation may wait for a year, and other applications may be deployed in this time.

    Attributes:
        total: largest number of open invocations of all applications.
        share: the part of the places left by other applications that one application may use,
            between 0 and 1.
    """

    total: int
    share: float

    @classmethod
    def of(cls, config: NodeConfig) -> OpenLimits:
        """Return the limits that a configuration sets."""
        return cls(
            config.invocations.invocations_open_max,
            config.invocations.app_invocations_open_share_max,
        )

    def of_one(self, open_: Mapping[str, int], application: str) -> int:
        """Return how many open invocations an application may have; `open_` is the number of open
        invocations of each application.
        """
        others = sum(open_.values()) - open_.get(application, 0)
        return limit_of_one(self.share, self.total, others, is_shared=True)

    def is_full(self, open_: Mapping[str, int], application: str) -> bool:
        """Whether an application has reached its limit, or all applications the limit `total`."""
        of_one = self.of_one(open_, application)
        return sum(open_.values()) >= self.total or open_.get(application, 0) >= of_one


class Admission:
    """Refuses invocations that would exceed the limits.

    An admitted invocation counts here until the invocation table has applied its record. From then
    on the table counts it.
    """

    def __init__(self, limits: OpenLimits) -> None:
        self._limits = limits
        self._admitted: Counter[str] = Counter()
        self._appended: list[tuple[SeqNum, str]] = []
        """A heap: seqnum and application of each record that was appended, but is not applied to
        the invocation table.
        """

    def admit(self, application: str, open_: Counter[str]) -> None:
        """Count a further invocation of an application. `open_` is the number of open invocations
        of each application in the table.

        Raises:
            OverloadedError: a limit is reached; the invocation is not counted.
        """
        counted = open_ + self._admitted
        if counted.total() >= self._limits.total:
            raise OverloadedError(
                f"{counted.total():,} recorded invocations wait or run, which is the limit "
                "(invocations_open_max); try again later."
            )
        if self._limits.is_full(counted, application):
            raise OverloadedError(
                f"{counted[application]:,} recorded invocations of app {application} wait or run, "
                "the most that one application may have (app_invocations_open_share_max of "
                "invocations_open_max). Try again later, or cancel some: "
                "`indilog invocation cancel`."
            )
        self._admitted[application] += 1

    def appended(self, application: str, seqnum: SeqNum) -> None:
        """Note that an admitted invocation was recorded at `seqnum`."""
        assert self._admitted[application] > 0, "only admitted invocations are appended"
        heapq.heappush(self._appended, (seqnum, application))

    def withdraw(self, application: str) -> None:
        """Subtract an admitted invocation whose append failed or has an unknown outcome."""
        self._admitted[application] -= 1
        assert self._admitted[application] >= 0, "only admitted invocations are withdrawn"
        if not self._admitted[application]:
            del self._admitted[application]

    def read(self, end: SeqNum) -> None:
        """Subtract the invocations with records below `end`, because the table counts them now."""
        while self._appended and self._appended[0][0] < end:
            self.withdraw(heapq.heappop(self._appended)[1])
        assert len(self._appended) <= self._admitted.total(), "each recorded invocation is counted"
