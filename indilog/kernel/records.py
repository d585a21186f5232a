"""The record batch: one byte string from the function to the disk and back (ARCHITECTURE 7).

A batch has consecutive records of one shard as columns, so that tiers move batches instead of
looping over records. Layout, little endian, without padding:

    header   magic "ILRB", version u8, flags u8, logspace u16, shard u16, epoch u32, first localid
        u64, time u64 (µs since 1970), count u32, tags u32 (sum), names bytes u32, data bytes u32,
        columns CRC32C u32, data CRC32C u32, header CRC32C u32
    columns  tags u64 * sum · data ends u32 * count · names ends u32 * count · data CRC32Cs u32 *
        count · tag counts u8 * count · names (see `indilog.base.ids.tag_columns`)
    data     concatenated

The columns CRC covers the columns with the names. The data CRC covers all data, and each record's
own CRC covers its data. So damage to data affects only the damaged records, and their tags, names
and times stay readable (decision 0024). The first tag of a record is the tag of its log.

A batch is written and read whole, and cuts fall between batches only. So an `append_batch` is
atomic and its seqnums are consecutive. Compute nodes build batches with `BatchBuilder`. Storage
nodes and readers of whole logs decode them with `RecordBatch`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import (
    HASH_BYTES,
    LOG_NAME_BYTES_MAX,
    TAG_BYTES_MAX,
    Epoch,
    LocalId,
    ShardId,
    TagColumns,
)

MAGIC: Final = b"ILRB"
VERSION: Final = 2
_HEADER: Final = Struct("<4sBBHHIQQIIIIII")
_CRC: Final = Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
RECORD_OVERHEAD_BYTES: Final = 13
"""Bytes that a record adds to its batch besides its tags (8 each), names and data."""


def record_bytes(data: bytes, columns: TagColumns) -> int:
    """Return how many bytes a record adds to its batch."""
    tags, names = columns
    return len(data) + len(tags) + len(names) + RECORD_OVERHEAD_BYTES


def tags_bytes_max(tags_max: int) -> int:
    """Return the most bytes that a record with `tags_max` tags adds besides its data."""
    names = LOG_NAME_BYTES_MAX + tags_max * (TAG_BYTES_MAX + 2)
    return names + 8 * (tags_max + 1) + RECORD_OVERHEAD_BYTES


class BatchHeader(NamedTuple):
    """The fixed part of a batch; `first` is the localid of its first record."""

    logspace: int
    shard: ShardId
    epoch: Epoch
    first: LocalId
    time_us: int
    records: int
    tags: int
    names_bytes: int
    data_bytes: int
    columns_crc: int
    data_crc: int

    @property
    def end(self) -> LocalId:
        """The localid after the last record."""
        return self.first + self.records

    @property
    def body_bytes(self) -> int:
        """How many bytes follow the header."""
        return self.columns_bytes + self.data_bytes

    @property
    def columns_bytes(self) -> int:
        """How many bytes the columns take, with the names."""
        return 8 * self.tags + RECORD_OVERHEAD_BYTES * self.records + self.names_bytes


class RawRecord(NamedTuple):
    """One record of a batch, before it has a seqnum."""

    data: bytes
    names: bytes
    time_us: int


class BatchBuilder:
    """Collects records until they are packed; the open batch of a writer.

    Every append calls `add`, or inlines it for speed.

    Attributes:
        data: the data of each record. Callers keep this list, so it must not change after the batch
            is packed.
        columns: the tags and names of each record; at most 255 tags. The caller checks limits.
        names: the names of each record, after `build`.
    """

    __slots__ = ("columns", "data", "names")

    def __init__(self) -> None:
        self.data: list[bytes] = []
        self.columns: list[TagColumns] = []
        self.names: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        return len(self.data)

    def add(self, data: bytes, columns: TagColumns) -> None:
        """Add one record."""
        self.data.append(data)
        self.columns.append(columns)

    def build(
        self, *, shard: ShardId, epoch: Epoch, first: LocalId, time_us: int, logspace: int = 0
    ) -> bytes:
        """Pack the records, as localids `first` and up of `shard`."""
        assert self.data, "an empty batch has no place in a shard"
        tags, self.names = zip(*self.columns, strict=True)
        data_ends = array("I", accumulate(map(len, self.data)))
        names_ends = array("I", accumulate(map(len, self.names)))
        packed_tags = b"".join(tags)
        columns = b"".join(
            (
                packed_tags,
                data_ends,
                names_ends,
                array("I", map(crc32c, self.data)),
                bytes([len(own) // HASH_BYTES for own in tags]),
                *self.names,
            )
        )
        data = self.data[0] if len(self.data) == 1 else b"".join(self.data)
        header = BatchHeader(
            logspace, shard, epoch, first, time_us, len(data_ends),
            len(packed_tags) // HASH_BYTES, names_ends[-1], data_ends[-1], crc32c(columns),
            crc32c(data),
        )  # fmt: skip
        return packed_batch(header, columns, data)


def packed_batch(header: BatchHeader, columns: bytes, data: bytes | memoryview) -> bytes:
    """Return a batch, given its header, its columns with the names, and all data."""
    packed = _HEADER.pack(MAGIC, VERSION, 0, *header)
    return b"".join((packed, _CRC.pack(crc32c(packed)), columns, data))


def batch_header(buffer: bytes | memoryview) -> BatchHeader:
    """Read and check a batch's header. Of the body, only the length is checked.

    Raises:
        MalformedFrameError: too short, not a batch, of an unknown version, or of another length
            than its header states; or the header's CRC is wrong.
    """
    if len(buffer) < HEADER_BYTES:
        raise MalformedFrameError(f"{len(buffer)} bytes are too few for a record batch")
    magic, version, flags, *fields = _HEADER.unpack_from(buffer)
    if magic != MAGIC:
        raise MalformedFrameError("not a record batch")
    if version != VERSION or flags:
        raise MalformedFrameError(
            f"record batch of version {version}, flags {flags}: this reader knows {VERSION}, 0"
        )
    if _CRC.unpack_from(buffer, _HEADER.size)[0] != crc32c(bytes(buffer[: _HEADER.size])):
        raise MalformedFrameError("the header's CRC is wrong")
    header = BatchHeader(*fields)
    if HEADER_BYTES + header.body_bytes != len(buffer):
        raise MalformedFrameError(
            f"a record batch of {HEADER_BYTES + header.body_bytes} bytes came as {len(buffer)}"
        )
    return header


def header_crc_stated(batch: bytes) -> int:
    """Return the CRC in a batch's header, unchecked. It covers all other CRCs."""
    crc: int = _CRC.unpack_from(batch, _HEADER.size)[0]
    return crc


