"""What an index node knows of trims, and how it learns what it misses (ARCHITECTURE 13).

Every index node needs every trim: a floor holds for all positions of the log, whichever index shard
has them. Two storage nodes send each trim unasked; trims are numbered, so one that is missed is
noticed, at the latest by a lookup that knows of it. Then all floors are fetched, page by page:
floors only grow, so it does no harm that some are newer than the count that comes with them.

The entry of a trim may be replaced by another one (decision 0031). One incarnation of the primary
has one metalog, so the number of trims and the incarnation that proposed the last of them say which
trims they are. Floors of a trim that was replaced stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, TagHash
from indilog.kernel.floors import Trimmed
from indilog.kernel.metalog import UNSAID, Floor
from indilog.roles.role import Send
from indilog.wire.messages import (
    ShardTags,
)
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted


class _Extent(NamedTuple):
    """Which trims a node knows: so many of the metalog of incarnation `copy_of`; `epoch` proposed
    the last of them.
    """

    copy_of: Epoch
    trims: int
    epoch: Epoch


class TrimFeed:
    """The floors of all trims up to a number, and the fetch of those that are missed.

    Attributes:
        trimmed: the floors; at least those of the first `trimmed.trims` trims.
        epoch: the incarnation that proposed the last of those trims; 0: there is none.
        copy_of: the newest incarnation of which it is known that its metalog has those trims.
        position: who has applied so many metalog entries has applied all that `trimmed` knows.
    """

    def __init__(self, sources: Sequence[NodeId], resend_s: float) -> None:
        self.trimmed = Trimmed()
        self.epoch = self.copy_of = UNSAID
        self.position: MetalogPosition = 0
        self._sources = sources
        self._resend_s = resend_s
        self._heard = 0
        """Storage nodes have announced so many trims."""
        self._attempts = 0
        self._cursor: TagHash | None = None
        """The page that was asked for last; None: none is awaited."""
        self._promised = _Extent(UNSAID, 0, UNSAID)
        """Which trims the pages cover when the last one is here."""
        self._due: Instant | None = None

    @property
    def trims(self) -> int:
        """How many trims are known here."""
        return self.trimmed.trims

    def start(self, now: Instant) -> list[Send]:
        """Fetch what there is."""
        return self._fetch(now)

    def knows(self, trims: int, epoch: Epoch) -> bool:
        """Whether the first `trims` trims of the metalog of incarnation `epoch` are known here."""
        return not trims or (trims <= self.trims and epoch <= self.copy_of)

    def restore(self, trims: int, epoch: Epoch) -> None:
        """Begin with so many trims, whose floors are in `trimmed`."""
        self.trimmed.trims, self.epoch, self.copy_of = trims, epoch, epoch

    def on_floors(
        self, sender: NodeId, message: TagFloors, now: Instant
    ) -> tuple[list[Floor], list[Send]]:
        """Take in floors; return those that are news, and what to ask next."""
        news = self.trimmed.apply(message.floors)
        self.position = max(self.position, message.position)
        if message.copy_of >= self.copy_of:
            self._heard = max(self._heard, message.trims)
        if message.start is None:
            return news, self._on_page(sender, message, now)
        return news, self._on_trims(message, message.start, now)

    def _on_trims(self, message: TagFloors, start: int, now: Instant) -> list[Send]:
        """Count the next trim, or see that those here are the right ones, or that they are not."""
        says = _Extent(message.copy_of, message.trims, message.epoch)
        ours = self.trims, self.epoch
        if (says.trims, says.epoch) == ours:
            self.copy_of = max(self.copy_of, says.copy_of)
            if self._cursor == 0:
                self._cursor = self._due = None
        elif says.copy_of < self.copy_of:
            pass  # an older copy, in which other trims may have been
        elif (start, message.previous) == ours:
            self._take(says)
        elif says.copy_of > self.copy_of and self._contradicted(message, start):
            self._take(_Extent(says.copy_of, 0, UNSAID))
            self._heard = message.trims
            return self._fetch(now)
        return []

    def _contradicted(self, message: TagFloors, start: int) -> bool:
        """Whether a newer copy has other trims than are known here: it has another one in the place
        of the last one or before, or none there any more.
        """
        if start == self.trims:
            return True
        announced = start == message.trims
        return start < self.trims and (announced or message.epoch > self.epoch)

    def _take(self, extent: _Extent) -> None:
        if extent.copy_of != self.copy_of:
            self._heard = extent.trims
        self.copy_of, self.trimmed.trims, self.epoch = extent

    def _on_page(self, sender: NodeId, message: TagFloors, now: Instant) -> list[Send]:
        if self._cursor != message.after:
            return []
        says = _Extent(message.copy_of, message.trims, message.epoch)
        if self._cursor != 0 and says.copy_of != self._promised.copy_of:
            return self._fetch(now)  # what the pages before say may have been replaced
        # A later page may come from the same node after a restart, when it knows less.
        self._promised = says if self._cursor == 0 else min(self._promised, says)
        if message.last:
            if self._promised[:2] > (self.copy_of, self.trims):
                self._take(self._promised)
            self._cursor = self._due = None
            return []
        return self._ask(sender, message.floors[-1].tag if message.floors else 0, now)

    def on_time(self, now: Instant, *, waited_for: bool = False) -> list[Send]:
        """Ask (again) when trims are missed, or what is here is `waited_for`, and nothing came for
        a while.
        """
        if self._cursor is None and self._heard <= self.trims and not waited_for:
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
        ours = (0, UNSAID) if after else (self.trims, self.epoch)
        return [Send(source, TagFloorsWanted(after, *ours))]


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
