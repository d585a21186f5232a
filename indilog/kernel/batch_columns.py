"""Many record batches at once, as columns of all their records (layout: `indilog.kernel.records`).

Programs that read a whole log decode millions of records. So the code here runs no Python step per
record. Per batch it makes a few calls: joins of byte strings, and one CRC for each part.
`indilog.kernel.record_arrays`, `indilog.kernel.cold_objects` and `indilog_pipeline` use the
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from indilog.kernel.records import HEADER_BYTES, MAGIC, RECORD_OVERHEAD_BYTES, VERSION, RecordBatch

_HEADER: Final = np.dtype(
    [
        ("magic", "S4"), ("version", "u1"), ("flags", "u1"), ("logspace", "<u2"), ("shard", "<u2"),
        ("epoch", "<u4"), ("first", "<u8"), ("time", "<u8"), ("records", "<u4"), ("tags", "<u4"),
        ("names", "<u4"), ("data", "<u4"), ("columns_crc", "<u4"), ("data_crc", "<u4"),
        ("crc", "<u4"),
    ]
)  # fmt: skip
_UNSTATED_BYTES: Final = 4
"""Size in bytes of a header's own CRC, the end of the header, which the CRC does not cover."""

Counts = NDArray[np.int64]
assert _HEADER.itemsize == HEADER_BYTES


class Expected(NamedTuple):
    """What each batch must be, as columns: its shard, first localid and number of records."""

    shards: NDArray[np.uint16]
    firsts: NDArray[np.uint64]
    records: NDArray[np.int64]


