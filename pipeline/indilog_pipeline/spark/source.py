"""The data source `indilog` as Spark talks to it (PySpark's Python Data Source API).

Spark makes these objects in Python processes beside the JVM: one process plans, and each task has
its own process. The objects are pickled on the way to a task. So they hold only options and plans,
and connect only when they read. Reads are in `tasks` and `streaming`, writes in `writing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from indilog_pipeline.spark.columns import COLUMNS, GAPS, ddl
from indilog_pipeline.spark.filters import narrowed
from indilog_pipeline.spark.options import ReadOptions, read_options
from indilog_pipeline.spark.reading import ReadPart
from indilog_pipeline.spark.streaming import LogStreamReader, RecordPartition
from indilog_pipeline.spark.tasks import columns_of, read_part, reads_of
from indilog_pipeline.spark.writing import LogStreamWriter, LogWriter, write_options

NAME: Final = "indilog"


class IndilogSource(DataSource):
    """Logs of IndiLog: `spark.read.format("indilog")` (docs/SPARK.md)."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return NAME

    def schema(self) -> str:
        """All columns. A read with `.schema(...)` decodes and moves only the columns of this
        schema.
        """
        return ddl(GAPS if read_options(self.options).shows_gaps else COLUMNS)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Read records, once."""
        return LogReader(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - its name
        """Read records as they come."""
        options = read_options(self.options)
        return LogStreamReader(options, columns_of(options, types_in(schema)))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        """Append a DataFrame."""
        return LogWriter(
            write_options(self.options, types_in(schema), overwrite=overwrite, streams=False)
        )

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001 - Spark's signature
    ) -> DataSourceStreamWriter:
        """Append the micro-batches of a stream."""
        return LogStreamWriter(
            write_options(self.options, types_in(schema), overwrite=overwrite, streams=True)
        )


class _OptionalPushdown:
    """`pushFilters` as a method that Spark calls if filter pushdown is on.

    Pushdown is off by default (`spark.sql.python.filterPushdown.enabled`). Spark then refuses a
    reader that overrides the method, so that no filter is ignored silently. `LogReader` is also
    correct without pushdown, because Spark evaluates every filter that `LogReader` returns. So this
    class makes Spark take the method for the inherited method.
    """

    def __get__(self, reader: LogReader | None, _owner: type) -> object:
        return DataSourceReader.pushFilters if reader is None else _Pushdown(reader)


class _Pushdown:
    """`pushFilters` of one reader."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[object]) -> Iterable[object]:
        self._reader.narrow(filters)
        return filters


class LogReader(DataSourceReader):
    """A batch read: it plans partitions, then reads them in tasks."""

    pushFilters = _OptionalPushdown()  # noqa: N815 - Spark's name

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns = columns_of(options, types_in(schema))
        self._bounds = options.bounds
        self._reads = reads_of(options)

    def narrow(self, filters: Iterable[object]) -> None:
        """Narrow the read by filters."""
        self._bounds = narrowed(self._bounds, filters)

    def partitions(self) -> list[InputPartition]:
        """Plan the read up to the present end of the log."""
        start, end = self._reads.range_of(self._bounds)
        parts = self._reads.parts(self._bounds, start, end)
        # Spark would replace an empty list by its own partition.
        return [RecordPartition(part) for part in parts or [ReadPart(end, end)]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a partition."""
        assert isinstance(partition, RecordPartition), "partitions come from `partitions`"
        return read_part(self._reads, partition.part, self._options, self._columns)


def types_in(schema: StructType) -> list[tuple[str, str]]:
    """Return name and Spark type of each column of a schema."""
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]
