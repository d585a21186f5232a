"""The rebuild of a primary: it lost metalog entries, and fetches them from its backups before it
does anything else (decision 0020).

The disk may show which entries are missing (`StoredMetalog`). There are two cases:

*A hole*: the primary has entries after the missing ones. The first of these identifies the metalog.
A copy with an entry of the same incarnation at that position equals this one up to it
(`indilog_ordering.backup`). So any one backup that has this entry can fill the hole, with the
entries or with a base that replaces them. If the base of a backup replaces the identifying entry
too, the primary uses its first entry at or after the last position of that base.

*An unknown end*: the disk was wiped, the end of the copy is damaged, or no backup has the entry
after the hole. Then **all** backups must answer. Each must be whole: it has every entry that it
ever acknowledged. Each also promises durably to follow no older incarnation, so its entries stay as
they are. The copy of the greatest extent becomes the metalog; the primary's own copy is a
candidate, too. No published entry is missing in the chosen copy:

- Let e be an entry that was published at position p. It was on the disks of the primary and of some
  backup B, and B still has it. Let l be the incarnation that proposed the last entry of the chosen
  copy, and b the one that proposed B's last entry. Then b <= l.
- b = l: both copies are prefixes of what l had, and the chosen one is not shorter.
- b < l: incarnation b or an earlier one proposed e, so before l started. If e was published before
  l started, or the primary's disk was never exchanged since, e was on that disk when l recovered.
  Otherwise l, or an incarnation between b and l, had rebuilt its metalog in this way. It had asked
  B, which was whole, and so had e. What l recovered lies below what it proposed, so below the end
  of the chosen copy.

It would not be enough to ask one member of each majority. A copy that was not asked may be of a
newer incarnation than the chosen one. `StoredMetalog.agreement` would then count entries as equal
that differ. With three sequencers both rules are the same: each majority is the primary and any one
backup.

Each request names the entry at its end (`Anchor`). So pages of different backups, and of different
incarnations of one backup, never mix. Until the last fetched entry is durable, the disk states that
entries are missing. A crash before that begins the rebuild anew.
"""

from __future__ import annotations

import msgspec

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.lineage import Extent
from indilog.kernel.view import View
from indilog.roles.role import Effect, Ignore, Received, Send
from indilog.wire.base_messages import MetalogCovered
from indilog.wire.messages import ForSequencer, MetalogWanted, ShardProgress, TailWanted
from indilog.wire.sequencer_messages import (
    MetalogAppend,
    MetalogCopy,
    MetalogCopyWanted,
    MetalogStored,
)
from indilog.wire.tag_messages import TrimWanted
from indilog_ordering.stored_metalog import Anchor, StoredMetalog


