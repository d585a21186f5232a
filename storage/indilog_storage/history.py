"""Fetches metalog entries that the primary no longer keeps (decision 0030).

A node whose disk lost old metalog entries receives the primary's base instead of them. The
checkpoints of all other storage nodes contain the entries below the base. One of these nodes, the
source, first sends the floors of all trims, and then the entries page by page.

The fetched entries are not journaled. The next checkpoint contains them; each entry counts as one
frame in the decision when to write this checkpoint. After a crash before this checkpoint, the fetch
starts again.

A source sends entries only if it has the last entry below the base. All its entries below the base
then equal the primary's entries (`indilog.kernel.lineage`). A source that itself lacks entries
below the base answers `lacking`. If all sources answer `lacking`, the order of the records below
the base is lost.

`StorageNode` runs `HistoryFetch`, and answers as a source with `history_for`.
"""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.kernel.floors import Trimmed
from indilog.kernel.metalog import NO_FLOORS, NO_INCARNATION, Base, Entry, is_possible
from indilog.kernel.placement import Placement
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.base_messages import History, HistoryWanted
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted
from indilog_storage.ordering import Ordering

_PAGE_ENTRIES = 1024


class HistoryFetch:
    """The fetch of one node, from one source at a time.

    Attributes:
        base: the base below which entries are missing; None: the primary still has all missing
            entries.
    """

    def __init__(
        self, node: NodeId, placement: Placement, ordering: Ordering, config: NodeConfig
    ) -> None:
        self.base: Base | None = None
        self._node = node
        self._placement = placement
        self._ordering = ordering
        self._resend = Resend(config.messages.resend_s, config.messages.resend_s_max)
        self._source = 0
        self._request = 0
        self._asked = False
        self._cursor = NO_FLOORS
        """The last floor received so far; the next page begins after it."""
        self._promised: int | None = None
        """How many trims the received floors cover; None: no floors were received yet."""
        self._is_short = False
        """Whether the source knows fewer trims than the base. Such a source lags behind the base,
        or itself lacks entries below the base.
        """
        self._has_floors = False
        self._lacking: set[NodeId] = set()

    @property
    def _others(self) -> tuple[NodeId, ...]:
        """The other storage nodes."""
        return self._others_at(self.base)

    def _others_at(self, base: Base | None) -> tuple[NodeId, ...]:
        """Return the other storage nodes of the newest view that the base and the applied entries
        name.
        """
        view = self._placement.view
        if base is not None and base.view is not None and base.view.number > view.number:
            view = base.view
        return tuple(node for node in view.storage_nodes if node != self._node)

    @property
    def _asked_node(self) -> NodeId:
        """The node that is the source now."""
        others = self._others
        return others[self._source % len(others)]

    def start(self, epoch: Epoch) -> None:
        """Begin an incarnation. Answers to questions of earlier incarnations are ignored."""
        self._request = epoch << 32

    def begin(self, base: Base) -> None:
        """Fetch the entries below `base`, which the primary has removed.

        Raises:
            DataLossError: there is no other storage node.
        """
        if base == self.base or self._ordering.has(base.position, base.last):
            return
        if not self._others_at(base):
            raise self._loss(base)
        if self.base is None or (self._promised is not None and self._promised < base.trims):
            self._begin_floors()
        self.base = base
        self._progressed()

    def end(self) -> None:
        """Stop, because the primary has sent the next entries."""
        self.base = None
        self._progressed()

    def _begin_floors(self) -> None:
        self._asked, self._has_floors = False, False
        self._cursor, self._promised = NO_FLOORS, None
        self._is_short = False
        self._lacking.clear()

    # --- asking

    def conclude(self, now: Instant) -> list[Effect]:
        """Ask the source for the next page. If no answer came within the pause, ask the next source
        instead.
        """
        if self.base is None:
            return []
        assert self._others, "`begin` refuses a base that no node can fill"
        assert not self._asked or self._resend.due is not None, "an open question has a deadline"
        if self._asked and not self._resend.is_due(now):
            return []
        if self._asked:
            self._next_source()
        self._asked = True
        self._resend.sent(now)
        return [Send(self._asked_node, self._question(self.base))]

    def _question(self, base: Base) -> TagFloorsWanted | HistoryWanted:
        if not self._has_floors and not self._is_short:
            return TagFloorsWanted(self._cursor)
        self._request += 1
        ordering = self._ordering
        last = ordering.reader.lineage.last
        return HistoryWanted(self._request, ordering.position, last, base.position, base.last)

    def _next_source(self) -> None:
        self._source += 1
        self._is_short = False
        if not self._has_floors:
            self._cursor, self._promised = NO_FLOORS, None

    def deadline(self) -> Instant | None:
        """When to ask again."""
        return self._resend.due if self.base is not None else None

    # --- taking

    def on_floors(self, event: Received, message: TagFloors) -> list[Effect]:
        """Apply a page of floors. Floors of trims after the applied entries do no harm."""
        wanted = self.base is not None and self._asked and not self._has_floors
        from_source = wanted and event.sender == self._asked_node
        if not from_source or message.start is not None or message.after != self._cursor:
            return [Ignore(event, "floors that were not requested, or are no longer needed")]
        assert self.base is not None
        self._ordering.floors.apply(message.floors)
        promised = message.trims if self._promised is None else self._promised
        self._promised = min(promised, message.trims)
        if not message.last:
            self._progressed()
            self._cursor = Trimmed.cursor_after(message.floors)
        elif self._promised >= self.base.trims:
            self._progressed()
            self._has_floors = True
            self._lacking.clear()
        else:  # ask the source for entries: its answer shows whether it lags or lacks entries
            self._asked, self._is_short = False, True
        return []

    def on_history(self, event: Received, message: History) -> Sequence[Entry]:
        """Return the received entries to apply next.

        The entries begin at `message.start`. If this is below the applied position, they replace
        the applied entries from there on.

        Raises:
            DataLossError: no storage node has these entries.
        """
        base = self.base
        if base is None or message.request != self._request:
            return ()
        if message.lacking:
            self._lacks(event.sender, base)
            return ()
        if not self._has_floors or not self._fits(message, base):
            return ()
        self._lacking.clear()
        self._progressed()
        return message.entries[: base.position - message.start]

    def _fits(self, message: History, base: Base) -> bool:
        start, epoch = message.start, message.previous
        if self._ordering.reader.lineage.before(start) != epoch:
            return False
        for position, entry in enumerate(message.entries, start):
            if entry.position != position or entry.epoch < epoch or not is_possible(entry):
                return False
            epoch = entry.epoch
        return bool(message.entries) and start < base.position

    def _lacks(self, source: NodeId, base: Base) -> None:
        """Ask the next source; raise if all sources lack the entries."""
        self._lacking.add(source)
        if self._lacking.issuperset(self._others):
            raise self._loss(base)
        self._progressed()
        self._next_source()

    def _progressed(self) -> None:
        self._asked = False
        self._resend.stop()

    def _loss(self, base: Base) -> DataLossError:
        return DataLossError(
            f"The order of the first {base.tail:,} records is damaged on the disk of {self._node}, "
            "and no other storage node has it. Restore the data directory of a storage node from "
            "a copy."
        )


def history_for(message: HistoryWanted, ordering: Ordering, *, lacking: bool) -> History | None:
    """Return the next page of entries; None: this node does not know whether it has them.

    `lacking`: whether this node itself lacks entries below a base.
    """
    if not ordering.has(message.end, message.end_epoch):
        return History(message.request, 0, NO_INCARNATION, (), lacking=True) if lacking else None
    start = message.start if ordering.has(message.start, message.last) else 0
    end = min(message.end, start + _PAGE_ENTRIES)
    previous = ordering.reader.lineage.before(start)
    assert previous is not None, "it is applied"
    return History(message.request, start, previous, ordering.entries(start, end))
