"""A budget for all bytes held in a gateway, and the shares that use parts of it.

A share takes bytes from the budget as they arrive; a budget that is used up refuses them. Bytes
that must be held anyway, such as a function's outcome, are counted even beyond the budget, so that
other requests are refused.
"""

from __future__ import annotations

from typing import Final

from indilog.base.errors import OverloadedError

UNCHARGED_BYTES: Final = 16 * 1024
"""Smaller amounts are not counted, so that a gateway with a used-up budget still serves small
requests.
"""


class ByteBudget:
    """Counts the bytes held in a gateway.

    Args:
        bytes_max: largest total of all shares.

    Attributes:
        used: bytes of all shares; may exceed `bytes_max` because of `ByteShare.note`.
        refused: number of refused requests for bytes.
    """

    __slots__ = ("bytes_max", "refused", "used")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.refused = 0

    @property
    def is_used_up(self) -> bool:
        """Whether shares may take no more bytes."""
        return self.used >= self.bytes_max

    def share(self) -> ByteShare:
        """Return a new, empty share."""
        return ByteShare(self)


class ByteShare:
    """The bytes that one request, link or connection uses of a budget.

    Attributes:
        held: number of bytes.
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
                f"{budget.used:,} bytes are held in this gateway, whose limit is "
                f"{budget.bytes_max:,}; nothing was done, try again later."
            )
        self.note(size)

    def take_up_to(self, size: int) -> None:
        """Raise the share to `size` bytes, if it has fewer bytes and `size` exceeds
        `UNCHARGED_BYTES`.

        Raises:
            OverloadedError: the budget is used up; the share is unchanged.
        """
        if size > UNCHARGED_BYTES and size > self.held:
            self.take(size - self.held)

    def note(self, size: int) -> None:
        """Count `size` more bytes, even beyond the budget."""
        self._budget.used += size
        self.held += size

    def release(self, size: int) -> None:
        """Return `size` bytes to the budget."""
        assert size <= self.held, "a share frees what it holds"
        self._budget.used -= size
        self.held -= size

    def free(self) -> None:
        """Return all bytes to the budget."""
        if self.held:
            self.release(self.held)
