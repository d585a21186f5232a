"""The local index: its parts behind one interface (thesis 5.1, 5.4).

The empty tag covers the whole log and is looked up in the Suffix, below its head in the Popularity
Cache; every other tag in the Tag Cache (algorithm 6), then in the Answer Cache. The Suffix follows
the metalog itself (type-O), the Tag Cache the index data (type-S), which comes later: so the two
have positions of their own, and a caller that must not read the past compares its session with them
first.

Only reads need the Tag Cache. So index data waits until a read comes, or until it has
`WAITING_MAX` tags, and then is sorted by tag together (`indilog.roles.tags_sorted`): a tag costs
one step for all of its records.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from indilog_compute.local_index.tag_cache import TagCache
from indilog_compute.local_index.tag_rows import First

_TAG_BYTES: Final = 8


class LocalIndex:
    """Answers lookups about the prefix of the log that was applied; bounded whatever the log's
    length.

    `Found`, `Empty` and `Matches` are always right for that prefix; `Miss` says to ask the index
    tier. It starts empty, at the beginning or at any `(position, tail)` of a running log, and is
    lost in a crash without harm.

    Attributes:
        tag_position: how many metalog positions the Tag Cache has applied.
        trims: how often trimmed records were forgotten; what was asked before the last time may
            not be learned.
    """

    __slots__ = (
        "_answers", "_bytes_max", "_lost", "_popularity", "_suffix", "_tag_cache", "_tag_tail",
        "_waiting", "_waiting_tags", "tag_position", "trims",
    )  # fmt: skip

    def __init__(self, config: NodeConfig, position: MetalogPosition = 0, tail: SeqNum = 0) -> None:
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
        )
        self._answers = AnswerCache(
            config.caches.answer_cache_entries_max * scale,
            bytes_max=config.caches.answer_cache_bytes_max,
        )
        self._waiting: list[tuple[MetalogPosition, Sequence[ShardTags]]] = []
        """Index data below `tag_position` that the Tag Cache has not got yet."""
        self._waiting_tags = 0
        self._bytes_max = {
            "suffix": config.caches.suffix_bytes_max,
            "popularity_cache": config.caches.popularity_bytes_max,
            "tag_cache": config.caches.tag_cache_bytes_max,
            "answer_cache": config.caches.answer_cache_bytes_max,
        }
        self._lost = LostRanges(ranges_max=config.index_tier.lost_ranges_max)
        """Records whose tags are lost; what the index tier tells never reaches across one."""
        self._tag_tail = tail
        """No seqnum of the index data to come is below this."""
        self.tag_position = position
        self.trims = 0

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
        self._waiting.append((position, parts))
        for part in parts:
            self._waiting_tags += len(part.tags) // _TAG_BYTES
            for lost in part.lost:
                self._lost.add(lost)
        if self._waiting_tags >= WAITING_MAX or len(self._waiting) >= WAITING_MAX:
            self._settle()
        if parts:
            self._tag_tail = parts[-1].first_seqnum + parts[-1].count
        self.tag_position += 1
        return None

    @property
    def _tags(self) -> TagCache:
        """The Tag Cache, with all index data that was applied."""
        if self._waiting:
            self._settle()
        return self._tag_cache

    def _settle(self) -> None:
        waiting, self._waiting, self._waiting_tags = self._waiting, [], 0
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

        The Popularity Cache and the Answer Cache know single records, so they have no part in this.
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

    # --- what the index tier told

    def learn_answer(
        self,
        direction: Direction,
        tag: TagHash,
        bound: SeqNum,
        found: tuple[SeqNum, ShardId],
        tail: SeqNum,
    ) -> None:
        """Remember the answer to a lookup that was about the log below `tail`, if it is for ever.

        Only while nothing of the tag is trimmed from `bound` on.
        """
        if tag == EMPTY_TAG:
            return
        if direction is Direction.NEXT:
            self._answers.learn_next(tag, bound, *found)
        else:
            self._answers.learn_prev(tag, bound, *found, tail)

    def forget_below(self, tag: TagHash, until: SeqNum) -> None:
        """Forget what is known of the records of `tag` below `until`: they were trimmed.

        Bounds below the first record kept miss from now on, so that the index tier tells what was
        trimmed. What the index tier is asked about later, it must not answer as if nothing had been
        trimmed: as long as records of a tag are trimmed, its first record is not told.
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
        """Whether records of tags are remembered at all."""
        return self._tags.enabled

    def knows_tag(self, tag: TagHash) -> bool:
        """Whether there is no reason to ask the index tier if `tag` is new."""
        return self._tags.knows(tag)

    def has_recent(self, tag: TagHash, seqnums: int) -> bool:
        """Whether the newest `seqnums` records of `tag`, or all that there are, are held."""
        return self._tags.has_recent(tag, seqnums)

    def expect(self, tag: TagHash) -> None:
        """The index tier is asked about the records of `tag` below `tag_tail`, at `tag_position`.

        The answer is told with that tail as its limit, or `give_up` is.
        """
        self._tags.expect(tag, self._tag_tail)

    def give_up(self, tag: TagHash, limit: SeqNum) -> None:
        """No answer about `tag` below `limit` will come."""
        self._tags.give_up(tag, limit)

    def learn_first(self, tag: TagHash, limit: SeqNum, first: First | None) -> None:
        """The first record of `tag` below `limit` is `first`; None: there is none."""
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
        """These are the newest records of `tag` below `limit`, or all of them; see `TagCache`."""
        self._tags.refill(tag, limit, seqnums, shards, complete=complete)

    # --- figures

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self._parts.values())

    def status(self) -> dict[str, dict[str, int]]:
        """Return entries, bytes and their limit, hits and misses of each part, for people and for
        metrics.
        """
        status = {
            name: {
                "entries": len(part), "bytes": part.size_bytes, "bytes_max": self._bytes_max[name],
                "hits": part.hits, "misses": part.misses,
            }
            for name, part in self._parts.items()
        }  # fmt: skip
        status["tag_cache"] |= {"entries": self._tags.held, "tags": len(self._tags)}
        return status

    @property
    def lost_ranges(self) -> int:
        """How many ranges of lost records are known here."""
        return len(self._lost)

    def check_invariants(self) -> None:
        """Assert the invariants of the parts."""
        for part in self._parts.values():
            part.check_invariants()
        self._lost.check_invariants()
