"""What all messages between nodes have in common (`indilog.wire.messages`)."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class WireMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages.

    Attributes:
        promises: whether it says anything that must hold after a crash of its sender. What promises
            nothing may leave before the sync of what the sender wrote (decision 0006).
    """

    promises: ClassVar[bool] = True
