"""One shard as one replica keeps it (ARCHITECTURE 3, 8 and thesis 5.5.1): writers, places of
batches, and seqnums of records.

A shard has three prefixes of localids, each at most as long as the one before. Records of the
`written` prefix are accepted and passed to the journal. Records of the `stored` prefix are durable.
Records of the `ordered` prefix have seqnums from the metalog. The stored prefix may have *holes*:
records that a damaged or wiped disk lost. Records in a hole are unknown here, never absent;
`indilog_storage.repair` fetches them from another replica.

A writer owns a shard from the metalog entry on that names the writer (`NewWriters`). This entry
drops the unordered records of earlier writers, so all unordered records are the newest writer's.
Only in a replay after damage can a batch precede the entry that names its writer.

Unordered records in a hole do not count as stored: the replica does not report them to the primary,
and their writer resends them.

The state is in flat arrays: 28 bytes per batch or hole, and 16 bytes per span of consecutive
records.

`MovedShards` keeps the `Shard`s of a node. The other parts of `StorageNode` change and query them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict

from indilog.base.columns import Packs
from indilog.base.ids import Epoch, LocalId, SeqNum, ShardId
from indilog.kernel.cold import ColdObject
from indilog.kernel.metalog import NO_INCARNATION, Span
from indilog.kernel.records import RecordBatch
from indilog.roles.role import Location
from indilog_storage.batch_reads import FIRST_COLD_SEGMENT, DamagedBatch
from indilog_storage.ordering import ShardHistory
from indilog_storage.shard_parts import BatchRows, LocalBatches, ShardColumns

_HOLE: Final = 0
"""The segment number of a row that is a hole: segments are numbered from 1."""
_HOLE_PLACE: Final = Location(_HOLE, 0, 0)
_GONE: Final = 2**32 - 1
"""The segment number of a discarded batch: all its records were trimmed."""
_NOWHERE: Final = (_HOLE, _GONE)
GONE: Final = Location(_GONE, 0, 0)
"""The place of a discarded batch."""
_COLD: Final = FIRST_COLD_SEGMENT
COLD_OBJECTS_MAX: Final = _GONE - _COLD
_ROWS_AT_ONCE: Final = 1 << 16
_ROWS: Final = ("_firsts", "_segments", "_offsets", "_lengths")
_SPANS: Final = ("_span_seqnums", "_span_localids")


class Shard:
    """One shard; methods that change it are called in the order of the journal.

    Attributes:
        writer: the newest writer that the applied metalog entries name; 0: none.
        leading: whether this is the first replica, which sends index data unrequested.
        alone: whether this is the only replica.
        written, stored, ordered: prefix lengths, see the module.
        bytes: bytes of all stored batches.
        unordered: batches that no entry has ordered yet, kept for their tags; the oldest may be
            missing.
        holes: unknown ranges inside the stored prefix; by first localid, the end of each range.
        given_up: first localids of holes that no replica can fill.
        damaged: damaged batches that an only replica keeps: by the first localid of the batch, its
            first damaged record and its number of damaged records.
    """

    __slots__ = (
        "_firsts", "_lengths", "_offsets", "_row_packs", "_runs", "_segments",
        "_span_localids", "_span_packs", "_span_seqnums", "_unreadable", "alone", "bytes",
        "damaged", "given_up", "holes", "id", "leading", "ordered", "stored", "unordered",
        "writer", "written",
    )  # fmt: skip

    def __init__(self, shard: ShardId, *, leading: bool = False, alone: bool = False) -> None:
        self.id = shard
        self.leading = leading
        self.alone = alone
        self.writer = NO_INCARNATION
        self.written: LocalId = 0
        self.stored: LocalId = 0
        self.ordered: LocalId = 0
        self.bytes = 0
        self.unordered: deque[RecordBatch] = deque()
        self.holes: SortedDict[LocalId, LocalId] = SortedDict()
        self.given_up: set[LocalId] = set()
        self.damaged: dict[LocalId, tuple[LocalId, int]] = {}
        self._unreadable: set[LocalId] = set()
        """First localids of holes whose batches the next incarnation may find readable."""
        self._runs: list[tuple[LocalId, Epoch]] = []
        """The writers of the stored, unordered records: first localid and epoch of each."""
        self._firsts = array("Q")
        self._segments = array("I")
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._span_seqnums = array("Q")
        self._span_localids = array("Q")
        self._row_packs, self._span_packs = Packs(), Packs()

    # --- writers

    def begin(self, writer: Epoch) -> None:
        """Give the shard to the writer that a metalog entry names; earlier entries are applied.

        Stored records of earlier writers that no entry has ordered are dropped. If batches of this
        or a later writer are stored already, the missing records before them become a hole.
        """
        self.writer = writer
        runs = [run for run in self._runs if run[1] >= writer]
        kept = max(runs[0][0], self.ordered) if runs else self.stored
        self._drop(self.ordered, kept, before=bool(runs))
        if runs and runs[0][1] == writer:
            runs[0] = (self.ordered, writer)
        self._runs = runs
        self.unordered = deque(b for b in self.unordered if b.header.epoch >= writer)
        self.written = self.stored

    def _drop(self, first: LocalId, end: LocalId, *, before: bool) -> None:
        """Drop all records from `first` on; if `before`, only [first, end), which becomes a
        hole.
        """
        if not before:
            self._truncate(first)
        elif first < end:
            start, stop = bisect_left(self._firsts, first), bisect_left(self._firsts, end)
            self._row_packs.changed(start)
            index = self.holes.bisect_left(first) - 1
            if index >= 0 and self.holes.peekitem(index)[1] > first:
                self.holes[self.holes.peekitem(index)[0]] = first
            self.bytes -= sum(self._lengths[start:stop])
            for column in (self._firsts, self._segments, self._offsets, self._lengths):
                del column[start:stop]
            for hole in [hole for hole in self.holes if first <= hole < end]:
                self._no_hole_at(hole)
            self._insert(start, first, _HOLE_PLACE)
            self.holes[first] = end

    def replaces(self, first: LocalId, writer: Epoch) -> bool:
        """Whether a batch at `first` shows that the later `writer` dropped the records from there
        on.

        This is possible only if the entry that names the writer was lost.
        """
        return first < self.stored and bool(self._runs) and writer > self._runs[-1][1]

    def truncate(self, end: LocalId) -> None:
        """Drop all records from `end` on; none of them is ordered."""
        assert end >= self.ordered, "ordered records are never dropped"
        self._truncate(end)
        self.written = self.stored

    def _truncate(self, end: LocalId) -> None:
        if end >= self.stored:
            return
        keep = bisect_left(self._firsts, end)
        self._row_packs.changed(keep)
        self.bytes -= sum(self._lengths[keep:])
        for column in (self._firsts, self._segments, self._offsets, self._lengths):
            del column[keep:]
        while self.holes and self.holes.peekitem()[0] >= end:
            self._no_hole_at(self.holes.peekitem()[0])
        if self.holes and (last := self.holes.peekitem())[1] > end:
            self.holes[last[0]] = end
        while self.unordered and self.unordered[-1].header.first >= end:
            self.unordered.pop()
        while self._runs and self._runs[-1][0] >= end:
            self._runs.pop()
        self.stored = end

    # --- moves

    def catch_up(self, history: ShardHistory) -> None:
        """Apply the effects of the entries that this node applied while it did not keep the shard.

        A batch that is here stays if its writer owns its localids. All other ordered records are
        missing.
        """
        for start, writer in history.writers:
            if writer > self.writer:
                self._order_to(start, history)
                self.begin(writer)
        self._order_to(history.ordered, history)

    def free(self, first: LocalId, end: LocalId) -> None:
        """Turn the batches within [first, end) into holes. Their bytes are freed, because the shard
        was moved to another node.
        """
        index = bisect_left(self._firsts, first)
        self._row_packs.changed(index)
        while index < len(self._firsts) and self._end_of(index) <= end:
            self.bytes -= self._lengths[index]
            self._segments[index], self._offsets[index], self._lengths[index] = _HOLE, 0, 0
            self.holes[self._firsts[index]] = self._end_of(index)
            index += 1

    def _order_to(self, end: LocalId, history: ShardHistory) -> None:
        if end <= self.ordered:
            return
        self._drop_misplaced(end)
        first, stop = np.searchsorted(history.localids, [self.ordered, end])
        localids, seqnums = history.localids[first:stop], history.seqnums[first:stop]
        jumps = np.append(0, np.flatnonzero(np.diff(seqnums - localids)) + 1)
        self._span_localids.frombytes(localids[jumps].tobytes())
        self._span_seqnums.frombytes(seqnums[jumps].tobytes())
        self._note_ordered(end)

    # --- damage

    def skip_to(self, end: LocalId) -> None:
        """Make a hole of the missing records up to `end`, which other replicas have stored. A hole
        directly before them is extended instead, so that `Repair` requests all of them at once.
        """
        if end <= self.stored:
            return
        last = self._firsts[-1] if self._firsts else self.stored
        is_asked_for = last not in self.given_up and last not in self._unreadable
        if self.holes.get(last) == self.stored and is_asked_for:
            self.holes[last] = end
        else:
            self._insert(len(self._firsts), self.stored, _HOLE_PLACE)
            self.holes[self.stored] = end
        self.stored = end
        self.written = max(self.written, end)

    def lose(self, damage: DamagedBatch) -> bool:
        """Make a hole of the lost part of a damaged batch; False: nothing has changed.

        The only replica of a shard keeps two kinds of damaged batches, because no other replica can
        fill a hole: a batch with damaged data of some records, and a batch that may be readable
        later.
        """
        if self.alone and not damage.readable:
            return False
        try:
            index = self._row_at(damage.location)
        except ValueError:
            return False
        if self.alone and damage.records:
            first = self._firsts[index]
            known = self.damaged.get(first)
            self.damaged[first] = damage.records[0], len(damage.records)
            return known is None
        self.bytes -= self._lengths[index]
        self._row_packs.changed(index)
        self._segments[index], self._offsets[index], self._lengths[index] = _HOLE, 0, 0
        self.holes[self._firsts[index]] = self._end_of(index)
        if not damage.readable:
            self._unreadable.add(self._firsts[index])
        return True

    def _no_hole_at(self, first: LocalId) -> None:
        del self.holes[first]
        self.given_up.discard(first)
        self._unreadable.discard(first)

    def _row_at(self, location: Location) -> int:
        index = self._offsets.index(location.offset)
        while self._segments[index] != location.segment:
            index = self._offsets.index(location.offset, index + 1)
        return index

    def fill(
        self, first: LocalId, end: LocalId, location: Location, writer: Epoch = NO_INCARNATION
    ) -> bool:
        """Note the place of a batch that fills a hole or is the next batch; False: neither."""
        if first >= self.stored:
            self.skip_to(first)
            self.store(first, end, location, writer)
            return True
        index = bisect_right(self._firsts, first) - 1
        hole, hole_end = self._firsts[index], self._end_of(index)
        if self._segments[index] != _HOLE or end > hole_end:
            return False
        self._no_hole_at(hole)
        self._row_packs.changed(index)
        for column in (self._firsts, self._segments, self._offsets, self._lengths):
            del column[index]
        if end < hole_end:
            self._insert(index, end, _HOLE_PLACE)
            self.holes[end] = hole_end
        self._insert(index, first, location)
        self.bytes += location.length
        if hole < first:
            self._insert(index, hole, _HOLE_PLACE)
            self.holes[hole] = first
        return True

    def lacks(self, localid: LocalId, end: LocalId | None = None) -> bool:
        """Whether one hole contains [localid, end); by default, `end` is `localid` + 1."""
        index = self.holes.bisect_right(localid) - 1
        end = localid + 1 if end is None else end
        return index >= 0 and localid < end <= self.holes.peekitem(index)[1]

    def lacks_any(self, first: LocalId, end: LocalId) -> bool:
        """Whether any of [first, end) is in a hole or not stored yet."""
        index = self.holes.bisect_right(first) - 1
        if index >= 0 and self.holes.peekitem(index)[1] > first:
            return True
        known_to = self.stored
        if index + 1 < len(self.holes):
            known_to = self.holes.peekitem(index + 1)[0]
        return end > known_to

    def lacking_to(self, first: LocalId) -> LocalId:
        """Return the end of the range from `first` on that this disk has lost permanently.

        The range is empty if the record at `first` is stored, was never known here, or is only
        unreadable now.
        """
        index = self.holes.bisect_right(first) - 1
        while 0 <= index < len(self.holes):
            hole, end = self.holes.peekitem(index)
            if hole in self._unreadable or not hole <= first < end:
                break
            first, index = end, index + 1
        return first

    def give_up(self, first: LocalId, end: LocalId) -> None:
        """Note that no replica has [first, end), which is the beginning of a hole."""
        if (hole_end := self.holes.get(first)) is None:
            return
        if end < hole_end:
            self._insert(bisect_left(self._firsts, end), end, _HOLE_PLACE)
            self.holes[first], self.holes[end] = end, hole_end
        self.given_up.add(first)

    def lost_within(self, first: LocalId, end: LocalId) -> list[tuple[LocalId, LocalId]]:
        """Return the parts of [first, end) that are in holes which no other replica can fill. These
        records and their tags are lost.
        """
        if not self.holes or not (self.alone or self.given_up):
            return []
        return [
            (max(first, hole), min(end, hole_end))
            for hole, hole_end in self.holes.items()
            if hole < end and hole_end > first and (self.alone or hole in self.given_up)
        ]

    def _insert(self, index: int, first: LocalId, location: Location) -> None:
        self._row_packs.changed(index)
        self._firsts.insert(index, first)
        self._segments.insert(index, location.segment)
        self._offsets.insert(index, location.offset)
        self._lengths.insert(index, location.length)

    def _end_of(self, index: int) -> LocalId:
        return self._firsts[index + 1] if index + 1 < len(self._firsts) else self.stored

    @property
    def last_writer(self) -> Epoch:
        """The newest writer that the metalog or a stored, unordered batch names."""
        return max(self.writer, self._runs[-1][1] if self._runs else NO_INCARNATION)

    @property
    def _named_end(self) -> LocalId:
        """The end of the stored records that are ordered or belong to the shard's writer."""
        for first, writer in self._runs:
            if writer > self.writer:
                return max(self.ordered, first)
        return self.stored

    @property
    def sound(self) -> LocalId:
        """The length of the prefix that is stored here under the shard's writer.

        It ends at the first hole that the writer must fill. Other replicas fill holes in ordered
        records. Records of a writer that the metalog does not name yet do not count.
        """
        start, end = self.ordered, self._named_end
        index = self.holes.bisect_right(start)
        if index and self.holes.peekitem(index - 1)[1] > start:
            return start
        return min(end, self.holes.peekitem(index)[0]) if index < len(self.holes) else end

    def misses(self, first: LocalId, end: LocalId) -> bool:
        """Whether [first, end) lies in a hole that the writer must fill."""
        return first >= self.ordered and self.lacks(first, end)

    @property
    def is_complete(self) -> bool:
        """Whether this replica stores every ordered record, except those that no replica has."""
        return all(first >= self.ordered or first in self.given_up for first in self.holes)

    @property
    def missing(self) -> int:
        """Number of localids in holes."""
        return sum(end - first for first, end in self.holes.items())

    @property
    def lost(self) -> int:
        """Number of records that no replica has with intact data."""
        lost = sum(end - first for first, end in self.lost_within(0, self.stored))
        return lost + sum(count for _, count in self.damaged.values())

    @property
    def first_lost(self) -> SeqNum | None:
        """The smallest seqnum of a lost record; None: no record is lost."""
        firsts = [first for first, _ in self.damaged.values()]
        firsts += [first for first, _ in self.lost_within(0, self.ordered)]
        first = min(firsts, default=self.ordered)
        return self.seqnum_of(first) if first < self.ordered else None

    # --- batches

    def store(
        self, first: LocalId, end: LocalId, location: Location, writer: Epoch = NO_INCARNATION
    ) -> None:
        """Note the place and the writer of the next batch, which is durable."""
        assert first == self.stored < end, "batches are stored in order, without gaps"
        if writer and (not self._runs or writer > self._runs[-1][1]):
            self._runs.append((first, writer))
        self._insert(len(self._firsts), first, location)
        self.bytes += location.length
        self.stored = end
        self.written = max(self.written, end)

    def location_of(self, localid: LocalId) -> Location | None:
        """Return the place of the batch with `localid`; None: no place is known here."""
        if not 0 <= localid < self.stored:
            return None
        index = bisect_right(self._firsts, localid) - 1
        if self._segments[index] in _NOWHERE:
            return None
        return Location(self._segments[index], self._offsets[index], self._lengths[index])

    def batch_from(
        self, localid: LocalId, *, local: bool = False
    ) -> tuple[LocalId, LocalId, Location] | None:
        """Return the range and place of the first known batch from `localid` on; None: there is
        none.

        If `local`, only batches in the journal count.
        """
        index = self._known_from(bisect_left(self._firsts, localid), local=local)
        if index is None:
            return None
        place = Location(self._segments[index], self._offsets[index], self._lengths[index])
        return self._firsts[index], self._end_of(index), place

    def batch_rows(self) -> BatchRows:
        """Return copies of the columns of all stored batches."""
        segments = np.array(self._segments, np.uint32)
        bounds = np.append(np.array(self._firsts, np.uint64), np.uint64(self.stored))
        firsts, ends = bounds[:-1], bounds[1:]
        gone = segments == _GONE
        known = ~gone & (segments != _HOLE)
        offsets, lengths = (np.array(c, np.uint64)[known] for c in (self._offsets, self._lengths))
        return BatchRows(
            firsts[known], ends[known], segments[known], offsets, lengths,
            np.stack((firsts[gone], ends[gone]), axis=1),
        )  # fmt: skip

    def _known_from(self, index: int, *, local: bool) -> int | None:
        """Return the first row from `index` on with a known place.

        If a log is trimmed or moved to cold storage continuously, millions of rows without a known
        place may come before this row.
        """
        count, end = len(self._segments), _COLD if local else _GONE
        if index < count and _HOLE < self._segments[index] < end:
            return index
        segments = np.frombuffer(self._segments, np.uint32)
        for start in range(index, count, _ROWS_AT_ONCE):
            rows = segments[start : start + _ROWS_AT_ONCE]
            known = np.flatnonzero((rows != _HOLE) & (rows < end))
            if len(known):
                return start + int(known[0])
        return None

    def locations(self, first: LocalId, end: LocalId) -> list[Location]:
        """Return the places of the stored batches of [first, end), in order."""
        if first >= min(end, self.stored):
            return []
        start = bisect_right(self._firsts, first) - 1
        stop = bisect_left(self._firsts, end)
        return [
            Location(*place)
            for place in zip(
                self._segments[start:stop],
                self._offsets[start:stop],
                self._lengths[start:stop],
                strict=True,
            )
            if place[0] not in _NOWHERE
        ]

    # --- cold storage

    def local_run(self, localid: LocalId, end: LocalId, bytes_max: int) -> LocalBatches | None:
        """Return the first batches in the journal from `localid` to `end`, about `bytes_max` bytes;
        None: there are none.
        """
        if (start := self._known_from(bisect_left(self._firsts, localid), local=True)) is None:
            return None
        size, found = 0, []
        index = start
        while index < len(self._firsts) and size < bytes_max and self._end_of(index) <= end:
            if not self._is_local_or_gone(index):
                break
            place = Location(self._segments[index], self._offsets[index], self._lengths[index])
            if place.segment != _GONE:
                found.append((self._firsts[index], place))
                size += place.length
            index += 1
        if not found:
            return None
        bounded = index < len(self._firsts) and not self._is_local_or_gone(index)
        return LocalBatches(found[0][0], self._end_of(index - 1), found, bounded)

    def _is_local_or_gone(self, index: int) -> bool:
        return _HOLE < self._segments[index] < _COLD or self._segments[index] == _GONE

    def move(self, first: LocalId, end: LocalId, number: int) -> list[tuple[Location, Location]]:
        """Note that the batches of [first, end) are in a cold object; return old and new places."""
        index = bisect_left(self._firsts, first)
        self._row_packs.changed(index)
        moved: list[tuple[Location, Location]] = []
        while index < len(self._firsts) and self._end_of(index) <= end:
            if _HOLE < self._segments[index] < _COLD:
                before = Location(self._segments[index], self._offsets[index], self._lengths[index])
                place = Location(_COLD + number, self._firsts[index], before.length)
                self._segments[index], self._offsets[index] = place.segment, place.offset
                moved.append((before, place))
            index += 1
        return moved

    def cold_runs(self, moved: ColdObject) -> list[tuple[LocalId, LocalId]]:
        """Return which records are known to be in an object, as ranges."""
        start = bisect_left(self._firsts, moved.first)
        stop = bisect_left(self._firsts, moved.end)
        segments = np.array(self._segments[start:stop], np.uint32)
        runs: list[tuple[LocalId, LocalId]] = []
        for row in np.flatnonzero(segments == _COLD + moved.number).tolist():
            first, end = self._firsts[start + row], self._end_of(start + row)
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((first, end))
        return runs

    @property
    def cold_bytes(self) -> int:
        """Bytes of the stored batches that are on cold storage."""
        segments = np.frombuffer(self._segments, np.uint32)
        is_cold = (segments >= _COLD) & (segments != _GONE)
        return int(np.frombuffer(self._lengths, np.uint64)[is_cold].sum())

    def ordered_below(self, seqnum: SeqNum) -> LocalId:
        """Return the first localid whose record has no seqnum below `seqnum`."""
        index = bisect_left(self._span_seqnums, seqnum)
        if not index:
            return 0
        localid = self._span_localids[index - 1] + seqnum - self._span_seqnums[index - 1]
        following = self._span_localids[index] if index < len(self._span_localids) else self.ordered
        return min(localid, following)

    # --- trim

    def discard(self, first: LocalId, location: Location) -> bool:
        """Forget the place of the batch at `first`, whose records are all trimmed; False: the batch
        is at another place.
        """
        index = bisect_left(self._firsts, first)
        if index == len(self._firsts) or self._firsts[index] != first:
            return False
        place = self._segments[index], self._offsets[index], self._lengths[index]
        if place != tuple(location):
            return False
        self.bytes -= location.length
        self._row_packs.changed(index)
        self._segments[index], self._offsets[index], self._lengths[index] = _GONE, 0, 0
        return True

    def discard_all(self, first: LocalId, end: LocalId) -> None:
        """Forget the places of all batches within [first, end), which were discarded."""
        index = bisect_left(self._firsts, first)
        self._row_packs.changed(index)
        while index < len(self._firsts) and self._end_of(index) <= end:
            if self._segments[index] not in _NOWHERE:
                self.bytes -= self._lengths[index]
                self._segments[index], self._offsets[index], self._lengths[index] = _GONE, 0, 0
            index += 1

    def replace(self, first: LocalId, end: LocalId, location: Location) -> bool:
        """Note the new place of the batch with exactly these records; False: no batch has them."""
        index = bisect_left(self._firsts, first)
        there = index < len(self._firsts) and self._firsts[index] == first
        if not there or self._end_of(index) != end or self._segments[index] in _NOWHERE:
            return False
        self.bytes += location.length - self._lengths[index]
        self._row_packs.changed(index)
        self._segments[index], self._offsets[index], self._lengths[index] = location
        return True

    def lose_segments(self, segments: Collection[int]) -> None:
        """Make holes of all batches in segments whose files are missing."""
        if not segments:
            return
        self._row_packs.changed(0)
        rows = np.frombuffer(self._segments, np.uint32)
        for index in np.flatnonzero(np.isin(rows, list(segments))).tolist():
            self.bytes -= self._lengths[index]
            self.holes[self._firsts[index]] = self._end_of(index)
            self._lengths[index] = self._offsets[index] = 0
        del rows
        for first in self.holes:
            self._segments[bisect_left(self._firsts, first)] = _HOLE

    # --- checkpoints

    def copied(self) -> Callable[[], ShardColumns]:
        """Copy the state; the returned function packs the copy and may run in any thread."""
        state = self.writer, self.stored, self.ordered, tuple(self._runs)
        self._join_gone()
        rows = self._row_packs.copied([getattr(self, name) for name in _ROWS])
        spans = self._span_packs.copied([getattr(self, name) for name in _SPANS])
        return lambda: ShardColumns(*state, rows(), spans())

    def _join_gone(self) -> None:
        """Join the rows of consecutive discarded batches."""
        gone = np.frombuffer(self._segments, np.uint32) == _GONE
        keep = np.ones(len(gone), np.bool_)
        keep[1:] = ~(gone[1:] & gone[:-1])
        if keep.all():
            return
        self._row_packs.changed(int(np.argmin(keep)))
        for name in _ROWS:
            column: array[int] = getattr(self, name)
            joined = array(column.typecode)
            joined.frombytes(np.frombuffer(column, f"<u{column.itemsize}")[keep].tobytes())
            setattr(self, name, joined)

    def restore(self, columns: ShardColumns) -> None:
        """Restore a copied state.

        Raises:
            MalformedFrameError: a column is of a version that this release does not know.
        """
        self.writer, self._runs = columns.writer, list(columns.runs)
        self.stored = self.written = columns.stored
        self.ordered = columns.ordered
        for packs, names, said in (
            (self._row_packs, _ROWS, columns.rows),
            (self._span_packs, _SPANS, columns.spans),
        ):
            typecodes = [getattr(self, name).typecode for name in names]
            for name, column in zip(names, packs.restore(said, typecodes), strict=True):
                setattr(self, name, column)
        self.bytes = int(np.frombuffer(self._lengths, np.uint64).sum())
        for index in np.flatnonzero(np.frombuffer(self._segments, np.uint32) == _HOLE).tolist():
            self.holes[self._firsts[index]] = self._end_of(index)

    def store_gone(self, first: LocalId, end: LocalId) -> None:
        """Note the next batch, which was discarded before a restart."""
        self.store(first, end, Location(_GONE, 0, 0))

    def fill_gone(self, first: LocalId, end: LocalId) -> bool:
        """Note that another replica discarded these records of a hole; False: no hole has them."""
        return first < end <= self.stored and self.fill(first, end, Location(_GONE, 0, 0))

    def is_gone(self, localid: LocalId) -> bool:
        """Whether a record was discarded because it was trimmed."""
        index = bisect_right(self._firsts, localid) - 1
        return index >= 0 and localid < self.stored and self._segments[index] == _GONE

    def gone_in(self, first: LocalId, end: LocalId) -> list[tuple[LocalId, LocalId]]:
        """Return the discarded parts of [first, end), in order."""
        if first >= min(end, self.stored):
            return []
        start = bisect_right(self._firsts, first) - 1
        stop = bisect_left(self._firsts, end)
        return [
            (max(first, self._firsts[index]), min(end, self._end_of(index)))
            for index in range(start, stop)
            if self._segments[index] == _GONE
        ]

    def gone_runs(
        self, first: LocalId, end: LocalId, rows_max: int
    ) -> tuple[NDArray[np.uint64], LocalId, int]:
        """Return the discarded parts of [first, end), after examining at most `rows_max` batches.

        Returns the runs of localids (a row each: first, end), the end of the examined range, and
        how many batches were examined.
        """
        end = min(end, self.stored)
        if first >= end:
            return np.empty((0, 2), np.uint64), first, 0
        start = bisect_right(self._firsts, first) - 1
        stop = min(bisect_left(self._firsts, end), start + rows_max)
        end = min(end, self._end_of(stop - 1))
        firsts = np.array(self._firsts[start:stop], np.uint64)
        gone = np.zeros(stop - start + 2, np.bool_)
        gone[1:-1] = np.array(self._segments[start:stop], np.uint32) == _GONE
        bounds = np.append(firsts, np.uint64(end))
        bounds[0] = first
        # Where runs of consecutive discarded batches begin and end.
        changes = np.flatnonzero(gone[1:] != gone[:-1])
        return bounds[changes].reshape(-1, 2), end, stop - start

    def seqnum_of(self, localid: LocalId) -> SeqNum:
        """Return the seqnum of an ordered record."""
        index = bisect_right(self._span_localids, localid) - 1
        return self._span_seqnums[index] + localid - self._span_localids[index]

    # --- order

    def _drop_misplaced(self, end: LocalId) -> None:
        """Drop the stored records of a writer whose entry was replaced, if any are below `end`."""
        if self._named_end < min(self.stored, end):
            self.truncate(self._named_end)

    def _note_ordered(self, end: LocalId) -> None:
        self.ordered = end
        self.skip_to(end)
        while len(self._runs) > 1 and self._runs[1][0] <= end:
            del self._runs[0]

    def order(self, span: Span) -> list[RecordBatch]:
        """Apply a span; return its batches that are still in memory.

        If a writer that no entry names has stored records at these localids, they are dropped. The
        records of the span are then missing here.
        """
        end = span.first_localid + span.length
        assert span.first_localid == self.ordered < end, "entries order without gaps"
        self._drop_misplaced(end)
        if not self._continues(span):
            self._span_seqnums.append(span.first_seqnum)
            self._span_localids.append(span.first_localid)
        self._note_ordered(end)
        batches: list[RecordBatch] = []
        while self.unordered and self.unordered[0].header.first < end:
            batches.append(self.unordered.popleft())
        return batches

    def _continues(self, span: Span) -> bool:
        """Whether the seqnums and the localids of a span continue where the last span ended."""
        return bool(self._span_seqnums) and (
            span.first_seqnum - self._span_seqnums[-1]
            == span.first_localid - self._span_localids[-1]
        )

    def cut_off(
        self,
        tail: SeqNum,
        ordered: LocalId,
        writer: Epoch,
        replaced: Sequence[tuple[LocalId, Epoch]],
    ) -> None:
        """Remove the seqnums from `tail` on, which replaced entries gave to localids from
        `ordered` on. The remaining entries name `writer`.

        The records stay and are ordered again. Holes stay, too: the other replicas have reported
        these records. `replaced`: the writers that the replaced entries name, and where each began.
        Their records do not count as those of `writer`.
        """
        newest = max((epoch for _, epoch in replaced), default=NO_INCARNATION)
        runs = [*replaced, *(run for run in self._runs if run[1] > newest)]
        ends = [*(first for first, _ in runs[1:]), self.stored]
        if replaced:
            self._runs = [run for run, end in zip(runs, ends, strict=True) if run[0] < end]
        index = bisect_left(self._span_seqnums, tail)
        self._span_packs.changed(index)
        del self._span_seqnums[index:], self._span_localids[index:]
        self.ordered, self.writer = min(self.ordered, ordered), writer

    def localid_of(self, seqnum: SeqNum) -> LocalId | None:
        """Return the localid of the record at `seqnum`; None: the shard has no such record."""
        index = bisect_right(self._span_seqnums, seqnum) - 1
        if index < 0:
            return None
        localid = self._span_localids[index] + seqnum - self._span_seqnums[index]
        following = index + 1
        end = (
            self._span_localids[following] if following < len(self._span_localids) else self.ordered
        )
        return localid if localid < end else None

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        assert self.stored <= self.written
        assert len(self._firsts) == len(self._segments) == len(self._offsets) == len(self._lengths)
        assert len(self._span_seqnums) == len(self._span_localids)
        assert not self._firsts or self._firsts[-1] < self.stored
        assert self.ordered <= self.stored
        assert self.given_up | self._unreadable <= self.holes.keys()
        assert self.holes.keys() >= self.given_up
        writers = [writer for _, writer in self._runs]
        assert writers == sorted(set(writers)), "later records are of later writers"
        assert not self._span_localids or self._span_localids[-1] < self.ordered
