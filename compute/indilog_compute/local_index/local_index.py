"""The local index: one interface for its four parts (thesis 5.1, 5.4).

A lookup of the empty tag, which covers the whole log, goes to the Suffix, or to the Popularity
Cache if the bound lies below the head of the Suffix. A lookup of any other tag goes to the Tag
Cache (algorithm 6), and after a miss to the Answer Cache.

The Suffix applies metalog entries (type-O). The Tag Cache applies their index data (type-S), which
arrives later. So the Suffix and the Tag Cache have different positions. Before a lookup, the caller
(`Engine`, `Reads`) compares the position of the part with that of its session.

Only reads need the Tag Cache. So index data waits until the next read, or until `WAITING_MAX`
(2,048) tags or positions wait. The waiting data is then sorted by tag
(`indilog.roles.tags_sorted`), so that each tag takes one step for all of its records.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from indilog.base.ids import EMPTY_TAG, MetalogPosition, SeqNum, ShardId, TagHash
from indilog.config import NodeConfig
from indilog.kernel.lost_ranges import LostRanges
from indilog.kernel.metalog import Span
from indilog.roles.tags_sorted import WAITING_MAX, rows_by_tag
from indilog.wire.messages import Direction, ShardTags
from indilog_compute.local_index.answer_cache import AnswerCache
from indilog_compute.local_index.answers import MISS, Answer, Found, Matches, RangeAnswer
from indilog_compute.local_index.index_parts import malformed
from indilog_compute.local_index.popularity_cache import PopularityCache
from indilog_compute.local_index.suffix import Suffix
from indilog_compute.local_index.tag_cache import ALL_SHARDS, TagCache
from indilog_compute.local_index.tag_rows import First

_TAG_BYTES: Final = 8


class LocalIndex:
    """Answers lookups about the applied prefix of the log, with bounded memory.

    `Found`, `Empty` and `Matches` are always right for this prefix; after a `Miss` the caller asks
    the index tier. The index starts empty, at any position of the log. A crash loses the index; the
    loss costs only misses.

    Args:
        config: the limits.
        position: the metalog position at which the index starts.
        tail: the tail of the log at `position`.
        own: the shards that this node writes. A tag of a record in another shard is kept only if it
            has a row, or a read has asked for the tag.

    Attributes:
        tag_position: number of metalog positions whose index data is applied.
        trims: number of calls of `forget_below`. If this number has grown since a question, the
            answer must not be kept.
    """

    __slots__ = (
        "_answers", "_bytes_max", "_lost", "_popularity", "_suffix", "_tag_cache", "_tag_tail",
        "_waiting", "_waiting_tags", "tag_position", "trims",
    )  # fmt: skip

    def __init__(
        self,
        config: NodeConfig,
        position: MetalogPosition = 0,
        tail: SeqNum = 0,
        own: Container[int] = ALL_SHARDS,
    ) -> None:
        scale = 0 if config.caches.local_index == "none" else 1
        self._suffix = Suffix(
            config.caches.suffix_cuts_max * scale, tail, bytes_max=config.caches.suffix_bytes_max
        )  # fmt: skip
        self._popularity = PopularityCache(
            config.caches.popularity_entries_max * scale,
            bytes_max=config.caches.popularity_bytes_max,
        )
        self._tag_cache = TagCache(
            config.caches.tag_cache_seqnums_max * scale,
            config.caches.tag_cache_seqnums_per_tag_max,
            position,
            bytes_max=config.caches.tag_cache_bytes_max,
            own=own,
        )
        self._answers = AnswerCache(
            config.caches.answer_cache_entries_max * scale,
            bytes_max=config.caches.answer_cache_bytes_max,
        )
        self._waiting: list[tuple[MetalogPosition, Sequence[ShardTags]]] = []
        """Index data below `tag_position` that is not in the Tag Cache yet."""
        self._waiting_tags = 0
        self._bytes_max = {
            "suffix": config.caches.suffix_bytes_max,
            "popularity_cache": config.caches.popularity_bytes_max,
            "tag_cache": config.caches.tag_cache_bytes_max,
            "answer_cache": config.caches.answer_cache_bytes_max,
        }
        self._lost = LostRanges(ranges_max=config.index_tier.lost_ranges_max)
        """Records whose tags are lost. A lookup misses if such a record lies between its bound and
        the answer.
        """
        self._tag_tail = tail
        """The tail of the log at `tag_position`; later index data has no seqnum below it."""
        self.tag_position = position
        self.trims = 0

    def apply_spans(self, spans: Sequence[Span]) -> None:
        """Apply the spans that the next metalog entry ordered (type-O)."""
        self._suffix.apply(spans)

    def apply_block(self, position: MetalogPosition, parts: Sequence[ShardTags]) -> str | None:
        """Apply the index data of the next position (type-S): the parts of all productive shards,
        ascending.

        Returns:
            None if the index data was applied. Otherwise the reason why the index data is
            malformed; then nothing has changed, and it must be requested again.
        """
        assert position == self.tag_position, "index data is applied in order, without gaps"
        if (reason := malformed(parts, self._tag_tail)) is not None:
            return reason
        self._waiting.append((position, parts))
        for part in parts:
            self._waiting_tags += len(part.tags) // _TAG_BYTES
            for lost in part.lost:
                self._lost.add(lost)
        if self._waiting_tags >= WAITING_MAX or len(self._waiting) >= WAITING_MAX:
            self._apply_waiting()
        if parts:
            self._tag_tail = parts[-1].first_seqnum + parts[-1].count
        self.tag_position += 1
        return None

    @property
    def _tags(self) -> TagCache:
        """The Tag Cache, after it has applied the waiting index data."""
        if self._waiting:
            self._apply_waiting()
        return self._tag_cache

    def _apply_waiting(self) -> None:
        waiting, self._waiting, self._waiting_tags = self._waiting, [], 0
        if not self._tag_cache.enabled:
            return
        rows = rows_by_tag([part for _, parts in waiting for part in parts])
        if rows is not None:
            self._tag_cache.apply_sorted(rows, waiting[-1][0])
            return
        for position, parts in waiting:
            self._tag_cache.apply(parts, position)

    @property
    def _parts(self) -> dict[str, Suffix | PopularityCache | TagCache | AnswerCache]:
        return {
            "suffix": self._suffix,
            "popularity_cache": self._popularity,
            "tag_cache": self._tags,
            "answer_cache": self._answers,
        }

    def find_next(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Look up the first record with `tag` and seqnum >= `bound`."""
        if tag != EMPTY_TAG:
            answer = self._tags.find_next(tag, bound)
            if answer is MISS:
                answer = self._answers.find_next(tag, bound, self._tag_tail)
            if self._lost and answer is not MISS:
                end = answer.seqnum if isinstance(answer, Found) else self._tag_tail
                return MISS if self._lost.any(bound, end) else answer
            return answer
        if bound >= self._suffix.head:
            return self._suffix.find_next(bound)
        return self._popularity.find(bound)

    def find_prev(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Look up the last record with `tag` and seqnum <= `bound`."""
        if tag != EMPTY_TAG:
            answer = self._tags.find_prev(tag, bound)
            if answer is MISS:
                answer = self._answers.find_prev(tag, bound, self._tag_tail)
            if self._lost and answer is not MISS:
                start = answer.seqnum + 1 if isinstance(answer, Found) else 0
                return MISS if self._lost.any(start, bound + 1) else answer
            return answer
        if bound >= self._suffix.head:
            return self._suffix.find_prev(bound)
        return self._popularity.find(bound)

    def find_range(self, tag: TagHash, bound: SeqNum, limit: int) -> RangeAnswer:
        """Look up the first `limit` records with `tag` from `bound` on.

        Only the Suffix and the Tag Cache answer, because the other caches have single records.
        """
        if tag != EMPTY_TAG:
            answer = self._tags.find_range(tag, bound, limit)
            if self._lost and isinstance(answer, Matches):
                full = len(answer.seqnums) == limit
                end = answer.seqnums[-1] if full else self._tag_tail
                return MISS if self._lost.any(bound, end) else answer
            return answer
        return self._suffix.find_range(bound, limit)

    def shard_of(self, seqnum: SeqNum) -> ShardId | None:
        """Return the shard of the record at `seqnum`; None: this index does not know it."""
        if seqnum >= self._suffix.head:
            return self._suffix.shard_of(seqnum)
        return self._popularity.shard_of(seqnum)

    def learn(self, seqnum: SeqNum, shard: ShardId) -> None:
        """Keep the shard of a record that the index tier found, whichever tag was looked up.

        A shard in the Suffix is known already, so only records below its head are kept.
        """
        if seqnum < self._suffix.head:
            self._popularity.learn(seqnum, shard)

    # --- answers of the index tier

    def learn_answer(
        self,
        direction: Direction,
        tag: TagHash,
        bound: SeqNum,
        found: tuple[SeqNum, ShardId],
        tail: SeqNum,
    ) -> None:
        """Keep `found`, the answer to a lookup of `tag` in the log below `tail`.

        Answers for the empty tag are not kept. The caller ensures that no records were trimmed
        since the question (`trims`).
        """
        if tag == EMPTY_TAG:
            return
        if direction is Direction.NEXT:
            self._answers.learn_next(tag, bound, *found)
        else:
            self._answers.learn_prev(tag, bound, *found, tail)

    def forget_below(self, tag: TagHash, until: SeqNum) -> None:
        """Drop the records of `tag` below `until`, because they were trimmed.

        From now on, lookups with a bound below the first kept record miss, so that the index tier
        answers which records were trimmed. If a tag has a floor, the index tier does not answer
        which record was the first of the tag.
        """
        self.trims += 1
        self._tags.forget_below(tag, until)
        self._answers.forget(tag)

    @property
    def tag_tail(self) -> SeqNum:
        """The tail of the log at `tag_position`."""
        return self._tag_tail

    @property
    def has_tag_cache(self) -> bool:
        """Whether the Tag Cache may have records: its limits are not 0."""
        return self._tags.enabled

    def knows_tag(self, tag: TagHash) -> bool:
        """Whether the index tier need not be asked if `tag` is new; see `TagCache.knows`."""
        return self._tags.knows(tag)

    def has_recent(self, tag: TagHash, seqnums: int) -> bool:
        """Whether the newest `seqnums` records of `tag`, or all its records, are cached."""
        return self._tags.has_recent(tag, seqnums)

    def expect(self, tag: TagHash) -> None:
        """Note a question to the index tier about `tag` below `tag_tail`.

        The caller later calls `learn_first`, `refill` or `give_up` with this tail as the limit.
        """
        self._tags.expect(tag, self._tag_tail)

    def give_up(self, tag: TagHash, limit: SeqNum) -> None:
        """Note that the question about `tag` below `limit` was dropped."""
        self._tags.give_up(tag, limit)

    def learn_first(self, tag: TagHash, limit: SeqNum, first: First | None) -> None:
        """Note the first record of `tag` below `limit`; None: the tag has no record there."""
        self._tags.learn_first(tag, limit, first)

    def refill(
        self,
        tag: TagHash,
        limit: SeqNum,
        seqnums: Sequence[SeqNum],
        shards: Sequence[ShardId],
        *,
        complete: bool,
    ) -> None:
        """Add the newest records of `tag` below `limit`, or all of them; see `TagCache.refill`."""
        self._tags.refill(tag, limit, seqnums, shards, complete=complete)

    # --- status

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self._parts.values())

    def status(self) -> dict[str, dict[str, int]]:
        """Return entries, bytes and their limit, hits and misses of each part, for operators."""
        status = {
            name: {
                "entries": len(part), "bytes": part.size_bytes, "bytes_max": self._bytes_max[name],
                "hits": part.hits, "misses": part.misses,
            }
            for name, part in self._parts.items()
        }  # fmt: skip
        status["tag_cache"] |= {"entries": self._tags.seqnums_cached, "tags": len(self._tags)}
        return status

    @property
    def lost_ranges(self) -> int:
        """Number of known ranges of lost records."""
        return len(self._lost)

    def check_invariants(self) -> None:
        """Assert the invariants of the parts."""
        for part in self._parts.values():
            part.check_invariants()
        self._lost.check_invariants()
