"""A log as a stream: micro-batches of seqnums, whose offset is one seqnum.

The offset `{"seqnum": n}` says that all records below n were read. A batch is a half-open range of
seqnums below the end of the log. The records of such a range never change, so a batch that is
repeated after a crash has the same records. `source` gives the reader to Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from indilog.base.errors import ConfigError
from indilog.base.ids import SeqNum
from indilog_pipeline.spark.options import ReadOptions
from indilog_pipeline.spark.reading import ReadPart
from indilog_pipeline.spark.tasks import read_part, reads_of

_SEQNUM: Final = "seqnum"


class RecordPartition(InputPartition):
    """The input of one task: a part of a micro-batch."""

    def __init__(self, part: ReadPart) -> None:
        super().__init__(part)
        self.part = part


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches, and reads their partitions in tasks.

    Args:
        options: options of the read.
        columns: names of the columns to return.
    """

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        if options.shows_gaps:
            raise ConfigError("A stream has records only; read rows=gaps with spark.read.")
        if options.access is not None and options.bounds.logs is None:
            raise ConfigError("A read through a platform is of one log: give option log.")
        self._options = options
        self._columns = columns
        self._reads = reads_of(options)
        self._target: SeqNum | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return where a new stream begins."""
        start, end = self._reads.range_of(self._options.bounds)
        return {_SEQNUM: end if self._options.from_tail else start}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit that the options set. If options limit both records and bytes, return
        the limit of records; `latestOffset` obeys both limits.
        """
        options = self._options
        if options.batch_records_max is not None:
            return ReadMaxRows(options.batch_records_max)
        if options.batch_bytes_max is not None:
            return ReadMaxBytes(options.batch_bytes_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Let this run of the query end at the present end of the log."""
        self._target = self._reads.range_of(self._options.bounds)[1]

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Return where the batch from `start` on ends."""
        first, options = start[_SEQNUM], self._options
        end = self._target
        if end is None:
            end = self._reads.range_of(options.bounds)[1]
        if end <= first:
            return start
        if not isinstance(limit, ReadAllAvailable):
            end = self._reads.end_of_batch(
                options.bounds,
                first,
                end,
                records_max=options.batch_records_max,
                bytes_max=options.batch_bytes_max,
            )
        return {_SEQNUM: end}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Return the parts of a batch."""
        parts = self._reads.parts(self._options.bounds, start[_SEQNUM], end[_SEQNUM])
        return [RecordPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a partition."""
        assert isinstance(partition, RecordPartition), "partitions come from `partitions`"
        return read_part(self._reads, partition.part, self._options, self._columns)
