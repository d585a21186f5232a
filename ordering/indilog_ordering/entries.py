"""Metalog entries in memory: the newest as objects, older ones packed.

An entry takes about 600 bytes as an object. A *pack* is a compressed group of consecutive entries,
in which an entry takes 6 to 12 bytes. A pack is decoded when a lagging reader requests its entries.
The first pack is dropped when a base replaces its entries (`indilog.kernel.metalog.Base`).

`StoredMetalog` owns the one `Entries` of a sequencer.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final

import msgspec
from cachetools import LRUCache

from indilog.base.ids import Epoch, MetalogPosition
from indilog.kernel.metalog import Entry, decode_entries, encode_entries

PAGE: Final = 512
"""Entries in a pack."""
UNPACKED_MIN: Final = 2048
"""Smallest number of newest entries that stay unpacked. With default settings, fewer entries may be
in flight.
"""
_PAGES_CACHED: Final = 4
_FAST: Final = 1


class PackedEntries(msgspec.Struct, frozen=True, array_like=True):
    """All entries, as checkpoints hold them: packs of `page` entries each from position `start` on,
    then the newest.
    """

    start: MetalogPosition
    page: int
    packed: tuple[bytes, ...]
    last_epochs: bytes
    newest: bytes


class Entries:
    """Entries at dense positions, with ascending epochs.

    Args:
        page: entries in a pack.
        unpacked_min: newest entries that are not packed.

    Attributes:
        start: the position of the first entry.
    """

    __slots__ = (
        "_cached", "_last_epochs", "_newest", "_packed", "_page", "_unpacked_min", "start",
    )  # fmt: skip

    def __init__(self, *, page: int = PAGE, unpacked_min: int = UNPACKED_MIN) -> None:
        self.start: MetalogPosition = 0
        self._page = page
        self._unpacked_min = unpacked_min
        self._packed: list[bytes] = []
        self._last_epochs = array("Q")
        """The epoch of the last entry of each pack."""
        self._newest: list[Entry] = []
        self._cached: LRUCache[int, tuple[Entry, ...]] = LRUCache(_PAGES_CACHED)

    @property
    def end(self) -> MetalogPosition:
        """The position after the last entry."""
        return self.start + len(self._packed) * self._page + len(self._newest)

    def __getitem__(self, position: MetalogPosition) -> Entry:
        index = position - self.start - len(self._packed) * self._page
        if index >= 0:
            return self._newest[index]
        assert self.start <= position, "there is an entry"
        number = self._number(position)
        return self._at(number)[position - self._first(number)]

    def _number(self, position: MetalogPosition) -> int:
        """Return the index of the pack with `position`. If `position` is among the newest entries,
        return the number of packs.
        """
        return min((position - self.start) // self._page, len(self._packed))

    def _first(self, number: int) -> MetalogPosition:
        return self.start + number * self._page

    def between(self, start: MetalogPosition, end: MetalogPosition) -> tuple[Entry, ...]:
        """Return the existing entries of [start, end)."""
        return tuple(self.iterate(start, end))

    def iterate(self, start: MetalogPosition, end: MetalogPosition) -> Iterator[Entry]:
        """Yield the existing entries of [start, end); decodes one pack at a time.

        The entries must not change during the iteration.
        """
        assert start >= self.start, "a base replaces the entries below `start`"
        return chain.from_iterable(self._slices(start, min(end, self.end)))

    def append(self, entry: Entry) -> None:
        """Add the next entry."""
        self._newest.append(entry)
        if len(self._newest) >= self._unpacked_min + self._page:
            pack, self._newest = self._newest[: self._page], self._newest[self._page :]
            self._packed.append(zlib.compress(encode_entries(pack), _FAST))
            self._last_epochs.append(pack[-1].epoch)

    def cut_off(self, end: MetalogPosition) -> None:
        """Remove the entries from `end` on."""
        assert self.start <= end <= self.end, "only existing entries can be cut off"
        number = self._number(end)
        self._newest = list(self._at(number)[: end - self._first(number)])
        del self._packed[number:], self._last_epochs[number:]
        self._cached.clear()

    def restart(self, start: MetalogPosition) -> None:
        """Remove all entries; the next entry is at `start`."""
        self._packed, self._last_epochs, self._newest = [], array("Q"), []
        self._cached.clear()
        self.start = start

    @property
    def first_pack_end(self) -> MetalogPosition | None:
        """The position after the entries that `drop_pack` would drop; None: there is no pack."""
        return self._first(1) if self._packed else None

    def drop_pack(self) -> None:
        """Drop the entries of the first pack."""
        assert self._packed, "the newest entries stay"
        del self._packed[0], self._last_epochs[0]
        self.start += self._page
        self._cached.clear()

    def end_older(self, epoch: Epoch) -> MetalogPosition:
        """Return the position after the last entry of an earlier epoch, or `start`."""
        number = bisect_left(self._last_epochs, epoch)
        return self._first(number) + bisect_left(self._at(number), epoch, key=_epoch_of)

    def end_not_newer(self, epoch: Epoch) -> MetalogPosition:
        """Return the position after the last entry of `epoch` or an earlier epoch, or `start`."""
        number = bisect_right(self._last_epochs, epoch)
        return self._first(number) + bisect_right(self._at(number), epoch, key=_epoch_of)

    def copied(self) -> Callable[[], PackedEntries]:
        """Copy all entries; the returned function packs the copy and may run in any thread."""
        packed, epochs, newest = tuple(self._packed), self._last_epochs.tobytes(), [*self._newest]
        start, page = self.start, self._page
        return lambda: PackedEntries(start, page, packed, epochs, encode_entries(newest))

    def restore(self, entries: PackedEntries) -> None:
        """Replace all entries by those of a checkpoint.

        Raises:
            MalformedFrameError: an entry is of a version that this release does not know.
        """
        self.start, self._page = entries.start, entries.page
        self._packed = list(entries.packed)
        self._last_epochs = array("Q", entries.last_epochs)
        self._newest = list(decode_entries(entries.newest))
        self._cached.clear()

    def _slices(self, start: MetalogPosition, end: MetalogPosition) -> Iterator[Sequence[Entry]]:
        """Yield the entries of [start, end), grouped by pack."""
        while start < end:
            number = self._number(start)
            first = self._first(number)
            entries = self._at(number)[start - first : end - first]
            yield entries
            start += len(entries)

    def _at(self, number: int) -> Sequence[Entry]:
        """Return the entries of a pack; for the number after the last pack, the newest entries."""
        if number == len(self._packed):
            return self._newest
        page = self._cached.get(number)
        if page is None:
            page = self._cached[number] = decode_entries(zlib.decompress(self._packed[number]))
        return page


def _epoch_of(entry: Entry) -> Epoch:
    return entry.epoch
