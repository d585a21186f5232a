"""Packs columns of integers in compressed form, with numpy (docs/decisions/0028).

Neighbouring values in a column of seqnums, positions or times are close to each other. So a packed
column stores the differences between neighbours, in the narrowest type that fits, and compresses
them. A million evenly growing values take a few kilobytes; times take one or two bytes each.
Checkpoints of index nodes (`indilog_index`) and of storage nodes (`indilog_storage`) use packed
columns.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from indilog.base.errors import MalformedFrameError

Integers: TypeAlias = npt.NDArray[np.uint64]

Pack: TypeAlias = tuple[bytes, ...]
PACK_ROWS: Final = 1 << 16
_LAYOUT: Final = struct.Struct("<BBQQ")
_VERSION: Final = 1
_FAST: Final = 1
_WIDTHS: Final = (1, 2, 4, 8)


def packed(column: Integers) -> bytes:
    """Return the packed bytes of a column of unsigned 64-bit integers; the column may have any
    length.
    """
    first = int(column[0]) if len(column) else 0
    values = column.view(np.int64)
    signed: npt.NDArray[np.int64] = values[1:] - values[:-1]
    steps = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    largest = int(steps.max()) if len(steps) else 0
    width = next(width for width in _WIDTHS if largest < 1 << 8 * width)
    narrow = zlib.compress(steps.astype(f"<u{width}").tobytes(), _FAST)
    return _LAYOUT.pack(_VERSION, width, len(column), first) + narrow


def unpacked(buffer: bytes) -> Integers:
    """Return the column that `packed` encoded.

    Raises:
        MalformedFrameError: the bytes have another version, or are not a packed column.
    """
    try:
        version, width, count, first = _LAYOUT.unpack_from(buffer)
        if version != _VERSION or width not in _WIDTHS:
            raise MalformedFrameError(f"a column of version {version} and width {width}")
        raw = zlib.decompress(memoryview(buffer)[_LAYOUT.size :])
    except (struct.error, zlib.error) as error:
        raise MalformedFrameError(f"not a packed column: {error}") from error
    if len(raw) != width * max(0, count - 1):
        raise MalformedFrameError(f"a column of {len(raw)} bytes that should have {width * count}")
    steps = np.frombuffer(raw, f"<u{width}").astype(np.uint64)
    values = np.empty(count, np.uint64)
    values[:1] = first
    signed = values[1:].view(np.int64)
    signed[:] = (steps >> np.uint64(1)).view(np.int64) ^ -(steps & np.uint64(1)).view(np.int64)
    return np.cumsum(values.view(np.int64), dtype=np.int64).view(np.uint64)


class Packs:
    """Packs columns of equal length. The columns change mostly at their end, so an unchanged row is
    packed only once.

    Copying rows for a checkpoint blocks the event loop. So `copied` copies only rows that are in no
    pack yet or have changed since they were packed. A pack covers `PACK_ROWS` rows. It contains one
    packed column (`packed`) for each column.
    """

    __slots__ = ("_changed_from", "_copies", "_made", "_packs")

    def __init__(self) -> None:
        self._packs: list[Pack] = []
        self._copies = 0
        self._changed_from = 0
        """The first row that was changed or added since the last copy."""
        self._made: tuple[int, list[Pack]] = 0, []
        """The result of the thread that packed a copy: the number of the copy, and all complete
        packs.
        """

    def changed(self, row: int) -> None:
        """Note that the rows from `row` on have changed or were removed."""
        self._changed_from = min(self._changed_from, row)

    def copied(self, columns: Sequence[array[int]]) -> Callable[[], tuple[Pack, ...]]:
        """Copy the rows that are in no pack yet. Return a function that packs the copied rows and
        returns all packs. The function may run in any thread.
        """
        number, made = self._made
        packs = made if number == self._copies else self._packs
        self._packs = kept = packs[: self._changed_from // PACK_ROWS]
        self._copies += 1
        self._changed_from = len(columns[0])
        copy = self._copies
        start = PACK_ROWS * len(kept)
        parts = [memoryview(column)[start:].tobytes() for column in columns]
        types = [f"<u{column.itemsize}" for column in columns]

        def encoded() -> tuple[Pack, ...]:
            fresh = [np.frombuffer(part, kind) for part, kind in zip(parts, types, strict=True)]
            rows = len(fresh[0])
            # `tuple` of a generator fails if another thread refers to the unfinished tuple, as
            # `gc.get_objects` of a memory profiler does (CPython issue 59313).
            packs = [
                tuple([packed(f[at : at + PACK_ROWS].astype(np.uint64)) for f in fresh])
                for at in range(0, rows, PACK_ROWS)
            ]
            self._made = copy, kept + packs[: rows // PACK_ROWS]
            return (*kept, *packs)

        return encoded

    def restore(self, packs: Sequence[Pack], typecodes: Sequence[str]) -> list[array[int]]:
        """Restore the columns from packed ones, and return them.

        Raises:
            MalformedFrameError: the columns have another version.
        """
        columns = [array(typecode) for typecode in typecodes]
        for pack in packs:
            for column, part in zip(columns, pack, strict=True):
                column.frombytes(unpacked(part).astype(f"<u{column.itemsize}").tobytes())
        self._changed_from = len(columns[0])
        self._packs = list(packs[: self._changed_from // PACK_ROWS])
        self._made = self._copies, self._packs
        return columns
