"""One budget of bytes over all that waits in a gateway, and the shares that hold parts of it.

A share takes bytes as they arrive and is refused when the budget is used up. What must be kept
anyway (an outcome that a function returned) is noted, which makes the budget refuse others.
"""

from __future__ import annotations

from typing import Final

from indilog.base.errors import OverloadedError

UNCHARGED_BYTES: Final = 16 * 1024
"""What is smaller is not counted: a gateway whose budget is used up still serves small requests."""


class ByteBudget:
    """Counts bytes that wait.

    Args:
        bytes_max: bytes that shares may take in all.

    Attributes:
        used: bytes that shares hold; above `bytes_max` by what was noted.
        refused: times that a share was refused.
    """

    __slots__ = ("bytes_max", "refused", "used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.refused = 0

    @property
    def is_used_up(self) -> bool:
        """Whether as much waits as may."""
        return self.used >= self.bytes_max

    def share(self) -> ByteShare:
        """Return a share that holds nothing yet."""
        return ByteShare(self)


class ByteShare:
    """What one request, link or connection holds of a budget.

    Attributes:
        held: bytes.
    """

    __slots__ = ("_budget", "held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, size: int) -> None:
        """Hold `size` bytes more.

        Raises:
            OverloadedError: the budget is used up; no more is held than before.
        """
        budget = self._budget
        if budget.used + size > budget.bytes_max:
            budget.refused += 1
            raise OverloadedError(
                f"{budget.used:,} bytes wait in this gateway, which is near its limit of "
                f"{budget.bytes_max:,}; nothing was done: try again later."
            )
        self.note(size)

    def take_up_to(self, size: int) -> None:
        """Hold `size` bytes in all, if that is more than now and more than `UNCHARGED_BYTES`.

        Raises:
            OverloadedError: the budget is used up; no more is held than before.
        """
        if size > UNCHARGED_BYTES and size > self.held:
            self.take(size - self.held)

    def note(self, size: int) -> None:
        """Hold `size` bytes more, also beyond the budget."""
        self._budget.used += size
        self.held += size

    def give(self, size: int) -> None:
        """Hold `size` bytes less."""
        assert size <= self.held, "a share frees what it holds"
        self._budget.used -= size
        self.held -= size

    def free(self) -> None:
        """Hold nothing any more."""
        if self.held:
            self.give(self.held)