class BatchColumns:
    """The intact batches among the given ones, with their headers, columns and data.

    Args:
        payloads: for each batch, the bytes from its start on; bytes after its end are ignored.
            None: the batch could not be read.
        expected: the records that each batch must have; a batch of other records counts as damaged.

    Attributes:
        damaged: indexes of the batches with damaged headers or columns.
        batches: indexes of the intact batches, ascending. The attributes below are of these
            batches.
        records: the number of records of each batch.
        times_us: when the writer closed each batch.
        tag_counts: the number of tags of each record; 0: the record is a tombstone.
        tags: the tags of all records, in the order of the records.
    """

    def __init__(self, payloads: Sequence[memoryview | None], expected: Expected) -> None:
        intact = np.array([p is not None and len(p) >= HEADER_BYTES for p in payloads], np.bool_)
        batches = np.flatnonzero(intact)
        whole = [p for p in payloads if p is not None and len(p) >= HEADER_BYTES]
        headers = np.frombuffer(b"".join([p[:HEADER_BYTES] for p in whole]), _HEADER)
        starts = (
            HEADER_BYTES
            + 8 * headers["tags"].astype(np.int64)
            + RECORD_OVERHEAD_BYTES * headers["records"].astype(np.int64)
            + headers["names"]
        )
        ends = starts + headers["data"]
        right = _are_expected(headers, whole, expected, batches) & (
            ends <= np.fromiter(map(len, whole), np.int64, len(whole))
        )
        for index in np.flatnonzero(right).tolist():
            columns = crc32c(whole[index][HEADER_BYTES : starts[index]])
            right[index] = columns == headers["columns_crc"][index]
        self.damaged = np.setdiff1d(np.arange(len(payloads)), batches[right])
        self.batches = batches[right]
        self._payloads = [whole[index] for index in np.flatnonzero(right).tolist()]
        self._headers = headers[right]
        self._data_starts, self._data_ends = starts[right], ends[right]
        self.records: Counts = self._headers["records"].astype(np.int64)
        self.times_us = self._headers["time"]
        tags = self._headers["tags"].astype(np.int64)
        self._column_starts = HEADER_BYTES + 8 * tags
        self.tags = np.frombuffer(
            self._joined(np.full(len(tags), HEADER_BYTES), self._column_starts), np.uint64
        )
        counts_at = self._column_starts + 12 * self.records
        self.tag_counts: Counts = np.frombuffer(
            self._joined(counts_at, counts_at + self.records), np.uint8
        ).astype(np.int64)

    def _joined(self, starts: Counts, ends: Counts) -> bytes:
        parts = zip(self._payloads, starts.tolist(), ends.tolist(), strict=True)
        return b"".join([payload[start:end] for payload, start, end in parts])

    def of_batches(self, chosen: NDArray[np.intp]) -> BatchColumns:
        """Return the columns of some batches. `chosen`: their indexes in `batches`, ascending."""
        some = object.__new__(BatchColumns)
        some.damaged = self.damaged
        some.batches = self.batches[chosen]
        some._payloads = [self._payloads[index] for index in chosen.tolist()]
        for name in ("_headers", "_data_starts", "_data_ends", "_column_starts"):
            setattr(some, name, getattr(self, name)[chosen])
        some.records, some.times_us = self.records[chosen], self.times_us[chosen]
        keep = np.zeros(len(self.batches), np.bool_)
        keep[chosen] = True
        of_record = np.repeat(keep, self.records)
        some.tag_counts = self.tag_counts[of_record]
        some.tags = self.tags[np.repeat(of_record, self.tag_counts)]
        return some

    def whole(self) -> list[memoryview]:
        """Return the bytes of each batch, from its header to the end of its data."""
        ends = self._data_ends.tolist()
        return [payload[:end] for payload, end in zip(self._payloads, ends, strict=True)]

    def epochs(self) -> Counts:
        """Return the epoch of the writer of each batch."""
        epochs: Counts = self._headers["epoch"].astype(np.int64)
        return epochs

    def header_crcs(self) -> Counts:
        """Return the CRC of each batch's header. It covers the batch's other CRCs."""
        crcs: Counts = self._headers["crc"].astype(np.int64)
        return crcs

    def data_crcs(self) -> Counts:
        """Return the CRC of each record's data as the batch states it, unchecked."""
        starts = self._column_starts + 8 * self.records
        crcs = self._joined(starts, starts + 4 * self.records)
        return np.frombuffer(crcs, np.uint32).astype(np.int64)

    def names(self) -> tuple[bytes, Counts]:
        """Return the joined names of all records, and for each record where its names end there."""
        starts = self._column_starts + RECORD_OVERHEAD_BYTES * self.records
        return self._joined(starts, self._data_starts), self._ends(4, "names")

    def data(self) -> tuple[bytes, Counts]:
        """Return the joined data of all records, and the end of each record's data in them.

        Some data may be damaged: see `damaged_records`.
        """
        return self._joined(self._data_starts, self._data_ends), self._ends(0, "data")

    def _ends(self, column_at: int, part: str) -> Counts:
        """Return a column of ends, as offsets in the joined parts of all batches."""
        starts = self._column_starts + column_at * self.records
        ends = np.frombuffer(self._joined(starts, starts + 4 * self.records), np.uint32)
        sizes = self._headers[part].astype(np.int64)
        counted: Counts = ends + np.repeat(np.cumsum(sizes) - sizes, self.records)
        return counted

    def damaged_data(self) -> list[int]:
        """Return the indexes in `batches` of the batches whose data does not match its CRC."""
        stated = self._headers["data_crc"].tolist()
        parts = zip(
            self._payloads, self._data_starts.tolist(), self._data_ends.tolist(), strict=True
        )
        return [
            index
            for index, (payload, start, end) in enumerate(parts)
            if crc32c(payload[start:end]) != stated[index]
        ]

    def damaged_records(self, batches: Sequence[int]) -> Counts:
        """Return which records of these batches have damaged data, as indexes among all records.

        `batches` has ascending indexes in `self.batches`. The returned indexes ascend, too.
        """
        firsts = np.cumsum(self.records) - self.records
        found: list[int] = []
        for index in batches:
            buffer = bytes(self._payloads[index][: self._data_ends[index]])
            damaged = RecordBatch(buffer, partly=True).damaged
            found += [int(firsts[index]) + record for record in sorted(damaged)]
        return np.array(found, np.int64)


def _are_expected(
    headers: NDArray[np.void],
    payloads: Sequence[memoryview],
    expected: Expected,
    batches: NDArray[np.intp],
) -> NDArray[np.bool_]:
    """Return, for each header, whether it is intact and belongs to the expected batch."""
    stated_end = HEADER_BYTES - _UNSTATED_BYTES
    crcs = np.fromiter((crc32c(p[:stated_end]) for p in payloads), np.uint32, len(payloads))
    right: NDArray[np.bool_] = (
        (crcs == headers["crc"])
        & (headers["magic"] == MAGIC)
        & (headers["version"] == VERSION)
        & (headers["flags"] == 0)
        & (headers["shard"] == expected.shards[batches])
        & (headers["first"] == expected.firsts[batches])
        & (headers["records"] == expected.records[batches])
    )
    return right
