"""A backup sequencer: keeps a durable copy of the primary's metalog (Scalog 3, "Ordering Layer").

The primary sends entries before it has synced them (decision 0006), so one that crashes may leave
entries here that it lost. An entry says by its `epoch` which incarnation of the primary proposed
it, and that tells the lost ones, as terms do in Raft. Rules:

1. Entries are taken only where the entry before them is here too: at its position, proposed by the
   same incarnation.
2. An entry replaces one of an older incarnation, and with it all that follow here.
3. What an older incarnation sends is ignored: older than the newest that was heard, or, after a
   restart, than the newest that the disk knows: one that proposed an entry, or was promised.

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
and so is counted for nothing until the primary has sent it again. Until it has *all* that the
primary had when it heard of that (`MetalogAppend.completes`), it says that it is not whole.

*The base* stands for entries that the primary keeps no more (decision 0030). A copy that ends below
the primary's base, or whose own base has entries that the primary lost, is replaced by that base.

*A primary that lost entries* asks for what is here (`indilog_ordering.rebuild`, decision 0020).
Before it is answered it is promised, durably, that no older incarnation is followed any more: so
nothing is published with the help of this copy that the answer does not show.

An incarnation can lose only what it proposed itself, so all entries that give way at once are of
one incarnation. Where that is not so, the primary's disk was exchanged behind our backs.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition, NodeId
from indilog.config import Config
from indilog.kernel.metalog import Base
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.base_messages import MetalogCovered
from indilog.wire.messages import ForSequencer, MetalogWanted, ShardProgress, TailWanted
from indilog.wire.sequencer_messages import (
    NO_INCARNATION,
    MetalogAppend,
    MetalogCopy,
    MetalogCopyWanted,
    MetalogStored,
)
from indilog.wire.tag_messages import TrimWanted
from indilog_ordering.stored_metalog import StoredMetalog


class Backup:
    """Stores what the primary sends.

    Guarantees: an entry it answered for is on its disk, and goes only if the primary has lost it,
    or by damage, and then it says so; a gap and a repetition are answered too, so the primary
    learns where to go on.
    """

    def __init__(
        self, primary: NodeId, config: Config, metalog: StoredMetalog, life: Epoch
    ) -> None:
        self._primary = primary
        self._page_entries = config.node.ordering.metalog_entries_in_flight_max
        self._page_bytes = config.node.messages.page_bytes_max
        self._metalog = metalog
        self._life = life
        """The incarnation of this backup."""
        self._epoch = metalog.epoch_seen
        """The newest incarnation of the primary that is known here."""
        self._promising = metalog.promised
        """The newest one to which a promise was written, durable or not."""
        self._completing = False
        """Whether it was written that nothing is missing any more."""
        self._answered: MetalogStored | None = None
        """None: an answer is owed. At first because a restart may have lost what was on its way.
        """
        self._copy_wanted: MetalogCopyWanted | None = None
        """What is to be answered when the promise is durable."""
        self._committed: MetalogPosition = 0
        self._folded: MetalogPosition = 0
        """Below this the primary keeps no entries, and this copy equals it."""

    @property
    def committed(self) -> MetalogPosition:
        """How many entries the primary has said are committed; fewer again where it lost them."""
        return self._committed

    def on_received(self, event: Received, message: ForSequencer) -> list[Effect]:
        """Handle one message; `advance` answers all messages of the iteration."""
        match message:
            case MetalogAppend():
                refused = self._refusal(event, message)
                return refused or self._on_metalog_append(event, message)
            case MetalogCopyWanted():
                refused = self._refusal(event, message)
                return refused or self._on_copy_wanted(message)
            case (
                ShardProgress()
                | MetalogStored()
                | MetalogWanted()
                | MetalogCovered()
                | TailWanted()
                | TrimWanted()
                | MetalogCopy()
            ):
                return [Ignore(event, f"a backup has no use for {type(message).__name__}")]

    def _refusal(self, event: Received, message: MetalogAppend | MetalogCopyWanted) -> list[Effect]:
        """Refuse what the current primary cannot have sent; none: note its incarnation."""
        if event.sender != self._primary:
            return [Ignore(event, "metalog entries of a node that is not the primary of this view")]
        if (reason := _misfit(message)) is not None:
            return [Ignore(event, reason)]
        if message.epoch < self._epoch:
            return [Ignore(event, "metalog entries from an older incarnation of the primary")]
        self._epoch = message.epoch
        return []

    def advance(self) -> list[Effect]:
        """Answer once for all that came, with what is durable."""
        metalog, effects = self._metalog, list[Effect]()
        if metalog.installing:
            return []
        metalog.fold(self._folded)
        last, length = metalog.stored_extent
        incomplete = self._life if metalog.incomplete else NO_INCARNATION
        answer = MetalogStored(last, length, incomplete, metalog.base.position)
        if answer != self._answered:
            self._answered = answer
            effects.append(Send(self._primary, answer))
        wanted = self._copy_wanted
        if wanted is not None and metalog.promised >= wanted.epoch:
            self._copy_wanted = None
            effects.append(Send(self._primary, self._copy(wanted)))
        return effects

    def check_invariants(self) -> None:
        """Assert that no more is stored or committed than there is."""
        assert self._committed <= len(self._metalog)
        assert self._metalog.stored <= len(self._metalog)
        assert self._metalog.epoch_before(len(self._metalog)) <= self._epoch

    def _on_metalog_append(self, event: Received, message: MetalogAppend) -> list[Effect]:
        metalog, start = self._metalog, message.start
        effects: list[Effect] = []
        if message.base is not None and not self._has(message.base):
            if (reason := self._base_contradiction(message.base)) is not None:
                return [Ignore(event, reason)]
            effects += self._install(message.base, message.anew)
        reached = metalog.base.position <= start <= len(metalog)
        if not reached or metalog.epoch_before(start) != message.previous:
            self._answered = None
            return effects
        known, overlap = 0, metalog.page(start, start + len(message.entries))
        for ours, theirs in zip(overlap, message.entries, strict=False):
            if ours != theirs:
                if (reason := self._contradiction(ours.epoch, theirs.epoch)) is not None:
                    return [Ignore(event, reason)]
                self._cut_off(start + known)
                break
            known += 1
        fresh = message.entries[known:]
        effects += [metalog.append(entry) for entry in fresh]
        agreed = start + len(message.entries)
        self._committed = max(self._committed, min(message.committed, agreed))
        self._folded = max(self._folded, min(message.folded, message.committed, agreed))
        if message.completes == self._life and metalog.incomplete:
            effects += self._complete()
        elif not fresh:
            self._answered = None
        return effects

    def _has(self, base: Base) -> bool:
        """Whether the entries that `base` stands for are here, one by one or not."""
        metalog, end = self._metalog, base.position
        within = metalog.base.position <= end <= len(metalog)
        return within and metalog.epoch_before(end) == base.last

    def _base_contradiction(self, base: Base) -> str | None:
        """Return why a base cannot replace what is here, or None; see `_contradiction`."""
        metalog = self._metalog
        if base.position < metalog.base.position:
            return None
        ours = metalog.epoch_before(min(base.position, len(metalog)))
        return "the base contradicts the entries stored here" if base.last < ours else None

    def _install(self, base: Base, anew: Epoch) -> list[Effect]:
        """Put a base in the place of all that is here.

        The primary sends one when it has nothing in common with this copy beyond the base. One that
        ends below the base here gives up what was answered for, as damage does: the primary has
        lost that. Only the primary's answer to this incarnation may do so.
        """
        metalog = self._metalog
        if base.position < metalog.base.position:
            if anew != self._life:
                return []
            metalog.give_up()
            self._completing = False
        self._committed = self._folded = base.position
        return [metalog.install(base)]

    def _complete(self) -> list[Effect]:
        """Hold on to it that nothing is missing any more; it is answered when it is durable."""
        if self._completing:
            return []
        self._completing = True
        return [self._metalog.complete()]

    def _on_copy_wanted(self, message: MetalogCopyWanted) -> list[Effect]:
        self._copy_wanted = message
        if message.epoch <= self._promising:
            return []
        self._promising = message.epoch
        return [self._metalog.promise(message.epoch)]

    def _copy(self, wanted: MetalogCopyWanted) -> MetalogCopy:
        """Return what is durable here, and a page of what is wanted of it."""
        metalog, start, anchor = self._metalog, wanted.start, wanted.anchor
        last, length = metalog.stored_extent
        end, anchor_epoch = start, NO_INCARNATION
        base = metalog.base if start < metalog.base.position <= length else None
        start = base.position if base is not None else start
        if anchor is not None and metalog.base.position <= anchor + 1 <= length:
            end = min(start + self._page_entries, anchor + 1)
            anchor_epoch = metalog.epoch_before(anchor + 1)
        return MetalogCopy(
            wanted.epoch,
            not metalog.incomplete,
            last,
            length,
            start,
            metalog.epoch_before(start) if start <= length else NO_INCARNATION,
            anchor,
            anchor_epoch,
            metalog.page(start, end, self._page_bytes) if start < end else (),
            base,
        )

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
        self._folded = min(self._folded, end)


def _misfit(message: MetalogAppend | MetalogCopyWanted) -> str | None:
    """Return what is wrong with a message that no primary sends, or None."""
    if message.start < 0:
        return "a position is never negative"
    if isinstance(message, MetalogCopyWanted):
        negative = message.anchor is not None and message.anchor < 0
        return "a position is never negative" if negative else None
    if (base := message.base) is not None:
        fits = (base.position, base.last) == (message.start, message.previous)
        if not (base.is_possible and fits and base.last <= message.epoch):
            return "a base that no entries add up to"
    epoch = message.previous
    for position, entry in enumerate(message.entries, message.start):
        if entry.position != position:
            return "the entries' positions do not follow on"
        if entry.epoch < epoch:
            return "the entries' epochs go back"
        epoch = entry.epoch
    return "an entry of an incarnation still to come" if epoch > message.epoch else None
