"""The messages by which compute nodes tell each other that a log of another kind than `shared` has
grown (decision 0098). `indilog.wire.messages` says how to read them.

Engines exchange them (`indilog_compute.log_growth`).
"""

from __future__ import annotations

from typing import ClassVar

from indilog.wire.wire_message import WireMessage


class GrowthWanted(WireMessage, frozen=True):
    """engine → engine: answer when the log in `folder` has more than `position` cells.

    Lost: the sender looks for new cells itself, at most a second later.
    Repeated: the second one replaces the first.
    """

    promises: ClassVar[bool] = False

    request: int
    folder: str
    position: int


class LogGrew(WireMessage, frozen=True):
    """engine → engine: the log of a `GrowthWanted` has grown.

    Lost: the receiver looks for new cells itself, at most a second later.
    Repeated: the second one finds no request.
    """

    promises: ClassVar[bool] = False  # the receiver reads the cells itself

    request: int
