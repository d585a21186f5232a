"""Limits the bytes held in a gateway: one budget, from which each request or link takes a share.

A share takes bytes from the budget as they arrive. A budget that is used up refuses further bytes.
Bytes that must be held anyway, such as a function's outcome, are counted even beyond the budget. So
the budget then refuses other requests. Only the gateway (`indilog_compute.gateway`) uses this
module.
"""

from __future__ import annotations

from typing import Final

from indilog.base.errors import OverloadedError

UNCHARGED_BYTES: Final = 16 * 1024
"""`ByteShare.take_up_to` does not count amounts up to this. So a gateway with a used-up budget
still serves small requests.
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
        """If `size` exceeds `UNCHARGED_BYTES`, raise the share to at least `size` bytes.

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
