"""The Tag Cache: the places of the newest records of the tags in use (thesis 5.1.3, 5.7).

It maps a tag to a row (`tag_rows`): the tag's highest seqnums and their shards. It applies the
type-S index data of every metalog position in order. So a row has every record of its tag from the
row's head on. Records below the head are unknown, unless the row is complete or has the tag's
minimum.

**Interest** (decision 0038). Index data comes from all writers, but most tags of other compute
nodes are never read here. A record that this node wrote begins a row for each of its tags. A record
of another writer begins a row only for a tag that is *wanted* (`expectations`). Every record
extends existing rows. So a tag that this node neither wrote nor read costs one failed search, and
no memory.

**Last access.** Each tag has the metalog position of its last event: insert, update or read hit
(including a proven absence). When a limit is exceeded, the tags with the lowest last access are
evicted with all their seqnums.

**Answers of the index tier.** They add completeness, the minimum, and older records of a tag that
is read often. `expectations` decides which of these answers still fit.

**No long pauses.** A rebuild of a dictionary of 10^6 tags stops the event loop for 0.06 s, a
rebuild of an ordered dictionary for 0.3 s (measured). So the map is split by the low bits of the
tag, which are practically random. Each partition has some ten thousand tags and is a plain
dictionary in the order of events. Eviction visits one partition after the other. It evicts the tags
at the front whose last access is at or below a *horizon*. After the last partition the horizon
moves to the oldest access left plus a 64th of its age. So the order of evictions may deviate from
the order of last accesses by that much. With one partition (a small cache) the order is exact.

**Memory** is bounded in seqnums and in bytes, by costs measured in CPython. A tag may exceed its
limit by an eighth before its oldest seqnums are evicted, so that eviction is amortised. These
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
"""Bytes that a tag costs in CPython besides its seqnum: two ints and a slot of a dictionary.

The dictionary is between a third and two thirds full.
"""
ROW_BYTES: Final = 288
"""Bytes that a tag's arrays cost besides their contents."""
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
    """Caches rows of tags: every record of a tag from the head of its row on, and sometimes all
    records.

    Caches at most `bytes_max` bytes and `seqnums_max` seqnums in all, and `seqnums_per_tag_max`
    seqnums plus an eighth for one tag. With a limit of 0 it is empty and every lookup misses.

    Attributes:
        seqnums_cached: number of cached seqnums.
        hits: lookups answered, including proven absences.
        misses: lookups of an unknown tag, or below the head of a row that is not complete.
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
        """The shards that are written here: all their tags are of interest."""
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
        """Eviction removes tags whose last access is at or below this position."""
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
        """Whether it may cache anything."""
        return self._seqnums_max > 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, by the measured cost of a tag, of its arrays and of a seqnum."""
        tags = self._tags + len(self._expectations)
        return tags * TAG_BYTES + self._rows * ROW_BYTES + self.seqnums_cached * SEQNUM_BYTES

    # --- index data

    def apply(self, parts: Sequence[ShardTags], position: MetalogPosition) -> None:
        """Add the index data of one metalog position, ascending and well-formed."""
        self._position = position
        if self._seqnums_max:
            for part in parts:
                self._apply_part(part)
                self._make_room()
        self._position += 1

    def apply_sorted(self, rows: RowsByTag, position: MetalogPosition) -> None:
        """Add the index data of several positions at once, as events of the last position,
        `position`.
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
        """Return the index of the first new record, from `start` on, that begins the tag's row; the
        number of records if no record does.
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
        """Add a run of records with one tag, if it is of interest."""
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
        """Add records one by one. `tags` and `seqnums` are equally long. This is the hot loop of
        the index.
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
        """Begin a new row with the tag's first record, if the index tier has answered it."""
        self._know_first(partition, tag, self._expectations.firsts.pop(tag))

    def _know_first(self, partition: _Partition, tag: TagHash, first: First | None) -> None:
        """Set the first record below a row's head; None: there is none, the row is complete."""
        cached = partition[tag]
        if first is not None:
            row = self._with_arrays(partition, tag)
            row.minimum = None if row.complete else first
        elif isinstance(cached, int):
            partition[tag] = cached | COMPLETE_BIT
        else:
            cached.complete, cached.minimum = True, None

    def _cut(self, tag: TagHash, row: TagRow) -> None:
        """Evict the oldest seqnums of one tag: its head moves up."""
        excess = len(row.seqnums) - self._per_tag_max
        row.cut(excess)
        self.seqnums_cached -= excess
        self._expectations.lose(tag)

    # --- eviction

    def _make_room(self) -> None:
        """Evict whole tags, least recently accessed first, when a limit is exceeded.

        It evicts more than necessary at once, because each search for the front of a dictionary
        skips all slots that were deleted there.
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
        """Whether the cache is larger than eviction should leave it."""
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
        """Return the oldest last access plus a 64th of its age, to evict enough."""
        oldest = min(
            (accessed_of(next(iter(p.values()))) for p in self._partitions if p), default=0
        )
        return oldest + (self._position - oldest) // _HORIZON_STEPS

    # --- answers of the index tier

    def knows(self, tag: TagHash) -> bool:
        """Whether this node knows if `tag` is new, so that the index tier need not be asked."""
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

        `learn_first`, `refill` or `give_up` is called with the same limit.
        """
        self._expectations.expect(tag, limit)
        self._make_room()

    def give_up(self, tag: TagHash, limit: SeqNum) -> None:
        """Note that the question was dropped."""
        self._expectations.fulfil(tag, limit)

    def learn_first(self, tag: TagHash, limit: SeqNum, first: First | None) -> None:
        """Handle the index tier's answer about the first record of `tag` below `limit`; None: there
        is none.

        Ignored if records of the tag were evicted since the question.
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

        Ignored if records of the tag were evicted since the question.

        Args:
            tag: a tag that was expected.
            limit: the limit of its expectation.
            seqnums: the newest seqnums below `limit`.
            shards: the shard of each.
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
        """Put records below `limit` before those that the row has, unless the row reaches further
        back.
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
        """Drop the records of `tag` below `until`, which were trimmed, and its minimum.

        Bounds below the new head miss, so that the index tier answers which records were trimmed.
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
        """Return the first `limit` records with `tag` from `bound` on; fewer: there are no more."""
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
