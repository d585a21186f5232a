"""Fetching missed index data from storage nodes, page by page (thesis 5.6.2).

After a restart an index node fetches what its snapshot and its checkpoint lack; after a loss, what
was lost. A storage node has index data of its own shards only. So several are asked side by side,
which together keep every shard; each has a cursor of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from indilog.base.ids import MetalogPosition, NodeId
from indilog.kernel.index_schedule import IndexPositions
from indilog.kernel.view import View
from indilog.roles.role import Send
from indilog.wire.messages import IndexBlock, IndexDataWanted


def sources_of(view: View, attempt: int) -> tuple[NodeId, ...]:
    """Return storage nodes that together keep every shard; a different one comes first each time.

    After as many attempts as there are storage nodes, each has come first once, so every replica of
    every shard was asked.
    """
    nodes = view.storage_nodes
    first = attempt % len(nodes)
    missing = set(view.shards)
    sources = []
    for node in nodes[first:] + nodes[:first]:
        if kept := missing.intersection(view.shards_of(node)):
            missing -= kept
            sources.append(node)
    return tuple(sources)


class Fetch:
    """Asks `sources` for those of `positions` that are not before `start` and below `end`.

    A source is asked for its next page as soon as it has answered, until it has nothing new. What
    is lost is not asked for again: its owner begins a new fetch when nothing happens any more.
    """

    __slots__ = ("_cursors", "_end", "_held", "_positions")

    def __init__(
        self,
        sources: Collection[NodeId],
        *,
        start: MetalogPosition,
        end: MetalogPosition,
        positions: IndexPositions,
    ) -> None:
        self._end = end
        self._positions = positions
        self._cursors = dict.fromkeys(sources, start)
        """Of each source that has not told all, the position that it was asked for last."""
        self._held: set[NodeId] = set()
        """Sources that are ahead of what there is room for."""

    @property
    def over(self) -> bool:
        """Whether every source has told all that it knows."""
        return not self._cursors

    @property
    def end(self) -> MetalogPosition:
        """The first position that is not asked for."""
        return self._end

    def first_pages(self) -> list[Send]:
        """Ask every source."""
        return [self._ask(source) for source in self._cursors]

    def is_answer(self, source: NodeId, blocks: Sequence[IndexBlock]) -> bool:
        """Tell whether this is what `source` was asked for, and not what it sends unasked.

        An answer begins where it was asked to; an empty one says that there is nothing.
        """
        cursor = self._cursors.get(source)
        if cursor is None or source in self._held:
            return False
        return not blocks or blocks[0].position <= cursor <= blocks[-1].position

    def on_answer(
        self,
        source: NodeId,
        blocks: Sequence[IndexBlock],
        applied: MetalogPosition,
        horizon: MetalogPosition,
    ) -> list[Send]:
        """Ask a source that has answered for its next page, unless that would bring nothing new.

        Args:
            source: who answered.
            blocks: its answer, ascending by position without gaps.
            applied: the first position that was missed before.
            horizon: positions from here on could not be kept; they are asked for later.
        """
        assert self.is_answer(source, blocks), "only an answer moves a cursor"
        if not blocks or blocks[-1].position < applied:
            del self._cursors[source]
            return []
        following = self._positions.first_from(blocks[-1].position + 1)
        self._cursors[source] = cursor = min(following, horizon)
        if cursor >= self._end:
            del self._cursors[source]
            return []
        if cursor >= horizon:
            self._held.add(source)
            return []
        return [self._ask(source)]

    def go_on(self, position: MetalogPosition) -> list[Send]:
        """Ask the sources that were held, now that everything below `position` is applied."""
        held, self._held = self._held, set()
        for source in held:
            self._cursors[source] = max(self._cursors[source], position)
        return [self._ask(source) for source in self._cursors if source in held]

    def _ask(self, source: NodeId) -> Send:
        """Ask for a page; where the spacing of the positions changes, the next page goes on."""
        first, end, step = self._positions.from_on(self._cursors[source])
        return Send(source, IndexDataWanted(first, min(end, self._end), step))
