"""What all messages between nodes have in common (`indilog.wire.messages`).

Every module of messages derives its messages from `WireMessage`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class WireMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages.

    Attributes:
        promises: whether the message claims anything that must hold after a crash of its sender.
            A message that claims nothing may be sent before the sync of what the sender wrote
            (decision 0006).
    """

    promises: ClassVar[bool] = True
