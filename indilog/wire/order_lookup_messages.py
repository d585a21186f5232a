"""The messages about facts from metalog entries: times, and places of records (ARCHITECTURE 9).
`indilog.wire.messages` says how to read them.

Engines ask, and storage nodes answer from the history.
"""

from __future__ import annotations

from indilog.base.ids import MetalogPosition, SeqNum
from indilog.base.log import PlacedSpan
from indilog.wire.wire_message import WireMessage


class TimeLookup(WireMessage, frozen=True):
    """engine → storage: asks for the first seqnum ordered at `time_us` or later, in microseconds
    since 1970 by the primary's clock.

    Lost: another storage node is asked after a pause.
    Repeated: answered again.
    """

    request: int
    time_us: int


class TimeFound(WireMessage, frozen=True):
    """storage → engine: the answer is `seqnum`, according to the first `position` metalog entries.

    `found` is False if none of the `position` entries applied here has a stamp that late; `seqnum`
    is then the tail after them.
    Lost: another storage node is asked after a pause.
    Repeated: the second one finds no request.
    """

    request: int
    seqnum: SeqNum
    position: MetalogPosition
    found: bool


class PlacesLookup(WireMessage, frozen=True):
    """engine → storage: asks for the places of the records from seqnum `start` to below `end`.

    Lost: another storage node is asked after a pause.
    Repeated: answered again.
    """

    request: int
    start: SeqNum
    end: SeqNum


class PlacesFound(WireMessage, frozen=True):
    """storage → engine: the spans of a first part of these records, ascending, without gaps,
    according to the first `position` metalog entries.

    `found` is False if no entry applied here ordered `start`.
    Lost: another storage node is asked after a pause.
    Repeated: the second one finds no request.
    """

    request: int
    position: MetalogPosition
    found: bool
    spans: tuple[PlacedSpan, ...] = ()
