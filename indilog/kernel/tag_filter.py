"""A Bloom filter over tags (B. H. Bloom, CACM 13(7), 1970).

The answer "no" is always right. The answer "yes" is wrong for about one in a hundred tags that were
never added. A tag sets `PROBES` bits, found by double hashing (Kirsch and Mitzenmacher, ESA 2006).
The number of bits is a power of two. So a filter that was built for more tags than were added can
be folded: its halves are combined, and the bits of a tag are then found modulo the smaller size.
Index snapshots (`indilog.kernel.index_snapshot`) contain a filter of their tags.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import TagHash

PROBES: Final = 7
BITS_PER_TAG: Final = 10
"""A filter is folded while it has at least twice as many bits for each added tag."""
_BITS_MIN: Final = 64
_BITS_MAX: Final = 1 << 32
_MIX: Final = 0x9E3779B97F4A7C15
"""Spreads tags that differ in few bits (Knuth, TAOCP 3, 6.4)."""
_WORD: Final = (1 << 64) - 1
_LOW: Final = 0xFFFFFFFF


class TagFilter:
    """A set of tags, which may also contain tags that were not added (false positives).

    Args:
        bits: eight to a byte, the lowest bit first; their number is a power of two, at least 64.
    """

    __slots__ = ("_bits", "_mask")

    def __init__(self, bits: bytes) -> None:
        if not is_filter(bits):
            raise ValueError(f"A filter has a power of two of bits, not {8 * len(bits)}.")
        self._bits = bits
        self._mask = 8 * len(bits) - 1

    @classmethod
    def of(cls, tags: NDArray[np.uint64]) -> TagFilter:
        """Return a filter of these tags."""
        builder = TagFilterBuilder(len(tags), bytes_max=len(tags) * BITS_PER_TAG + _BITS_MIN)
        builder.add(np.unique(tags))
        return builder.built()

    @property
    def bits(self) -> bytes:
        """The filter as it is stored."""
        return self._bits

    def may_hold(self, tag: TagHash) -> bool:
        """Return whether the tag may have been added; False: it was not."""
        bits, mask = self._bits, self._mask
        mixed = tag * _MIX & _WORD
        place, step = mixed & _LOW, mixed >> 32 | 1
        for _ in range(PROBES):
            at = place & mask
            if not bits[at >> 3] >> (at & 7) & 1:
                return False
            place += step
        return True


class TagFilterBuilder:
    """Makes a filter of tags whose number is not known before.

    Args:
        tags_max: about the largest number of tags that are added; with more tags, false positives
            are more frequent.
        bytes_max: the largest size; the size is a power of two at or below it.
    """

    def __init__(self, tags_max: int, *, bytes_max: int) -> None:
        bits = _BITS_MIN
        bits_max = min(8 * bytes_max, _BITS_MAX)
        while bits < BITS_PER_TAG * tags_max and 2 * bits <= bits_max:
            bits *= 2
        self._bytes: NDArray[np.uint8] = np.zeros(bits // 8, np.uint8)
        self._tags = 0

    def add(self, tags: NDArray[np.uint64]) -> None:
        """Add tags, each of them once."""
        self._tags += len(tags)
        mixed = tags * np.uint64(_MIX)
        place, step = mixed & np.uint64(_LOW), mixed >> np.uint64(32) | np.uint64(1)
        mask = np.uint64(8 * len(self._bytes) - 1)
        for _ in range(PROBES):
            at = place & mask
            bit = (np.uint64(1) << (at & np.uint64(7))).astype(np.uint8)
            np.bitwise_or.at(self._bytes, (at >> np.uint64(3)).astype(np.intp), bit)
            place += step

    def built(self) -> TagFilter:
        """Return the filter, folded as far as allowed."""
        found = self._bytes
        while len(found) * 8 >= max(2 * _BITS_MIN, 2 * BITS_PER_TAG * self._tags):
            half = len(found) // 2
            found = found[:half] | found[half:]
        assert len(found) * 8 >= _BITS_MIN, "a filter is not folded below the smallest size"
        return TagFilter(found.tobytes())


def is_filter(bits: bytes) -> bool:
    """Return whether these bytes can be a stored filter."""
    count = 8 * len(bits)
    return _BITS_MIN <= count <= _BITS_MAX and count & (count - 1) == 0
