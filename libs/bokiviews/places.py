"""Places: what a command writes and a transaction reads, as digests.

A command writes some keys of an object, or the whole object. A transaction reads keys, or whole
objects. A read of a key conflicts with writes of this key and of the whole object. A read of the
whole object conflicts with every write of the object. `Part` and `ViewObject` make places;
`ViewsState` decides by `RecentWrites`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

import msgspec

from bokiviews.errors import InvalidValueError
from bokiviews.records import DIGEST_BYTES, Digest
from indilog.sdk import SeqNum

Key: TypeAlias = str | int
"""A key of a map, or a member of a set."""
RECENT_MAX: Final = 16_384
"""Number of places whose last write is known. Part of the format: all processes must decide alike.
"""
_INTEGER_MIN: Final = -(2**63)
_INTEGER_END: Final = 2**64

_encode: Final = msgspec.msgpack.Encoder().encode


class ObjectPlaces(NamedTuple):
    """The places of an object as a whole.

    Attributes:
        whole: written by each command that names no keys.
        any: written by each command.
    """

    whole: Digest
    any: Digest


def check_key(key: object) -> Key:
    """Return a key, if it is valid.

    Raises:
        InvalidValueError: it is not text or an integer of 64 bits.
    """
    if type(key) is int and _INTEGER_MIN <= key < _INTEGER_END:
        return key
    if type(key) is str:
        return key
    raise InvalidValueError(
        f"A key must be text or an integer of 64 bits, not {key!r:.64} "
        f"of type {type(key).__name__}."
    )


def place_of_key(name: str, key: Key) -> Digest:
    """Return the place of a key of the object `name`."""
    return _digest((name, key))


def places_of_object(name: str) -> ObjectPlaces:
    """Return the places of the object `name` as a whole."""
    return ObjectPlaces(_digest((name,)), _digest((name, None)))


def _digest(place: tuple[Key | None, ...]) -> Digest:
    return hashlib.blake2b(_encode(place), digest_size=DIGEST_BYTES).digest()


class RecentWrites:
    """The last write of each of the last `RECENT_MAX` places that were written.

    These writes follow from the records alone, not from the contents of objects. So a process can
    also decide transactions about objects that it does not host.

    Args:
        writes: places and the seqnums of their last writes, ascending.
        floor: seqnum of the last write that is no longer known; -1: all are known. Places without a
            known write count as written at `floor`. So a transaction that began too long ago
            conflicts.
    """

    def __init__(self, writes: Iterable[tuple[Digest, SeqNum]] = (), floor: int = -1) -> None:
        self._last = OrderedDict(writes)
        self.floor = floor

    def __len__(self) -> int:
        return len(self._last)

    def note(self, place: Digest, seqnum: SeqNum) -> None:
        """Note that the record at `seqnum`, the newest one, wrote a place."""
        self._last[place] = seqnum
        self._last.move_to_end(place)
        if len(self._last) > RECENT_MAX:
            self.floor = self._last.popitem(last=False)[1]

    def is_written(self, places: Iterable[Digest], horizon: SeqNum) -> bool:
        """Whether one of the places was, or may have been, written at or after `horizon`."""
        last, floor = self._last, self.floor
        return any(last.get(place, floor) >= horizon for place in places)

    def snapshot(self) -> tuple[bytes, tuple[SeqNum, ...]]:
        """Return the known writes: the places, joined, and the seqnums of the writes."""
        return b"".join(self._last), tuple(self._last.values())
