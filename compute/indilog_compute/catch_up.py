"""When an engine asks for metalog entries and index data that it has missed (PITFALLS 8: a gap is
fetched, it never stalls).

A gap is asked for at once; a loss that no gap shows, after a pause without progress while something
is known to be missing, or while a caller waits for records that may not be appended yet. The pause
doubles up to `resend_s_max`, so waiting callers cost next to nothing, however many they are.
"""

from __future__ import annotations

from indilog.base.ids import Instant, MetalogPosition
from indilog.base.resend import Resend
from indilog.kernel.view import Views
from indilog.roles.metalog_reader import MetalogReader
from indilog.roles.role import Effect, Send
from indilog.wire.messages import IndexDataWanted


class CatchUp:
    """What one engine has heard of and not got, and when it asks.

    Attributes:
        reader: what the engine has of the metalog.
    """

    __slots__ = ("_at", "_fetch_end", "_resend", "_views", "reader")

    def __init__(self, views: Views, resend: Resend) -> None:
        self._views = views
        self._resend = resend
        self.reader = MetalogReader()
        self._fetch_end: MetalogPosition = 0
        """Index data below this was asked for, and what has come of it is asked on from.

        What is ordered later comes unasked: under load the metalog may stay ahead for ever.
        """
        self._at = (0, False)

    def gap(self) -> list[Effect]:
        """Ask for entries that are known or feared to be missing; once a gap."""
        return self.want_metalog() if self.reader.eager else []

    def want_metalog(self) -> list[Effect]:
        """Ask for the entries that follow."""
        return [Send(self._views[-1].primary, self.reader.wanted())]

    def on_index_data(self, before: MetalogPosition, tag_position: MetalogPosition) -> list[Effect]:
        """Ask for the next page after one that took the engine from `before` to `tag_position`."""
        if before < tag_position < self._fetch_end:
            return self._want_index_data(tag_position, self._fetch_end)
        return []

    def _want_index_data(self, start: MetalogPosition, end: MetalogPosition) -> list[Effect]:
        self._fetch_end = end
        wanted = IndexDataWanted(start, end, 1)
        return [Send(node, wanted) for node in self._views[-1].storage_nodes]

    def note(self, now: Instant, position: MetalogPosition, tag_position: MetalogPosition) -> None:
        """Take note how far the engine is: from the last progress on it counts how long it waits.

        Where index data is missing, more of the metalog is no progress: it may never cease to come.
        """
        at = tag_position, tag_position < position
        if self._resend.due is None or self._at != at:
            self._at = at
            self._resend.progressed()
            self._resend.sent(now)

    def due(self) -> Instant | None:
        """When to ask whether something was missed; None: nobody waits for anything."""
        return self._resend.due

    def check(
        self,
        now: Instant,
        position: MetalogPosition,
        tag_position: MetalogPosition,
        *,
        behind: bool,
        watched: bool,
    ) -> list[Effect]:
        """Ask for what may have been lost, after a while without progress."""
        if not (behind or watched):
            self._resend.progressed()
            return []
        self.note(now, position, tag_position)
        if not self._resend.is_due(now):
            return []
        self._resend.sent(now)
        effects = self.want_metalog()
        if tag_position < position:
            effects += self._want_index_data(tag_position, position)
        return effects