class Rebuild:
    """A primary whose metalog is not whole (`StoredMetalog.whole`): it asks backups, fetches
    entries and stores them.

    Guarantees: it proposes, publishes and answers nothing. When it is complete, this metalog has
    every entry that was ever published.

    Raises:
        DataLossError: from `advance`: a backup has lost entries, too, so what is missing cannot be
            known.
    """

    def __init__(self, view: View, config: Config, metalog: StoredMetalog, epoch: Epoch) -> None:
        self._node = view.primary
        self._epoch = epoch
        self._metalog = metalog
        self._resend = Resend(config.node.messages.resend_s, config.node.messages.resend_s_max)
        self._answers: dict[NodeId, MetalogCopy | None] = dict.fromkeys(view.backups)
        """The newest answer of each backup, without entries; None: no answer to this incarnation.
        """
        self._asked: MetalogCopyWanted | None = None
        self._begun = False
        """Whether a frame was written that marks the copy as incomplete."""
        self._recorded = False
        """Whether a frame was written that marks the copy as whole."""
        self._anchor_from: MetalogPosition = 0
        """Entries after a hole that lie below this position are no anchors, because no backup has
        them as single entries.
        """

    def on_received(self, event: Received, message: ForSequencer) -> list[Effect]:
        """Handle one message; `advance` acts on the answers."""
        match message:
            case MetalogCopy():
                return self._on_metalog_copy(event, message)
            case (
                ShardProgress()
                | MetalogStored()
                | MetalogWanted()
                | MetalogCovered()
                | TailWanted()
                | TrimWanted()
            ):
                return []  # for a working primary; senders resend them
            case MetalogAppend() | MetalogCopyWanted():
                return [Ignore(event, f"a primary has no use for {type(message).__name__}")]

    def _on_metalog_copy(self, event: Received, message: MetalogCopy) -> list[Effect]:
        if event.sender not in self._answers:
            return [Ignore(event, "a copy of the metalog from a node that is no backup")]
        if (reason := self._misfit(message)) is not None:
            return [Ignore(event, reason)]
        self._answers[event.sender] = msgspec.structs.replace(message, entries=())
        return self._take(message)

    def advance(self, now: Instant) -> list[Effect]:
        """Evaluate the answers; send requests that are due.

        Raises:
            DataLossError: all backups have answered, and what is missing cannot be known.
        """
        self._judge_hole()
        effects: list[Effect] = []
        if self._metalog.incomplete and not self._begun:
            self._begun = True
            effects.append(self._metalog.begin_to_fetch())
        if self._is_complete() and not self._recorded:
            self._recorded = True
            effects.append(self._metalog.complete())
        if self._recorded:
            self._resend.stop()
            return effects
        return effects + self._ask(now)

    def deadline(self) -> Instant | None:
        """When to resend the request."""
        return self._resend.due

    def check_invariants(self) -> None:
        """Assert that a request is scheduled while entries are missing."""
        assert self._metalog.stored <= len(self._metalog)
        assert self._recorded or self._resend.due is not None

    @property
    def silent(self) -> tuple[NodeId, ...]:
        """The backups that have not answered."""
        return tuple(node for node, answer in self._answers.items() if answer is None)

    # --- what is missing

    def _heard(self) -> list[MetalogCopy]:
        return [answer for answer in self._answers.values() if answer is not None]

    def _all_heard(self) -> bool:
        return len(self._heard()) == len(self._answers)

    def _extent(self) -> Extent | None:
        """Return the extent of the metalog; None: it is not known yet."""
        if not (self._metalog.incomplete and self._all_heard()):
            return None
        answers = self._heard()
        if not all(answer.whole for answer in answers):
            raise self._loss()
        return max(self._metalog.extent, *(Extent(a.last, a.length) for a in answers))

    def _is_complete(self) -> bool:
        """Whether this copy has the extent of the metalog, so that nothing is missing."""
        return self._metalog.incomplete and self._extent() == self._metalog.extent

    def _anchor(self) -> Anchor | None:
        """Return the last entry to be fetched; None: it is not known yet."""
        if (behind_hole := self._metalog.later_from(self._anchor_from)) is not None:
            return behind_hole
        extent = self._extent()
        return Anchor(extent.length - 1, extent.last) if extent is not None else None

    def _judge_hole(self) -> None:
        """Drop the entries after a hole if no backup has them: so they were never published.

        If the base of a backup replaces the anchor, take a later anchor, at the end of that base or
        after it.
        """
        anchor = self._metalog.later_from(self._anchor_from)
        if anchor is None or not self._all_heard():
            return
        answers = self._heard()
        if any(answer.anchor != anchor.position or _has(answer, anchor) for answer in answers):
            return
        ends = [answer.base.position - 1 for answer in answers if answer.base is not None]
        beyond = min((end for end in ends if end > anchor.position), default=None)
        if beyond is not None and self._metalog.later_from(beyond) is not None:
            self._anchor_from = beyond
            return
        if not all(answer.whole for answer in answers):
            raise self._loss()
        self._metalog.forget_behind_hole()

    def _loss(self) -> DataLossError:
        lacking = [node for node, answer in self._answers.items() if answer and not answer.whole]
        return DataLossError(
            f"The order of the log is damaged on the disk of {self._node}, and on that of "
            f"{' and '.join(lacking)} too, so no node knows whether an acknowledged record "
            "would be missing; restore the whole data directory from a copy."
        )

    # --- requests

    def _ask(self, now: Instant) -> list[Effect]:
        """Request the entries up to the anchor, from one backup that has it; after a pause, from
        all backups.
        """
        anchor = self._anchor()
        position = anchor.position if anchor is not None else None
        wanted = MetalogCopyWanted(self._epoch, len(self._metalog), position)
        due = self._resend.due is None or self._resend.is_due(now)
        if not due and wanted == self._asked:
            return []
        if wanted != self._asked:
            self._resend.stop()
        nodes = list(self._answers) if due or anchor is None else self._having(anchor)
        self._asked = wanted
        self._resend.sent(now)
        hole = self._metalog.hole
        if hole is not None and wanted.start == hole.position:
            return []  # the hole is filled; its entries are being written
        return [Send(node, wanted) for node in nodes]

    def _having(self, anchor: Anchor) -> list[NodeId]:
        """Return one backup that is known to have the anchor; all backups if none is known to."""
        for node, answer in self._answers.items():
            if answer is None:
                continue
            if _has(answer, anchor) or Extent(answer.last, answer.length) == (
                anchor.epoch,
                anchor.position + 1,
            ):
                return [node]
        return list(self._answers)

    # --- answers

    def _misfit(self, message: MetalogCopy) -> str | None:
        """Return what is wrong with an answer, or None."""
        if message.asked != self._epoch:
            return "an answer to another incarnation of the primary"
        if message.last >= self._epoch or message.length < 0 or message.start < 0:
            return "a copy of the metalog that cannot be"
        base = message.base
        if base is not None and not (
            base.is_possible and (base.position, base.last) == (message.start, message.previous)
        ):
            return "a base that no entries add up to"
        epoch = message.previous
        for position, entry in enumerate(message.entries, message.start):
            if entry.position != position or entry.epoch < epoch:
                return "the entries of a copy do not follow on"
            epoch = entry.epoch
        return None

    def _take(self, message: MetalogCopy) -> list[Effect]:
        """Append the entries of an answer that are missing here."""
        metalog, anchor = self._metalog, self._anchor()
        if self._recorded or anchor is None or not _has(message, anchor):
            return []
        base = message.base
        if base is not None and len(metalog) < base.position <= anchor.position + 1:
            return [metalog.install(base)]  # entries after the base follow
        if message.start != len(metalog):
            return []  # it answers an older request
        if message.start > anchor.position + 1 or message.previous != metalog.extent.last:
            # Entries after the common part were lost by a later incarnation.
            if metalog.incomplete:
                metalog.cut_off_last_epoch()
            return []
        end = hole.position if (hole := metalog.hole) is not None else anchor.position + 1
        return [metalog.append(e) for e in message.entries if e.position < end]


def _has(answer: MetalogCopy, anchor: Anchor) -> bool:
    return (answer.anchor, answer.anchor_epoch) == anchor
