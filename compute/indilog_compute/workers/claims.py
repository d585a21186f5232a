"""Shows which calls a worker has begun, in memory shared by a compute node and one worker.

A worker with a blocked event loop answers no message, so the node cannot ask which calls it has
begun. Instead, each call has two bytes. The worker writes `begun`, then reads `revoked`. The node
writes `revoked`, and reads `begun` after `VISIBLE_S`. The process that writes second sees the byte
of the other process. So either the worker does not run the call, or the node knows that the call
may have begun. A store becomes visible to all processors in far less than `VISIBLE_S`.

`process` has the node's side, `starting.worker_process` the worker's side.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

SLOTS: Final = 4096
"""Largest number of revocable calls of one worker; further calls cannot be revoked."""
NO_SLOT: Final = 0
VISIBLE_S: Final = 0.02
_BYTES: Final = 2 * SLOTS


def claims_memory() -> int:
    """Return a file descriptor of zeroed shared memory; the caller closes it.

    Raises:
        OSError: not enough memory.
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
        """Return a free slot for a call; `NO_SLOT` if none is free."""
        return self._free.pop() if self._free else NO_SLOT

    def free(self, slot: int) -> None:
        """Free the slot of a call that the worker has answered."""
        if slot != NO_SLOT:
            assert NO_SLOT < slot < SLOTS, "`allocate` returned the slot"
            self._memory[slot] = self._memory[SLOTS + slot] = 0
            self._free.append(slot)
            assert len(self._free) < SLOTS, "a slot is freed once"

    def is_begun(self, slot: int) -> bool:
        """Tell whether the call may have begun. If the answer is False at least `VISIBLE_S` seconds
        after `revoke`, the call never begins.
        """
        return slot == NO_SLOT or self._memory[slot] != 0

    def revoke(self, slot: int) -> None:
        """Prevent the worker from beginning the call, unless it has begun."""
        if slot != NO_SLOT:
            self._memory[SLOTS + slot] = 1


class WorkerClaims:
    """The worker's side."""

    __slots__ = ("_memory",)

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)

    def begin(self, slot: int) -> bool:
        """Mark a call as begun; False: the call was revoked, and must not begin."""
        if slot == NO_SLOT:
            return True
        self._memory[slot] = 1
        return self._memory[SLOTS + slot] == 0
