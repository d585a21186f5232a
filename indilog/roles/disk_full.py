"""Telling others that this node's disk is full, for as long as it is (ARCHITECTURE 11, decision
0009).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from indilog.base.ids import Instant, NodeId
from indilog.roles.role import Effect, Send
from indilog.wire.messages import DiskFull

_REPEAT_S: Final = 2.0
BELIEVED_S: Final = 5 * _REPEAT_S
"""After this without a repetition a receiver takes the disk for usable again."""


class DiskFullNotifier:
    """Says `DiskFull` to `receivers`: at once, again while it holds, and when it is over."""

    def __init__(self, receivers: Iterable[NodeId]) -> None:
        self._receivers = tuple(dict.fromkeys(receivers))
        self._full = False
        self._due: Instant | None = None

    def changed(self, *, full: bool, now: Instant) -> None:
        """Take note how it is now; it is said in `conclude`."""
        if full != self._full:
            self._full, self._due = full, now

    def conclude(self, now: Instant) -> list[Effect]:
        """Say it, if it is time to."""
        if self._due is None or now < self._due:
            return []
        self._due = Instant(now + _REPEAT_S) if self._full else None
        return [Send(receiver, DiskFull(self._full)) for receiver in self._receivers]

    def deadline(self) -> Instant | None:
        """When to say it again."""
        return self._due
