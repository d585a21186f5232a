"""Which calls a worker has begun, in memory shared by a compute node and one worker.

A worker whose event loop is blocked answers no message, so the node cannot ask which calls it has
begun. Two bytes per call say so. The worker writes `begun`, then reads `revoked`. The node writes
`revoked`, and reads `begun` after `SETTLE_S`. The one that writes second reads the other's byte:
the worker does not run the call, or the node knows that the call may have begun. A store is visible
to all processors within far less than `SETTLE_S`.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

SLOTS: Final = 4096
"""Calls of one worker that can be revoked at once; further calls cannot be."""
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
    """The compute node's side: allocates slots, revokes calls."""

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
        """Tell whether the call may have begun. False is final `SETTLE_S` after `revoke`."""
        return slot == NO_SLOT or self._memory[slot] != 0

    def revoke(self, slot: int) -> None:
        """Prevent the worker from beginning the call, if it has not begun it."""
        if slot != NO_SLOT:
            self._memory[SLOTS + slot] = 1


class WorkerClaims:
    """The worker's side."""

    __slots__ = ("_memory",)

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)

    def begin(self, slot: int) -> bool:
        """Note that a call begins now; False: it was revoked and must not begin."""
        if slot == NO_SLOT:
            return True
        self._memory[slot] = 1
        return self._memory[SLOTS + slot] == 0
