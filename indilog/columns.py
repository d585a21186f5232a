"""Long columns of integers as few bytes, which numpy reads at once (decision 0028).

Neighbours in a column of places, positions or times are close to each other, so each value is
stored as its difference to the one before it, in the narrowest type that fits, compressed. A column
of a million values that grow evenly takes a few kilobytes, one of times one or two bytes a value.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from indilog.errors import MalformedFrameError

Integers: TypeAlias = npt.NDArray[np.uint64]

_LAYOUT: Final = struct.Struct("<BBQ")
_VERSION: Final = 1
_FAST: Final = 1
_WIDTHS: Final = (1, 2, 4, 8)


def packed(column: Integers) -> bytes:
    """Return the bytes of a column of unsigned 64-bit integers, of any length."""
    signed: npt.NDArray[np.int64] = column.view(np.int64).copy()
    signed[1:] -= column.view(np.int64)[:-1]
    steps = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    largest = int(steps.max()) if len(steps) else 0
    width = next(width for width in _WIDTHS if largest < 1 << 8 * width)
    narrow = steps.astype(f"<u{width}")
    return _LAYOUT.pack(_VERSION, width, len(column)) + zlib.compress(narrow.tobytes(), _FAST)


def unpacked(buffer: bytes) -> Integers:
    """Return the column that `packed` made bytes of.

    Raises:
        MalformedFrameError: the bytes are of another version, or of no column.
    """
    try:
        version, width, count = _LAYOUT.unpack_from(buffer)
        if version != _VERSION or width not in _WIDTHS:
            raise MalformedFrameError(f"a column of version {version} and width {width}")
        raw = zlib.decompress(memoryview(buffer)[_LAYOUT.size :])
    except (struct.error, zlib.error) as error:
        raise MalformedFrameError(f"not a packed column: {error}") from error
    if len(raw) != width * count:
        raise MalformedFrameError(f"a column of {len(raw)} bytes that should have {width * count}")
    steps = np.frombuffer(raw, f"<u{width}").astype(np.uint64)
    signed = (steps >> np.uint64(1)).view(np.int64) ^ -(steps & np.uint64(1)).view(np.int64)
    return np.cumsum(signed, dtype=np.int64).view(np.uint64)


def copied(column: array[int]) -> Integers:
    """Return a copy of an array of unsigned integers, which later changes leave alone."""
    return np.frombuffer(column.tobytes(), f"<u{column.itemsize}").astype(np.uint64, copy=False)


def restored(typecode: str, column: Integers) -> array[int]:
    """Return an array of that type with the values of a column."""
    values = array(typecode)
    values.frombytes(column.astype(f"<u{values.itemsize}").tobytes())
    return values
