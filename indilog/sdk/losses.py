"""What who replays a log does where records of it are lost: name it, once, and read on behind it
(decision 0024).

A follower that keeps a state for others (deployments, policies, invocations) must neither stop at a
loss nor pass over it without a word. It keeps the losses, so that it can answer "unknown" instead
of "absent" about what may have been recorded there.
"""

from __future__ import annotations

from typing import Final

import structlog

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum
from indilog.kernel.lost_ranges import LostRange, LostRanges

_RANGES_MAX: Final = 64


class Losses:
    """The losses that one follower has met, at most 64 ranges; beyond it neighbours become one.

    Args:
        what: what the records were, a plural ("deployments").
        consequence: what that means for whoever depends on them, a sentence.
    """

    def __init__(self, what: str, consequence: str) -> None:
        self._what = what
        self._consequence = consequence
        self._ranges = LostRanges(ranges_max=_RANGES_MAX)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def sentence(self) -> str:
        """Where records may be missing; empty: nowhere."""
        if not self._ranges:
            return ""
        places = ", ".join(f"[{start}, {end})" for start, end in self._ranges)
        return f"Records of {self._what} at seqnums {places} may be lost by damage."

    def read_on_after(self, error: DataLossError, bound: SeqNum) -> SeqNum:
        """Note and log what is lost; return where to read on.

        Args:
            error: what a read raised.
            bound: where that read began.

        Raises:
            DataLossError: it does not say where reading goes on.
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
    """Return an error that says which state cannot be read because of a loss.

    Args:
        what: the state ("Object 'x' of log 'y'").
        error: what a read raised, or what was named before.
    """
    if str(error).startswith(what):
        return error
    return DataLossError(
        f"{what} cannot be read: {error}",
        seqnum=error.seqnum,
        next_seqnum=error.next_seqnum,
        tags=error.tags,
    )
