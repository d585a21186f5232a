"""The Popularity Cache: the shards of older records that were read recently (thesis 5.1.2).

The cache learns a seqnum below the head of the Suffix after a lookup of this seqnum missed. It
keeps single seqnums without ranges, so only a bound that is a kept seqnum hits (algorithm 2).
`LocalIndex` calls `PopularityCache`.
"""

from __future__ import annotations

from typing import Final

from cachetools import LRUCache

from indilog.base.ids import SeqNum, ShardId
from indilog_compute.local_index.answers import MISS, Answer, Found

ENTRY_BYTES: Final = 200
"""Bytes of an entry in CPython: two ints, two slots of a dict, and one slot of an OrderedDict."""


class PopularityCache:
    """Keeps the shards of at most `entries_max` seqnums, in at most `bytes_max` bytes.

    The least recently used entry is evicted.

    Attributes:
        hits: number of answered lookups.
        misses: number of lookups of seqnums that are not cached.
    """

    __slots__ = ("_entries_max", "_shards", "hits", "misses")

    def __init__(self, entries_max: int, *, bytes_max: int = 1 << 40) -> None:
        self._entries_max = min(entries_max, bytes_max // ENTRY_BYTES)
        self._shards: LRUCache[SeqNum, ShardId] = LRUCache(self._entries_max)
        self.hits = self.misses = 0

    def __len__(self) -> int:
        """Number of cached seqnums."""
        return len(self._shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of the cached entries, by the measured cost of an entry."""
        return len(self._shards) * ENTRY_BYTES

    def learn(self, seqnum: SeqNum, shard: ShardId) -> None:
        """Cache the answer to a lookup that missed."""
        if self._entries_max:
            self._shards[seqnum] = shard

    def find(self, bound: SeqNum) -> Answer:
        """Return the record at `bound`, for a lookup in either direction; a miss if it is not
        cached.
        """
        shard = self.shard_of(bound)
        return MISS if shard is None else Found(bound, shard)

    def shard_of(self, seqnum: SeqNum) -> ShardId | None:
        """Return the shard of `seqnum`; None: it is not cached."""
        shard = self._shards.get(seqnum)
        if shard is None:
            self.misses += 1
        else:
            self.hits += 1
        return shard

    def check_invariants(self) -> None:
        """Assert that the bound holds."""
        assert len(self._shards) <= self._entries_max, "more entries than allowed"
