"""Reads of a data directory, without the platform or beside a running platform.

The planner reads one image of the directory. Each task gets its part of the image, so a task opens
data files only. `tasks.reads_of` creates `DirectoryReads`, which read by `record_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from indilog.base.errors import ConfigError, DataLossError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, parts_of, read_records
from indilog_pipeline.shared_logs import check_shared
from indilog_pipeline.spark.options import BATCH_ROWS_MIN, Bounds
from indilog_pipeline.spark.reading import Found, Gap, ReadPart, check_end

_BATCH_BYTES: Final = 16 * 1024 * 1024


class _ImagePart(NamedTuple):
    """A task's input besides its range: the wanted records, and where they are."""

    wanted: Filter
    image: LogImage


class DirectoryReads:
    """Reads of the logs in a data directory (`LogReads`).

    Args:
        path: the data directory; tasks must see it at the same path.
        tag: only records with this tag; None: any tag.
        partition_bytes: target size of a part.
        batch_rows: rows of an Arrow batch, at most.
    """

    def __init__(
        self, path: str, tag: UserTag | None, *, partition_bytes: int, batch_rows: int
    ) -> None:
        self._path = Path(path).absolute()
        self._tag = tag
        self._partition_bytes = partition_bytes
        self._batch_rows = batch_rows

    def range_of(self, bounds: Bounds) -> tuple[SeqNum, SeqNum]:
        """Return the range [start, end) of seqnums within `bounds`, at most to the present end of
        the log.
        """
        image = LogImage.read(self._path)
        start, end = bounds.start, min(bounds.end, image.tail)
        if bounds.ordered_start_us is not None:
            start = max(start, image.seqnum_at(bounds.ordered_start_us))
        if bounds.ordered_end_us is not None:
            end = min(end, image.seqnum_at(bounds.ordered_end_us))
        return start, end

    def parts(self, bounds: Bounds, start: SeqNum, end: SeqNum) -> list[ReadPart]:
        """Split [start, end) into parts of about the target size on disk.

        Raises:
            ConfigError: a log has another kind than `shared`.
        """
        if start >= end:
            return []
        image = LogImage.read(self._path)
        check_end(end, image.tail)
        for log in sorted(bounds.logs or ()):
            check_shared(image, log, start, end)
        return [
            ReadPart(part.start, part.end, _ImagePart(wanted, image.between(part.start, part.end)))
            for wanted in self._wanted(bounds)
            for part in parts_of(image, start, end, self._partition_bytes)
        ]

    def _wanted(self, bounds: Bounds) -> list[Filter]:
        if bounds.logs is None:
            if self._tag is not None:
                raise ConfigError("A tag is of one log: give option log, too.")
            return [Filter()]
        return [Filter(log, self._tag) for log in sorted(bounds.logs)]

    def end_of_batch(
        self,
        bounds: Bounds,
        start: SeqNum,
        end: SeqNum,
        *,
        records_max: int | None,
        bytes_max: int | None,
    ) -> SeqNum:
        """Return where a batch from `start` ends (`LogReads.end_of_batch`).

        Without a limit of bytes, no data is read.
        """
        if records_max is None and bytes_max is None:
            return end
        columns = ["seqnum"] if bytes_max is None else ["seqnum", "data"]
        part = ReadPart(start, end, _ImagePart(self._wanted(bounds)[0], LogImage.read(self._path)))
        records = data_bytes = 0
        for found in self.batches(part, bounds, columns):
            if isinstance(found, Gap):
                continue
            sizes = _sizes(found) if bytes_max is not None else [0] * found.num_rows
            for row, size in enumerate(sizes):
                records += 1
                data_bytes += size
                too_many = records_max is not None and records > records_max
                too_large = bytes_max is not None and data_bytes > bytes_max
                if records > 1 and (too_many or too_large):
                    return int(found.column("seqnum")[row].as_py())
        return end

    def batches(self, part: ReadPart, bounds: Bounds, columns: Sequence[str]) -> Iterator[Found]:
        """Yield the records of a part in log order, and the gaps between them."""
        del bounds  # the part has all that is needed
        assert isinstance(part.source, _ImagePart), "the part was planned by this class"
        wanted, image = part.source
        waiting: list[pa.RecordBatch] = []
        for found in _records(image, wanted, part.start, part.end, columns):
            if isinstance(found, Gap):
                yield from self._joined(waiting)
                waiting = []
                yield found
                continue
            waiting.append(found)
            large = sum(batch.nbytes for batch in waiting) >= _BATCH_BYTES
            if large or sum(batch.num_rows for batch in waiting) >= BATCH_ROWS_MIN:
                yield from self._joined(waiting)
                waiting = []
        yield from self._joined(waiting)

    def _joined(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join batches up to the row limit, because a batch of one tag has few rows."""
        if batches:
            table = pa.Table.from_batches(batches).combine_chunks()
            yield from table.to_batches(max_chunksize=self._batch_rows)


def _records(
    image: LogImage, wanted: Filter, start: SeqNum, end: SeqNum, columns: Sequence[str]
) -> Iterator[Found]:
    """Yield the records of [start, end), and the gaps between them."""
    floor = wanted.floor_in(image)
    if start < floor:
        yield Gap("trimmed", start, min(floor, end), TrimmedError(floor))
        start = floor
    while start < end:
        try:
            yield from read_records(image, start, end, columns=columns, wanted=wanted)
        except DataLossError as error:
            following = error.next_seqnum
            if following is None or following <= start:
                raise
            first = start if error.seqnum is None else max(start, error.seqnum)
            yield Gap("lost", first, min(following, end), error)
            start = following
        else:
            return


def _sizes(batch: pa.RecordBatch) -> list[int]:
    return [len(value.as_buffer()) for value in batch.column("data")]
