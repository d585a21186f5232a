"""How many recorded invocations may be open: of the platform, and of one application of it
(docs/decisions/0033).
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

    One application has a share of what the others leave, also while it is the only one that is
    deployed: an invocation may wait for a year, and others may be deployed meanwhile.

    Attributes:
        total: open invocations of all applications.
        share: of one application, between 0 and 1.
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
        """Return how many an application may have, where `open_` counts those of each."""
        others = sum(open_.values()) - open_.get(application, 0)
        return limit_of_one(self.share, self.total, others, is_shared=True)

    def is_full(self, open_: Mapping[str, int], application: str) -> bool:
        """Tell whether no further invocation of an application may be opened."""
        of_one = self.of_one(open_, application)
        return sum(open_.values()) >= self.total or open_.get(application, 0) >= of_one


class Admission:
    """Refuses invocations beyond the limits.

    One that was admitted counts from before its record is appended until the fold has the record.
    """

    def __init__(self, limits: OpenLimits) -> None:
        self._limits = limits
        self._under_way: Counter[str] = Counter()
        self._appended: list[tuple[SeqNum, str]] = []
        """A heap: records that were appended, and are not in the fold yet."""

    def admit(self, application: str, open_: Counter[str]) -> None:
        """Count a further invocation of an application, beside those in the fold (`open_`).

        Raises:
            OverloadedError: a limit is reached; it is not counted.
        """
        counted = open_ + self._under_way
        if counted.total() >= self._limits.total:
            raise OverloadedError(
                f"{counted.total():,} recorded invocations wait or run, which is the limit "
                "(invocations_open_max); try again later."
            )
        if self._limits.is_full(counted, application):
            raise OverloadedError(
                f"{counted[application]:,} recorded invocations of app {application} wait or run, "
                "which is all that one application may have (app_invocations_open_share_max of "
                "invocations_open_max); try again later, or cancel some: "
                "`indilog invocation cancel`."
            )
        self._under_way[application] += 1

    def appended(self, application: str, seqnum: SeqNum) -> None:
        """An admitted invocation was recorded at `seqnum`."""
        heapq.heappush(self._appended, (seqnum, application))

    def withdraw(self, application: str) -> None:
        """An admitted invocation was not recorded, as far as is known."""
        self._under_way[application] -= 1
        assert self._under_way[application] >= 0, "it was admitted"
        if not self._under_way[application]:
            del self._under_way[application]

    def read(self, end: SeqNum) -> None:
        """The fold has the records below `end`, and counts what they opened."""
        while self._appended and self._appended[0][0] < end:
            self.withdraw(heapq.heappop(self._appended)[1])
