"""The metalog as a storage node has applied it, and the spans that each entry ordered (ARCHITECTURE
2 and 8.5).

Entries are applied in order, without gaps; the node requests missing entries. Entries that the
primary has replaced are cut off (`indilog.roles.metalog_reader`). Flat arrays hold the facts that
index data needs: 24 bytes per position, 18 bytes per span, and 18 bytes per new writer of a shard.
The floors and position of each trim are kept, and the replicas of each moved shard.

`StorageNode` owns the one `Ordering`. Reads, repair, reclamation and checkpoints query it;
`indilog_pipeline` reads its columns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Final, NamedTuple, assert_never

import msgspec
import numpy as np
from numpy.typing import NDArray

from indilog.base.columns import Pack, Packs
from indilog.base.ids import Epoch, LocalId, MetalogPosition, SeqNum, ShardId, ViewNumber
from indilog.base.log import PlacedSpan
from indilog.kernel.floors import Trimmed
from indilog.kernel.lineage import Extent, Lineage, LineageColumns, TrimExtent
from indilog.kernel.metalog import (
    NO_INCARNATION,
    Entry,
    MetalogReplay,
    NewRecords,
    NewReplicas,
    NewView,
    NewWriters,
    Replicas,
    Span,
    Trim,
    replicas_in,
)
from indilog.kernel.view import View
from indilog.roles.metalog_reader import MetalogReader


class OrderingColumns(msgspec.Struct, frozen=True, array_like=True):
    """The state of an `Ordering` without floors, packed (`indilog.base.columns`)."""

    position: MetalogPosition
    tail: SeqNum
    cut: dict[ShardId, LocalId]
    trims: int
    lineage: LineageColumns
    positions: tuple[Pack, ...]
    spans: tuple[Pack, ...]
    trim_positions: tuple[Pack, ...]
    writers: tuple[Pack, ...]
    replicas: tuple[tuple[ShardId, Replicas], ...] = ()
    """All shards that were moved, ascending by position."""
    views: tuple[tuple[MetalogPosition, View], ...] = ()
    """All views that entries install, ascending."""


class OrderedColumns(NamedTuple):
    """Ordered records: a row for each entry, and a row for each span.

    Attributes:
        tails, times: for each entry, the log's tail after the entry, and the entry's stamp in
            microseconds since 1970.
        positions, shards, localids, seqnums, lengths: for each span, ascending by seqnum, the
            position of its entry, its shard, its first localid, its first seqnum, and its number of
            records.
    """

    tails: NDArray[np.uint64]
    times: NDArray[np.uint64]
    positions: NDArray[np.int64]
    shards: NDArray[np.uint16]
    localids: NDArray[np.uint64]
    seqnums: NDArray[np.uint64]
    lengths: NDArray[np.uint64]


class ShardHistory(NamedTuple):
    """The facts about one shard in the applied entries.

    Attributes:
        localids, seqnums: where its spans begin, ascending.
        writers: for each writer of the shard, its first localid and its epoch.
        ordered: number of the shard's ordered records.
    """

    localids: NDArray[np.uint64]
    seqnums: NDArray[np.uint64]
    writers: list[tuple[LocalId, Epoch]]
    ordered: LocalId

    def may_have(self, localid: LocalId, writer: Epoch) -> bool:
        """Whether a record of `writer` at `localid` is ordered, or may still be ordered."""
        index = bisect_right(self.writers, localid, key=itemgetter(0)) - 1
        having = self.writers[index][1] if index >= 0 else NO_INCARNATION
        return writer == having or (writer > having and localid >= self.ordered)


_VIEW: Final = ViewNumber(1)
"""The view number in entries sent to other nodes. The original number is not kept, and no node
reads it.
"""
_COLUMNS: Final = (
    ("_tails", "_times", "_span_ends"),
    ("_shards", "_localids", "_lengths"),
    ("_trim_positions",),
    ("_writer_positions", "_writer_shards", "_writer_epochs"),
)


class Ordering:
    """The applied entries.

    Attributes:
        reader: checks received entries, and requests missing ones from the primary.
        floors: the floors of all applied trims.
        trimmed_at: the position after the last trim. A node that has applied all entries below this
            position knows all these floors.
    """

    __slots__ = (
        "_lengths", "_localids", "_moves", "_packs", "_replay", "_shards", "_span_ends", "_tails",
        "_times", "_trim_positions", "_views", "_writer_epochs", "_writer_positions",
        "_writer_shards", "floors", "reader", "trimmed_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.reader = MetalogReader()
        self._replay = MetalogReplay()
        self._tails = array("Q")
        self._times = array("Q")
        """When each entry was proposed, in microseconds since 1970; never decreases."""
        self._span_ends = array("Q")
        self._shards = array("H")
        self._localids = array("Q")
        self._lengths = array("Q")
        self._trim_positions = array("Q")
        """The positions of trims."""
        self._writer_positions = array("Q")
        self._writer_shards = array("H")
        self._writer_epochs = array("Q")
        """For each new writer: the position of the entry that names it, its shard and its epoch."""
        self._moves: list[tuple[ShardId, Replicas]] = []
        """Each move of a shard by an entry, with the new replicas; ascending by position."""
        self._views: list[tuple[MetalogPosition, View]] = []
        """Each view that an entry installs, with its position."""
        self._packs = tuple(Packs() for _ in _COLUMNS)
        self.floors = Trimmed()
        self.trimmed_at: MetalogPosition = 0

    @property
    def position(self) -> MetalogPosition:
        """Number of applied entries."""
        return self._replay.position

    @property
    def tail(self) -> SeqNum:
        """The first seqnum that no applied entry has ordered."""
        return self._replay.tail

    @property
    def last(self) -> Epoch:
        """The incarnation of the primary that proposed the last applied entry; 0: there is none."""
        return self.reader.lineage.last

    @property
    def trims(self) -> int:
        """Number of applied trims."""
        return self._replay.trims

    @property
    def trim_extent(self) -> TrimExtent:
        """Which trims are applied."""
        return TrimExtent(self.last, self.trims, self.trim_epoch(self.trims))

    def knows(self, trims: int, epoch: Epoch) -> bool:
        """Whether the first `trims` trims are applied, and also an entry that incarnation `epoch`
        or a later incarnation proposed.
        """
        return epoch <= self.last and TrimExtent(self.last, self.trims).covers(trims, epoch)

    @property
    def extent(self) -> Extent:
        """The extent of the applied entries."""
        return Extent(self.reader.lineage.last, self.position)

    def recover(self, entry: Entry) -> list[Span]:
        """Apply the next entry, from the journal or from another storage node."""
        self.reader.lineage.append(entry.epoch)
        return self.apply(entry)

    def epoch_at(self, position: MetalogPosition) -> Epoch:
        """Return the incarnation that proposed the applied entry at `position`; 0 for position
        -1.
        """
        epoch = self.reader.lineage.before(position + 1)
        assert epoch is not None, "it is applied"
        return epoch

    def trim_epoch(self, trims: int) -> Epoch:
        """Return the incarnation that proposed the last of the first `trims` applied trims; 0 if
        `trims` is 0.
        """
        return self.epoch_at(self._trim_positions[trims - 1] if trims else -1)

    def apply(self, entry: Entry) -> list[Span]:
        """Apply the next entry, which the reader has accepted; return the spans that it ordered."""
        spans = [span for span in self._replay.apply(entry) if span.length]
        for span in spans:
            self._shards.append(span.shard)
            self._localids.append(span.first_localid)
            self._lengths.append(span.length)
        before_us = self._times[-1] if self._times else 0
        self._times.append(max(before_us, entry.time_us))
        match entry:
            case NewRecords():
                pass
            case Trim():
                self.floors.apply(entry.floors)
                self.trimmed_at = self.position
                self._trim_positions.append(entry.position)
            case NewWriters():
                for shard, writer in entry.writers.items():
                    self._writer_positions.append(entry.position)
                    self._writer_shards.append(shard)
                    self._writer_epochs.append(writer)
            case NewReplicas():
                self._moves += replicas_in(entry).items()
            case NewView():
                self._views.append((entry.position, entry.following))
            case unreachable:
                assert_never(unreachable)
        self._tails.append(self._replay.tail)
        self._span_ends.append(len(self._shards))
        return spans

    def cut_off(self, position: MetalogPosition) -> None:
        """Remove the entries from `position` on, because the primary has replaced them.

        Floors stay, because a client may rely on a trim that was acknowledged.
        """
        assert position <= self.position, "only applied entries can be cut off"
        spans = self._span_ends[position - 1] if position else 0
        cut = dict(self._replay.cut)
        for shard, length in zip(self._shards[spans:], self._lengths[spans:], strict=True):
            cut[ShardId(shard)] -= length
        trims = bisect_left(self._trim_positions, position)
        self._replay = MetalogReplay(position, self.tail_before(position), cut, trims)
        self.trimmed_at = self._trim_positions[trims - 1] + 1 if trims else 0
        writers = bisect_left(self._writer_positions, position)
        for packs, rows in zip(self._packs, (position, spans, trims, writers), strict=True):
            packs.changed(rows)
        del self._trim_positions[trims:]
        for by_writer in (self._writer_positions, self._writer_shards, self._writer_epochs):
            del by_writer[writers:]
        self._moves = [move for move in self._moves if move[1].since < position]
        self._views = [at for at in self._views if at[0] < position]
        for by_position in (self._tails, self._times, self._span_ends):
            del by_position[position:]
        for by_span in (self._shards, self._localids, self._lengths):
            del by_span[spans:]

    def writer_of(self, shard: ShardId) -> Epoch:
        """Return the newest writer of a shard; 0: there is none."""
        named = zip(self._writer_shards, self._writer_epochs, strict=True)
        return Epoch(max((epoch for of, epoch in named if of == shard), default=NO_INCARNATION))

    @property
    def replicas(self) -> dict[ShardId, Replicas]:
        """The newest replicas of each shard that was moved."""
        return dict(self._moves)

    @property
    def view(self) -> View | None:
        """The newest view that an applied entry installs; None: no entry installs a view."""
        return self._views[-1][1] if self._views else None

    def history_of(self, shard: ShardId) -> ShardHistory:
        """Return the facts about one shard in the applied entries."""
        rows = np.flatnonzero(np.frombuffer(self._shards, np.uint16) == shard)
        lengths = np.frombuffer(self._lengths, np.uint64)
        seqnums = np.cumsum(lengths)[rows] - lengths[rows]
        localids = np.frombuffer(self._localids, np.uint64)[rows]
        positions = np.searchsorted(np.frombuffer(self._span_ends, np.uint64), rows, side="right")
        ends = localids + lengths[rows]
        writers: list[tuple[LocalId, Epoch]] = []
        for position, of, epoch in self.writers(self.position).tolist():
            if of == shard:
                before = int(np.searchsorted(positions, position))
                writers.append((int(ends[before - 1]) if before else 0, Epoch(epoch)))
        return ShardHistory(localids, seqnums, writers, self.cut_of(shard))

    def writers_from(
        self, position: MetalogPosition, shard: ShardId
    ) -> list[tuple[LocalId, Epoch]]:
        """Return the writers of a shard that the entries from `position` on name. Each comes with
        the number of the shard's records that were ordered before it.
        """
        found: list[tuple[LocalId, Epoch]] = []
        for row in range(bisect_left(self._writer_positions, position), len(self._writer_shards)):
            if self._writer_shards[row] == shard:
                start = self._span_ends[self._writer_positions[row]]
                following = zip(self._shards[start:], self._lengths[start:], strict=True)
                ordered = sum(length for other, length in following if other == shard)
                found.append((self.cut_of(shard) - ordered, Epoch(self._writer_epochs[row])))
        return found

    def cut_of(self, shard: ShardId) -> LocalId:
        """Return the number of ordered records of a shard."""
        return self._replay.cut.get(shard, 0)

    def tail_at(self, position: MetalogPosition) -> SeqNum:
        """Return the log's tail after the applied entry at `position`."""
        return self._tails[position]

    def spans_at(self, position: MetalogPosition) -> list[Span]:
        """Return the spans that the applied entry at `position` ordered."""
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

    def places(self, start: SeqNum, end: SeqNum, spans_max: int) -> tuple[PlacedSpan, ...]:
        """Return the first spans of the ordered records from `start` to below `end`, at most
        `spans_max`.
        """
        found: list[PlacedSpan] = []
        position = self.position_of(start)
        while start < end and position < self.position and len(found) < spans_max:
            for shard, localid, first, length, *_ in self.spans_at(position):
                if first < end and first + length > start and len(found) < spans_max:
                    at, stop = max(first, start), min(first + length, end)
                    found.append(PlacedSpan(at, stop, shard, localid + at - first, position))
            position += 1
        return tuple(found)

    def find_time(self, time_us: int) -> MetalogPosition | None:
        """Return the position of the first entry proposed at `time_us` or later; None: there is
        none.

        `time_us` is in microseconds since 1970. The entry may have ordered no records.
        """
        position = bisect_left(self._times, time_us)
        return position if position < len(self._times) else None

    def ordered_us(self, seqnum: SeqNum) -> int:
        """Return the stamp of the applied entry that ordered `seqnum`, microseconds since 1970."""
        return self._times[bisect_right(self._tails, seqnum)]

    @property
    def last_us(self) -> int:
        """The stamp of the last applied entry, microseconds since 1970; 0: there is none."""
        return self._times[-1] if self._times else 0

    def position_of(self, seqnum: SeqNum) -> MetalogPosition:
        """Return the position of the applied entry that ordered `seqnum`."""
        return bisect_right(self._tails, seqnum)

    def tail_before(self, position: MetalogPosition) -> SeqNum:
        """Return the log's tail before the applied entry at `position`."""
        return self._tails[position - 1] if position else 0

    def columns(self, end: MetalogPosition) -> OrderedColumns:
        """Return copies of the columns of the applied entries below `end`."""
        span_ends = np.array(self._span_ends[:end], np.int64)
        spans = int(span_ends[-1]) if end else 0
        lengths = np.array(self._lengths[:spans], np.uint64)
        return OrderedColumns(
            np.array(self._tails[:end], np.uint64),
            np.array(self._times[:end], np.uint64),
            np.searchsorted(span_ends, np.arange(spans), side="right"),
            np.array(self._shards[:spans], np.uint16),
            np.array(self._localids[:spans], np.uint64),
            np.cumsum(lengths) - lengths,
            lengths,
        )

    def writers(self, end: MetalogPosition) -> NDArray[np.int64]:
        """Return a row (position, shard, epoch) for each writer that the entries below
        `end` name.
        """
        count = bisect_left(self._writer_positions, end)
        columns = (self._writer_positions, self._writer_shards, self._writer_epochs)
        return np.stack([np.array(column[:count], np.int64) for column in columns], axis=1)

    # --- for other storage nodes

    def has(self, position: MetalogPosition, last: Epoch) -> bool:
        """Whether the entries below `position` are applied, and incarnation `last` proposed the
        last one of them.
        """
        return self.reader.lineage.before(position) == last

    def entries(self, start: MetalogPosition, end: MetalogPosition) -> tuple[Entry, ...]:
        """Return the applied entries of [start, end), without the floors of trims."""
        return tuple(self._entry(position) for position in range(start, end))

    def _entry(self, position: MetalogPosition) -> Entry:
        epoch = self.epoch_at(position)
        number = bisect_left(self._trim_positions, position)
        if number < len(self._trim_positions) and self._trim_positions[number] == position:
            return Trim(position, _VIEW, epoch, number, ())
        first = bisect_left(self._writer_positions, position)
        end = bisect_right(self._writer_positions, position)
        if first < end:
            named = zip(self._writer_shards[first:end], self._writer_epochs[first:end], strict=True)
            writers = {ShardId(shard): Epoch(writer) for shard, writer in named}
            return NewWriters(position, _VIEW, epoch, writers)
        if moves := {s: moved.nodes for s, moved in self._moves if moved.since == position}:
            return NewReplicas(position, _VIEW, epoch, moves)
        for at, following in self._views:
            if at == position:
                return NewView(position, _VIEW, epoch, following)
        counts = {span.shard: span.length for span in self.spans_at(position)}
        return NewRecords(position, _VIEW, epoch, counts, self._times[position])

    # --- checkpoints

    def copied(self) -> Callable[[], OrderingColumns]:
        """Copy the state; the returned function packs the copy and may run in any thread."""
        replay = self._replay
        lineage = self.reader.lineage.copied()
        state = replay.position, replay.tail, dict(replay.cut), replay.trims, lineage
        copies = [
            packs.copied([getattr(self, name) for name in names])
            for packs, names in zip(self._packs, _COLUMNS, strict=True)
        ]
        moves, views = tuple(self._moves), tuple(self._views)

        def packed() -> OrderingColumns:
            positions, spans, trims, writers = (copy() for copy in copies)
            return OrderingColumns(*state, positions, spans, trims, writers, moves, views)

        return packed

    def restore(self, columns: OrderingColumns) -> None:
        """Restore a copied state.

        Raises:
            MalformedFrameError: a column is of a version that this release does not know.
        """
        self._replay = MetalogReplay(columns.position, columns.tail, columns.cut, columns.trims)
        said = columns.positions, columns.spans, columns.trim_positions, columns.writers
        for packs, names, found in zip(self._packs, _COLUMNS, said, strict=True):
            typecodes = [getattr(self, name).typecode for name in names]
            for name, column in zip(names, packs.restore(found, typecodes), strict=True):
                setattr(self, name, column)
        self._moves, self._views = list(columns.replicas), list(columns.views)
        self.reader.lineage = Lineage.restored(columns.lineage)

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        assert len(self._tails) == len(self._span_ends) == self.position
        assert self.tail == sum(self._replay.cut.values())
        assert self.reader.lineage.position == self.position
        assert self.trims == len(self._trim_positions)
        assert len(self._writer_positions) == len(self._writer_shards) == len(self._writer_epochs)
        assert self.trimmed_at <= self.position
        assert len(self._shards) == len(self._localids) == len(self._lengths)
        assert not self._span_ends or self._span_ends[-1] == len(self._shards)
