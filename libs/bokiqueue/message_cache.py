"""Caches the bytes of messages that a process has read and not yet delivered.

The memory is bounded, and the cache decides nothing: other bytes are read from the log again. Each
`QueueReplica` has one cache. Its `ShardState` objects fill the cache while they apply pushes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cachetools import LRUCache

from indilog.sdk import SeqNum

_BYTES_MAX: Final = 16 * 1024 * 1024
"""Memory in bytes for the cached messages of one queue in one process."""
_ENTRY_BYTES: Final = 300
"""Overhead of an entry in bytes (measured: 275)."""


class MessageCache:
    """The bytes of messages by seqnum; the least recently used entries are evicted first."""

    def __init__(self) -> None:
        self._data: LRUCache[SeqNum, bytes] = LRUCache(_BYTES_MAX, getsizeof=_size_of)

    def __len__(self) -> int:
        """Number of messages in the cache."""
        return len(self._data)

    def keep(self, seqnum: SeqNum, data: bytes) -> None:
        """Keep the message pushed at `seqnum`, unless its entry is larger than the cache."""
        if _size_of(data) <= _BYTES_MAX:
            self._data[seqnum] = data

    def take(self, seqnum: SeqNum) -> bytes | None:
        """Remove the bytes of a message from the cache and return them; None: not cached."""
        data: bytes | None = self._data.pop(seqnum, None)
        return data

    def get(self, seqnum: SeqNum) -> bytes | None:
        """Return the bytes of a message and keep them in the cache; None: not cached."""
        data: bytes | None = self._data.get(seqnum)
        return data

    def forget(self, seqnums: Iterable[SeqNum]) -> None:
        """Remove messages that will no longer be delivered."""
        for seqnum in seqnums:
            self._data.pop(seqnum, None)


def _size_of(data: bytes) -> int:
    return len(data) + _ENTRY_BYTES
