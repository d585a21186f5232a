"""The pauses between resends of a message that was not answered.

Such a message may be lost, or its receiver may be slow. A fixed rate would keep a slow receiver
slow. So the pause doubles with each resend up to a bound. An answer resets it.
"""

from __future__ import annotations

from indilog.base.ids import Instant


class Resend:
    """The pauses of one resend.

    Args:
        base_s: the first pause, in seconds.
        max_s: the longest one.

    Attributes:
        due: when to send again; None: nothing is awaited.
    """

    __slots__ = ("_base_s", "_max_s", "_pause_s", "due")

    def __init__(self, base_s: float, max_s: float) -> None:
        self._base_s = base_s
        self._max_s = max(base_s, max_s)
        self._pause_s = base_s
        self.due: Instant | None = None

    def sent(self, now: Instant) -> None:
        """Note that it was sent: it is due again after the next pause."""
        self.due = Instant(now + self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._max_s)

    def is_due(self, now: Instant) -> bool:
        """Whether it was sent, and the pause is over."""
        return self.due is not None and now >= self.due

    def hurry(self, now: Instant) -> None:
        """Resend now what is awaited, because another node is to answer."""
        if self.due is not None:
            self._pause_s, self.due = self._base_s, now

    def stop(self) -> None:
        """Stop resending: an answer came, or none is awaited any more. The next pause is the first
        one.

        A message that is still awaited needs a `Resend` of its own: an answer to one message must
        not stop the resends of another.
        """
        self._pause_s = self._base_s
        self.due = None
