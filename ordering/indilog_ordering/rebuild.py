"""A primary that lacks entries gets them from its backups before it does anything else (decision
0020).

Which ones it lacks is known or not (`StoredMetalog`):

*A hole.* There is an entry behind it, here. A copy with an entry of the same incarnation at that
position equals this one up to it (`indilog_ordering.backup`). So any one backup that has that entry
fills the hole, also with a base that stands for what is missing. If a backup's base stands for the
entry itself, the first entry here that it does not stand for is asked for instead.

*It is not known where the copy ended*: the disk was wiped, or its end is damaged; or no backup
reaches behind the hole. Then **all** backups must answer, and each must be whole: have all that it
ever answered for. They promise durably to follow no older incarnation, so what they have stays as
it is. The copy of the greatest extent, this one among them, becomes the metalog. Nothing that was
published is missing in it:

- An entry e that was published at position p was on the disks of the primary and of some backup;
  that one, B, has it still. Let l be the incarnation that proposed the last entry of the copy that
  is chosen, and b that of B's last one: b <= l.
- b = l: both are prefixes of what l had, and the chosen one is not shorter.
- b < l: e was proposed by b or earlier, so before l started. If it was published before l started,
  or the primary's disk was the same one since, it was there when l recovered. Otherwise l, or one
  between, had rebuilt its metalog in this way, with B (whole) among those that it asked, and so had
  e. What l recovered lies below what it proposed, so below the end of the chosen copy.

All, and not just so many that one of each majority is among them: a copy that was not asked may be
of a newer incarnation than the chosen one, and `StoredMetalog.agreement` would then take entries
for equal that are not. Among three sequencers that is the same: a majority is the primary and any
one backup.

What is fetched names the entry at its end (`Anchor`), so pages of different backups, and of
different lives of one, never mix. Until the last one is durable the disk says that entries are
missing, and a crash begins this anew.
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
    """A primary until its metalog is whole (`StoredMetalog.whole`): it asks, fetches and stores.

    Guarantees: nothing is proposed, published or answered meanwhile; when it is over, every entry
    that was ever published is here.

    Raises:
        DataLossError: from `advance`: some backup has lost entries too, so it is not known.
    """

    def __init__(self, view: View, config: Config, metalog: StoredMetalog, epoch: Epoch) -> None:
        self._node = view.primary
        self._epoch = epoch
        self._metalog = metalog
        self._resend = Resend(config.node.messages.resend_s, config.node.messages.resend_s_max)
        self._answers: dict[NodeId, MetalogCopy | None] = dict.fromkeys(view.backups)
        """The newest of each backup, without its entries; None: it has not answered this life."""
        self._asked: MetalogCopyWanted | None = None
        self._begun = False
        """Whether it is written that entries may be missing behind those that are here."""
        self._recorded = False
        """Whether it is written that nothing is missing any more."""
        self._anchor_from: MetalogPosition = 0
        """Entries behind a hole and below this position are not asked for: no backup has them one
        by one.
        """

    def on_received(self, event: Received, message: ForSequencer) -> list[Effect]:
        """Take in one message."""
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
                return []  # for a primary that works; resent until it does
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
        """Conclude from the answers; ask on.

        Raises:
            DataLossError: all have answered, and what is missing cannot be known.
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
        """When to ask again."""
        return self._resend.due

    def check_invariants(self) -> None:
        """Assert that what is missing is asked for."""
        assert self._metalog.stored <= len(self._metalog)
        assert self._recorded or self._resend.due is not None

    @property
    def silent(self) -> tuple[NodeId, ...]:
        """The backups that have not answered."""
        return tuple(node for node, answer in self._answers.items() if answer is None)

    # --- what is wanted

    def _heard(self) -> list[MetalogCopy]:
        return [answer for answer in self._answers.values() if answer is not None]

    def _all_heard(self) -> bool:
        return len(self._heard()) == len(self._answers)

    def _extent(self) -> Extent | None:
        """How far the metalog goes; None: not known yet."""
        if not (self._metalog.incomplete and self._all_heard()):
            return None
        answers = self._heard()
        if not all(answer.whole for answer in answers):
            raise self._loss()
        return max(self._metalog.extent, *(Extent(a.last, a.length) for a in answers))

    def _is_complete(self) -> bool:
        """Whether this copy is the chosen one, or has become it."""
        return self._metalog.incomplete and self._extent() == self._metalog.extent

    def _anchor(self) -> Anchor | None:
        """Return the entry that is wanted with all before it; None: not known yet."""
        if (behind_hole := self._metalog.later_from(self._anchor_from)) is not None:
            return behind_hole
        extent = self._extent()
        return Anchor(extent.length - 1, extent.last) if extent is not None else None

    def _judge_hole(self) -> None:
        """Give up what lies behind a hole if no backup has it: so it was never published.

        The base of a backup may stand for it; then ask for what is at the end of that base.
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

    # --- asking

    def _ask(self, now: Instant) -> list[Effect]:
        """Ask one that has it for what follows; all of them when time has passed."""
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
            return []  # all of it is here, on its way to the disk
        return [Send(node, wanted) for node in nodes]

    def _having(self, anchor: Anchor) -> list[NodeId]:
        """Return one backup of which it is known that it has the anchor; all if there is none."""
        for node, answer in self._answers.items():
            if answer is None:
                continue
            if _has(answer, anchor) or Extent(answer.last, answer.length) == (
                anchor.epoch,
                anchor.position + 1,
            ):
                return [node]
        return list(self._answers)

    # --- taking

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
        """Take the entries that are wanted."""
        metalog, anchor = self._metalog, self._anchor()
        if self._recorded or anchor is None or not _has(message, anchor):
            return []
        base = message.base
        if base is not None and len(metalog) < base.position <= anchor.position + 1:
            return [metalog.install(base)]  # its entries, or those behind the hole, come next
        if message.start != len(metalog):
            return []  # of an older question
        if message.start > anchor.position + 1 or message.previous != metalog.extent.last:
            # What follows the common part here was lost by a later incarnation.
            if metalog.incomplete:
                metalog.cut_off_last_epoch()
            return []
        end = hole.position if (hole := metalog.hole) is not None else anchor.position + 1
        return [metalog.append(e) for e in message.entries if e.position < end]


def _has(answer: MetalogCopy, anchor: Anchor) -> bool:
    return (answer.anchor, answer.anchor_epoch) == anchor
