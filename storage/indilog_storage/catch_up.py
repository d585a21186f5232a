"""When a storage node asks the primary for metalog entries: after a start, at a gap, when the
primary has restarted, and when reads wait for entries that do not come (PITFALLS 8: a gap is
fetched, it never stalls).
"""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog.roles.metalog_reader import MetalogReader
from indilog.wire.messages import MetalogWanted


class CatchUp:
    """Asks at once for each page while behind, and again after a pause that doubles.

    It is over when everything is here that the primary called committed in an answer to a question
    of this catch-up (`MetalogReader.behind`).
    """

    __slots__ = ("_reader", "_resend")

    def __init__(self, reader: MetalogReader, resend: Resend) -> None:
        self._reader = reader
        self._resend = resend

    def ask(self, now: Instant, *, waiting: bool) -> MetalogWanted | None:
        """Return what to ask the primary now, if anything.

        `waiting`: somebody needs a later position, which may well be on its way.
        """
        reader, resend = self._reader, self._resend
        if reader.progressed:
            reader.progressed = False
            resend.progressed()
        if not (reader.behind or waiting):
            resend.progressed()
            return None
        if reader.eager or resend.is_due(now):
            resend.sent(now)
            return reader.wanted()
        if resend.due is None:
            resend.sent(now)
        return None

    def deadline(self) -> Instant | None:
        """When to ask again."""
        return self._resend.due
