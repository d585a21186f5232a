"""The segments of a log that was switched from one kind to another.

Each segment is a log of its own in some logspace, and only the last one is open. The seqnums of
each segment are shifted, so that they continue where the previous segment ends. A logspace may have
ordered records at or above the end of a closed segment; these records are not in the log.

`catalog` derives the segments from its records; `segmented_log` reads and appends through them.
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


class LogSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a log, of one kind. A *local* seqnum is a seqnum in the segment's logspace.

    Attributes:
        number: seqnum of the record `closing` with which the switch to this segment began; `FIRST`
            for the first segment.
        kind: its kind.
        place, folder: see `NewSegment`.
        local_log: name of the log in the segment's logspace.
        start: its first seqnum.
        local_first: the local seqnum of `start`.
        local_end: the first local seqnum after the segment; None: the segment is open.
        time_floor: the log's time when the segment began, seconds since 1970.
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
        """Return the local seqnum of a seqnum of the log; from `local_first` to `local_end`."""
        local = max(seqnum - self.start, 0) + self.local_first
        return min(local, MAX_SEQNUM if self.local_end is None else self.local_end)

    def has(self, local: SeqNum) -> bool:
        """Whether a local seqnum is in the segment."""
        return self.local_first <= local and (self.local_end is None or local < self.local_end)

    def ordered_at(self, local: float) -> float:
        """Return the time of the log for the time `local` of the logspace. Logspaces may have
        different clocks, but the time of a log never goes back.
        """
        return max(local, self.time_floor)

    def record(self, found: Record, log: str) -> Record:
        """Return a record of the segment with the seqnum, names and time of `log`."""
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
        """Return the error of a segment with seqnums of the log."""
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

    def closed(self, local_end: SeqNum) -> LogSegment:
        """Return the segment as closed at `local_end`."""
        return msgspec.structs.replace(self, local_end=local_end)


def from_bound(segments: Sequence[LogSegment], bound: SeqNum) -> Iterator[LogSegment]:
    """Yield the segments with seqnums >= `bound`, in order."""
    first = bisect_right(segments, bound, key=lambda segment: segment.start) - 1
    for segment in segments[max(first, 0) :]:
        if segment.end > max(bound, segment.start):
            yield segment


def down_from(segments: Sequence[LogSegment], bound: SeqNum) -> Iterator[LogSegment]:
    """Yield the segments with seqnums <= `bound`, the last one first."""
    last = bisect_right(segments, bound, key=lambda segment: segment.start)
    for segment in reversed(segments[:last]):
        if segment.end > segment.start:
            yield segment


def bridged(
    last: LogSegment, *, local_end: SeqNum, time: float, to: LogSegment
) -> tuple[LogSegment, LogSegment]:
    """Return the segment `last` as closed, and `to` as the segment that continues the log.

    Args:
        last: the open segment.
        local_end: the local end of `last`.
        time: the log's time at that end, seconds since 1970.
        to: the new segment; its `start` and `time_floor` are replaced.
    """
    closed = last.closed(max(local_end, last.local_first))
    return closed, msgspec.structs.replace(
        to, start=closed.end, time_floor=max(time, last.time_floor)
    )
