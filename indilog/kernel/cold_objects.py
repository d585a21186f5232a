"""The content of an object on cold storage: a Parquet file with a row for each record (decision
0039, docs/FORMATS.md).

Its first columns are those of the Spark source, so that any program that reads Parquet can use it.
From the other columns, a reader rebuilds each record batch, byte for byte. The columns state the
CRC of the batch's header, which covers the whole batch. So a rebuilt batch either has this CRC and
equals the one that was written, or it is damaged.

A row group holds whole batches: it ends with the batch that reaches `GROUP_BYTES` or
`GROUP_RECORDS`. A reader fetches the end of the object once and then one row group at a time.
`indilog.runtime.cold_store` and `indilog_pipeline` write and read objects.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from crc32c import crc32c
from numpy.typing import NDArray

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, LocalId, ShardId
from indilog.kernel.batch_columns import BatchColumns, Expected
from indilog.kernel.cold import VERSION, ColdBatch, ColdTags
from indilog.kernel.record_arrays import RECORD_FIELDS, RecordArrays, strings, times
from indilog.kernel.records import (
    BatchHeader,
    batch_header,
    header_crc_stated,
    packed_batch,
)

GROUP_BYTES: Final = 512 * 1024
GROUP_RECORDS: Final = 8192
"""A row group ends with the batch that reaches one of these limits."""
_VERSION_KEY: Final = b"indilog.cold_object.version"
_INFO_KEY: Final = b"indilog.cold_object.info"
_TAIL_BYTES: Final = 64 * 1024
"""Bytes at the end of an object that are read first; the footer is usually among them."""
_FOOTER_END_BYTES: Final = 8
_MAGIC: Final = b"PAR1"
_SEPARATOR: Final = "\x1f"

pc: Final[Any] = pyarrow.compute
"""Untyped, because the published types lack variants that are used here."""
_FIELDS: Final[list[pa.Field[Any]]] = [
    *RECORD_FIELDS,
    pa.field("tag_kinds", pa.string()),
    pa.field("log_tag", pa.int64()),
    pa.field("checksum", pa.int64()),
    pa.field("epoch", pa.int64()),
    pa.field("batch", pa.int64()),
    pa.field("batch_checksum", pa.int64()),
]
_SCHEMA: Final = pa.schema(_FIELDS)
_DICTIONARIES: Final[Any] = ["log", "tag_kinds", "tag_names.list.element", "log_tag"]
_STATISTICS: Final = ["seqnum", "ordered_at", "time", "log", "localid", "position"]

ReadAt = Callable[[int, int], bytes]
"""Returns bytes of an object, given their offset and number; its errors are not caught."""


class _Group(msgspec.Struct, frozen=True, array_like=True):
    """A row group: its bytes, their CRC, and its first and last localid."""

    offset: int
    size: int
    crc: int
    first: LocalId
    last: LocalId


class _Info(msgspec.Struct, frozen=True):
    """What the object holds."""

    logspace: int
    shard: ShardId
    groups: tuple[_Group, ...]


class EncodedObject(NamedTuple):
    """The bytes of an object, and the CRC of their end, which the name of the object states."""

    content: bytes
    footer_crc: int


# --- writing


def encode_object(batches: Sequence[ColdBatch]) -> EncodedObject:
    """Return an object of consecutive batches of one shard.

    Before the object is returned, every batch is decoded from it and compared.

    Raises:
        MalformedFrameError: a batch is damaged, or cannot be built again from its columns.
    """
    headers = [batch_header(batch.payload) for batch in batches]
    logspace, shard = headers[0].logspace, headers[0].shard
    if any((header.logspace, header.shard) != (logspace, shard) for header in headers):
        raise MalformedFrameError("the batches of an object are of one shard")
    columns = BatchColumns([memoryview(b.payload) for b in batches], _expected(headers))
    if len(columns.damaged) or columns.damaged_data():
        raise MalformedFrameError("a batch for an object is damaged")
    table = pa.Table.from_arrays(_arrays(columns, batches), schema=_SCHEMA)
    sink = io.BytesIO()
    groups: list[_Group] = []
    with pq.ParquetWriter(
        sink,
        _SCHEMA.with_metadata({_VERSION_KEY: str(VERSION).encode()}),
        compression="zstd",
        use_dictionary=_DICTIONARIES,
        write_statistics=_STATISTICS,
        write_page_checksum=True,
    ) as writer:
        row = 0
        for rows in _groups(columns.records, batches):
            offset = sink.tell()
            part = table.slice(row, rows)
            writer.write_table(part, row_group_size=rows)
            written = sink.getbuffer()[offset:]
            localids = part["localid"]
            first, last = int(localids[0].as_py()), int(localids[-1].as_py())
            groups.append(_Group(offset, len(written), crc32c(written), first, last))
            del written
            row += rows
        info = msgspec.json.encode(_Info(logspace, shard, tuple(groups))).decode()
        writer.add_key_value_metadata({_INFO_KEY.decode(): info})
    content = sink.getvalue()
    encoded = EncodedObject(content, crc32c(content[-_footer_bytes(content) :]))
    _check_same(encoded, batches)
    return encoded


def _expected(headers: Sequence[BatchHeader]) -> Expected:
    return Expected(
        np.array([header.shard for header in headers], np.uint16),
        np.array([header.first for header in headers], np.uint64),
        np.array([header.records for header in headers], np.int64),
    )


def _arrays(columns: BatchColumns, batches: Sequence[ColdBatch]) -> list[pa.Array[Any]]:
    """Return all columns of an object."""
    count = columns.records
    index = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)

    def of_each(values: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
        return np.repeat(np.asarray(values, np.int64), count)

    headers = [batch_header(batch.payload) for batch in batches]
    firsts = of_each([header.first for header in headers])
    records = RecordArrays(columns)
    is_tombstone = columns.tag_counts == 0
    log_tags = np.zeros(len(index), np.int64)
    log_tags[~is_tombstone] = columns.tags[records.log_tags()].view(np.int64)
    return [
        pa.array(of_each([batch.seqnum for batch in batches]) + index),
        times(of_each([batch.ordered_us for batch in batches])),
        times(of_each([header.time_us for header in headers])),
        pc.if_else(pa.array(~is_tombstone), records.logs(), pa.scalar(None, pa.string())),
        records.tags(),
        records.tag_names(),
        records.data(),
        pa.array(of_each([header.shard for header in headers]).astype(np.int32)),
        pa.array(firsts + index),
        pa.array(of_each([batch.position for batch in batches])),
        records.tag_kinds(),
        pa.array(log_tags, mask=is_tombstone),
        pa.array(columns.data_crcs()),
        pa.array(of_each(columns.epochs())),
        pa.array(firsts),
        pa.array(of_each(columns.header_crcs())),
    ]


def _groups(records: NDArray[np.int64], batches: Sequence[ColdBatch]) -> Iterator[int]:
    """Yield how many records each row group has."""
    rows = size = 0
    for count, batch in zip(records.tolist(), batches, strict=True):
        rows += count
        size += len(batch.payload)
        if rows >= GROUP_RECORDS or size >= GROUP_BYTES:
            yield rows
            rows = size = 0
    if rows:
        yield rows


def _check_same(encoded: EncodedObject, batches: Sequence[ColdBatch]) -> None:
    """Check that the batches decoded from an object equal those from which it was made."""
    content, crc = encoded
    reader = ObjectReader(len(content), crc, lambda offset, size: content[offset : offset + size])
    found = [b for group in range(reader.groups) for b in reader.batches(group).values()]
    if found != [batch.payload for batch in batches]:
        raise MalformedFrameError("a batch cannot be rebuilt from its columns")


# --- reading


class _Part(io.RawIOBase):
    """A file object with only one part in memory."""

    def __init__(self, size: int, start: int, content: bytes) -> None:
        super().__init__()
        self._size, self._start, self._content = size, start, content
        self._at = 0

    def read(self, size: int = -1, /) -> bytes:
        """Read from the current place; outside the part, fewer bytes are returned."""
        start, end = self._at - self._start, self._size if size < 0 else self._at + size
        found = self._content[max(0, start) : max(0, end - self._start)] if start >= 0 else b""
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Set the current place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._at

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True


class ObjectReader:
    """Reads row groups of an object.

    Args:
        size: bytes of the object.
        footer_crc: the CRC of its end. Parquet has no checksum there, and its readers crash on some
            damage. So nothing is decoded before its CRC is verified.
        read: returns some of its bytes.

    Raises:
        MalformedFrameError: the end of the object is damaged, or the object is of another version.
    """

    def __init__(self, size: int, footer_crc: int, read: ReadAt) -> None:
        self._size, self._read = size, read
        self._metadata = _metadata(size, footer_crc, read)
        stated = self._metadata.metadata or {}
        if (version := stated.get(_VERSION_KEY)) != str(VERSION).encode():
            raise MalformedFrameError(
                f"a cold object of version {version!r}; this release reads version {VERSION}"
            )
        try:
            self._info = msgspec.json.decode(stated[_INFO_KEY], type=_Info)
        except (KeyError, msgspec.DecodeError) as error:
            raise MalformedFrameError(f"its content is not described: {error}") from error

    @property
    def groups(self) -> int:
        """The number of row groups of the object."""
        return len(self._info.groups)

    @property
    def footer_bytes(self) -> int:
        """About how many bytes of memory the footer takes."""
        return int(self._metadata.serialized_size)

    def group_of(self, localid: LocalId) -> int | None:
        """Return the row group that has a record; None: no row group has it."""
        groups = self._info.groups
        index = bisect_right(groups, localid, key=lambda group: group.first) - 1
        return index if index >= 0 and localid <= groups[index].last else None

    def batches(self, group: int) -> dict[LocalId, bytes]:
        """Return the batches of a row group, by their first localid.

        Raises:
            MalformedFrameError: the row group is damaged.
        """
        table = self._table(group, None)
        try:
            return _rebuilt(table, self._info)
        except (pa.ArrowException, ValueError, IndexError, KeyError) as error:
            raise MalformedFrameError(f"row group {group} cannot be decoded: {error}") from error

    def tags(self) -> ColdTags:
        """Return the tags of all records.

        Raises:
            MalformedFrameError: the object is damaged.
        """
        parts = []
        for group in range(self.groups):
            table = self._table(group, ["seqnum", "log_tag", "tags"])
            counts, tags = _all_tags(table)
            seqnums = table["seqnum"].to_numpy().astype(np.uint64)
            parts.append((seqnums.tobytes(), counts.astype(np.uint8).tobytes(), tags.tobytes()))
        return ColdTags(*(b"".join(column) for column in zip(*parts, strict=True)))

    def _table(self, group: int, columns: list[str] | None) -> pa.Table:
        part = self._info.groups[group]
        content = self._read(part.offset, part.size)
        if crc32c(content) != part.crc:
            raise MalformedFrameError(f"row group {group} is damaged")
        source = _Part(self._size, part.offset, content)
        try:
            file = pq.ParquetFile(
                pa.PythonFile(source, "r"),
                metadata=self._metadata,
                page_checksum_verification=True,
                pre_buffer=False,
            )
            return file.read_row_group(group, columns=columns, use_threads=False)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise MalformedFrameError(f"row group {group} is damaged: {error}") from error


def _footer_bytes(tail: bytes) -> int:
    """Return the length of an object's footer, which its last bytes state.

    Raises:
        MalformedFrameError: the bytes are not the last bytes of an object.
    """
    if len(tail) < _FOOTER_END_BYTES or tail[-4:] != _MAGIC:
        raise MalformedFrameError("the end of a cold object is missing")
    return int.from_bytes(tail[-_FOOTER_END_BYTES:-4], "little") + _FOOTER_END_BYTES


def _metadata(size: int, footer_crc: int, read: ReadAt) -> pq.FileMetaData:
    tail = read(max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    needed = _footer_bytes(tail)
    if needed > size:
        raise MalformedFrameError("the end of a cold object is damaged")
    if needed > len(tail):
        tail = read(size - needed, needed)
    footer = tail[-needed:]
    if crc32c(footer) != footer_crc:
        raise MalformedFrameError("the end of a cold object is damaged")
    try:
        return pq.read_metadata(pa.BufferReader(footer))
    except (OSError, pa.ArrowException) as error:
        raise MalformedFrameError(f"the end of a cold object is damaged: {error}") from error


# --- building batches again


def _content(array: pa.Array[Any]) -> tuple[memoryview, NDArray[np.int64]]:
    """Return the joined bytes of texts or byte strings, and where each begins and ends in them."""
    _, offsets, content = array.buffers()
    assert offsets is not None, "texts and byte strings have ends"
    ends: memoryview = memoryview(offsets)
    bounds = np.frombuffer(ends, np.int32)[array.offset : array.offset + len(array) + 1]
    bounds = bounds.astype(np.int64)
    view = memoryview(content) if content is not None else memoryview(b"")
    return view[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0]


def _column(table: pa.Table, name: str) -> Any:  # noqa: ANN401 lists have no type
    return table[name].combine_chunks()


def _all_tags(table: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the number of tags of each record, with its log's tag, and the tags of all records."""
    logs, lists = _column(table, "log_tag"), _column(table, "tags")
    alive = np.asarray(logs.is_valid())
    others = np.asarray(pc.list_value_length(lists)).astype(np.int64)
    counts: NDArray[np.int64] = others + alive
    tags = np.empty(int(counts.sum()), np.int64)
    is_log = np.zeros(len(tags), np.bool_)
    is_log[(np.cumsum(counts) - counts)[alive]] = True
    tags[is_log] = np.asarray(logs.fill_null(0))[alive]
    tags[~is_log] = np.asarray(lists.flatten())
    return counts, tags.view(np.uint64)