class RecordBatch:
    """A batch that was read, with verified CRCs; records are decoded on demand.

    Args:
        buffer: all of its bytes.
        partly: whether to accept a batch if only data is damaged.

    Attributes:
        damaged: indexes of the records whose data is damaged; only with `partly`.

    Raises:
        MalformedFrameError: as `batch_header`, or a CRC is wrong. With `partly`, a wrong CRC of the
            data is accepted.
    """

    __slots__ = (
        "_data_start", "_ends", "buffer", "damaged", "header",
    )  # fmt: skip

    def __init__(self, buffer: bytes, *, partly: bool = False) -> None:
        self.buffer = buffer
        self.header = header = batch_header(buffer)
        view = memoryview(buffer)
        self._data_start = HEADER_BYTES + header.columns_bytes
        if crc32c(view[HEADER_BYTES : self._data_start]) != header.columns_crc:
            raise MalformedFrameError("the CRC of the columns is wrong")
        self._ends: tuple[array[int], array[int]] | None = None
        self.damaged: frozenset[int] = frozenset()
        if crc32c(view[self._data_start :]) != header.data_crc:
            if not partly:
                raise MalformedFrameError("the CRC of the data is wrong")
            self.damaged = self._find_damaged()

    def _find_damaged(self) -> frozenset[int]:
        """Return the records whose data does not match its CRC; all records if each one matches."""
        count, crcs = self.header.records, HEADER_BYTES + 8 * (self.header.tags + len(self))
        stated = array("I", self.buffer[crcs : crcs + 4 * count])
        found = (crc32c(self.buffer[slice(*self._data_at(index))]) for index in range(count))
        damaged = frozenset(index for index, crc in enumerate(found) if crc != stated[index])
        return damaged or frozenset(range(count))

    @property
    def damaged_localids(self) -> list[LocalId]:
        """The records whose data is damaged, ascending."""
        return [self.header.first + index for index in sorted(self.damaged)]

    def _data_at(self, index: int) -> tuple[int, int]:
        start = self._data_start
        ends = self.ends[0]
        return start + (ends[index - 1] if index else 0), start + ends[index]

    def __len__(self) -> int:
        return self.header.records

    def record(self, index: int) -> RawRecord:
        """Return the record with localid `header.first + index`, whose data is intact."""
        assert index not in self.damaged, "damaged data never leaves its batch"
        data_from, data_end = self._data_at(index)
        return RawRecord(
            data=self.buffer[data_from:data_end],
            names=self.names(index),
            time_us=self.header.time_us,
        )

    def names(self, index: int) -> bytes:
        """Return the names of a record, which are intact."""
        start = HEADER_BYTES + 8 * self.header.tags + RECORD_OVERHEAD_BYTES * self.header.records
        ends = self.ends[1]
        return self.buffer[start + (ends[index - 1] if index else 0) : start + ends[index]]

    @property
    def ends(self) -> tuple[array[int], array[int]]:
        """Where the data and the names of each record end; must not be changed.

        Decoded on first use: an append does not use them.
        """
        if self._ends is None:
            count = self.header.records
            start = HEADER_BYTES + 8 * self.header.tags
            # From bytes: array() reads each byte of a memoryview as a number.
            self._ends = (
                array("I", self.buffer[start : start + 4 * count]),
                array("I", self.buffer[start + 4 * count : start + 8 * count]),
            )
        return self._ends

    @property
    def tag_counts(self) -> bytes:
        """The number of tags of each record; 0: the record is a tombstone, which only keeps its
        localid.
        """
        start = HEADER_BYTES + 8 * self.header.tags + 12 * self.header.records
        return self.buffer[start : start + self.header.records]

    def with_tombstones(self, dead: Sequence[bool]) -> bytes:
        """Return a batch of the same length in which dead records are tombstones. A tombstone has
        no tags, not even its log's, and no names or data.
        """
        builder = BatchBuilder()
        for index, (tags, is_dead) in enumerate(zip(self._packed_tags(), dead, strict=True)):
            if is_dead:
                builder.add(b"", TagColumns(b"", b""))
            else:
                raw = self.record(index)
                builder.add(raw.data, TagColumns(tags, raw.names))
        return self._built(builder)

    def with_data(self, changed: Mapping[int, bytes]) -> bytes:
        """Return the batch with other data of some records, by their index."""
        builder = BatchBuilder()
        for index, tags in enumerate(self._packed_tags()):
            raw = self.record(index)
            builder.add(changed.get(index, raw.data), TagColumns(tags, raw.names))
        return self._built(builder)

    def _packed_tags(self) -> Iterator[bytes]:
        """Yield the tags of each record."""
        at = HEADER_BYTES
        for count in self.tag_counts:
            end = at + HASH_BYTES * count
            yield self.buffer[at:end]
            at = end

    def _built(self, builder: BatchBuilder) -> bytes:
        header = self.header
        return builder.build(
            shard=header.shard,
            epoch=header.epoch,
            first=header.first,
            time_us=header.time_us,
            logspace=header.logspace,
        )

    def tag_columns(self) -> tuple[bytes, bytes]:
        """Return tag counts (u8 each record) and tags (u64 each), as the batch has them."""
        return (
            self.tag_counts,
            self.buffer[HEADER_BYTES : HEADER_BYTES + 8 * self.header.tags],
        )
