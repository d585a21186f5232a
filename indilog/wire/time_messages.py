"""The messages about times (ARCHITECTURE 9). `indilog.wire.messages` says how to read them."""

from __future__ import annotations

from indilog.base.ids import MetalogPosition, SeqNum
from indilog.wire.wire_message import WireMessage


class TimeLookup(WireMessage, frozen=True):
    """engine → storage: what is the first seqnum that was ordered at `time_us` or later, in
    microseconds since 1970 on the clock of the primary?

    Lost: another storage node is asked after a while.
    Repeated: answered again.
    """

    request: int
    time_us: int


class TimeFound(WireMessage, frozen=True):
    """storage → engine: it is `seqnum`, and who has applied `position` metalog entries has it.

    Not `found`: nothing was ordered so late among the `position` entries applied here; `seqnum` is
    the tail after them.
    Lost: another storage node is asked after a while.
    Repeated: the second one finds no request.
    """

    request: int
    seqnum: SeqNum
    position: MetalogPosition
    found: bool
