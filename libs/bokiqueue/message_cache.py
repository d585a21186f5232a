"""A cache of message bytes that a process has read and not yet delivered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cachetools import LRUCache

from indilog.sdk import SeqNum

_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of messages that a queue keeps in memory for its consumers; other messages are read
again.
"""
_ENTRY_BYTES: Final = 300
"""Overhead of an entry in bytes (measured: 275)."""


class MessageCache:
    """The bytes of messages, in bounded memory; the oldest messages are evicted first."""

    def __init__(self) -> None:
        self._data: LRUCache[SeqNum, bytes] = LRUCache(_BYTES_MAX, getsizeof=_size_of)

    def __len__(self) -> int:
        """Number of messages in the cache."""
        return len(self._data)

    def keep(self, seqnum: SeqNum, data: bytes) -> None:
        """Keep the message pushed at `seqnum`, unless it is larger than the cache."""
        if _size_of(data) <= _BYTES_MAX:
            self._data[seqnum] = data

    def take(self, seqnum: SeqNum) -> bytes | None:
        """Remove and return the bytes of a message; None: the message is not cached."""
        data: bytes | None = self._data.pop(seqnum, None)
        return data

    def get(self, seqnum: SeqNum) -> bytes | None:
        """Return the bytes of a message, which stay in the cache; None: it is not cached."""
        data: bytes | None = self._data.get(seqnum)
        return data

    def forget(self, seqnums: Iterable[SeqNum]) -> None:
        """Remove messages that will no longer be delivered."""
        for seqnum in seqnums:
            self._data.pop(seqnum, None)


def _size_of(data: bytes) -> int:
    return len(data) + _ENTRY_BYTES
