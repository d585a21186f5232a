"""What the primary knows of one backup: how much it has, and what is on its way to it.

As the progress of a follower in Raft implementations: a backup is *probed* until it has said how
much it has, then entries are sent ahead of its answers (pipelined), within a window. When an answer
shows that something was lost, sending goes back once to what the backup has; after that only time
does it again, so that the many answers to one gap do not each repeat everything.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition
from indilog.base.resend import Resend
from indilog.wire.sequencer_messages import NO_INCARNATION


class BackupProgress:
    """One backup, as the primary sees it.

    Attributes:
        stored: how many entries it said are durable there; 0 while probed.
        sent: how many have been sent; `stored <= sent`.
        probed: it has not said yet what it has.
        incomplete: its incarnation, if it said that it may lack entries it had once; else 0.
        base: the entries below it are not there one by one.
        life: its incarnation.
        base_sent: whether the base of the primary is on its way to it.
        resend: when to say again what it has not answered.
    """

    __slots__ = (
        "_went_back", "base", "base_sent", "incomplete", "life", "probed", "resend", "sent",
        "stored",
    )  # fmt: skip

    def __init__(self, resend: Resend) -> None:
        self.stored: MetalogPosition = 0
        self.sent: MetalogPosition = 0
        self.probed = True
        self.incomplete = NO_INCARNATION
        self.base: MetalogPosition = 0
        self.life = NO_INCARNATION
        self.base_sent = False
        self.resend = resend
        self._went_back = False

    def needs_base(self, base: MetalogPosition) -> bool:
        """Whether it must begin anew with the primary's base, which ends at `base`.

        It lacks entries that the primary has no more, or has others than the primary in its own
        base: the primary lost some (decision 0030).
        """
        return not self.probed and self.stored < max(base, self.base)

    def on_stored(
        self,
        length: MetalogPosition,
        incomplete: Epoch = NO_INCARNATION,
        base: MetalogPosition = 0,
        life: Epoch = NO_INCARNATION,
    ) -> None:
        """Note how much the backup has; it is believed even if it is less than before."""
        self.incomplete, self.base, self.life = incomplete, base, life
        advanced = length > self.stored
        self.resend.due = None
        if advanced or self.probed:
            self.resend.progressed()
        if self.probed:
            self.probed = False
            self._back_to(length)
        elif advanced:
            self._went_back = False
        elif not self._went_back:
            self._went_back = True
            self._back_to(length)
        self.stored = length
        self.sent = max(self.sent, length)

    def go_back(self) -> None:
        """Send again from what the backup has: it did not answer in time."""
        self._back_to(self.stored)
        self._went_back = True
        self.resend.due = None

    def _back_to(self, length: MetalogPosition) -> None:
        self.sent = length
        self.base_sent = False
