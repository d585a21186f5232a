"""The messages of conditional appends (decision 0043). `indilog.wire.messages` says how to read
them.

Each tag has a home: the compute node that checks the conditions of all appends with that tag.
Engines exchange the messages (`indilog_compute.conditional`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from indilog.base.ids import Epoch, MetalogPosition, SeqNum, UserTag
from indilog.base.log import After
from indilog.wire.wire_message import WireMessage


class HomeWanted(WireMessage, frozen=True):
    """engine → engine: asks the home of a tag for its incarnation, before `ConditionalAppend`.

    Lost: resent until it is answered; then the append fails, and nothing was appended.
    Repeated: answered again.
    """

    promises: ClassVar[bool] = False

    request: int


class HomeIs(WireMessage, frozen=True):
    """engine → engine: this node is up; the envelope has its incarnation.

    Lost: the question is resent.
    Repeated: the second one finds no question.
    """

    promises: ClassVar[bool] = False

    request: int


class ConditionalAppend(WireMessage, frozen=True):
    """engine → engine: append these records of `log` if the condition `after` holds.

    `home` is the incarnation of the receiver that may append; another incarnation answers that the
    outcome is unknown. A record has data and tags.
    Lost: resent until it is answered; then the outcome is unknown to the caller.
    Repeated: the receiver remembers the newest requests of each sender, and answers them again. An
        older request is ignored.
    """

    request: int
    home: Epoch
    log: str
    after: After
    records: tuple[tuple[bytes, tuple[UserTag, ...]], ...]


class ConditionalAnswer(WireMessage, frozen=True):
    """engine → engine: the records were appended from seqnum `first` on, or an error.

    `position`: a node that has applied as many metalog entries sees the records, or the record that
    contradicts the condition. `kind`: the class of the error; empty: there is none. `attributes`
    are those of the error.
    Lost: the request is resent.
    Repeated: the second one finds no request.
    """

    request: int
    position: MetalogPosition = 0
    first: SeqNum = 0
    kind: str = ""
    message: str = ""
    attributes: dict[str, Any] = msgspec.field(default_factory=dict)
