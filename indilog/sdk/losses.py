"""Handles lost records in a log that a follower replays: each loss is logged once, and the follower
continues after it (docs/decisions/0024).

A follower replays a log into state that its process needs (deployments, policies, invocations). It
must neither stop at a loss nor skip it silently. It keeps the lost ranges, so that it can answer
"unknown" instead of "absent" about state that may have been recorded there. `Replica`, `PolicyLog`,
and the services of a compute node keep `Losses`.
"""

from __future__ import annotations

from typing import Final

import structlog

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum
from indilog.kernel.lost_ranges import LostRange, LostRanges

_RANGES_MAX: Final = 64


class Losses:
    """The lost ranges that one follower has met. It keeps at most 64 ranges; beyond that, it joins
    neighbouring ranges.

    Args:
        what: plural noun for the content of the records, such as "deployments".
        consequence: a sentence that tells the operator the consequence of a loss.
    """

    def __init__(self, what: str, consequence: str) -> None:
        self._what = what
        self._consequence = consequence
        self._ranges = LostRanges(ranges_max=_RANGES_MAX)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def sentence(self) -> str:
        """A sentence that names the seqnums where records may be missing; empty if there was no
        loss.
        """
        if not self._ranges:
            return ""
        places = ", ".join(f"[{start}, {end})" for start, end in self._ranges)
        return f"Records of {self._what} at seqnums {places} may be lost by damage."

    def read_on_after(self, error: DataLossError, bound: SeqNum) -> SeqNum:
        """Store and log a loss; return the seqnum where reading continues.

        Args:
            error: the error that a read raised.
            bound: seqnum where that read began.

        Raises:
            DataLossError: the error has no `next_seqnum` after `bound`.
        """
        following = error.next_seqnum
        if following is None or following <= bound:
            raise error
        start = bound if error.seqnum is None else max(bound, error.seqnum)
        self._ranges.add(LostRange(start, following))
        structlog.get_logger().error(
            f"{self._what} lost",
            first_seqnum=start,
            next_seqnum=following,
            tags=list(error.tags),
            consequence=self._consequence,
            reason=str(error),
        )
        return following


def name_loss(what: str, error: DataLossError) -> DataLossError:
    """Return an error for a loss that says which state cannot be read.

    Args:
        what: the state, such as "Object 'x' of log 'y'".
        error: the error of a read, or an earlier result of this function.
    """
    if str(error).startswith(what):
        return error
    return DataLossError(
        f"{what} cannot be read: {error}",
        seqnum=error.seqnum,
        next_seqnum=error.next_seqnum,
        tags=error.tags,
    )
