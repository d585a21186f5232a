"""When a storage node asks the primary for metalog entries: after a start, at a gap, and when reads
wait for entries that do not come (PITFALLS 8: a gap is fetched, it never stalls).
"""

from __future__ import annotations

from indilog.ids import Instant, MetalogPosition


class CatchUp:
    """Asks at once from each new position while behind, and again after `resend_s` of silence."""

    __slots__ = ("_asked", "_behind", "_due", "_resend_s")

    def __init__(self, resend_s: float) -> None:
        self._resend_s = resend_s
        self._behind = False
        self._asked: MetalogPosition | None = None
        self._due: Instant | None = None

    @property
    def behind(self) -> bool:
        """Whether entries are known or feared to be missing."""
        return self._behind

    def start(self) -> None:
        """Assume that entries were missed, until an answer brings nothing new."""
        self._behind = True

    def heard(self, *, news: bool, gap: bool) -> None:
        """Take note of entries from the primary: whether some could be applied, or are missing."""
        self._behind = gap or (self._behind and news)
        if not self._behind:
            self._asked = None

    def due(self, position: MetalogPosition, now: Instant, *, waiting: bool) -> bool:
        """Tell whether to ask now for the entries from `position` on; then it counts as asked.

        `waiting`: somebody needs a later position, which may well be on its way.
        """
        if not (self._behind or waiting):
            self._due = None
            return False
        if not self._behind or position == self._asked:
            if self._due is None:
                self._due = Instant(now + self._resend_s)
            if now < self._due:
                return False
        self._asked = position
        self._due = Instant(now + self._resend_s)
        return True

    def deadline(self) -> Instant | None:
        """When to ask again."""
        return self._due
