"""What the primary knows of one backup: which entries it has stored, and which are in flight to it.

It resembles the progress of a follower in Raft implementations. A backup is *probed* until it has
answered how many entries it has. Entries are then pipelined within a window. When an answer shows
that messages were lost, the primary resends once from the end of what the backup has. Further
answers to the same gap do not resend; only a timeout does.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition
from indilog.base.resend import Resend
from indilog.wire.sequencer_messages import NO_INCARNATION


class BackupProgress:
    """One backup, as the primary sees it.

    Attributes:
        stored: how many entries it reported durable; 0 while probed.
        sent: how many entries were sent; `stored <= sent`.
        probed: whether it has not yet answered what it has.
        incomplete: its incarnation, if it reported that it may lack entries that it once had; else
            0.
        base: the position of its base, which summarises the entries below.
        life: its incarnation.
        base_sent: whether the base of the primary is in flight to it.
        resend: when to resend what it has not answered.
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
        """Whether the backup must begin anew with the primary's base, which ends at `base`.

        This is so if it lacks entries that the primary has only as a base, or if its own base has
        entries that the primary lost (decision 0030).
        """
        return not self.probed and self.stored < max(base, self.base)

    def on_stored(
        self,
        length: MetalogPosition,
        incomplete: Epoch = NO_INCARNATION,
        base: MetalogPosition = 0,
        life: Epoch = NO_INCARNATION,
    ) -> None:
        """Note how many entries the backup has, even if they are fewer than before."""
        self.incomplete, self.base, self.life = incomplete, base, life
        advanced = length > self.stored
        self.resend.due = None
        if advanced or self.probed:
            self.resend.stop()
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
        """Resend from what the backup has: it did not answer in time."""
        self._back_to(self.stored)
        self._went_back = True
        self.resend.due = None

    def _back_to(self, length: MetalogPosition) -> None:
        self.sent = length
        self.base_sent = False
