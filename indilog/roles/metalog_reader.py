"""A reader of the metalog: what it checks before it applies entries, and which entries it requests.

A reader (storage node, engine) has a copy of the committed entries. The primary may lose published
entries if damage to its journal looks like a torn tail. It then proposes other entries in their
places. So each message with entries names the incarnation that proposed the entry before them, and
the number of committed entries. A reader applies an entry only if all entries before it equal the
primary's.

After the first message of a new incarnation of the primary, the reader asks it to confirm the copy.
The request is for the entries after the last one of the copy, and names the incarnation that
proposed that last one. The primary answers from the position up to which both copies are equal.
Entries of the copy after that position were replaced.

Answers are matched with questions by a number. So a late or repeated answer, or entries that were
sent unrequested, never end a catch-up. `CatchUp` decides when the requests are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.lineage import Fit, Lineage
from indilog.kernel.metalog import Entry, is_possible
from indilog.roles.role import Received
from indilog.wire.base_messages import MetalogBase
from indilog.wire.messages import MetalogEntries, MetalogWanted

_REQUESTS_PER_EPOCH = 1 << 32
"""The first request number of an incarnation is the reader's epoch times this, so answers to an
earlier incarnation match no request.
"""


class Taken(NamedTuple):
    """The result of a message.

    Attributes:
        entries: the entries to apply now, in order; the reader counts them as applied.
        wrong_from: the caller first drops the entries from this position on; None: all are right.
        restarted: whether it is the first message of a new incarnation of the primary.
        refused: why the message was ignored; None: it was not.
    """

    entries: Sequence[Entry] = ()
    wrong_from: MetalogPosition | None = None
    restarted: bool = False
    refused: str | None = None


class MetalogReader:
    """The reader's side of `MetalogEntries` and `MetalogWanted`.

    Attributes:
        lineage: the epochs of the entries that the reader has applied.
        known_end: entries below this are committed, according to the primary.
        unconfirmed: whether entries of the copy may be missing or wrong.
        asked_from: the start of the question in flight; None: there is none.
        progressed: whether entries were applied since the owner last reset this.
    """

    __slots__ = (
        "_eager",
        "_incarnation",
        "_request",
        "asked_from",
        "known_end",
        "lineage",
        "progressed",
        "unconfirmed",
    )  # fmt: skip

    def __init__(self, lineage: Lineage | None = None) -> None:
        self.lineage = lineage or Lineage()
        self.known_end: MetalogPosition = 0
        self.unconfirmed = False
        self.asked_from: MetalogPosition | None = None
        self.progressed = False
        self._eager = True
        """Whether there is a new reason to ask since the last question."""
        self._request = 0
        self._incarnation = Epoch(0)

    def start(self, epoch: Epoch) -> None:
        """Begin the reader's incarnation `epoch`."""
        self._request = epoch * _REQUESTS_PER_EPOCH

    def join(self, position: MetalogPosition, last: Epoch) -> None:
        """Begin a copy at `position`; `last` proposed the entry before it."""
        self.lineage = Lineage(position, last)
        self.known_end = position
        self.unconfirmed, self.asked_from = False, None

    @property
    def behind(self) -> bool:
        """Whether entries are missing, or may be missing or wrong."""
        return self.unconfirmed or self.lineage.position < self.known_end

    def mark_unconfirmed(self) -> None:
        """Mark the copy as unconfirmed; only an answer to a later question confirms it."""
        self.unconfirmed, self.asked_from, self._eager = True, None, True

    @property
    def eager(self) -> bool:
        """Whether to ask at once; otherwise after a pause, because an answer may be in flight."""
        return self.behind and self._eager and self.asked_from is None

    def wanted(self) -> MetalogWanted:
        """Return a new question about the entries after the last one. From now on, answers to
        earlier questions do not count.
        """
        self._request += 1
        self._eager = False
        self.asked_from = self.lineage.position
        return MetalogWanted(self.asked_from, self.lineage.last, self._request)

    def begin_term(self, *, elsewhere: bool) -> None:
        """Ask the primary of a new term to confirm the copy. `elsewhere`: the primary is another
        node.

        Incarnations of two nodes cannot be compared.
        """
        if elsewhere:
            self._incarnation = Epoch(0)
        self.known_end = 0
        self.mark_unconfirmed()

    def note_incarnation(self, incarnation: Epoch) -> bool | None:
        """Note an incarnation of the primary; return whether it is new. None: a newer one is known,
        so the message must be ignored.

        A new incarnation makes the copy unconfirmed and the committed end unknown. The very first
        incarnation does not, because the reader asked at its start.
        """
        if incarnation == self._incarnation:
            return False
        if incarnation < self._incarnation:
            return None
        first, self._incarnation = not self._incarnation, incarnation
        if first:
            return False
        self.known_end = 0
        self.mark_unconfirmed()
        return True

    def refused_base(self, event: Received, message: MetalogBase) -> str | None:
        """Note that the requested entries are gone; return why the message was ignored, or None.

        Missing entries are requested again after a pause. A reader that gets the history from
        another node needs the entries after the history.
        """
        if event.incarnation < self._incarnation:
            return "a base of an earlier incarnation of the primary"
        if self.asked_from is None or message.request != self._request:
            return "a base that was not requested, or is no longer wanted"
        if not message.base.is_possible:
            return "a base that no entries can produce"
        self.unconfirmed, self.asked_from = True, None
        self.known_end = max(self.known_end, message.base.position)
        return None

    def take(self, event: Received, message: MetalogEntries) -> Taken:
        """Handle a message of the primary; the caller applies the returned entries.

        If `wrong_from` lies before the copy's base, no entries are returned, and the caller starts
        a new copy.
        """
        if (restarted := self.note_incarnation(event.incarnation)) is None:
            return Taken(refused="metalog entries of an earlier incarnation of the primary")
        if (misfit := _misfit(message)) is not None:
            return Taken(refused=misfit, restarted=restarted)
        self.known_end = max(self.known_end, message.committed)
        asked_from = self.asked_from if message.request == self._request else None
        if asked_from is not None:
            self.unconfirmed, self.asked_from = False, None
        fit, equal = self.lineage.compare(message.start, message.previous, message.entries)
        if fit in (Fit.GAP, Fit.UNRELATED):
            self._ask_on(fit, answered=asked_from is not None)
            return Taken(restarted=restarted)
        shortened = asked_from is not None and message.start < asked_from
        if fit is Fit.WITHIN and not shortened:
            return Taken(restarted=restarted)
        wrong_from = None if fit is Fit.FOLLOWS else equal
        if wrong_from is not None:
            if wrong_from < self.lineage.base:
                return Taken(wrong_from=wrong_from, restarted=restarted)
            self.lineage.cut_off(wrong_from)
        return Taken(self._following(message), wrong_from, restarted)

    def _ask_on(self, fit: Fit, *, answered: bool) -> None:
        """Note a message that begins after the copy's end, or contradicts the copy before it."""
        if fit is Fit.UNRELATED:
            self.unconfirmed = True
            self._eager = self._eager or not answered
        else:
            self._eager = self._eager or self.asked_from != self.lineage.position

    def _following(self, message: MetalogEntries) -> Sequence[Entry]:
        """Return the entries after the copy's end, and append them to its lineage."""
        entries = message.entries[self.lineage.position - message.start :]
        for entry in entries:
            self.lineage.append(entry.epoch)
        if entries:
            self.progressed = self._eager = True
        return entries


def _misfit(message: MetalogEntries) -> str | None:
    """Return what is wrong with a message that no primary sends, or None."""
    start, entries = message.start, message.entries
    if start < 0 or message.committed < start + len(entries):
        return "entries that are not committed, or before the first"
    epoch = message.previous
    for position, entry in enumerate(entries, start):
        if entry.position != position or entry.epoch < epoch:
            return "entries that are not consecutive"
        if not is_possible(entry):
            return "an entry with impossible shards or counts"
        epoch = entry.epoch
    return None
