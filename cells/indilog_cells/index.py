"""The index of a log over cells: which seqnums have a tag, and which cell has a seqnum.

The index is a sequence of *generations*. The newest one is open: it is in memory, and grows with
each applied cell. It is closed at limits that are fixed for the log (`GenerationLimits`), so every
process closes the same generations. A closed generation is immutable and stored beside the cells
(`cells.Notes`); a read that needs it loads it. Its filter (a Bloom filter of its tags) stays in
memory, so most reads load only generations that have their tag.

`state` builds the index, and `lookups` reads it.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import SeqNum, TagHash
from indilog_cells.content import opened, sealed

_MAGIC: Final = b"ILCG"
_VERSION: Final = 1
_FILTER_BITS_PER_TAG: Final = 10
_FILTER_HASHES: Final = 5

assert sys.byteorder == "little", "arrays are stored in the byte order of the machine"


class GenerationLimits(NamedTuple):
    """When an open generation is closed. All processes of a log use the same limits.

    Attributes:
        records: it is closed after the cell with which it has this many records.
        cells: it is closed when it has this many cells. A process that opens the log reads fewer
            cells than this.
    """

    records: int = 65_536
    cells: int = 1_024


GENERATION_LIMITS: Final = GenerationLimits()
"""The default."""


class CellPlace(NamedTuple):
    """The place of a record.

    Attributes:
        position: its cell.
        item: number of an item of the cell, at or before the item of the record.
        offset: number of records from the beginning of `item` to the record.
    """

    position: int
    item: int
    offset: int


class CellTable:
    """The cells with records, by seqnum. A row stands for consecutive items of one cell, all of
    which took effect. An item whose condition failed ends a row.

    Attributes:
        positions: the cell of each row, ascending; a cell may have several rows.
        items: the first item of each row.
        firsts: seqnum of the first record of each row.
        times_us: when the records of each row were ordered, microseconds since 1970.
    """

    __slots__ = ("firsts", "items", "positions", "times_us")

    def __init__(self) -> None:
        self.positions = array("Q")
        self.items = array("Q")
        self.firsts = array("Q")
        self.times_us = array("Q")

    def add(self, position: int, item: int, first: SeqNum, time_us: int) -> None:
        """Add a row after all others."""
        if self.firsts:
            assert position >= self.positions[-1], "cells are applied in order"
            assert first > self.firsts[-1], "each row has a record"
            assert time_us >= self.times_us[-1], "the time of the log never decreases"
        self.positions.append(position)
        self.items.append(item)
        self.firsts.append(first)
        self.times_us.append(time_us)

    def place(self, seqnum: SeqNum) -> tuple[CellPlace, int]:
        """Return the place of a record that is in this table, and the time at which it was ordered
        (microseconds since 1970).
        """
        at = bisect_right(self.firsts, seqnum) - 1
        assert at >= 0, "the record is in this table"
        place = CellPlace(self.positions[at], self.items[at], seqnum - self.firsts[at])
        return place, self.times_us[at]

    def find_time(self, time_us: int) -> SeqNum | None:
        """Return the first seqnum ordered at `time_us` or later; None: there is none."""
        at = bisect_left(self.times_us, time_us)
        return self.firsts[at] if at < len(self.firsts) else None


class OpenGeneration:
    """The newest generation.

    Attributes:
        start: position of its first cell.
        first: the first seqnum that may be in it.
        cells: number of applied cells, including those without records.
        records: number of records.
        table: the cells that have records.
        streams: seqnums by tag, ascending.
    """

    def __init__(self, start: int, first: SeqNum) -> None:
        self.start, self.first = start, first
        self.cells = 0
        self.records = 0
        self.table = CellTable()
        self.streams: defaultdict[TagHash, array[SeqNum]] = defaultdict(lambda: array("Q"))

    def add(self, seqnum: SeqNum, tags: Iterable[TagHash]) -> None:
        """Add the next record."""
        assert seqnum == self.first + self.records, "seqnums are dense"
        for tag in tags:
            self.streams[tag].append(seqnum)
        self.records += 1

    def seqnums(self, tag: TagHash) -> array[SeqNum]:
        """Return the seqnums of a tag, ascending."""
        return self.streams.get(tag) or _NONE

    def is_complete(self, limits: GenerationLimits) -> bool:
        """Whether the generation is to be closed."""
        return self.records >= limits.records or self.cells >= limits.cells


_NONE: Final = array("Q")


class GenerationInfo(msgspec.Struct, frozen=True, array_like=True):
    """What stays in memory of a closed generation.

    Attributes:
        start, end: range of its cells (half-open).
        first, tail: range of its seqnums (half-open).
        first_us, last_us: when its first and its last record were ordered, microseconds since
            1970; 0: it has no records.
        filter: the Bloom filter of its tags.
    """

    start: int
    end: int
    first: SeqNum
    tail: SeqNum
    first_us: int
    last_us: int
    filter: bytes

    def may_have(self, tag: TagHash) -> bool:
        """Whether the generation may have records with `tag`. False is certain; True is wrong for
        about 1 tag in 100.
        """
        bits = self.filter
        return bool(bits) and all(bits[b >> 3] >> (b & 7) & 1 for b in _bits(tag, 8 * len(bits)))


def _bits(tag: TagHash, size: int) -> list[int]:
    low, high = tag & 0xFFFFFFFF, tag >> 32 | 1
    return [(low + n * high) % size for n in range(_FILTER_HASHES)]


def filter_of(tags: Iterable[TagHash], count: int) -> bytes:
    """Return the filter of `count` tags."""
    bits = bytearray((_FILTER_BITS_PER_TAG * count + 7) // 8)
    for tag in tags:
        for bit in _bits(tag, 8 * len(bits)):
            bits[bit >> 3] |= 1 << (bit & 7)
    return bytes(bits)


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A closed generation as stored; arrays are u64, little-endian.

    Attributes:
        positions, items, firsts, times_us: the columns of `CellTable`.
        tags: all tags, sorted.
        ends: for each tag, where its seqnums end in `seqnums`.
        seqnums: the seqnums of all tags, in the order of `tags`.
    """

    positions: bytes
    items: bytes
    firsts: bytes
    times_us: bytes
    tags: bytes
    ends: bytes
    seqnums: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


