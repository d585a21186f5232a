"""The local index: Suffix, Popularity Cache and Tag Cache behind one interface (thesis 5.1, 5.4).

The empty tag covers the whole log and is looked up in the Suffix, below its head in the Popularity
Cache; every other tag in the Tag Cache (algorithm 6). The Suffix follows the metalog itself
(type-O), the Tag Cache the index data (type-S), which comes later: so the two have positions of
their own, and a caller that must not read the past compares its session with them first.
"""

from __future__ import annotations

from collections.abc import Sequence

from compute.local_index.answers import Answer, RangeAnswer
from compute.local_index.popularity_cache import PopularityCache
from compute.local_index.suffix import Suffix
from compute.local_index.tag_cache import TagCache, malformed
from indilog.config import NodeConfig
from indilog.ids import EMPTY_TAG, MetalogPosition, SeqNum, ShardId, TagHash
from indilog.messages import ShardTags
from indilog.metalog import Span


class LocalIndex:
    """Answers lookups about the prefix of the log that was applied; bounded whatever the log's
    length.

    `Found`, `Empty` and `Matches` are always right for that prefix; `Miss` says to ask the index
    tier. It starts empty, at the beginning or at any `(position, tail)` of a running log, and is
    lost in a crash without harm.

    Attributes:
        tag_position: how many metalog positions the Tag Cache has applied.
    """

    __slots__ = ("_popularity", "_suffix", "_tag_tail", "_tags", "tag_position")

    def __init__(self, config: NodeConfig, position: MetalogPosition = 0, tail: SeqNum = 0) -> None:
        self._suffix = Suffix(config.suffix_cuts_max, tail)
        self._popularity = PopularityCache(config.popularity_entries_max)
        self._tags = TagCache(
            config.tag_cache_seqnums_max, config.tag_cache_seqnums_per_tag_max, position
        )
        self._tag_tail = tail
        """No seqnum of the index data to come is below this."""
        self.tag_position = position

    def apply_spans(self, spans: Sequence[Span]) -> None:
        """Apply what the next metalog entry ordered (type-O)."""
        self._suffix.apply(spans)

    def apply_block(self, position: MetalogPosition, parts: Sequence[ShardTags]) -> str | None:
        """Apply the index data of the next position (type-S): the parts of all productive shards,
        ascending.

        Returns:
            None when it is applied. Otherwise why it cannot be what it claims to be, for an
            `Ignore`; nothing has changed then, and the position is to be asked for again.
        """
        assert position == self.tag_position, "index data is applied in order, without gaps"
        if (reason := malformed(parts, self._tag_tail)) is not None:
            return reason
        self._tags.apply(parts, position)
        if parts:
            self._tag_tail = parts[-1].first_seqnum + parts[-1].count
        self.tag_position += 1
        return None

    def find_next(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Look up the first record with `tag` and seqnum >= `bound`."""
        if tag != EMPTY_TAG:
            return self._tags.find_next(tag, bound)
        if bound >= self._suffix.head:
            return self._suffix.find_next(bound)
        return self._popularity.find(bound)

    def find_prev(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Look up the last record with `tag` and seqnum <= `bound`."""
        if tag != EMPTY_TAG:
            return self._tags.find_prev(tag, bound)
        if bound >= self._suffix.head:
            return self._suffix.find_prev(bound)
        return self._popularity.find(bound)

    def find_range(self, tag: TagHash, bound: SeqNum, limit: int) -> RangeAnswer:
        """Look up the first `limit` records with `tag` from `bound` on.

        The Popularity Cache has only point hits, so it has no part in this.
        """
        if tag != EMPTY_TAG:
            return self._tags.find_range(tag, bound, limit)
        return self._suffix.find_range(bound, limit)

    def shard_of(self, seqnum: SeqNum) -> ShardId | None:
        """Return the shard that holds `seqnum`; None: not known here."""
        if seqnum >= self._suffix.head:
            return self._suffix.shard_of(seqnum)
        return self._popularity.shard_of(seqnum)

    def learn(self, seqnum: SeqNum, shard: ShardId) -> None:
        """Remember where a record is that the index tier had to find, through any tag.

        Only what lies below the Suffix: the rest is known.
        """
        if seqnum < self._suffix.head:
            self._popularity.learn(seqnum, shard)

    def status(self) -> dict[str, dict[str, int]]:
        """Return entries, bytes, hits and misses of each part, for people and for metrics."""
        suffix, popularity, tags = self._suffix, self._popularity, self._tags
        return {
            "suffix": {
                "entries": len(suffix), "bytes": suffix.size_bytes,
                "hits": suffix.hits, "misses": suffix.misses,
            },
            "popularity_cache": {
                "entries": len(popularity), "bytes": popularity.size_bytes,
                "hits": popularity.hits, "misses": popularity.misses,
            },
            "tag_cache": {
                "entries": tags.held, "tags": len(tags), "bytes": tags.size_bytes,
                "hits": tags.hits, "misses": tags.misses,
            },
        }  # fmt: skip

    def check_invariants(self) -> None:
        """Assert the invariants of the parts."""
        self._suffix.check_invariants()
        self._popularity.check_invariants()
        self._tags.check_invariants()
