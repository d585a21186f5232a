"""The metalog as a storage node has applied it, and what it says about each position (ARCHITECTURE
2 and 8.5).

Entries are applied in order without gaps. What comes early waits, bounded; what is missing is asked
for by the node. All that index data needs to know about a position is kept in flat arrays: 24 bytes
a position and 18 bytes a span. Of trims the floors are kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from indilog.columns import copied, packed, restored, unpacked
from indilog.floors import Trimmed
from indilog.ids import LocalId, MetalogPosition, SeqNum, ShardId
from indilog.metalog import Entry, MetalogReplay, Span, Trim


class OrderingColumns(msgspec.Struct, frozen=True, array_like=True):
    """What `Ordering` keeps, but floors, packed (`indilog.columns`)."""

    position: MetalogPosition
    tail: SeqNum
    cut: dict[ShardId, LocalId]
    trims: int
    tails: bytes
    times: bytes
    span_ends: bytes
    shards: bytes
    localids: bytes
    lengths: bytes


_COLUMNS: Final = ("tails", "times", "span_ends", "shards", "localids", "lengths")


class Ordering:
    """Applied entries, and at most `ahead_max` that wait for earlier ones.

    Attributes:
        floors: what the applied trims add up to.
        trimmed_at: the position after the last of them: whoever is there knows all floors.
    """

    __slots__ = (
        "_ahead", "_ahead_max", "_lengths", "_localids", "_replay", "_shards", "_span_ends",
        "_tails", "_times", "floors", "trimmed_at",
    )  # fmt: skip

    def __init__(self, *, ahead_max: int) -> None:
        self._ahead_max = ahead_max
        self._ahead: dict[MetalogPosition, Entry] = {}
        self._replay = MetalogReplay()
        self._tails = array("Q")
        self._times = array("Q")
        """When each entry was proposed, in microseconds since 1970; never goes back."""
        self._span_ends = array("Q")
        self._shards = array("H")
        self._localids = array("Q")
        self._lengths = array("Q")
        self.floors = Trimmed()
        self.trimmed_at: MetalogPosition = 0

    @property
    def position(self) -> MetalogPosition:
        """How many entries are applied."""
        return self._replay.position

    @property
    def tail(self) -> SeqNum:
        """The first seqnum that no applied entry has ordered."""
        return self._replay.tail

    @property
    def gap(self) -> bool:
        """Whether a later entry is here while the next one is missing."""
        return bool(self._ahead)

    def put(self, entries: Iterable[Entry]) -> list[tuple[Entry, list[Span]]]:
        """Take in entries; return those that could be applied, in order, with what they ordered.

        Known ones are skipped. Too many ahead are forgotten: they are asked for again.
        """
        applied: list[tuple[Entry, list[Span]]] = []
        for entry in entries:
            if entry.position == self.position:
                applied.append((entry, self._apply(entry)))
            elif entry.position > self.position and len(self._ahead) < self._ahead_max:
                self._ahead[entry.position] = entry
        while self._ahead:
            following = self._ahead.pop(self.position, None)
            if following is None:
                break
            applied.append((following, self._apply(following)))
        if self._ahead and applied:
            self._ahead = {p: e for p, e in self._ahead.items() if p > self.position}
        return applied

    def _apply(self, entry: Entry) -> list[Span]:
        spans = [span for span in self._replay.apply(entry) if span.length]
        for span in spans:
            self._shards.append(span.shard)
            self._localids.append(span.first_localid)
            self._lengths.append(span.length)
        before_us = self._times[-1] if self._times else 0
        self._times.append(max(before_us, entry.time_us))
        if isinstance(entry, Trim):
            self.floors.apply(entry.floors)
            self.floors.trims = self._replay.trims
            self.trimmed_at = self.position
        self._tails.append(self._replay.tail)
        self._span_ends.append(len(self._shards))
        return spans

    def tail_at(self, position: MetalogPosition) -> SeqNum:
        """Return the log's tail after the entry at `position`, which is applied."""
        return self._tails[position]

    def spans_at(self, position: MetalogPosition) -> list[Span]:
        """Return what the entry at `position`, which is applied, ordered."""
        start = self._span_ends[position - 1] if position else 0
        seqnum = self._tails[position - 1] if position else 0
        spans: list[Span] = []
        for index in range(start, self._span_ends[position]):
            span = Span(
                ShardId(self._shards[index]), self._localids[index], seqnum, self._lengths[index]
            )
            spans.append(span)
            seqnum = span.end_seqnum
        return spans

    def find_time(self, time_us: int) -> MetalogPosition | None:
        """Return the position of the first entry that was proposed at `time_us` or later, or None.

        It may have ordered nothing: then what follows was ordered later still.
        """
        position = bisect_left(self._times, time_us)
        return position if position < len(self._times) else None

    def ordered_us(self, seqnum: SeqNum) -> int:
        """Return the stamp of the applied entry that ordered `seqnum`, microseconds since 1970."""
        return self._times[bisect_right(self._tails, seqnum)]

    def tail_before(self, position: MetalogPosition) -> SeqNum:
        """Return the log's tail before the entry at `position`, which is applied."""
        return self._tails[position - 1] if position else 0

    # --- checkpoints

    def copied(self) -> Callable[[], OrderingColumns]:
        """Copy everything; return what packs the copy, which may run in a thread."""
        replay = self._replay
        state = replay.position, replay.tail, dict(replay.cut), replay.trims
        columns = [copied(getattr(self, f"_{name}")) for name in _COLUMNS]
        return lambda: OrderingColumns(*state, *map(packed, columns))

    def restore(self, columns: OrderingColumns) -> None:
        """Begin with what was copied once.

        Raises:
            MalformedFrameError: a column is of a version that this release does not know.
        """
        self._replay = MetalogReplay(columns.position, columns.tail, columns.cut, columns.trims)
        for name in _COLUMNS:
            typecode = getattr(self, f"_{name}").typecode
            setattr(self, f"_{name}", restored(typecode, unpacked(getattr(columns, name))))

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        assert len(self._tails) == len(self._span_ends) == self.position
        assert self.tail == sum(self._replay.cut.values())
        assert all(position > self.position for position in self._ahead)
