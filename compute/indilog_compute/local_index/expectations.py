"""What the index tier was asked about tags, and what it told of tags that have no row yet (thesis
5.7).

The index tier is asked about the records of a tag below a *limit*: the tail that is applied here
when it is asked. By the time it answers, more index data has come; the answer still fits if the Tag
Cache has lost nothing of that tag since. So a tag is *expected* when it is asked about, whatever
makes the cache lose records of it ends the expectation, and an answer without one, or about another
limit, is dropped. The timestamps of thesis 5.7 rule out that an answer knows too much; this rules
out as well that a tag which was evicted between question and answer becomes complete without being
it.

What was told of a tag without a row stays true until its next record, which begins a row; until
then it answers lookups: a tag that has no record at all is proven to have none.
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
    """At most a 32nd as many tags as the Tag Cache may hold, of each kind; the oldest go first.

    To forget one is harmless: a tag is not known to be complete, no more.

    Attributes:
        told: the first record of a tag that has no row, or None: it has no record. The least
            recently used comes first.
    """

    __slots__ = ("_entries_max", "_limits", "told")

    def __init__(self, tags_max: int) -> None:
        self._entries_max = min(_ENTRIES_MAX, -(-tags_max // _SHARE))
        self._limits: dict[TagHash, SeqNum] = {}
        """Below which seqnum a tag was asked about; nothing of it was lost since."""
        self.told: dict[TagHash, First | None] = {}

    def __len__(self) -> int:
        return len(self._limits) + len(self.told)

    def __contains__(self, tag: TagHash) -> bool:
        """Whether `tag` was asked about, or told of."""
        return tag in self._limits or tag in self.told

    def expect(self, tag: TagHash, limit: SeqNum) -> None:
        """Remember that the index tier is asked about `tag` below `limit`."""
        if self._entries_max:
            self._limits.pop(tag, None)
            self._limits[tag] = limit
            if len(self._limits) > self._entries_max:
                del self._limits[next(iter(self._limits))]

    def fulfil(self, tag: TagHash, limit: SeqNum) -> bool:
        """End an expectation; whether there was this one."""
        if self._limits.get(tag) != limit:
            return False
        del self._limits[tag]
        return True

    def lose(self, tag: TagHash) -> None:
        """End any expectation: records of `tag` were forgotten."""
        self._limits.pop(tag, None)

    def lose_all(self, tags: Sequence[TagHash]) -> None:
        """End any expectation of `tags`: they were forgotten whole."""
        if self._limits:
            for tag in tags:
                self._limits.pop(tag, None)

    def tell(self, tag: TagHash, first: First | None) -> None:
        """Remember what was told of a tag that has no row."""
        self.told.pop(tag, None)
        self.told[tag] = first
        if len(self.told) > self._entries_max:
            del self.told[next(iter(self.told))]

    def forget(self, tag: TagHash) -> None:
        """Forget everything about `tag`."""
        self._limits.pop(tag, None)
        self.told.pop(tag, None)

    def is_new(self, tag: TagHash) -> bool:
        """Whether `tag` is known to have no record."""
        return self.told.get(tag, ()) is None

    def next(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the first record from `bound` on of a tag that has no row."""
        if tag not in self.told:
            return MISS
        first = self.told[tag]
        if first is not None and bound > first.seqnum:
            return MISS
        self.tell(tag, first)
        return EMPTY if first is None else Found(*first)

    def prev(self, tag: TagHash, bound: SeqNum) -> Answer:
        """Return the last record up to `bound` of a tag that has no row."""
        if tag not in self.told:
            return MISS
        first = self.told[tag]
        if first is not None and bound > first.seqnum:
            return MISS
        self.tell(tag, first)
        if first is None or bound < first.seqnum:
            return EMPTY
        return Found(*first)

    def check_invariants(self) -> None:
        """Assert the bounds."""
        assert max(len(self._limits), len(self.told)) <= self._entries_max
