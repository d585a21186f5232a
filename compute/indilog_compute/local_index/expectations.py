"""The Tag Cache's state of tags without a row, and of questions to the index tier about any tag
(thesis 5.7). `TagCache` calls `Expectations`.

A question asks for the records of a tag below a *limit*: the tail that is applied here when the
question is sent. More index data may arrive before the answer. The answer is still valid if the Tag
Cache has evicted no record of that tag since the question. So a tag becomes *expected* when a
question about it is sent, and any eviction of its records ends the expectation. An answer without
an expectation, or with another limit, is dropped.

The timestamps of thesis 5.7 only exclude answers about records at or above the applied tail.
Expectations also ensure that a tag does not count as complete if records of it were evicted between
question and answer.

If a tag has no row, the index tier may have answered its first record, or that it has no record.
This answer serves lookups until the next record of the tag begins a row.

A lookup that misses because its tag has no row makes the tag *wanted*: the next record of the tag,
by any writer, begins a row. The next record of an expected tag, or of a tag with a known first
record, also begins a row. Otherwise a later row would lack that record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from indilog.base.ids import SeqNum, TagHash
from indilog_compute.local_index.answers import EMPTY, MISS, Answer, Found
from indilog_compute.local_index.tag_rows import First

_ENTRIES_MAX: Final = 16_384
_SHARE: Final = 32


class Expectations:
    """Keeps expectations, first records and wanted tags.

    Each of the three is limited to a 32nd of the Tag Cache's tags, and to 16,384 tags; the oldest
    tag is dropped first. A drop costs only hits: the tag is not known to be complete, or has no row
    until it is looked up again.

    Attributes:
        firsts: the answered first records of tags without a row; None: the tag has no record. The
            least recently used tag comes first.
        limits: for each expected tag, the limit of the question about it.
        wanted: tags without a row whose lookups missed, the oldest first.
    """

    __slots__ = ("_entries_max", "firsts", "limits", "wanted")

    def __init__(self, tags_max: int) -> None:
        self._entries_max = min(_ENTRIES_MAX, -(-tags_max // _SHARE))
        self.limits: dict[TagHash, SeqNum] = {}
        self.firsts: dict[TagHash, First | None] = {}
        self.wanted: dict[TagHash, None] = {}

    def __len__(self) -> int:
        return len(self.limits) + len(self.firsts) + len(self.wanted)

    def __contains__(self, tag: TagHash) -> bool:
        """Whether `tag` is expected, or its first record is known."""
        return tag in self.limits or tag in self.firsts

    def begins_row(self, tag: TagHash) -> bool:
        """Whether the next record of `tag`, by any writer, begins a row. The caller ensures that
        `tag` has no row.
        """
        return tag in self.wanted or tag in self.limits or tag in self.firsts

    def want(self, tag: TagHash) -> None:
        """Note a lookup that missed because `tag` has no row."""
        if self._entries_max and tag not in self.wanted:
            self.wanted[tag] = None
            if len(self.wanted) > self._entries_max:
                del self.wanted[next(iter(self.wanted))]

    def expect(self, tag: TagHash, limit: SeqNum) -> None:
        """Note a question to the index tier about `tag` below `limit`."""
        if self._entries_max:
            self.limits.pop(tag, None)
            self.limits[tag] = limit
            if len(self.limits) > self._entries_max:
                del self.limits[next(iter(self.limits))]

    def fulfil(self, tag: TagHash, limit: SeqNum) -> bool:
        """End the expectation of `tag` with this limit; return whether there was one."""
        if self.limits.get(tag) != limit:
            return False
        del self.limits[tag]
        return True

    def lose(self, tag: TagHash) -> None:
        """End any expectation of `tag`, because some of its records were evicted."""
        self.limits.pop(tag, None)

    def lose_all(self, tags: Sequence[TagHash]) -> None:
        """End all expectations of `tags`, because their rows were evicted."""
        if self.limits:
            for tag in tags:
                self.limits.pop(tag, None)

    def learn_first(self, tag: TagHash, first: First | None) -> None:
        """Keep the first record of a tag that has no row; None: the tag has no record."""
        self.firsts.pop(tag, None)
        self.firsts[tag] = first
        if len(self.firsts) > self._entries_max:
            del self.firsts[next(iter(self.firsts))]

    def forget(self, tag: TagHash) -> None:
        """Drop the expectation of `tag` and its first record."""
        self.limits.pop(tag, None)
        self.firsts.pop(tag, None)

    def is_new(self, tag: TagHash) -> bool:
        """Whether `tag` is known to have no record."""
        return self.firsts.get(tag, ()) is None

    def next(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the first record from `bound` on of `tag`, which has no row."""
        if tag not in self.firsts:
            return MISS
        first = self.firsts[tag]
        if first is not None and bound > first.seqnum:
            return MISS
        self.learn_first(tag, first)
        return EMPTY if first is None else Found(*first)

    def prev(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the last record up to `bound` of `tag`, which has no row."""
        if tag not in self.firsts:
            return MISS
        first = self.firsts[tag]
        if first is not None and bound > first.seqnum:
            return MISS
        self.learn_first(tag, first)
        if first is None or bound < first.seqnum:
            return EMPTY
        return Found(*first)

    def check_invariants(self) -> None:
        """Assert the bounds."""
        lengths = len(self.limits), len(self.firsts), len(self.wanted)
        assert max(lengths) <= self._entries_max
