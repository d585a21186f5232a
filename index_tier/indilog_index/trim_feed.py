"""The trims that an index node knows, and the fetch of missing trims (ARCHITECTURE 13).

Every index node needs every trim: a floor applies to all positions of the log, so to all index
shards. Two storage nodes send each trim unrequested. Trims are numbered, so a missing trim is
noticed from the next trim, or from a lookup that names more trims than are known. The node then
fetches all floors, page by page. Floors only grow, so a page may have newer floors than the trims
that it names.

The metalog entry of a trim may be replaced (decision 0031). One incarnation of the primary proposes
one metalog. So the number of trims, and the incarnation that proposed the last of them, identify a
sequence of trims (`TrimExtent`). Floors of a replaced trim stay.

`IndexNode` owns the one `TrimFeed`, and drops the records below its new floors.
"""

from __future__ import annotations

import numpy as np

from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.kernel.floors import Trimmed
from indilog.kernel.lineage import TrimExtent
from indilog.kernel.metalog import NO_FLOORS, Floor, FloorCursor
from indilog.kernel.placement import Placement
from indilog.roles.role import Send
from indilog.wire.messages import ShardTags
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted


class TrimFeed:
    """The floors of all trims up to a number, and the fetch of missing trims.

    Attributes:
        trimmed: the floors, at least those of the trims in `known`.
        known: the known trims; `copy_of` is the newest incarnation whose metalog is known to
            contain them.
        position: after this many metalog entries, all trims in `trimmed` are applied.
    """

    def __init__(self, placement: Placement, config: NodeConfig) -> None:
        self.trimmed = Trimmed()
        self.known = TrimExtent()
        self.position: MetalogPosition = 0
        self._placement = placement
        self._resend = Resend(config.messages.resend_s, config.messages.resend_s_max)
        self._announced = 0
        """The largest number of trims that a storage node has announced, in the known copy of the
        metalog or a newer copy.
        """
        self._attempts = 0
        self._cursor: FloorCursor | None = None
        """Where the requested page begins; None: no page is requested."""
        self._promised = TrimExtent()
        """The trims that the pages cover when the last page has arrived."""

    @property
    def trims(self) -> int:
        """Number of known trims."""
        return self.known.trims

    def start(self, now: Instant) -> list[Send]:
        """Fetch all floors that storage has."""
        return self._fetch(now)

    def restore(self, trims: int, epoch: Epoch) -> None:
        """Start from `trims` known trims, whose floors are in `trimmed`."""
        assert not self.known.trims, "a checkpoint is restored before any trim"
        self.known = TrimExtent(epoch, trims, epoch)

    def on_floors(
        self, sender: NodeId, message: TagFloors, now: Instant
    ) -> tuple[list[Floor], list[Send]]:
        """Apply floors; return the new floors, and the next requests."""
        risen = self.trimmed.apply(message.floors)
        self.position = max(self.position, message.position)
        if message.copy_of >= self.known.copy_of:
            self._announced = max(self._announced, message.trims)
        if message.start is None:
            return risen, self._on_page(sender, message, now)
        return risen, self._on_trims(message, message.start, now)

    def _on_trims(self, message: TagFloors, start: int, now: Instant) -> list[Send]:
        """Count the next trim, confirm the known trims, or detect that known trims were
        replaced.
        """
        extent, known = message.extent, self.known
        if extent[1:] == known[1:]:
            self.known = max(known, extent)
            if self._cursor == NO_FLOORS:
                self._end_fetch()
        elif extent.copy_of < known.copy_of:
            pass  # an older copy of the metalog, which may have other trims
        elif (start, message.previous) == known[1:]:
            self._take(extent)
        elif extent.copy_of > known.copy_of and self._contradicted(message, start):
            self._take(TrimExtent(extent.copy_of))
            self._announced = message.trims
            return self._fetch(now)
        return []

    def _contradicted(self, message: TagFloors, start: int) -> bool:
        """Whether a newer copy of the metalog contradicts the known trims: it has another trim in
        the place of a known trim, or fewer trims.
        """
        if start == self.trims:
            return True
        announced = start == message.trims
        return start < self.trims and (announced or message.epoch > self.known.epoch)

    def _take(self, extent: TrimExtent) -> None:
        if extent.copy_of != self.known.copy_of:
            self._announced = extent.trims
        self.known = extent

    def _on_page(self, sender: NodeId, message: TagFloors, now: Instant) -> list[Send]:
        if self._cursor != message.after:
            return []
        extent, is_first = message.extent, self._cursor == NO_FLOORS
        if not is_first and extent.copy_of != self._promised.copy_of:
            return self._fetch(now)  # trims on earlier pages may have been replaced
        # The source may have restarted between two pages, and then know fewer trims.
        self._promised = extent if is_first else min(self._promised, extent)
        self._resend.stop()
        if message.last:
            if self._promised[:2] > self.known[:2]:
                self._take(self._promised)
            self._end_fetch()
            return []
        return self._ask(sender, Trimmed.cursor_after(message.floors), now)

    def on_time(self, now: Instant, *, waited_for: bool = False) -> list[Send]:
        """Ask for missing trims, after a pause without progress.

        `waited_for`: whether a lookup needs more trims, or a confirmation of the known trims.
        """
        if self._cursor is None and self._announced <= self.trims and not waited_for:
            self._resend.stop()
            return []
        if self._resend.due is None:
            self._resend.sent(now)  # the missing trims may be in transit
        return self._fetch(now) if self._resend.is_due(now) else []

    def deadline(self) -> Instant | None:
        """When to ask again; None: nothing is missing."""
        return self._resend.due

    def _fetch(self, now: Instant) -> list[Send]:
        sources = self._placement.view.storage_nodes
        source = sources[self._attempts % len(sources)]
        self._attempts += 1
        return self._ask(source, NO_FLOORS, now)

    def _ask(self, source: NodeId, after: FloorCursor, now: Instant) -> list[Send]:
        self._cursor = after
        self._resend.sent(now)
        _, trims, epoch = self.known if after == NO_FLOORS else TrimExtent()
        return [Send(source, TagFloorsWanted(after, trims, epoch))]

    def check_invariants(self) -> None:
        """Assert that a fetch has a deadline."""
        assert self._cursor is None or self._resend.due is not None
        self.trimmed.logs.check_invariants()
        self.trimmed.tags.check_invariants()

    def _end_fetch(self) -> None:
        self._cursor = None
        self._resend.stop()


def without_trimmed(part: ShardTags, trimmed: Trimmed) -> ShardTags:
    """Return index data without trimmed records, which storage sends again after a restart."""
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
