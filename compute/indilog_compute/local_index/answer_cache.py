"""The Answer Cache: answers of the index tier that no append can change (thesis 10).

An append adds a record after all others, so two kinds of answers are final:

- The first record with a tag from bound b on is at s. Then the tag will never have a record in [b,
  s).
- The last record with a tag up to b is at s, and b is below the log's tail. Then the tag will never
  have a record in (s, b].

Such an answer is kept as a *zone* around the record at s: no other record of the tag lies in
[below, above]. Two zones around the same record are merged. The answers "no record from b on" and
"the last record of all" are not kept, because the next append may change them.

So if the Tag Cache cannot answer a lookup (mostly of the first record of a tag), the lookup goes to
the index tier only once. A trim can change an answer; it drops all zones of the tag. `LocalIndex`
calls `AnswerCache`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final

from indilog.base.ids import SeqNum, ShardId, TagHash
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Found

ZONE_BYTES: Final = 560
"""Bytes of a zone in CPython, if its tag has no other; several zones of a tag take less each."""


class _Zone:
    """The zone of a record: no other record of the tag lies in [below, above]."""

    __slots__ = ("above", "below", "shard")

    def __init__(self, shard: ShardId, below: SeqNum, above: SeqNum) -> None:
        self.shard = shard
        self.below = below
        self.above = above


class AnswerCache:
    """Keeps at most `entries_max` zones in at most `bytes_max` bytes; evicts the least recently
    used zone.

    Attributes:
        hits: number of answered lookups.
        misses: number of lookups whose bound lies in no zone.
    """

    __slots__ = ("_entries_max", "_seqnums", "_zones", "hits", "misses")

    def __init__(self, entries_max: int, *, bytes_max: int = 1 << 40) -> None:
        self._entries_max = min(entries_max, bytes_max // ZONE_BYTES)
        self._zones: OrderedDict[tuple[TagHash, SeqNum], _Zone] = OrderedDict()
        """The zones by tag and seqnum of the record, the least recently used zone first."""
        self._seqnums: dict[TagHash, array[int]] = {}
        """By tag: the seqnums of its records that have a zone, ascending."""
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Number of cached zones."""
        return len(self._zones)

    @property
    def size_bytes(self) -> int:
        """Bytes of the cached zones, by the measured cost of a zone."""
        return len(self._zones) * ZONE_BYTES

    def learn_next(self, tag: TagHash, bound: SeqNum, seqnum: SeqNum, shard: ShardId) -> None:
        """Cache that the first record of `tag` from `bound` on is at `seqnum`."""
        assert bound <= seqnum, "the first from a bound on is not before it"
        self._learn(tag, seqnum, _Zone(shard, bound, seqnum))

    def learn_prev(
        self, tag: TagHash, bound: SeqNum, seqnum: SeqNum, shard: ShardId, tail: SeqNum
    ) -> None:
        """Cache that the last record of `tag` up to `bound`, and below `tail`, is at `seqnum`.

        `tail` is the log's tail in the question. Later records may lie at `tail` or above it, so
        the zone ends below `tail`.
        """
        assert seqnum <= bound, "the last up to a bound is not after it"
        assert seqnum < tail, "only ordered records are found"
        self._learn(tag, seqnum, _Zone(shard, seqnum, min(bound, tail - 1)))

    def _learn(self, tag: TagHash, seqnum: SeqNum, zone: _Zone) -> None:
        if not self._entries_max:
            return
        known = self._zones.get((tag, seqnum))
        if known is not None:
            known.below = min(known.below, zone.below)
            known.above = max(known.above, zone.above)
            self._zones.move_to_end((tag, seqnum))
            return
        if len(self._zones) >= self._entries_max:
            (other, place), _ = self._zones.popitem(last=False)
            self._remove(other, place)
        self._zones[tag, seqnum] = zone
        seqnums = self._seqnums.setdefault(tag, array("Q"))
        seqnums.insert(bisect_left(seqnums, seqnum), seqnum)

    def _remove(self, tag: TagHash, seqnum: SeqNum) -> None:
        seqnums = self._seqnums[tag]
        del seqnums[bisect_left(seqnums, seqnum)]
        if not seqnums:
            del self._seqnums[tag]

    def forget(self, tag: TagHash) -> None:
        """Drop all zones of `tag`, because some of its records were trimmed."""
        for seqnum in self._seqnums.pop(tag, ()):
            del self._zones[tag, seqnum]

    def find_next(self, tag: TagHash, bound: SeqNum, tail: SeqNum) -> Answer:
        """Return the first record of `tag` from `bound` on; a miss unless a zone below `tail` shows
        it.
        """
        seqnums = self._seqnums.get(tag)
        if seqnums is not None:
            place = bisect_left(seqnums, bound)
            if place < len(seqnums) and (seqnum := seqnums[place]) < tail:
                zone = self._zones[tag, seqnum]
                if zone.below <= bound:
                    return self._hit(tag, seqnum, zone)
        self.misses += 1
        return MISS

    def find_prev(self, tag: TagHash, bound: SeqNum, tail: SeqNum) -> Answer:
        """Return the last record of `tag` up to `bound`; a miss unless a zone below `tail` shows
        it, or shows that there is none.
        """
        seqnums = self._seqnums.get(tag)
        if seqnums is not None:
            place = bisect_right(seqnums, bound)
            if place and (seqnum := seqnums[place - 1]) < tail:
                zone = self._zones[tag, seqnum]
                if bound <= zone.above:
                    return self._hit(tag, seqnum, zone)
            if not place and not self._zones[tag, seqnums[0]].below:
                self.hits += 1
                return EMPTY  # `bound` lies before the first record of the tag
        self.misses += 1
        return MISS

    def _hit(self, tag: TagHash, seqnum: SeqNum, zone: _Zone) -> Found:
        self.hits += 1
        self._zones.move_to_end((tag, seqnum))
        return Found(seqnum, zone.shard)

    def check_invariants(self) -> None:
        """Assert the bound, and that zones of one tag do not overlap."""
        assert len(self._zones) <= self._entries_max, "more zones than allowed"
        kept = [(tag, s) for tag, seqnums in self._seqnums.items() for s in seqnums]
        assert sorted(kept) == sorted(self._zones), "every zone is found by its tag"
        for tag, seqnums in self._seqnums.items():
            seqnum_before = above_before = -1
            for seqnum in seqnums:
                zone = self._zones[tag, seqnum]
                assert zone.below <= seqnum <= zone.above, "a zone lies around its record"
                assert seqnum_before < zone.below, "no record before it lies in its zone"
                assert above_before < seqnum, "nor does it lie in the zone before"
                seqnum_before, above_before = seqnum, zone.above
