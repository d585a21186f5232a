"""The Tag Cache: the places of the newest records of the tags in use (thesis 5.1.3, 5.7).

The cache maps a tag to a row (`tag_rows`): the tag's highest seqnums and their shards. It applies
the type-S index data of every metalog position in order. So a row has every record of its tag from
the row's head on. A row that is complete, or has the tag's minimum, also answers for records below
the head. `LocalIndex` calls `TagCache`.

**Interest** (decision 0038). Index data comes from all writers, but most tags of other compute
nodes are never read here. A record that this node wrote begins a row for each of its tags. A record
of another writer begins a row only for a tag that was looked up or asked about
(`Expectations.begins_row`). Every record extends existing rows. So a tag that this node neither
wrote nor read costs one failed search, and no memory.

**Last access.** Each tag has the metalog position of its last event: insert, update or read hit
(including a proven absence). When a limit is exceeded, the tags with the lowest last access are
evicted with all their seqnums.

**Answers of the index tier** add completeness, the minimum, and older records of a tag that is read
often. `Expectations` decides which answers are still valid.

**No long pauses.** A rebuild of a dictionary of 10^6 tags stops the event loop for 0.06 s, a
rebuild of an ordered dictionary for 0.3 s (measured). So the map is split into partitions by the
low bits of the tag, which are practically random. A partition is a plain dictionary of some ten
thousand tags, in the order of their last events. Eviction visits one partition after the other. In
each, it evicts the tags at the front whose last access is at or below a *horizon*. After the last
partition, the horizon moves to the oldest remaining access plus a 64th of its age. So evictions may
deviate from the order of last accesses by a 64th of that age. A small cache has one partition;
there the order is exact.

**Memory** is limited in seqnums and in bytes, by costs measured in CPython. A tag may exceed its
own limit by an eighth before its oldest seqnums are evicted, so that eviction is amortised. These
excess seqnums count in the total.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from typing import Final, TypeAlias

from indilog.base.ids import MetalogPosition, SeqNum, ShardId, TagHash
from indilog.roles.tags_sorted import RowsByTag
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Matches, RangeAnswer
from indilog_compute.local_index.expectations import Expectations
from indilog_compute.local_index.index_parts import columns_of
from indilog_compute.local_index.tag_rows import (
    ACCESSED_MASK,
    ACCESSED_SHIFT,
    COMPLETE_BIT,
    SEQNUM_SHIFT,
    SHARD_MASK,
    First,
    Row,
    TagRow,
    accessed_of,
    head_of,
    next_in,
    prev_in,
    range_in,
    single_of,
    touched,
)

SEQNUM_BYTES: Final = 12
TAG_BYTES: Final = 164
"""Bytes that a tag costs in CPython besides its seqnums: two ints and a slot of a dictionary that
is between a third and two thirds full.
"""
ROW_BYTES: Final = 288
"""Bytes that the arrays of a tag cost besides their contents."""
_TAGS_PER_PARTITION: Final = 16_384
_PARTITIONS_MAX: Final = 1024
_HORIZON_STEPS: Final = 64
_EVICTED_AT_ONCE: Final = 512
ALL_SHARDS: Final = range(SHARD_MASK + 1)

_Partition: TypeAlias = dict[TagHash, Row]
"""Tags in the order of their last events, the oldest first."""


def _move_to_end(partition: _Partition, tag: TagHash, cached: Row) -> None:
    """Move `tag` to the end of its partition, with `cached` as its row."""
    del partition[tag]
    partition[tag] = cached


class TagCache:
    """Caches rows of tags; a row has every record of its tag from the row's head on.

    The rows have at most `bytes_max` bytes and `seqnums_max` seqnums in all. One row has at most
    `seqnums_per_tag_max` seqnums plus an eighth. If any limit is 0, the cache stays empty and every
    lookup misses.

    Attributes:
        seqnums_cached: number of cached seqnums.
        hits: number of answered lookups, including proven absences.
        misses: number of lookups that were not answered.
    """

    __slots__ = (
        "_bytes_enough", "_bytes_max", "_cursor", "_cut_above", "_enough", "_expectations",
        "_horizon", "_mask", "_own", "_partitions", "_per_tag_max", "_position", "_rows",
        "_seqnums_max", "_tags", "hits", "misses", "seqnums_cached",
    )  # fmt: skip

    def __init__(
        self,
        seqnums_max: int,
        seqnums_per_tag_max: int,
        position: MetalogPosition = 0,
        *,
        bytes_max: int = 1 << 40,
        own: Container[int] = ALL_SHARDS,
    ) -> None:
        self._own = own
        """The shards that this node writes; any of their records may begin a row."""
        self._bytes_max = bytes_max
        self._seqnums_max = seqnums_max if seqnums_per_tag_max and bytes_max else 0
        self._enough = seqnums_max - min(_EVICTED_AT_ONCE, seqnums_max // 32)
        self._bytes_enough = bytes_max - min(_EVICTED_AT_ONCE * TAG_BYTES, bytes_max // 32)
        self._per_tag_max = min(seqnums_per_tag_max, seqnums_max)
        self._cut_above = min(self._per_tag_max + self._per_tag_max // 8, seqnums_max)
        tags_max = min(seqnums_max, bytes_max // TAG_BYTES)
        partitions = 1 << (tags_max // _TAGS_PER_PARTITION).bit_length()
        self._partitions: list[_Partition] = [{} for _ in range(min(partitions, _PARTITIONS_MAX))]
        self._mask = len(self._partitions) - 1
        self._position = position
        """Number of applied metalog positions. Read hits count as events at this position."""
        self._horizon = 0
        """Eviction removes only tags whose last access is at or below this position."""
        self._cursor = 0
        """The partition at which eviction continues."""
        self._expectations = Expectations(tags_max if self._seqnums_max else 0)
        self._tags = 0
        self._rows = 0
        """Number of tags that have arrays."""
        self.seqnums_cached = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Number of cached tags."""
        return self._tags

    @property
    def enabled(self) -> bool:
        """Whether the cache may have rows: no limit is 0."""
        return self._seqnums_max > 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows and expectations, by the measured costs of tags, arrays and seqnums."""
        tags = self._tags + len(self._expectations)
        return tags * TAG_BYTES + self._rows * ROW_BYTES + self.seqnums_cached * SEQNUM_BYTES

    # --- index data

    def apply(self, parts: Sequence[ShardTags], position: MetalogPosition) -> None:
        """Add the index data of one metalog position; `parts` ascend and are not `malformed`."""
        self._position = position
        if self._seqnums_max:
            for part in parts:
                self._apply_part(part)
                self._make_room()
        self._position += 1

    def apply_sorted(self, rows: RowsByTag, position: MetalogPosition) -> None:
        """Add the index data of several positions at once. All records count as events at
        `position`, the last of these positions.
        """
        self._position = position
        if self._seqnums_max:
            self._add_sorted(rows)
            self._make_room()
        self._position += 1

    def _add_sorted(self, rows: RowsByTag) -> None:
        """Add the records of one tag after the other."""
        partitions, mask, cut_above = self._partitions, self._mask, self._cut_above
        position, firsts, own = self._position, self._expectations.firsts, self._own
        seqnums, shards = memoryview(rows.seqnums), memoryview(rows.shards)
        seqnum_at, shard_at = seqnums.cast("Q"), shards.cast("H")
        for tag, first, end in rows.groups:
            start = first
            partition = partitions[tag & mask]
            cached = partition.get(tag)
            if cached is None:
                if shard_at[start] not in own:
                    start = self._first_of_interest(tag, shard_at[start:end], start)
                    if start == end:
                        continue
                shard = ShardId(shard_at[start])
                partition[tag] = single_of(seqnum_at[start], shard, position)
                self._tags += 1
                if firsts and tag in firsts:
                    self._begin(partition, tag)
                self.seqnums_cached += 1
                start += 1
                if start == end:
                    continue
            row = self._with_arrays(partition, tag)
            row.seqnums.frombytes(seqnums[8 * start : 8 * end])
            row.shards.frombytes(shards[2 * start : 2 * end])
            self.seqnums_cached += end - start
            if row.accessed != position:
                row.accessed = position
                _move_to_end(partition, tag, row)
            if len(row.seqnums) > cut_above:
                self._cut(tag, row)

    def _first_of_interest(self, tag: TagHash, shards: memoryview[int], start: int) -> int:
        """Return the index of the record that begins the row of `tag`.

        `shards` are the shards of the tag's new records, whose indexes begin at `start`. If no
        record begins a row, the result is the index after the last record.
        """
        if self._expectations.begins_row(tag):
            return start
        own = self._own
        return start + next((i for i, shard in enumerate(shards) if shard in own), len(shards))

    def _apply_part(self, part: ShardTags) -> None:
        columns = columns_of(part)
        for tag in columns.runs:
            self._extend(tag, columns.seqnums_of_run, part.shard)
        self._add(columns.tags, columns.seqnums, part.shard)

    def _extend(self, tag: TagHash, seqnums: range, shard: ShardId) -> None:
        """Add a run of records with one tag, if the tag has a row or the records begin one."""
        partition = self._partitions[tag & self._mask]
        if tag not in partition:
            if shard not in self._own and not self._expectations.begins_row(tag):
                return
            partition[tag] = single_of(seqnums[0], shard, self._position)
            self._tags += 1
            self.seqnums_cached += 1
            seqnums = seqnums[1:]
            if tag in self._expectations.firsts:
                self._begin(partition, tag)
        row = self._with_arrays(partition, tag)
        row.seqnums.extend(seqnums)
        row.shards.extend(array("H", (shard,)) * len(seqnums))
        row.accessed = self._position
        _move_to_end(partition, tag, row)
        self.seqnums_cached += len(seqnums)
        if len(row.seqnums) > self._cut_above:
            self._cut(tag, row)

    def _add(self, tags: Iterable[TagHash], seqnums: Iterable[SeqNum], shard: ShardId) -> None:
        """Add records one by one: for each of `tags`, the record at the corresponding seqnum of
        `seqnums`. This is the hot loop of the index.
        """
        partitions, mask, cut_above = self._partitions, self._mask, self._cut_above
        position, firsts = self._position, self._expectations.firsts
        accessed_and_shard = position << ACCESSED_SHIFT | shard
        is_own, begins_row = shard in self._own, self._expectations.begins_row
        added = created = 0
        for tag, seqnum in zip(tags, seqnums, strict=True):
            partition = partitions[tag & mask]
            row = partition.get(tag)
            if row is None:
                if not is_own and not begins_row(tag):
                    continue
                partition[tag] = seqnum << SEQNUM_SHIFT | accessed_and_shard
                created += 1
                if firsts and tag in firsts:
                    self._begin(partition, tag)
                continue
            if isinstance(row, int):
                row = self._with_arrays(partition, tag)
            of_tag = row.seqnums
            if of_tag[-1] == seqnum:
                continue  # a tag that a record has twice counts once
            of_tag.append(seqnum)
            row.shards.append(shard)
            added += 1
            if row.accessed != position:
                row.accessed = position
                _move_to_end(partition, tag, row)
            if len(of_tag) > cut_above:
                self._cut(tag, row)
        self._tags += created
        self.seqnums_cached += added + created

    def _with_arrays(self, partition: _Partition, tag: TagHash) -> TagRow:
        """Return the row of a cached tag; give it arrays if it has none."""
        cached = partition[tag]
        if isinstance(cached, int):
            cached = partition[tag] = TagRow(cached)
            self._rows += 1
        return cached

    def _begin(self, partition: _Partition, tag: TagHash) -> None:
        """Move the answered first record of a tag from `Expectations` to its new row."""
        self._know_first(partition, tag, self._expectations.firsts.pop(tag))

    def _know_first(self, partition: _Partition, tag: TagHash, first: First | None) -> None:
        """Note the first record of a tag, which lies below the head of its row; None: no record
        lies below the head, so the row is complete.
        """
        cached = partition[tag]
        if first is not None:
            row = self._with_arrays(partition, tag)
            row.minimum = None if row.complete else first
        elif isinstance(cached, int):
            partition[tag] = cached | COMPLETE_BIT
        else:
            cached.complete, cached.minimum = True, None

    def _cut(self, tag: TagHash, row: TagRow) -> None:
        """Evict the oldest seqnums of one tag, so that `seqnums_per_tag_max` are left."""
        excess = len(row.seqnums) - self._per_tag_max
        row.cut(excess)
        self.seqnums_cached -= excess
        self._expectations.lose(tag)

    # --- eviction

    def _make_room(self) -> None:
        """If a limit is exceeded, evict whole tags, the least recently accessed first.

        Each call evicts more than necessary, because the search for the first entry of a dictionary
        skips all slots that were deleted before it.
        """
        if self.seqnums_cached <= self._seqnums_max and self.size_bytes <= self._bytes_max:
            return
        while self._excessive():
            self._evict_from(self._partitions[self._cursor])
            if self._excessive():
                self._cursor += 1
                if self._cursor == len(self._partitions):
                    self._cursor = 0
                    self._horizon = self._next_horizon()

    def _excessive(self) -> bool:
        """Whether eviction must continue, because the cache is larger than it should become."""
        over = self.seqnums_cached > self._enough or self.size_bytes > self._bytes_enough
        return over and self._tags > 0

    def _evict_from(self, partition: _Partition) -> None:
        """Evict tags of one partition up to the horizon, until the limits hold."""
        evicted: list[TagHash] = []
        horizon, left, bytes_left = self._horizon, self.seqnums_cached, self.size_bytes
        enough, bytes_enough = self._enough, self._bytes_enough
        for tag, cached in partition.items():
            if left <= enough and bytes_left <= bytes_enough:
                break
            if isinstance(cached, int):
                if cached >> ACCESSED_SHIFT & ACCESSED_MASK > horizon:
                    break
                left -= 1
                bytes_left -= TAG_BYTES + SEQNUM_BYTES
            else:
                if cached.accessed > horizon:
                    break
                seqnums = len(cached.seqnums)
                left -= seqnums
                bytes_left -= TAG_BYTES + ROW_BYTES + seqnums * SEQNUM_BYTES
                self._rows -= 1
            evicted.append(tag)
        for tag in evicted:
            del partition[tag]
        self._expectations.lose_all(evicted)
        self.seqnums_cached = left
        self._tags -= len(evicted)

    def _next_horizon(self) -> MetalogPosition:
        """Return the oldest last access of all tags plus a 64th of its age."""
        oldest = min(
            (accessed_of(next(iter(p.values()))) for p in self._partitions if p), default=0
        )
        return oldest + (self._position - oldest) // _HORIZON_STEPS

    # --- answers of the index tier

    def knows(self, tag: TagHash) -> bool:
        """Whether the index tier need not be asked if `tag` is new: the tag has a row, its first
        record is known, or a question about it is in flight.
        """
        return tag in self._partitions[tag & self._mask] or tag in self._expectations

    def has_recent(self, tag: TagHash, seqnums: int) -> bool:
        """Whether the newest `seqnums` records of `tag`, or all its records, are cached."""
        cached = self._partitions[tag & self._mask].get(tag)
        if cached is None:
            return self._expectations.is_new(tag)
        if isinstance(cached, int):
            return bool(cached & COMPLETE_BIT) or seqnums <= 1
        return cached.complete or len(cached.seqnums) >= seqnums

    def expect(self, tag: TagHash, limit: SeqNum) -> None:
        """Note a question to the index tier about `tag` below `limit`, the tail applied here.

        The caller later calls `learn_first`, `refill` or `give_up` with the same limit.
        """
        self._expectations.expect(tag, limit)
        self._make_room()

    def give_up(self, tag: TagHash, limit: SeqNum) -> None:
        """Note that the question about `tag` below `limit` was dropped."""
        self._expectations.fulfil(tag, limit)

    def learn_first(self, tag: TagHash, limit: SeqNum, first: First | None) -> None:
        """Handle the index tier's answer about the first record of `tag` below `limit`; None: there
        is no such record.

        The answer is ignored if records of the tag were evicted since the question.
        """
        if not self._expectations.fulfil(tag, limit):
            return
        partition = self._partitions[tag & self._mask]
        cached = partition.get(tag)
        if cached is None:
            self._expectations.learn_first(tag, first)
        elif first is None or first.seqnum < head_of(cached):
            self._know_first(partition, tag, first)
        elif first.seqnum == head_of(cached):
            self._know_first(partition, tag, None)
        self._make_room()

    def refill(
        self,
        tag: TagHash,
        limit: SeqNum,
        seqnums: Sequence[SeqNum],
        shards: Sequence[ShardId],
        *,
        complete: bool,
    ) -> None:
        """Handle the index tier's answer with the newest records of `tag` below `limit`, ascending.

        The answer is ignored if records of the tag were evicted since the question.

        Args:
            tag: the tag of the question.
            limit: the limit of the question.
            seqnums: the newest seqnums of `tag` below `limit`.
            shards: the shard of each seqnum.
            complete: whether these are all records of the tag below `limit`.
        """
        if not self._expectations.fulfil(tag, limit):
            return
        self._expectations.firsts.pop(tag, None)
        partition = self._partitions[tag & self._mask]
        if tag not in partition:
            if not seqnums:
                self._expectations.learn_first(tag, None)
                return
            partition[tag] = single_of(seqnums[-1], shards[-1], self._position)
            self._tags += 1
            self.seqnums_cached += 1
        if seqnums:
            self._put_older(partition, tag, seqnums, shards, limit)
        if complete:
            self._know_first(partition, tag, None)
        row = partition[tag]
        _move_to_end(partition, tag, touched(row, self._position))
        if isinstance(row, TagRow) and len(row.seqnums) > self._cut_above:
            self._cut(tag, row)
        self._make_room()

    def _put_older(
        self,
        partition: _Partition,
        tag: TagHash,
        seqnums: Sequence[SeqNum],
        shards: Sequence[ShardId],
        limit: SeqNum,
    ) -> None:
        """Replace the records below `limit` of a row by `seqnums`, if these begin below the row's
        head.
        """
        cached = partition[tag]
        if head_of(cached) <= seqnums[0]:
            return
        row = self._with_arrays(partition, tag)
        before = len(row.seqnums)
        row.put_before(seqnums, shards, limit)
        self.seqnums_cached += len(row.seqnums) - before
        if row.minimum is not None and row.minimum.seqnum >= row.head:
            row.complete, row.minimum = True, None

    def forget_below(self, tag: TagHash, until: SeqNum) -> None:
        """Drop the minimum of `tag` and its records below `until`, which were trimmed.

        Lookups with a bound below the new head miss, so that the index tier answers which records
        were trimmed.
        """
        self._expectations.forget(tag)
        partition = self._partitions[tag & self._mask]
        cached = partition.get(tag)
        if cached is None:
            return
        row = self._with_arrays(partition, tag)
        row.complete, row.minimum = False, None
        before = len(row.seqnums)
        row.put_before((), (), until)
        self.seqnums_cached -= before - len(row.seqnums)
        if not row.seqnums:
            del partition[tag]
            self._tags -= 1
            self._rows -= 1

    # --- lookups

    def find_next(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the first record with `tag` and seqnum >= `bound` (algorithms 3 and 4)."""
        cached = self._partitions[tag & self._mask].get(tag)
        if cached is None:
            return self._without_row(tag, self._expectations.next(tag, bound))
        answer = next_in(cached, bound) if isinstance(cached, int) else cached.next(bound)
        if answer is MISS:
            self.misses += 1
        else:
            self._hit(tag, cached)
        return answer

    def find_prev(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the last record with `tag` and seqnum <= `bound`."""
        cached = self._partitions[tag & self._mask].get(tag)
        if cached is None:
            return self._without_row(tag, self._expectations.prev(tag, bound))
        answer = prev_in(cached, bound) if isinstance(cached, int) else cached.prev(bound)
        if answer is MISS:
            self.misses += 1
        else:
            self._hit(tag, cached)
        return answer

    def find_range(self, tag: TagHash, bound: SeqNum, limit: int) -> RangeAnswer:
        """Return the first `limit` records with `tag` from `bound` on; fewer if there are no
        further ones.
        """
        cached = self._partitions[tag & self._mask].get(tag)
        if cached is None:
            answer = self._without_row(tag, self._expectations.next(tag, bound))
            return Matches((), ()) if answer is EMPTY else MISS
        matches = range_in(cached, bound, limit)
        if matches is MISS:
            self.misses += 1
        else:
            self._hit(tag, cached)
        return matches

    def _hit(self, tag: TagHash, cached: Row) -> None:
        """Count a read hit, which is an event of the tag."""
        self.hits += 1
        if accessed_of(cached) != self._position:
            partition = self._partitions[tag & self._mask]
            _move_to_end(partition, tag, touched(cached, self._position))

    def _without_row(self, tag: TagHash, answer: Answer) -> Answer:
        """Count the answer to a lookup of a tag that has no row; a miss makes the tag wanted."""
        if answer is MISS:
            self.misses += 1
            self._expectations.want(tag)
            self._make_room()
        else:
            self.hits += 1
        return answer

    def check_invariants(self) -> None:
        """Assert the bounds, the order, and that the counters are right."""
        tags = [cached for partition in self._partitions for cached in partition.values()]
        rows = [cached for cached in tags if not isinstance(cached, int)]
        lengths = [len(row.seqnums) for row in rows]
        assert self._tags == len(tags), "tags are counted"
        assert self._rows == len(rows), "arrays are counted"
        assert self.seqnums_cached == len(tags) - len(rows) + sum(lengths), "seqnums are counted"
        assert self.seqnums_cached <= self._seqnums_max, "more seqnums than allowed"
        assert self.size_bytes <= self._bytes_max or not tags, "more bytes than allowed"
        assert max(lengths, default=0) <= self._cut_above, "more seqnums of a tag than allowed"
        for row in rows:
            assert len(row.seqnums) == len(row.shards) > 0, "a seqnum has a shard"
            assert row.minimum is None or (not row.complete and row.minimum.seqnum < row.head)
            assert list(row.seqnums) == sorted(set(row.seqnums)), "a row ascends"
        for partition in self._partitions:
            accesses = list(map(accessed_of, partition.values()))
            assert accesses == sorted(accesses), "a partition is in the order of events"
            assert not partition.keys() & self._expectations.firsts.keys(), (
                "a tag with a row has no first record"
            )
        self._expectations.check_invariants()
