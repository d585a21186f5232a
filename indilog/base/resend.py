"""Computes the pauses between resends of a message that was not answered.

The message may be lost, or its receiver may be overloaded. Resends at a fixed rate would keep an
overloaded receiver overloaded. So the pause doubles with each resend, up to a bound, and an answer
resets it. Roles of all tiers keep a `Resend` for each request to another node.
"""

from __future__ import annotations

from indilog.base.ids import Instant


class Resend:
    """The pauses between resends of one message.

    Args:
        base_s: the first pause, in seconds.
        max_s: the longest pause, in seconds.

    Attributes:
        due: when to resend; None: no answer is awaited.
    """

    __slots__ = ("_base_s", "_max_s", "_pause_s", "due")

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max(base_s, max_s)
        self._pause_s = base_s
        self.due: Instant | None = None

    def sent(self, now: Instant) -> None:
        """Note that the message was sent, so it is due again after the next pause."""
        self.due = Instant(now + self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._max_s)

    def is_due(self, now: Instant) -> bool:
        """Tell whether the message was sent and the pause is over."""
        return self.due is not None and now >= self.due

    def make_due(self, now: Instant) -> None:
        """If an answer is awaited, make the resend due now, for example to another node."""
        if self.due is not None:
            self._pause_s, self.due = self._base_s, now

    def stop(self) -> None:
        """Stop resending: an answer came, or an answer is no longer awaited. The next message
        begins with the first pause again.

        Messages with separate answers need separate `Resend`s: an answer to one message must not
        stop the resends of another.
        """
        self._pause_s = self._base_s
        self.due = None
