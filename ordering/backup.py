"""A backup sequencer: keeps a durable copy of the primary's metalog (Scalog 3, "Ordering Layer").

The primary sends entries before it has synced them (decision 0006), so one that crashes may leave
entries here that it lost. An entry says by its `epoch` which incarnation of the primary proposed
it, and that tells the lost ones, as terms do in Raft. Rules:

1. Entries are taken only where the entry before them is here too: at its position, proposed by the
   same incarnation.
2. An entry replaces one of an older incarnation, and with it all that follow here.
3. What an older incarnation sends is ignored: older than the newest that was heard, or, after a
   restart, than the one that proposed the last entry here.

Write log(i) for all that incarnation i recovered and proposed. Epochs ascend along it; i proposes
once at a position; and what a later incarnation recovers is on the primary's disk and never
changes. So two logs that have entries of the same incarnation at one position are equal up to it.

*The metalog here is always a prefix of log(l), l being the incarnation that proposed its last
entry.* By rule 1 it equals log(i) up to where new entries of log(i) are put, and by rule 2 nothing
else stays behind them. A crash leaves a prefix of the frames written, and each is such a step.

*Common prefixes are equal.* With i the primary now: what survived of log(l) in log(i) are its
entries up to the last that is not newer than l, and just so far the metalog here equals log(i)
(`StoredMetalog.agreement`). So an answer is true whenever it arrives, and says nothing of entries
that the primary lost.

*Nothing that is on the primary's disk is dropped.* By rules 2 and 3 an entry gives way only to one
of a later incarnation, which had recovered all that survived of log(l); where it proposed another
one, that of l was lost. What was published was on the primary's disk before.

*A damaged copy is no copy.* A metalog that may have a hole is forgotten whole (`StoredMetalog`),
and so is counted for nothing until the primary has sent it again.

A primary whose disk was wiped breaks this. It is noticed where that can be seen: an incarnation can
lose only what it proposed itself, so all entries that give way at once are of one incarnation.
"""

from __future__ import annotations

from indilog.ids import Epoch, MetalogPosition, NodeId
from indilog.messages import MetalogAppend, MetalogStored
from indilog.roles import Effect, Ignore, Received, Send
from ordering.stored_metalog import StoredMetalog


class Backup:
    """Stores what the primary sends.

    Guarantees: an entry it answered for is on its disk, and goes only if the primary has lost it; a
    gap and a repetition are answered too, so the primary learns where to go on.
    """

    def __init__(self, primary: NodeId, metalog: StoredMetalog) -> None:
        self._primary = primary
        self._metalog = metalog
        self._epoch = metalog.epoch_seen
        """The newest incarnation of the primary that is known here."""
        self._answered: tuple[Epoch, MetalogPosition] | None = None
        """None: an answer is owed. At first because a restart may have lost what was on its way.
        """
        self._committed: MetalogPosition = 0

    @property
    def committed(self) -> MetalogPosition:
        """How many entries the primary has said are committed; fewer again where it lost them."""
        return self._committed

    def on_received(self, event: Received) -> list[Effect]:
        """Take in one message; the answer to all of them is given in `advance`."""
        message = event.message
        if not isinstance(message, MetalogAppend):
            return [Ignore(event, f"a backup has no use for {type(message).__name__}")]
        if event.sender != self._primary:
            return [Ignore(event, "metalog entries of a node that is not the primary of this view")]
        if (reason := _misfit(message)) is not None:
            return [Ignore(event, reason)]
        if message.epoch < self._epoch:
            return [Ignore(event, "metalog entries from an older incarnation of the primary")]
        self._epoch = message.epoch
        return self._on_metalog_append(event, message)

    def advance(self) -> list[Effect]:
        """Answer once for all that came, with what is durable."""
        stored = self._metalog.stored
        answer = (self._metalog.epoch_before(stored), stored)
        if answer == self._answered:
            return []
        self._answered = answer
        return [Send(self._primary, MetalogStored(*answer))]

    def check_invariants(self) -> None:
        """Assert that no more is stored or committed than there is."""
        assert self._committed <= len(self._metalog)
        assert self._metalog.stored <= len(self._metalog)
        assert self._metalog.epoch_before(len(self._metalog)) <= self._epoch

    def _on_metalog_append(self, event: Received, message: MetalogAppend) -> list[Effect]:
        metalog, start = self._metalog, message.start
        if start > len(metalog) or metalog.epoch_before(start) != message.previous:
            self._answered = None
            return []
        known, overlap = 0, metalog.page(start, start + len(message.entries))
        for ours, theirs in zip(overlap, message.entries, strict=False):
            if ours != theirs:
                if (reason := self._contradiction(ours.epoch, theirs.epoch)) is not None:
                    return [Ignore(event, reason)]
                self._cut_off(start + known)
                break
            known += 1
        fresh = message.entries[known:]
        if not fresh:
            self._answered = None
        effects: list[Effect] = [metalog.append(entry) for entry in fresh]
        agreed = start + len(message.entries)
        self._committed = max(self._committed, min(message.committed, agreed))
        return effects

    def _contradiction(self, ours: Epoch, theirs: Epoch) -> str | None:
        """Return why an entry must not be replaced by another one, or None.

        Such a message gets no answer, so nothing in it is committed with our help.
        """
        if theirs <= ours:
            return "the entries contradict those stored here"
        if ours != self._metalog.epoch_before(len(self._metalog)):
            return "the primary has lost more than one incarnation can lose"
        return None

    def _cut_off(self, end: MetalogPosition) -> None:
        self._metalog.cut_off(end)
        self._committed = min(self._committed, end)


def _misfit(message: MetalogAppend) -> str | None:
    """Return what is wrong with a message that no primary sends, or None."""
    if message.start < 0:
        return "a position is never negative"
    epoch = message.previous
    for position, entry in enumerate(message.entries, message.start):
        if entry.position != position:
            return "the entries' positions do not follow on"
        if entry.epoch < epoch:
            return "the entries' epochs go back"
        epoch = entry.epoch
    return "an entry of an incarnation still to come" if epoch > message.epoch else None
