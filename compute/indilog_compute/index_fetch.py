"""Decides when an engine requests missing index data from storage (PITFALLS 8: a gap is fetched, so
that it never stalls the engine).

The metalog shows which positions have index data. Under load, index data always arrives a little
later than its metalog entry. So an engine requests missing index data only after a pause in which
no index data was applied. `Engine` calls `IndexFetch` and sends its requests.
"""

from __future__ import annotations

from indilog.base.ids import Instant, MetalogPosition
from indilog.base.resend import Resend
from indilog.kernel.placement import Placement
from indilog.roles.role import Effect, Send
from indilog.wire.messages import IndexDataWanted


class IndexFetch:
    """The fetch of one engine; it asks every storage node for the index data of its shards."""

    __slots__ = ("_end", "_placement", "_resend", "_tag_position")

    def __init__(self, placement: Placement, resend: Resend) -> None:
        self._placement = placement
        self._resend = resend
        self._end: MetalogPosition = 0
        """The end of the positions whose index data was requested. Index data comes in pages: when
        a page arrives, `on_index_data` requests the next one. Storage sends the index data of later
        positions without a request.
        """
        self._tag_position: MetalogPosition = 0
        """`tag_position` at the last call of `note`."""

    def on_index_data(self, before: MetalogPosition, tag_position: MetalogPosition) -> list[Effect]:
        """Request the next page, if a page has raised the engine's `tag_position` from `before`."""
        assert before <= tag_position, "index data is never taken back"
        if before < tag_position < self._end:
            return self._wanted(tag_position, self._end)
        return []

    def note(self, now: Instant, position: MetalogPosition, tag_position: MetalogPosition) -> None:
        """Note the engine's positions. The pause starts anew whenever `tag_position` has grown."""
        assert tag_position <= position, "index data is not ahead of the metalog"
        if tag_position != self._tag_position or tag_position >= position:
            self._tag_position = tag_position
            self._resend.stop()
        if tag_position < position and self._resend.due is None:
            self._resend.sent(now)

    def ask(
        self, now: Instant, position: MetalogPosition, tag_position: MetalogPosition
    ) -> list[Effect]:
        """Ask for the index data of [tag_position, position), after a pause without progress."""
        self.note(now, position, tag_position)
        if not self._resend.is_due(now):
            return []
        self._resend.sent(now)
        return self._wanted(tag_position, position)

    def _wanted(self, start: MetalogPosition, end: MetalogPosition) -> list[Effect]:
        assert start < end, "something is missing"
        self._end = end
        wanted = IndexDataWanted(start, end, 1)
        return [Send(node, wanted) for node in self._placement.view.storage_nodes]

    def deadline(self) -> Instant | None:
        """When to ask again; None: nothing is missing."""
        return self._resend.due