class Generation:
    """A closed generation in memory."""

    __slots__ = ("_ends", "_seqnums", "_tags", "size_bytes", "table")

    def __init__(self, stored: bytes) -> None:
        """Decode what `closed` returned.

        Raises:
            MalformedFrameError: the bytes are damaged, or of another version.
        """
        try:
            found = _decoder.decode(opened(_MAGIC, _VERSION, stored))
        except msgspec.MsgspecError as error:
            raise MalformedFrameError(f"no valid index: {error}") from error
        self.table = CellTable()
        self.table.positions = array("Q", found.positions)
        self.table.items = array("Q", found.items)
        self.table.firsts = array("Q", found.firsts)
        self.table.times_us = array("Q", found.times_us)
        self._tags, self._ends = array("Q", found.tags), array("Q", found.ends)
        self._seqnums = array("Q", found.seqnums)
        self.size_bytes = len(stored)

    def seqnums(self, tag: TagHash) -> array[SeqNum]:
        """Return the seqnums of a tag, ascending."""
        at = bisect_left(self._tags, tag)
        if at == len(self._tags) or self._tags[at] != tag:
            return _NONE
        return self._seqnums[self._ends[at - 1] if at else 0 : self._ends[at]]


def closed(generation: OpenGeneration, end: int, tail: SeqNum) -> tuple[GenerationInfo, bytes]:
    """Close a generation: return what stays in memory of it, and its bytes for the store.

    Args:
        generation: the open generation.
        end: the position after its last cell.
        tail: the seqnum after its last record.
    """
    assert generation.start + generation.cells == end, "each cell is counted once"
    assert generation.first + generation.records == tail, "seqnums are dense"
    tags = sorted(generation.streams)
    ends, seqnums = array("Q"), array("Q")
    for tag in tags:
        seqnums += generation.streams[tag]
        ends.append(len(seqnums))
    table = generation.table
    rows = (table.positions, table.items, table.firsts, table.times_us)
    columns = (*rows, array("Q", tags), ends, seqnums)
    stored = _Stored(*(column.tobytes() for column in columns))
    times = table.times_us
    info = GenerationInfo(
        generation.start, end, generation.first, tail, times[0] if times else 0,
        times[-1] if times else 0, filter_of(tags, len(tags)),
    )  # fmt: skip
    return info, sealed(_MAGIC, _VERSION, _encoder.encode(stored))
