"""Records of a data directory as Arrow record batches (decision 0035).

`read_records` decodes the batches of a range of seqnums, many at once, in order. Trimmed records
are left out, as in reads of the platform. Lost and damaged records raise `DataLossError`, or are
counted if the caller skips them.

The Spark data source and the analyses call this module; it reads an image by `Payloads`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from indilog.base.errors import DataLossError
from indilog.base.ids import SeqNum, UserTag, log_tag, tag_hash
from indilog.kernel.batch_columns import BatchColumns
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.record_arrays import RECORD_FIELDS, RecordArrays, times
from indilog_pipeline.log_image import BatchPlaces, LogImage, joined_ranges
from indilog_pipeline.payloads import Chunk, Payloads

SCHEMA: Final = pa.schema(RECORD_FIELDS)
"""The columns of a record.

`tags` are the hashes of the record's tags, without the tag of its log. Each hash is the 64 bits of
`indilog.base.ids.tag_hash` as a signed integer. `tag_names` are the tags as text, in the same
order. `position` is the metalog position of the entry that ordered the record.
"""
COLUMNS: Final = tuple(SCHEMA.names)
PART_BYTES: Final = 32 * 1024 * 1024


@dataclasses.dataclass
class ReadCounts:
    """Counts of records that one or more calls of `read_records` found.

    Attributes:
        records: records that were yielded.
        lost: records left out because no replica has them.
        damaged: records left out because no replica has their data intact.
    """

    records: int = 0
    lost: int = 0
    damaged: int = 0


class Filter(NamedTuple):
    """Which records are wanted: all records, the records of a log, or those with a tag of the log.

    Attributes:
        log: the name of a log; None: all logs.
        tag: a tag of this log; None: all records of the log.
    """

    log: str | None = None
    tag: UserTag | None = None

    @property
    def hash(self) -> int | None:
        """The hash that every wanted record has; None: all records are wanted."""
        if self.log is None:
            assert self.tag is None, "a tag belongs to a log"
            return None
        return log_tag(self.log) if self.tag is None else tag_hash(self.log, self.tag)

    def floor_in(self, image: LogImage) -> SeqNum:
        """Return the seqnum below which all wanted records are trimmed."""
        if self.log is None:
            return 0
        floor = image.floors.logs.of(log_tag(self.log))
        return floor if self.tag is None else max(floor, image.floors.tags.of(self.hash or 0))


EVERYTHING: Final = Filter()


class SeqnumRange(NamedTuple):
    """A range of seqnums `[start, end)`, of about `bytes` bytes on disk."""

    start: SeqNum
    end: SeqNum
    bytes: int


def parts_of(
    image: LogImage, start: SeqNum = 0, end: SeqNum | None = None, part_bytes: int = PART_BYTES
) -> list[SeqnumRange]:
    """Split `[start, end)` into ranges of about `part_bytes` each; return them, ascending.

    Every seqnum below the tail is in exactly one part, also if no record is there.
    """
    end = image.tail if end is None else min(end, image.tail)
    if start >= end:
        return []
    rows = image.rows_of(start, end)
    sizes = np.cumsum(image.batches.bytes[rows.start : rows.stop])
    total = int(sizes[-1]) if len(sizes) else 0
    cuts = np.searchsorted(sizes, np.arange(part_bytes, total, part_bytes)) + rows.start
    inner = np.unique(image.batches.seqnums[cuts]) if len(cuts) else np.empty(0, np.int64)
    bounds = [start, *(int(cut) for cut in inner if start < cut < end), end]
    found = []
    for first, after in itertools.pairwise(bounds):
        of_part = image.rows_of(first, after)
        size = int(image.batches.bytes[of_part.start : of_part.stop].sum())
        found.append(SeqnumRange(first, after, size))
    return found


def read_records(
    image: LogImage,
    start: SeqNum = 0,
    end: SeqNum | None = None,
    *,
    columns: Sequence[str] = COLUMNS,
    wanted: Filter = EVERYTHING,
    skip_lost: bool = False,
    counts: ReadCounts | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of `[start, end)` in order of seqnums, as record batches of `columns`.

    A batch has about 65,536 rows or 16 MiB; batches of one log or tag may be smaller. If a platform
    replaces files meanwhile, the records of these files are read through a new image, up to the
    same end.

    Args:
        image: image of the data directory.
        start: the first seqnum.
        end: the end of the range, exclusive. None, or a seqnum beyond the tail: the image's tail.
        columns: the columns of `SCHEMA` that the batches have, in this order. Without `data`, the
            data of records is neither copied nor verified.
        wanted: selects the records.
        skip_lost: count lost and damaged records instead of raising an error.
        counts: gets the counts of this call added.

    Raises:
        DataLossError: records that might be wanted are lost, or the data of wanted records is
            damaged. Continue at `next_seqnum`.
        DataDirectoryError, NotReadyError: as `LogImage.read`.
    """
    end = image.tail if end is None else min(end, image.tail)
    reader = _Reader(image, columns, wanted, skip_lost=skip_lost)
    yield from reader.read(start, end, ReadCounts() if counts is None else counts)


