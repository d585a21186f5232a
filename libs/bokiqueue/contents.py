"""The bytes of messages that a process has read and not yet delivered, as far as there is room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cachetools import LRUCache

from indilog.sdk import SeqNum

_BYTES_MAX: Final = 16 * 1024 * 1024
"""What a queue keeps in memory for its consumers; the rest is read again."""
_ENTRY_BYTES: Final = 300
"""What an entry takes beside its bytes (measured: 275)."""


class Contents:
    """Bounded in memory, however small the messages are; what came first goes first."""

    def __init__(self) -> None:
        self._data: LRUCache[SeqNum, bytes] = LRUCache(_BYTES_MAX, getsizeof=_size_of)

    def __len__(self) -> int:
        """How many messages it has."""
        return len(self._data)

    def keep(self, seqnum: SeqNum, data: bytes) -> None:
        """Keep what was pushed at `seqnum`, if it fits at all."""
        if _size_of(data) <= _BYTES_MAX:
            self._data[seqnum] = data

    def take(self, seqnum: SeqNum) -> bytes | None:
        """Return and forget the bytes of a message, None: they are not here."""
        data: bytes | None = self._data.pop(seqnum, None)
        return data

    def forget(self, seqnums: Iterable[SeqNum]) -> None:
        """Forget messages that will not be delivered any more."""
        for seqnum in seqnums:
            self._data.pop(seqnum, None)


def _size_of(data: bytes) -> int:
    return len(data) + _ENTRY_BYTES
