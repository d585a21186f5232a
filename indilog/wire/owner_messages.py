"""The messages by which compute nodes let the owner of a log append (decision 0096).
`indilog.wire.messages` says how to read them.

Engines exchange them (`indilog_compute.owner_appends`).
"""

from __future__ import annotations

import enum
from typing import ClassVar

from indilog.wire.wire_message import WireMessage


class OwnerOutcome(enum.IntEnum):
    """What became of an `OwnerAppend`."""

    DONE = 0
    """The content is in a cell."""
    PENDING = 1
    """The owner is appending the content, and answers when it has."""
    REFUSED = 2
    """The receiver does not own the log, or does not any more. The content may be in a cell, and
    the receiver does not append it later.
    """


class OwnerAppend(WireMessage, frozen=True):
    """engine → engine: append `content` to the log in `folder`, as its owner in the tenure `owner`.

    Lost: resent until it is answered; then the sender claims the log.
    Repeated: the receiver remembers the newest requests of each sender, and answers them again. An
        older request is ignored.
    """

    promises: ClassVar[bool] = False

    request: int
    folder: str
    owner: str
    content: bytes


class OwnerAnswer(WireMessage, frozen=True):
    """engine → engine: what became of an `OwnerAppend`. `outcomes` has the outcomes of the items in
    its content, as bytes of `indilog_cells.outcomes`.

    Lost: the request is resent.
    Repeated: the second one finds no request.
    """

    promises: ClassVar[bool] = False  # the content is on the disks of storage nodes already

    request: int
    outcome: OwnerOutcome
    outcomes: bytes = b""