class _Reader:
    """Reads one range."""

    def __init__(
        self, image: LogImage, columns: Sequence[str], wanted: Filter, *, skip_lost: bool
    ) -> None:
        self._payloads = Payloads(image)
        self._schema = pa.schema([SCHEMA.field(name) for name in columns])
        self._with_data = "data" in columns
        self._wanted = wanted
        self._skip_lost = skip_lost

    def read(self, start: SeqNum, end: SeqNum, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
        """Yield the records of `[start, end)`."""
        try:
            while start < end:
                chunk = self._payloads.chunk(start, end, with_data=self._with_data)
                yield from self._records(chunk, counts)
                start = chunk.stop
        finally:
            self._payloads.close()

    def _records(self, chunk: Chunk, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
        records = _Records(chunk)
        floor = max(chunk.start, self._wanted.floor_in(chunk.image))
        chosen = records.chosen(self._wanted.hash, floor, chunk.stop)
        damaged = chunk.columns.damaged_records(chunk.broken)
        damaged = damaged[chosen[damaged]]
        chosen[damaged] = False
        lost = _lost_in(chunk, floor)
        broken = records.seqnums[damaged]  # before `arrow`, which drops batches from `records`
        if not self._skip_lost and (len(lost) or len(damaged)):
            first = min([*lost[:1, 0].tolist(), *broken[:1].tolist()])
            chosen &= records.seqnums < first
        if chosen.any():
            batch = records.arrow(self._schema, chosen)
            counts.records += batch.num_rows
            yield batch
        if not self._skip_lost:
            _raise_loss(lost, broken)
        counts.lost += int((lost[:, 1] - lost[:, 0]).sum())
        counts.damaged += len(damaged)


def _lost_in(chunk: Chunk, floor: SeqNum) -> NDArray[np.int64]:
    """Return the seqnums of lost records of a chunk from `floor` on, as ranges."""
    batches = chunk.batches
    starts = batches.seqnums[chunk.columns.damaged]
    unreadable = np.stack((starts, starts + batches.records[chunk.columns.damaged]), axis=1)
    lost = joined_ranges(np.concatenate((chunk.image.lost, unreadable)))
    bounded: NDArray[np.int64] = np.clip(lost, floor, max(floor, chunk.stop))
    return bounded[bounded[:, 0] < bounded[:, 1]]


def _raise_loss(lost: NDArray[np.int64], damaged: NDArray[np.int64]) -> None:
    """Raise the error of the first lost or damaged record, if there is any."""
    if len(lost) and not (len(damaged) and damaged[0] < lost[0, 0]):
        raise LostRange(*lost[0].tolist()).error()
    if len(damaged):
        seqnum = int(damaged[0])
        raise DataLossError(
            f"The data of the record at seqnum {seqnum} is damaged on all replicas. Read on from "
            f"seqnum {seqnum + 1}, or read without data.",
            seqnum=seqnum,
            next_seqnum=seqnum + 1,
        )


class _Records:
    """The records of a chunk, as numpy columns.

    Attributes:
        seqnums: seqnums of all records in intact batches, ascending.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._image = chunk.image
        self._take(
            chunk.columns, BatchPlaces._make(c[chunk.columns.batches] for c in chunk.batches)
        )

    def _take(self, columns: BatchColumns, batches: BatchPlaces) -> None:
        self._columns, self._batches = columns, batches
        self._arrays = RecordArrays(columns)
        firsts = np.cumsum(columns.records) - columns.records
        self._index = np.arange(int(columns.records.sum())) - self._of_batch(firsts)
        self.seqnums: NDArray[np.int64] = self._of_batch(batches.seqnums) + self._index

    def _of_batch(self, column: NDArray[np.generic]) -> NDArray[np.int64]:
        """Return a column of the batches for each record."""
        return np.repeat(column.astype(np.int64), self._columns.records)

    def chosen(self, tag: int | None, start: SeqNum, stop: SeqNum) -> NDArray[np.bool_]:
        """Return which records of `[start, stop)` are alive and have `tag`; None: any tag."""
        columns, floors = self._columns, self._image.floors
        chosen: NDArray[np.bool_] = (self.seqnums >= start) & (self.seqnums < stop)
        if tag is not None:
            of_record = np.repeat(np.arange(len(self.seqnums)), columns.tag_counts)
            has = np.zeros(len(self.seqnums), np.bool_)
            has[of_record[columns.tags == np.uint64(tag)]] = True
            chosen &= has
        if len(self.seqnums) and (
            floors.highest > self.seqnums[0] or columns.tag_counts.min() == 0
        ):
            seqnums = self.seqnums.astype(np.uint64)
            chosen &= ~floors.dead_at(seqnums, columns.tag_counts, columns.tags)
        return chosen

    def arrow(self, schema: pa.Schema, chosen: NDArray[np.bool_]) -> pa.RecordBatch:
        """Return the chosen records; batches without chosen records are not copied."""
        firsts = np.cumsum(self._columns.records) - self._columns.records
        batches = np.flatnonzero(np.logical_or.reduceat(chosen, firsts))
        if len(batches) < len(firsts):
            chosen = chosen[
                np.repeat(np.isin(np.arange(len(firsts)), batches), self._columns.records)
            ]
            places = BatchPlaces._make(column[batches] for column in self._batches)
            self._take(self._columns.of_batches(batches), places)
        arrays = [getattr(self, f"_{field.name}")() for field in schema]
        if not chosen.all():
            rows = pa.array(np.flatnonzero(chosen))
            arrays = [array.take(rows) for array in arrays]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _seqnum(self) -> pa.Array[Any]:
        return pa.array(self.seqnums)

    def _ordered_at(self) -> pa.Array[Any]:
        return times(self._of_batch(self._batches.ordered_us))

    def _time(self) -> pa.Array[Any]:
        return times(self._of_batch(self._columns.times_us))

    def _shard(self) -> pa.Array[Any]:
        return pa.array(self._of_batch(self._batches.shards).astype(np.int32))

    def _localid(self) -> pa.Array[Any]:
        return pa.array(self._of_batch(self._batches.localids) + self._index)

    def _position(self) -> pa.Array[Any]:
        return pa.array(self._of_batch(self._batches.positions))

    def _data(self) -> pa.Array[Any]:
        return self._arrays.data()

    def _tags(self) -> pa.Array[Any]:
        return self._arrays.tags()

    def _log(self) -> pa.Array[Any]:
        return self._arrays.logs()

    def _tag_names(self) -> pa.Array[Any]:
        return self._arrays.tag_names()
