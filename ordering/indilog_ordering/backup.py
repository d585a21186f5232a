"""A backup sequencer: keeps a durable copy of the primary's metalog (Scalog 3, "Ordering Layer").

The primary sends entries before it has synced them (decision 0006). So after its crash this backup
may have entries that the primary lost. The `epoch` of an entry is the incarnation of the primary
that proposed it; like Raft's terms it identifies lost entries. Rules:

1. Entries are accepted only if the entry before them is here, with the same epoch at the same
   position.
2. An entry replaces an entry of an older incarnation at its position, and all entries after that.
3. Messages of an incarnation older than the newest known one are ignored. After a restart the
   newest known one is read from the disk: it proposed an entry, or a promise to follow it was made.

Let log(i) be the entries that incarnation i recovered and proposed. Epochs ascend along log(i).
Incarnation i proposes once at a position. The entries that a later incarnation recovers are on the
primary's disk and never change. So two logs with entries of the same incarnation at one position
are equal up to it.

*The metalog here is always a prefix of log(l).* Here l is the incarnation that proposed its last
entry. By rule 1 it equals log(i) up to the place of new entries of log(i). By rule 2 no other entry
stays after them. A crash leaves a prefix of the written frames, and each frame is such a step.

*Common prefixes are equal.* Let i be the current primary. The part of log(l) that survived in
log(i) ends with the last entry of log(i) that is not newer than l. The metalog here equals log(i)
exactly up to there (`StoredMetalog.agreement`). So an acknowledgement is true whenever it arrives,
and does not count entries that the primary lost.

*Nothing that is on the primary's disk is dropped.* By rules 2 and 3 only an entry of a later
incarnation replaces another one. That incarnation had recovered all surviving entries of log(l). If
it proposed another entry at that position, the one of l was lost. Every published entry was on the
primary's disk before.

*A damaged copy does not count.* A metalog that may have a hole is dropped completely
(`StoredMetalog`) and fetched from the primary again. The backup reports that it is not whole until
it has all entries that the primary had when it learned of the damage (`MetalogAppend.completes`).

*The base* replaces entries that the primary does not keep any more (decision 0030). A copy that
ends below the primary's base, or whose own base has entries that the primary lost, is replaced by
that base.

*A primary that lost entries* asks for the entries here (`indilog_ordering.rebuild`, decision 0020).
Before the answer, this backup durably promises to follow no older incarnation. So this copy helps
to publish no entry that is missing in the answer.

An incarnation can lose only entries that it proposed itself, so all entries replaced at once are of
one incarnation. If they are not, the primary's disk was exchanged.
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
    """Stores the entries that the primary sends.

    Guarantees: an acknowledged entry is on this disk. It is dropped only if the primary has lost
    it, or because of damage, which is reported. Gaps and repetitions are answered too, so the
    primary learns where to continue.
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
        """Whether the note that no entry is missing was written."""
        self._answered: MetalogStored | None = None
        """None: an answer is due. Initially None, because a restart may have lost an answer in
        flight.
        """
        self._copy_wanted: MetalogCopyWanted | None = None
        """The question to answer when the promise is durable."""
        self._committed: MetalogPosition = 0
        self._folded: MetalogPosition = 0
        """The primary keeps no entries below this position, and this copy equals its metalog up to
        it.
        """

    @property
    def committed(self) -> MetalogPosition:
        """Number of entries that the primary has reported as committed; it decreases if the primary
        lost some.
        """
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
        """Refuse a message that the current primary cannot have sent; otherwise note its
        incarnation.
        """
        if event.sender != self._primary:
            return [Ignore(event, "metalog entries of a node that is not the primary of this view")]
        if (reason := _misfit(message)) is not None:
            return [Ignore(event, reason)]
        if message.epoch < self._epoch:
            return [Ignore(event, "metalog entries from an older incarnation of the primary")]
        self._epoch = message.epoch
        return []

    def advance(self) -> list[Effect]:
        """Answer all messages of the iteration at once, with the durable state."""
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
        """Assert that stored and committed positions are not beyond the metalog."""
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
        """Whether the entries replaced by `base` are here, as entries or in this copy's base."""
        metalog, end = self._metalog, base.position
        within = metalog.base.position <= end <= len(metalog)
        return within and metalog.epoch_before(end) == base.last

    def _base_contradiction(self, base: Base) -> str | None:
        """Return why a base cannot replace this copy, or None; see `_contradiction`."""
        metalog = self._metalog
        if base.position < metalog.base.position:
            return None
        ours = metalog.epoch_before(min(base.position, len(metalog)))
        return "the base contradicts the entries stored here" if base.last < ours else None

    def _install(self, base: Base, anew: Epoch) -> list[Effect]:
        """Replace this copy by a base.

        The primary sends its base if it has no entry after it in common with this copy. A base that
        ends before the base here drops acknowledged entries, which the primary has lost. Only the
        primary's answer to this incarnation may do that.
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
        """Persist that no entry is missing any more; it is acknowledged when it is durable."""
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
        """Return the durable extent of this copy, and a page of the requested entries."""
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

        Such a message gets no answer, so this copy does not help to commit it.
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
    """Return what is invalid in a message, or None."""
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