def _names(table: pa.Table) -> pa.Array[Any]:
    """Return the names of each record, as record batches store them."""
    logs = _column(table, "log").fill_null("")
    lists = _column(table, "tag_names")
    letters, _ = _content(_column(table, "tag_kinds"))
    kinds = strings(pa.string(), np.arange(1, len(letters) + 1), bytes(letters))
    spelled = pc.binary_join_element_wise(kinds, lists.flatten(), "")
    offsets = np.concatenate(([0], np.cumsum(np.asarray(pc.list_value_length(lists)))))
    ends: Any = pa.array(offsets.astype(np.int32))
    tags = pa.ListArray.from_arrays(ends, spelled)
    joined: Any = pc.binary_join_element_wise(
        logs, pc.binary_join(tags, _SEPARATOR), pa.scalar(_SEPARATOR)
    )
    names: pa.Array[Any] = pc.if_else(pa.array(np.diff(offsets) > 0), joined, logs)
    return names


def _rebuilt(table: pa.Table, info: _Info) -> dict[LocalId, bytes]:
    """Return the batches of a row group.

    Raises:
        MalformedFrameError: a batch does not have the CRC that its columns state.
    """
    counts, tags = _all_tags(table)
    tag_ends = np.concatenate(([0], np.cumsum(counts)))
    names, names_at = _content(_names(table))
    data, data_at = _content(_column(table, "data"))
    firsts, epochs, stated, crcs = (
        table[name].to_numpy() for name in ("batch", "epoch", "batch_checksum", "checksum")
    )
    time_us = table["time"].cast(pa.int64()).to_numpy()
    crcs32, counts8 = crcs.astype(np.uint32), counts.astype(np.uint8)
    starts = np.flatnonzero(np.concatenate(([True], np.diff(firsts) != 0))).tolist()
    found: dict[LocalId, bytes] = {}
    for start, end in zip(starts, [*starts[1:], len(firsts)], strict=True):
        data_start, names_start = int(data_at[start]), int(names_at[start])
        columns = b"".join(
            (
                tags[tag_ends[start] : tag_ends[end]].tobytes(),
                (data_at[start + 1 : end + 1] - data_start).astype(np.uint32).tobytes(),
                (names_at[start + 1 : end + 1] - names_start).astype(np.uint32).tobytes(),
                crcs32[start:end].tobytes(),
                counts8[start:end].tobytes(),
                names[names_start : int(names_at[end])],
            )
        )
        own_data = data[data_start : int(data_at[end])]
        header = BatchHeader(
            info.logspace, info.shard, Epoch(int(epochs[start])), int(firsts[start]),
            int(time_us[start]), end - start, int(tag_ends[end] - tag_ends[start]),
            int(names_at[end]) - names_start, len(own_data), crc32c(columns), crc32c(own_data),
        )  # fmt: skip
        batch = packed_batch(header, columns, own_data)
        if header_crc_stated(batch) != stated[start]:
            raise MalformedFrameError(f"the batch at localid {firsts[start]} is damaged")
        found[int(firsts[start])] = batch
    return found
