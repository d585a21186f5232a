"""The Tag Cache: where the newest records of the tags in use are (thesis 5.1.3, algorithm 3).

A map from tag to the highest seqnums with it, ascending, and their shards. Fed with type-S index
data of every metalog position in order; so from a tag's head (the oldest seqnum kept) on, nothing
with this tag is missing, and what lies below the head is unknown.

**Last access.** Each tag has the metalog position of its last event: insert, update, read hit
(proven absence included). When the total exceeds its limit, the tags with the lowest are forgotten
whole.

**No long pauses.** A dictionary of 10^6 tags stops everything for 0.06 s whenever it is rebuilt, an
ordered one for 0.3 s (measured). So the map is split by the low bits of the tag, which are as good
as random, into partitions of some ten thousand tags, plain dictionaries kept in the order of
events. What is evicted next: in one partition after the other, the tags at the front whose last
access is at or below a *horizon*; when all partitions are done, the horizon moves to the oldest
access left plus a 64th of its age. So a tag may be forgotten before one whose last access was
earlier by less than that; with one partition (a small cache) the order is exact.

**Memory.** Most tags of some workloads have one record and never a second one. Such a tag is one
integer, `seqnum << 64 | last access << 16 | shard`; arrays are made when the second record comes. A
tag that outgrows its limit may exceed it by an eighth before the oldest are cut off, so that
cutting is amortised; what is really held is what counts toward the total.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, cast

from compute.local_index.answers import EMPTY, MISS, Answer, Found, Matches, RangeAnswer
from indilog.ids import MAX_SEQNUM, MetalogPosition, SeqNum, ShardId, TagHash
from indilog.messages import ShardTags

SEQNUM_BYTES: Final = 12
TAG_BYTES: Final = 144
"""What a tag with one record costs in CPython: two ints and a slot of a dictionary."""
SUFFIX_BYTES: Final = 240
"""What a tag's arrays cost beside their contents."""
_TAGS_PER_PARTITION: Final = 16_384
_PARTITIONS_MAX: Final = 1024
_HORIZON_STEPS: Final = 64
_EVICTED_AT_ONCE: Final = 512
_SEQNUM_SHIFT: Final = 64
_ACCESSED_SHIFT: Final = 16
_ACCESSED_MASK: Final = 2**48 - 1
_SHARD_MASK: Final = 0xFFFF


class _TagSuffix:
    """The highest seqnums of one tag, ascending, and the shard of each; at least one.

    Attributes:
        accessed: the metalog position of the tag's last event.
    """

    __slots__ = ("accessed", "seqnums", "shards")

    def __init__(self, single: int) -> None:
        self.seqnums = array("Q", (single >> _SEQNUM_SHIFT,))
        self.shards = array("H", (single & _SHARD_MASK,))
        self.accessed: MetalogPosition = _accessed(single)


_Held: TypeAlias = int | _TagSuffix
"""What is held of a tag: a single record as one integer, or arrays."""

_Partition: TypeAlias = dict[TagHash, _Held]
"""Tags in the order of their last events, the oldest first."""


def _accessed(held: _Held) -> MetalogPosition:
    if isinstance(held, int):
        return held >> _ACCESSED_SHIFT & _ACCESSED_MASK
    return held.accessed


def _move_to_end(partition: _Partition, tag: TagHash, held: _Held) -> None:
    """Make `tag` the last that had an event, and `held` what is held of it."""
    del partition[tag]
    partition[tag] = held


def _head(held: _Held) -> SeqNum:
    return held >> _SEQNUM_SHIFT if isinstance(held, int) else held.seqnums[0]


def malformed(parts: Sequence[ShardTags], tail: SeqNum) -> str | None:
    """Say why `parts` cannot be the index data that follows on `tail`; None: they can."""
    for part in parts:
        if not part.count == len(part.tag_counts) > 0:
            return "a part has another number of records than of tag counts"
        if sum(part.tag_counts) * 8 != len(part.tags):
            return "a part has another number of tags than its counts add up to"
        if part.first_seqnum < tail or not 0 <= part.shard <= _SHARD_MASK:
            return "the parts do not ascend from the tail of what is applied"
        tail = part.first_seqnum + part.count
        if tail > MAX_SEQNUM:
            return "the parts go beyond the last seqnum that can exist"
    return None


