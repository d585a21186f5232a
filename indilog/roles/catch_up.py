"""Decides when a reader of the metalog requests missing entries from the primary (PITFALLS 8).

`MetalogReader` knows which entries are missing and makes the requests; this module knows the times.
Storage nodes and engines ask after a start, at a gap, and after a restart of the primary. They also
ask while a caller waits for entries that do not arrive.
"""

from __future__ import annotations

from indilog.base.ids import Instant
from indilog.base.resend import Resend
from indilog.roles.metalog_reader import MetalogReader
from indilog.wire.messages import MetalogWanted


class CatchUp:
    """Asks at once for each page of missing entries; without an answer, asks again after a pause.

    The pause doubles with each repetition (`Resend`). A catch-up ends when the reader has all
    entries that an answer of the primary reported as committed (`MetalogReader.behind`).

    Attributes:
        reader: checks received entries, and makes the requests to the primary.
    """

    __slots__ = ("_resend", "reader")

    def __init__(self, reader: MetalogReader, resend: Resend) -> None:
        self.reader = reader
        self._resend = resend

    def ask_at_once(self, now: Instant) -> MetalogWanted | None:
        """Return a request for a gap that was not requested yet; None: no gap is unrequested."""
        if not self.reader.eager:
            return None
        self._resend.sent(now)
        return self.reader.wanted()

    def ask(self, now: Instant, *, waiting: bool) -> MetalogWanted | None:
        """Return the request that is due now; None: none is.

        `waiting`: a caller needs a later position, whose entry may be in transit. The first request
        for this entry is due after one pause, so that the entry can arrive unrequested.
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
        """When to ask again; None: nothing is missing."""
        return self._resend.due
