"""The segments of a log that was switched from one kind to another.

Each segment is a log of its own in some logspace, and only the last one is open. Seqnums of each
segment are shifted, so that they continue where the segment before it ends. A logspace may have
ordered records at or above the end of a closed segment; these are not in the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from indilog.base.errors import DataLossError
from indilog.base.ids import MAX_SEQNUM, SeqNum
from indilog.base.log import After, Record
from indilog.base.log_kinds import LogKind

_NAMES_SEPARATOR: Final = b"\x1f"
"""Separates the texts of a record's log and tags (`indilog.base.ids.TagColumns.names`)."""

FIRST: Final = -1
"""Number of the first segment of a log."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a log, of one kind. A *local* seqnum is a seqnum in the segment's logspace.

    Attributes:
        number: seqnum of the catalog's record with which the segment began; `FIRST`: it is the
            first one.
        kind: its kind.
        place, folder: those of its object store (`CreatedLog`).
        local_log: name of the log in its logspace.
        start: its first seqnum.
        local_first: the local seqnum of `start`.
        local_end: the first local seqnum after it; None: it is open.
        time_floor: the log's time when it began, seconds since 1970.
    """

    number: SeqNum
    kind: LogKind
    place: str
    folder: str
    local_log: str
    start: SeqNum
    local_first: SeqNum = 0
    local_end: SeqNum | None = None
    time_floor: float = 0.0

    @property
    def end(self) -> SeqNum:
        """The first seqnum after the segment; for an open segment, a number above all seqnums."""
        return MAX_SEQNUM + 1 if self.local_end is None else self.seqnum(self.local_end)

    def seqnum(self, local: SeqNum) -> SeqNum:
        """Return the seqnum in the log."""
        return local - self.local_first + self.start

    def local(self, seqnum: SeqNum) -> SeqNum:
        """Return the local seqnum, limited to those of the segment and the one after them."""
        local = max(seqnum - self.start, 0) + self.local_first
        return min(local, MAX_SEQNUM if self.local_end is None else self.local_end)

    def has(self, local: SeqNum) -> bool:
        """Whether a local seqnum is in the segment."""
        return self.local_first <= local and (self.local_end is None or local < self.local_end)

    def ordered_at(self, local: float) -> float:
        """Return the log's time of a record with the logspace's time `local`. Clocks of two kinds
        may differ, but the time of a log never goes back.
        """
        return max(local, self.time_floor)

    def record(self, found: Record, log: str) -> Record:
        """Return a record of the segment as a record of `log`."""
        if not self.start and not self.local_first and not self.time_floor:
            return found
        _, separator, tags = found.names.partition(_NAMES_SEPARATOR)
        return Record(
            self.seqnum(found.seqnum),
            log.encode() + separator + tags,
            found.data,
            found.time,
            self.ordered_at(found.ordered_at),
            found.aux,
        )

    def loss(self, error: DataLossError) -> DataLossError:
        """Return the error with seqnums of the log."""
        found, after = error.seqnum, error.next_seqnum
        return DataLossError(
            str(error),
            seqnum=None if found is None else self.seqnum(found),
            next_seqnum=None if after is None else self.seqnum(self.limited(after)),
            tags=error.tags,
        )

    def limited(self, local: SeqNum) -> SeqNum:
        """Return a local seqnum, at most the end of the segment."""
        return local if self.local_end is None else min(local, self.local_end)

    def after(self, condition: After) -> After:
        """Return the part of a condition that is about this segment."""
        seqnum = condition.seqnum
        if seqnum is None or seqnum < self.start:
            return After(condition.tag, None)
        return After(condition.tag, self.local(seqnum))

    def closed(self, local_end: SeqNum) -> Segment:
        """Return the segment with an end."""
        return msgspec.structs.replace(self, local_end=local_end)


def from_bound(segments: Sequence[Segment], bound: SeqNum) -> Iterator[Segment]:
    """Yield the segments that have seqnums from `bound` on, in order."""
    first = bisect_right(segments, bound, key=lambda segment: segment.start) - 1
    for segment in segments[max(first, 0) :]:
        if segment.end > max(bound, segment.start):
            yield segment


def down_from(segments: Sequence[Segment], bound: SeqNum) -> Iterator[Segment]:
    """Yield the segments that have seqnums up to `bound`, the last one first."""
    last = bisect_right(segments, bound, key=lambda segment: segment.start)
    for segment in reversed(segments[:last]):
        if segment.end > segment.start:
            yield segment


def bridged(
    last: Segment, *, local_end: SeqNum, time: float, to: Segment
) -> tuple[Segment, Segment]:
    """Return the segment `last` as closed, and `to` as the segment that continues the log.

    Args:
        last: the open segment.
        local_end: its end.
        time: the log's time at its end.
        to: the new segment; `start` and `time_floor` are replaced.
    """
    closed = last.closed(max(local_end, last.local_first))
    return closed, msgspec.structs.replace(
        to, start=closed.end, time_floor=max(time, last.time_floor)
    )
