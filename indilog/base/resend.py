"""Computes the pauses between resends of a message that was not answered.

Such a message may be lost, or its receiver may be overloaded, and resends at a fixed rate would
keep it overloaded. So the pause doubles with each resend, up to a bound. An answer resets it.
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
        """If an answer is awaited, make the resend due now, because another node is to answer."""
        if self.due is not None:
            self._pause_s, self.due = self._base_s, now

    def stop(self) -> None:
        """Stop resending, because an answer came or is no longer awaited. The next pause is again
        the first one.

        Messages with separate answers need separate `Resend`s: an answer to one message must not
        stop the resends of another.
        """
        self._pause_s = self._base_s
        self.due = None
