"""What an index node knows of trims, and how it learns what it misses (ARCHITECTURE 13).

Every index node needs every trim: a floor holds for all positions of the log, whichever index shard
has them. Two storage nodes send each trim unasked; trims are numbered, so one that is missed is
noticed, at the latest by a lookup that knows of it. Then all floors are fetched, page by page:
floors only grow, so it does no harm that some are newer than the count that comes with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from indilog.floors import Trimmed
from indilog.ids import Instant, MetalogPosition, NodeId, TagHash
from indilog.messages import (
    ShardTags,
)
from indilog.metalog import Floor
from indilog.roles import Send
from indilog.tag_messages import TagFloors, TagFloorsWanted


class TrimFeed:
    """The floors of all trims up to a number, and the fetch of those that are missed.

    Attributes:
        trimmed: the floors; at least those of the first `trimmed.trims` trims.
        position: who has applied so many metalog entries has applied all that `trimmed` knows.
    """

    def __init__(self, sources: Sequence[NodeId], resend_s: float) -> None:
        self.trimmed = Trimmed()
        self.position: MetalogPosition = 0
        self._sources = sources
        self._resend_s = resend_s
        self._wanted = 0
        """So many trims are known to exist."""
        self._attempts = 0
        self._cursor: TagHash | None = None
        """The page that was asked for last; None: none is awaited."""
        self._promised = 0
        """How many trims the pages cover when the last one is here."""
        self._due: Instant | None = None

    @property
    def trims(self) -> int:
        """How many trims are known here."""
        return self.trimmed.trims

    def start(self, now: Instant) -> list[Send]:
        """Fetch what there is."""
        return self._fetch(now)

    def want(self, trims: int) -> None:
        """Note that so many trims exist."""
        self._wanted = max(self._wanted, trims)

    def on_floors(
        self, sender: NodeId, message: TagFloors, now: Instant
    ) -> tuple[list[Floor], list[Send]]:
        """Take in floors; return those that are news, and what to ask next."""
        news = self.trimmed.apply(message.floors)
        self.position = max(self.position, message.position)
        self.want(message.trims)
        if message.start is None:
            return news, self._on_page(sender, message, now)
        if message.start == self.trims:
            self.trimmed.trims = max(self.trims, message.trims)
        return news, []

    def _on_page(self, sender: NodeId, message: TagFloors, now: Instant) -> list[Send]:
        if self._cursor != message.after:
            return []
        first = self._cursor == 0
        # A later page may come from the same node after a restart, when it knows less.
        self._promised = message.trims if first else min(self._promised, message.trims)
        if message.last:
            self.trimmed.trims = max(self.trims, self._promised)
            self._cursor = self._due = None
            return []
        return self._ask(sender, message.floors[-1].tag if message.floors else 0, now)

    def on_time(self, now: Instant) -> list[Send]:
        """Ask (again) when trims are missed and nothing came for a while."""
        if self._cursor is None and self._wanted <= self.trims:
            self._due = None
            return []
        if self._due is None:
            # A gap: what is missed may well be under way.
            self._due = Instant(now + self._resend_s)
        return self._fetch(now) if now >= self._due else []

    def deadline(self) -> Instant | None:
        """When to ask again."""
        return self._due

    def _fetch(self, now: Instant) -> list[Send]:
        source = self._sources[self._attempts % len(self._sources)]
        self._attempts += 1
        return self._ask(source, 0, now)

    def _ask(self, source: NodeId, after: TagHash, now: Instant) -> list[Send]:
        self._cursor = after
        self._due = Instant(now + self._resend_s)
        return [Send(source, TagFloorsWanted(after))]


def without_trimmed(part: ShardTags, trimmed: Trimmed) -> ShardTags:
    """Return index data without what is trimmed, as it comes after a restart."""
    if trimmed.highest <= part.first_seqnum or not part.tags:
        return part
    counts = np.frombuffer(part.tag_counts, np.uint8).astype(np.int64)
    of_tag = np.repeat(np.arange(part.count), counts)
    seqnums = of_tag.astype(np.uint64) + np.uint64(part.first_seqnum)
    tags = np.frombuffer(part.tags, np.uint64)
    dead = trimmed.dead(part.first_seqnum, part.tag_counts, part.tags)
    below = np.maximum(trimmed.logs.of_each(tags), trimmed.tags.of_each(tags)) > seqnums
    kept = ~(dead[of_tag] | below)
    if kept.all():
        return part
    left = np.bincount(of_tag[kept], minlength=part.count).astype(np.uint8)
    return ShardTags(
        part.shard, part.first_seqnum, part.count, left.tobytes(), tags[kept].tobytes(), part.lost
    )
