"""The primary's knowledge of one other sequencer: the entries that it has stored, and the messages
in flight to it.

`MemberProgress` resembles the progress of a follower in Raft implementations. A sequencer is
*probed* until the primary knows the position up to which the two copies are equal. Entries are then
pipelined within a window. When an answer shows that messages were lost, the primary resends once,
from the end of the entries that the sequencer has. Further answers about the same gap cause no
resend; only a timeout causes another resend.

`Leader` keeps a `MemberProgress` for each other sequencer.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition
from indilog.base.resend import Resend
from indilog.kernel.lineage import Extent


class MemberProgress:
    """One incarnation of another sequencer, as the primary knows it.

    Attributes:
        incarnation: its incarnation; 0: no message of it has arrived.
        elects: whether the newest configuration of the primary has it.
        voter: whether it is known to be no learner; False until its first answer.
        echoed: the newest round that it has answered.
        sealed_in: the round in which its first answer to a `Seal` arrived; None: no answer has.
        extent: the extent of its copy when it last answered a `Seal`.
        stored: number of entries of the primary that it durably has; 0 while probed.
        sent: number of entries that were sent; `stored <= sent`.
        probed: whether the primary does not know yet up to which position both copies are equal.
        probe_at: the position that the next probe compares; None: the end of the primary's copy.
        learner_until: (number of entries, round). The sequencer becomes a voter when it has these
            entries and this round is confirmed. None: it is not known to be a learner.
        base_sent: whether the base of the primary is in flight to it.
        round_sent: the newest round that was sent to it.
        resend: when to resend unanswered messages.
    """

    __slots__ = (
        "_went_back", "base_sent", "echoed", "elects", "extent", "incarnation", "learner_until",
        "probe_at", "probed", "resend", "round_sent", "sealed_in", "sent", "stored", "voter",
    )  # fmt: skip

    def __init__(
        self,
        resend: Resend,
        incarnation: Epoch = Epoch(0),  # noqa: B008 an int
        *,
        elects: bool = True,
    ) -> None:
        self.incarnation = incarnation
        self.elects = elects
        self.voter = False
        self.echoed = 0
        self.sealed_in: int | None = None
        self.extent = Extent(Epoch(0), 0)
        self.stored: MetalogPosition = 0
        self.sent: MetalogPosition = 0
        self.probed = True
        self.probe_at: MetalogPosition | None = None
        self.learner_until: tuple[MetalogPosition, int] | None = None
        self.base_sent = False
        self.round_sent = 0
        self.resend = resend
        self._went_back = False

    @property
    def counts(self) -> bool:
        """Whether the sequencer counts in majorities."""
        return self.elects and self.voter

    def needs_base(self, base: MetalogPosition) -> bool:
        """Whether the sequencer lacks entries below `base`, which the primary has only as a
        base.
        """
        known = self.probe_at if self.probed else self.stored
        return known is not None and known < base

    def is_restored(self, confirmed: int) -> bool:
        """Whether a learner may become a voter; `confirmed`: the newest confirmed round."""
        until = self.learner_until
        return until is not None and self.stored >= until[0] and confirmed >= until[1]

    def on_stored(self, length: MetalogPosition) -> None:
        """Note an acknowledgement: the sequencer durably has `length` entries of the primary."""
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
            self._back_to(self.stored)
        self.stored = max(self.stored, length)
        self.sent = max(self.sent, self.stored)

    def on_mismatch(self, position: MetalogPosition) -> None:
        """Note that the sequencer refused a message: its copy equals the primary's at most up to
        `position`.
        """
        if self.probed:
            if self.probe_at is None or position < self.probe_at:
                self.probe_at = position
                self.resend.stop()
                self._back_to(position)
        elif not self._went_back:
            self._went_back = True
            self._back_to(self.stored)

    def go_back(self) -> None:
        """Resend from the end of the entries that the sequencer has, because it did not answer in
        time.
        """
        self._back_to(self.stored)
        self._went_back = True
        self.round_sent = 0
        self.resend.due = None

    def _back_to(self, length: MetalogPosition) -> None:
        self.sent = length
        self.base_sent = False
