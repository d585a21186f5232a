"""A budget for all bytes that wait in a gateway, and the shares that use parts of it.

A share takes bytes as they arrive, and is refused when the budget is used up. Bytes that must be
kept anyway, such as a function's outcome, are noted: they count, so the budget refuses others.
"""

from __future__ import annotations

from typing import Final

from indilog.base.errors import OverloadedError

UNCHARGED_BYTES: Final = 16 * 1024
"""Smaller amounts are not counted, so that a gateway without budget still serves small requests."""


class ByteBudget:
    """Counts bytes that wait.

    Args:
        bytes_max: largest total of all shares.

    Attributes:
        used: bytes of all shares; may exceed `bytes_max` by noted bytes.
        refused: number of refusals.
    """

    __slots__ = ("bytes_max", "refused", "used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.refused = 0

    @property
    def is_used_up(self) -> bool:
        """Whether no share may take more."""
        return self.used >= self.bytes_max

    def share(self) -> ByteShare:
        """Return a new, empty share."""
        return ByteShare(self)


class ByteShare:
    """The bytes of one request, link or connection in a budget.

    Attributes:
        held: bytes.
    """

    __slots__ = ("_budget", "held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, size: int) -> None:
        """Take `size` more bytes.

        Raises:
            OverloadedError: the budget is used up; the share is unchanged.
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
        """Raise the share to `size` bytes, if it has fewer and `size` exceeds `UNCHARGED_BYTES`.

        Raises:
            OverloadedError: the budget is used up; no more is held than before.
        """
        if size > UNCHARGED_BYTES and size > self.held:
            self.take(size - self.held)

    def note(self, size: int) -> None:
        """Count `size` more bytes, even beyond the budget."""
        self._budget.used += size
        self.held += size

    def give(self, size: int) -> None:
        """Return `size` bytes to the budget."""
        assert size <= self.held, "a share frees what it holds"
        self._budget.used -= size
        self.held -= size

    def free(self) -> None:
        """Return all bytes to the budget."""
        if self.held:
            self.give(self.held)
