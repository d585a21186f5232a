"""Fetches missing index data from storage nodes, page by page (thesis 5.6.2).

After a restart, an index node fetches the index data that its snapshot and its checkpoint lack.
After a lost message, it fetches the index data of that message. A storage node has index data of
its own shards only. So the index node asks several storage nodes at once, which together keep every
shard. Each of them answers in separate pages.

`IndexNode` runs one `Fetch` at a time, and passes it the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from indilog.base.ids import MetalogPosition, NodeId
from indilog.kernel.index_schedule import IndexPositions
from indilog.kernel.placement import Placement
from indilog.roles.role import Send
from indilog.wire.messages import IndexBlock, IndexDataWanted


def sources_of(placement: Placement, nodes: tuple[NodeId, ...], attempt: int) -> tuple[NodeId, ...]:
    """Return storage nodes that together keep every shard; `attempt` selects the first node.

    With n storage nodes, each is the first in one of n attempts. So every replica of every shard is
    asked in one of the attempts. A node that starts knows only a view, so the place of a shard may
    be unknown; the result is then all storage nodes.
    """
    first = attempt % len(nodes)
    missing = set(placement.shards)
    sources = []
    for node in nodes[first:] + nodes[:first]:
        if kept := missing.intersection(placement.shards_of(node)):
            missing -= kept
            sources.append(node)
    return tuple(sources) if not missing else nodes[first:] + nodes[:first]


class Fetch:
    """Asks `sources` for the index data of those `positions` that are in [start, end).

    A source is asked for its next page as soon as it has answered, until it has no new data. Lost
    messages are not resent here: the index node begins a new fetch after a pause without progress.
    """

    __slots__ = ("_cursors", "_end", "_paused", "_positions")

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
        """For each source with further pages, the first position of the last requested page."""
        self._paused: set[NodeId] = set()
        """Sources whose next page begins after the positions for which there is memory now."""

    @property
    def over(self) -> bool:
        """Whether every source has sent all its data."""
        return not self._cursors

    @property
    def end(self) -> MetalogPosition:
        """The first position that is not requested."""
        return self._end

    def first_pages(self) -> list[Send]:
        """Ask every source."""
        return [self._ask(source) for source in self._cursors]

    def is_answer(self, source: NodeId, blocks: Sequence[IndexBlock]) -> bool:
        """Whether this is the answer of `source`, and not index data that it sent unrequested.

        An answer contains the requested position. An empty answer means that the source has no
        index data from this position on.
        """
        cursor = self._cursors.get(source)
        if cursor is None or source in self._paused:
            return False
        return not blocks or blocks[0].position <= cursor <= blocks[-1].position

    def on_answer(
        self,
        source: NodeId,
        blocks: Sequence[IndexBlock],
        applied: MetalogPosition,
        horizon: MetalogPosition,
    ) -> list[Send]:
        """Ask a source that has answered for its next page, unless that page would contain no new
        data.

        Args:
            source: the storage node that answered.
            blocks: its answer, ascending by position without gaps.
            applied: the first position that was missing before the answer.
            horizon: the first position for which there is no memory yet. It is requested later.
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
            self._paused.add(source)
            return []
        return [self._ask(source)]

    def resume(self, position: MetalogPosition) -> list[Send]:
        """Ask the paused sources, because all positions below `position` are now applied."""
        paused, self._paused = self._paused, set()
        for source in paused:
            self._cursors[source] = max(self._cursors[source], position)
        return [self._ask(source) for source in self._cursors if source in paused]

    def _ask(self, source: NodeId) -> Send:
        """Ask for a page; it ends where the spacing of the positions changes."""
        first, end, step = self._positions.range_from(self._cursors[source])
        return Send(source, IndexDataWanted(first, min(end, self._end), step))
