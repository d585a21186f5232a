"""Which calls a worker has begun: memory that a compute node and one worker share.

A worker whose event loop is blocked answers nothing, so a message cannot tell which of its calls it
has begun. Two bytes per call can: the worker writes `begun`, then reads `revoked`; the node writes
`revoked`, and `SETTLE_S` later reads `begun`. Whoever comes second sees the other's byte: the
worker does not run the call, or the node knows that it may. (A store is visible to all processors
within far less than `SETTLE_S`.)
"""

from __future__ import annotations

import mmap
import os
from typing import Final

SLOTS: Final = 4096
"""Calls of one worker that can be withdrawn; further ones just cannot."""
NO_SLOT: Final = 0
SETTLE_S: Final = 0.02
_BYTES: Final = 2 * SLOTS


def claims_memory() -> int:
    """Return a file descriptor of zeroed memory to share; the caller closes it.

    Raises:
        OSError: there is no memory.
    """
    fd = os.memfd_create("indilog-claims")
    os.ftruncate(fd, _BYTES)
    return fd


class NodeClaims:
    """The compute node's side: gives out slots, revokes calls."""

    __slots__ = ("_free", "_memory")

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)
        self._free = list(range(SLOTS - 1, NO_SLOT, -1))

    def allocate(self) -> int:
        """Return a slot for a call that is about to be sent; `NO_SLOT` if none is left."""
        return self._free.pop() if self._free else NO_SLOT

    def free(self, slot: int) -> None:
        """The worker has answered the call: the slot may be used again."""
        if slot != NO_SLOT:
            self._memory[slot] = self._memory[SLOTS + slot] = 0
            self._free.append(slot)

    def is_begun(self, slot: int) -> bool:
        """Tell whether the call may have begun; False, `SETTLE_S` after `revoke`, is for good."""
        return slot == NO_SLOT or self._memory[slot] != 0

    def revoke(self, slot: int) -> None:
        """Have the worker not begin the call, unless it has."""
        if slot != NO_SLOT:
            self._memory[SLOTS + slot] = 1


class WorkerClaims:
    """The worker's side."""

    __slots__ = ("_memory",)

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)

    def begin(self, slot: int) -> bool:
        """Say that a call begins now; False: it was revoked and must not."""
        if slot == NO_SLOT:
            return True
        self._memory[slot] = 1
        return self._memory[SLOTS + slot] == 0
