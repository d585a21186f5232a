"""Lost records in a log that a follower replays: each loss is logged once, and the follower
continues after it (decision 0024).

A follower replays a log into state that its process needs (deployments, policies, invocations). It
must neither stop at a loss nor skip it silently. It remembers the lost ranges, so that it can
answer "unknown" instead of "absent" about what may have been recorded there.
"""

from __future__ import annotations

from typing import Final

import structlog

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum
from indilog.kernel.lost_ranges import LostRange, LostRanges

_RANGES_MAX: Final = 64


class Losses:
    """The lost ranges that one follower has met, at most 64; beyond that, neighbours are joined.

    Args:
        what: what the records were, a plural ("deployments").
        consequence: a sentence for the operator about what the loss means.
    """

    def __init__(self, what: str, consequence: str) -> None:
        self._what = what
        self._consequence = consequence
        self._ranges = LostRanges(ranges_max=_RANGES_MAX)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def sentence(self) -> str:
        """A sentence that names the seqnums where records may be missing; empty if none may be."""
        if not self._ranges:
            return ""
        places = ", ".join(f"[{start}, {end})" for start, end in self._ranges)
        return f"Records of {self._what} at seqnums {places} may be lost by damage."

    def read_on_after(self, error: DataLossError, bound: SeqNum) -> SeqNum:
        """Remember and log a loss; return the seqnum where to read on.

        Args:
            error: what a read raised.
            bound: where that read began.

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
    """Return a loss as an error that says which state cannot be read.

    Args:
        what: the state ("Object 'x' of log 'y'").
        error: what a read raised, or what this function returned before.
    """
    if str(error).startswith(what):
        return error
    return DataLossError(
        f"{what} cannot be read: {error}",
        seqnum=error.seqnum,
        next_seqnum=error.next_seqnum,
        tags=error.tags,
    )
