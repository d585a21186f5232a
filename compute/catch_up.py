"""When an engine asks for metalog entries and index data that it has missed (PITFALLS 8: a gap is
fetched, it never stalls).

A gap is asked for at once; a loss that no gap shows, after `resend_s` without progress while
something is known to be missing. Who waits for records that nobody has appended yet knows of
nothing missing: for them the primary is asked seldom, however many they are.
"""

from __future__ import annotations

from typing import Final

from indilog.ids import Instant, MetalogPosition
from indilog.messages import IndexDataWanted, MetalogWanted
from indilog.roles import Effect, Send
from indilog.view import Views

_IDLE_CHECKS: Final = 8
"""While only watches wait, the primary is asked this many times less often than when behind."""


class CatchUp:
    """What one engine has heard of and not got, and when it asks.

    Attributes:
        known_end: metalog entries below this exist, as far as was told.
    """

    __slots__ = ("_asked_from", "_at", "_fetch_end", "_resend_s", "_since", "_views", "known_end")

    def __init__(self, views: Views, resend_s: float) -> None:
        self._views = views
        self._resend_s = resend_s
        self.known_end: MetalogPosition = 0
        self._asked_from: MetalogPosition = -1
        """Where the metalog was last asked for."""
        self._fetch_end: MetalogPosition = 0
        """Index data below this was asked for, and what has come of it is asked on from.

        What is ordered later comes unasked: under load the metalog may stay ahead for ever.
        """
        self._since: Instant | None = None
        self._at = (0, False)

    def heard_of(self, position: MetalogPosition) -> None:
        """Take note that there is an entry at `position`."""
        self.known_end = max(self.known_end, position + 1)

    def gap(self, position: MetalogPosition) -> list[Effect]:
        """Ask for the entries from `position` on if later ones are known; once a gap."""
        if position < self.known_end and self._asked_from != position:
            return self.want_metalog(position)
        return []

    def want_metalog(self, position: MetalogPosition) -> list[Effect]:
        """Ask for the entries from `position` on."""
        self._asked_from = position
        return [Send(self._views[-1].primary, MetalogWanted(position))]

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
        if self._since is None or self._at != at:
            self._since, self._at = now, at

    def due(self, *, behind: bool) -> Instant | None:
        """When to ask whether something was missed; None: nobody waits for anything."""
        if self._since is None:
            return None
        return Instant(self._since + self._resend_s * (1 if behind else _IDLE_CHECKS))

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
            self._since = None
            return []
        self.note(now, position, tag_position)
        due = self.due(behind=behind)
        if due is None or now < due:
            return []
        self._since = now
        effects = self.want_metalog(position)
        if tag_position < position:
            effects += self._want_index_data(tag_position, position)
        return effects
