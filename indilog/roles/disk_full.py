"""Notifies other nodes while this node's disk is full (ARCHITECTURE 11, decision 0009).

Primaries and storage nodes send the notifications; compute nodes receive them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from indilog.base.errors import DiskFullError
from indilog.base.ids import Instant, NodeId
from indilog.roles.role import Effect, Send
from indilog.wire.messages import DiskFull

_REPEAT_S: Final = 2.0
BELIEVED_S: Final = 5 * _REPEAT_S
"""Seconds without a notification after which a receiver treats the disk as usable again."""


def no_room_on(*places: str) -> DiskFullError:
    """Return the error of an append that is refused because the disks of `places` are full."""
    return DiskFullError(
        f"There is no disk space left on {', '.join(places)}; nothing was appended. Make room: the "
        "log takes appends again by itself."
    )


class DiskFullNotifier:
    """Sends `DiskFull` to `receivers`: at once and then periodically while the disk is full, and
    once when it has room again.
    """

    def __init__(self, receivers: Iterable[NodeId]) -> None:
        self._receivers = tuple(dict.fromkeys(receivers))
        self._full = False
        self._due: Instant | None = None

    def set_receivers(self, receivers: Iterable[NodeId]) -> None:
        """Note which nodes are notified from now on."""
        self._receivers = tuple(dict.fromkeys(receivers))

    def changed(self, *, full: bool, now: Instant) -> None:
        """Note whether the disk is full now; `conclude` sends the notification."""
        if full != self._full:
            self._full, self._due = full, now

    def conclude(self, now: Instant) -> list[Effect]:
        """Return the notifications that are due."""
        if self._due is None or now < self._due:
            return []
        self._due = Instant(now + _REPEAT_S) if self._full else None
        return [Send(receiver, DiskFull(self._full)) for receiver in self._receivers]

    def deadline(self) -> Instant | None:
        """When the next notification is due."""
        return self._due
