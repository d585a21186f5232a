"""When a reader of the metalog asks the primary for entries (PITFALLS 8: a gap is fetched, it never
stalls).

Storage nodes and engines ask after a start, at a gap, and after a restart of the primary. They also
ask while a caller waits for entries that do not arrive.
"""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog.roles.metalog_reader import MetalogReader
from indilog.wire.messages import MetalogWanted


class CatchUp:
    """Asks at once for each page while entries are missed, and again after a pause that doubles.

    A catch-up ends when the reader has all entries that an answer of this catch-up called committed
    (`MetalogReader.behind`).

    Attributes:
        reader: the applied entries, as requests to the primary describe them.
    """

    __slots__ = ("_resend", "reader")

    def __init__(self, reader: MetalogReader, resend: Resend) -> None:
        self.reader = reader
        self._resend = resend

    def ask_at_once(self, now: Instant) -> MetalogWanted | None:
        """Return the question about a gap that was not asked yet; None: there is none."""
        if not self.reader.eager:
            return None
        self._resend.sent(now)
        return self.reader.wanted()

    def ask(self, now: Instant, *, waiting: bool) -> MetalogWanted | None:
        """Return what to ask the primary now; None: nothing.

        `waiting`: a caller needs a later position, which may be on its way.
        """
        reader, resend = self.reader, self._resend
        if reader.progressed:
            reader.progressed = False
            resend.stop()
        if not (reader.behind or waiting):
            resend.stop()
            return None
        if reader.eager or resend.is_due(now):
            resend.sent(now)
            return reader.wanted()
        if resend.due is None:
            resend.sent(now)
        return None

    def deadline(self) -> Instant | None:
        """When to ask again; None: nothing is missed."""
        return self._resend.due