class TagCache:
    """Knows, for the tags that it holds, every record from the tag's head on.

    Holds at most `seqnums_max` seqnums in all and, but for the slack of an eighth,
    `seqnums_per_tag_max` of one tag. With a limit of 0 it holds nothing and everything is a miss.

    Attributes:
        held: how many seqnums it holds.
        hits: lookups answered, proven absence included.
        misses: lookups of an unknown tag, or below a tag's head.
    """

    __slots__ = (
        "_cursor", "_cut_above", "_horizon", "_mask", "_partitions", "_per_tag_max", "_position",
        "_seqnums_max", "_suffixes", "held", "hits", "misses",
    )  # fmt: skip

    def __init__(
        self, seqnums_max: int, seqnums_per_tag_max: int, position: MetalogPosition = 0
    ) -> None:
        self._seqnums_max = seqnums_max if seqnums_per_tag_max else 0
        self._per_tag_max = min(seqnums_per_tag_max, seqnums_max)
        self._cut_above = min(self._per_tag_max + self._per_tag_max // 8, seqnums_max)
        partitions = 1 << (seqnums_max // _TAGS_PER_PARTITION).bit_length()
        self._partitions: list[_Partition] = [{} for _ in range(min(partitions, _PARTITIONS_MAX))]
        self._mask = len(self._partitions) - 1
        self._position = position
        """How many metalog positions are applied: the time of read hits."""
        self._horizon = 0
        """Eviction takes tags whose last access is at or below this,"""
        self._cursor = 0
        """from this partition on."""
        self._suffixes = 0
        """How many tags have arrays."""
        self.held = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """How many tags it holds."""
        return sum(map(len, self._partitions))

    @property
    def size_bytes(self) -> int:
        """Bytes held, by the measured cost of a tag, of its arrays and of a seqnum."""
        return len(self) * TAG_BYTES + self._suffixes * SUFFIX_BYTES + self.held * SEQNUM_BYTES

    # --- index data

    def apply(self, parts: Sequence[ShardTags], position: MetalogPosition) -> None:
        """Add the index data of one metalog position, ascending; `malformed` found nothing."""
        self._position = position
        if self._seqnums_max:
            for part in parts:
                self._apply_part(part)
                if self.held > self._seqnums_max:
                    self._evict()
        self._position += 1

    def _apply_part(self, part: ShardTags) -> None:
        """Add records in columns where they have the same shape, one by one otherwise.

        Writers put the tag of the log first. So where all records have as many tags as each other,
        every `width`-th tag is often the same one: a column that is one tag, the largest of the
        cache, is added at the speed of C.
        """
        counts, count, shard = part.tag_counts, part.count, part.shard
        seqnums = range(part.first_seqnum, part.first_seqnum + count)
        tags = array("Q", part.tags)
        width = counts[0]
        if count == 1:
            self._add(tags, [part.first_seqnum] * width, shard)
            return
        if counts.count(width) < count:
            each = [s for s, width in zip(seqnums, counts, strict=True) for _ in range(width)]
            self._add(tags, each, shard)
            return
        while width and (column := tags[::width]).tobytes() == column[:1].tobytes() * count:
            others = tags[:]
            del others[::width]
            if column[0] in others:
                break
            self._extend(column[0], seqnums, shard)
            tags, width = others, width - 1
        if width == 1:
            self._add(tags, seqnums, shard)
        else:
            self._add(tags, [s for s in seqnums for _ in range(width)], shard)

    def _extend(self, tag: TagHash, seqnums: range, shard: ShardId) -> None:
        """Add a run of records with one tag."""
        partition = self._partitions[tag & self._mask]
        suffix = partition.get(tag)
        if suffix is None:
            suffix = self._with_arrays(partition, tag, seqnums[0] << _SEQNUM_SHIFT | shard)
            self.held += 1
            seqnums = seqnums[1:]
        elif isinstance(suffix, int):
            suffix = self._with_arrays(partition, tag, suffix)
        suffix.seqnums.extend(seqnums)
        suffix.shards.extend(array("H", (shard,)) * len(seqnums))
        suffix.accessed = self._position
        _move_to_end(partition, tag, suffix)
        self.held += len(seqnums)
        if len(suffix.seqnums) > self._cut_above:
            self._cut(suffix)

    def _add(self, tags: Iterable[TagHash], seqnums: Iterable[SeqNum], shard: ShardId) -> None:
        """Add records one by one, `seqnums` as many as `tags`: the hot loop of the index."""
        partitions, mask, cut_above = self._partitions, self._mask, self._cut_above
        position = self._position
        accessed_and_shard = position << _ACCESSED_SHIFT | shard
        added = 0
        for tag, seqnum in zip(tags, seqnums, strict=True):
            partition = partitions[tag & mask]
            suffix = partition.get(tag)
            if suffix is None:
                partition[tag] = seqnum << _SEQNUM_SHIFT | accessed_and_shard
                added += 1
                continue
            if isinstance(suffix, int):
                suffix = self._with_arrays(partition, tag, suffix)
            of_tag = suffix.seqnums
            if of_tag[-1] == seqnum:
                continue  # a record that has a tag twice is there once
            of_tag.append(seqnum)
            suffix.shards.append(shard)
            added += 1
            if suffix.accessed != position:
                suffix.accessed = position
                _move_to_end(partition, tag, suffix)
            if len(of_tag) > cut_above:
                self._cut(suffix)
        self.held += added

    def _with_arrays(self, partition: _Partition, tag: TagHash, single: int) -> _TagSuffix:
        suffix = partition[tag] = _TagSuffix(single)
        self._suffixes += 1
        return suffix

    def _cut(self, suffix: _TagSuffix) -> None:
        """Forget the oldest of one tag: its head moves up."""
        excess = len(suffix.seqnums) - self._per_tag_max
        del suffix.seqnums[:excess], suffix.shards[:excess]
        self.held -= excess

    def _evict(self) -> None:
        """Forget whole tags, least recently accessed first, until the total fits.

        Some more than necessary go, because the way to the front of a dictionary leads past what
        was deleted there before.
        """
        enough = self._seqnums_max - min(_EVICTED_AT_ONCE, self._seqnums_max // 32)
        while self.held > enough:
            self._evict_from(self._partitions[self._cursor], enough)
            if self.held > enough:
                self._cursor += 1
                if self._cursor == len(self._partitions):
                    self._cursor = 0
                    self._horizon = self._next_horizon()

    def _evict_from(self, partition: _Partition, enough: int) -> None:
        """Forget tags of one partition up to the horizon, until `enough` are left in all."""
        evicted: list[TagHash] = []
        horizon, left = self._horizon, self.held
        for tag, held in partition.items():
            if left <= enough:
                break
            if isinstance(held, int):
                if held >> _ACCESSED_SHIFT & _ACCESSED_MASK > horizon:
                    break
                left -= 1
            else:
                if held.accessed > horizon:
                    break
                left -= len(held.seqnums)
                self._suffixes -= 1
            evicted.append(tag)
        for tag in evicted:
            del partition[tag]
        self.held = left

    def _next_horizon(self) -> MetalogPosition:
        """Return the oldest last access of all, and a little later: so sweeps are worth it."""
        oldest = min(_accessed(next(iter(p.values()))) for p in self._partitions if p)
        return oldest + (self._position - oldest) // _HORIZON_STEPS

    # --- lookups

    def find_next(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the first record with `tag` and seqnum >= `bound` (algorithm 3)."""
        held = self._accessed_for(tag, bound)
        if held is None:
            return MISS
        if isinstance(held, int):
            if bound > held >> _SEQNUM_SHIFT:
                return EMPTY
            return Found(held >> _SEQNUM_SHIFT, ShardId(held & _SHARD_MASK))
        index = bisect_left(held.seqnums, bound)
        if index == len(held.seqnums):
            return EMPTY
        return Found(held.seqnums[index], ShardId(held.shards[index]))

    def find_prev(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the last record with `tag` and seqnum <= `bound`.

        From the head on there always is one; below it there may be older ones that were evicted.
        """
        held = self._accessed_for(tag, bound)
        if held is None:
            return MISS
        if isinstance(held, int):
            return Found(held >> _SEQNUM_SHIFT, ShardId(held & _SHARD_MASK))
        index = bisect_right(held.seqnums, bound) - 1
        return Found(held.seqnums[index], ShardId(held.shards[index]))

    def find_range(self, tag: TagHash, bound: SeqNum, limit: int) -> RangeAnswer:
        """Return the first `limit` records with `tag` from `bound` on; fewer: there are no more."""
        held = self._accessed_for(tag, bound)
        if held is None:
            return MISS
        suffix = _TagSuffix(held) if isinstance(held, int) else held
        first = bisect_left(suffix.seqnums, bound)
        seqnums = suffix.seqnums[first : first + limit]
        shards = suffix.shards[first : first + limit]
        return Matches(seqnums.tolist(), cast("list[ShardId]", shards.tolist()))

    def _accessed_for(self, tag: TagHash, bound: SeqNum) -> _Held | None:
        """Return what is held of `tag` if it can answer about `bound`: a read hit; else None.

        The head itself is held, so a bound at the head is a hit. One below is a miss, even by one:
        the bound itself may be what was evicted (PITFALLS 9).
        """
        partition = self._partitions[tag & self._mask]
        held = partition.get(tag)
        if held is None or bound < _head(held):
            self.misses += 1
            return None
        self.hits += 1
        if _accessed(held) != self._position:
            if isinstance(held, int):
                seqnum, shard = held >> _SEQNUM_SHIFT, held & _SHARD_MASK
                held = seqnum << _SEQNUM_SHIFT | self._position << _ACCESSED_SHIFT | shard
            else:
                held.accessed = self._position
            _move_to_end(partition, tag, held)
        return held

    def check_invariants(self) -> None:
        """Assert the bounds, the order, and that the counters say what is really held."""
        tags = [held for partition in self._partitions for held in partition.values()]
        suffixes = [held for held in tags if not isinstance(held, int)]
        lengths = [len(suffix.seqnums) for suffix in suffixes]
        assert self.held == len(tags) - len(suffixes) + sum(lengths), "seqnums are counted"
        assert self._suffixes == len(suffixes), "arrays are counted"
        assert self.held <= self._seqnums_max, "more seqnums than allowed"
        assert max(lengths, default=0) <= self._cut_above, "more seqnums of a tag than allowed"
        assert all(len(s.seqnums) == len(s.shards) for s in suffixes), "a seqnum has a shard"
        for partition in self._partitions:
            accesses = list(map(_accessed, partition.values()))
            assert accesses == sorted(accesses), "a partition is in the order of events"
