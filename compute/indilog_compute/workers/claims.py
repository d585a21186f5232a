"""Shows which calls a worker has begun, in memory that a compute node shares with the worker.

A worker with a blocked event loop answers no message, so the node cannot ask which calls the worker
has begun. Instead, each call has two bytes. The worker writes `begun`, then reads `revoked`. The
node writes `revoked`, and reads `begun` after `VISIBLE_S` (0.02 s). A store becomes visible to all
processors in far less time. So the process that writes second sees the byte of the other process:
either the worker does not run the call, or the node knows that the call may have begun.

`process` makes the node's side (`NodeClaims`), which `CallRouter` uses. `starting.worker_process`
makes the worker's side (`WorkerClaims`), which `WorkerRunner` uses.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

SLOTS: Final = 4096
"""Number of slots of one worker. Slot 0 is `NO_SLOT`, so 4,095 calls can be revoked at a time; any
further call has `NO_SLOT` and cannot be revoked.
"""
NO_SLOT: Final = 0
VISIBLE_S: Final = 0.02
_BYTES: Final = 2 * SLOTS


def claims_memory() -> int:
    """Return a file descriptor of zeroed shared memory, which the caller closes.

    Raises:
        OSError: there is not enough memory.
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
        """Return a free slot for a call; `NO_SLOT` if no slot is free."""
        return self._free.pop() if self._free else NO_SLOT

    def free(self, slot: int) -> None:
        """Free the slot of a call that the worker has answered."""
        if slot != NO_SLOT:
            assert NO_SLOT < slot < SLOTS, "`allocate` returned the slot"
            self._memory[slot] = self._memory[SLOTS + slot] = 0
            self._free.append(slot)
            assert len(self._free) < SLOTS, "a slot is freed once"

    def is_begun(self, slot: int) -> bool:
        """Whether the call in a slot may have begun. If the answer is False at least `VISIBLE_S`
        seconds after `revoke`, the call never begins.
        """
        return slot == NO_SLOT or self._memory[slot] != 0

    def revoke(self, slot: int) -> None:
        """Prevent the worker from beginning the call in a slot, unless the call has begun."""
        if slot != NO_SLOT:
            self._memory[SLOTS + slot] = 1


class WorkerClaims:
    """The worker's side: marks calls as begun."""

    __slots__ = ("_memory",)

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _BYTES)

    def begin(self, slot: int) -> bool:
        """Mark the call in a slot as begun; False: the call was revoked, and must not begin."""
        if slot == NO_SLOT:
            return True
        self._memory[slot] = 1
        return self._memory[SLOTS + slot] == 0
