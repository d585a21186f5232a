"""The code shared by the tasks of batch and streaming reads: columns, reads, and gaps.

`source`, `streaming` and `export` call it. It chooses between `PlatformReads` and `DirectoryReads`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from indilog.base.errors import DataLossError, IndilogError
from indilog_pipeline.spark.columns import COLUMNS, GAPS, arrow_schema, check_columns
from indilog_pipeline.spark.connection import with_token
from indilog_pipeline.spark.directory_reads import DirectoryReads
from indilog_pipeline.spark.options import ReadOptions
from indilog_pipeline.spark.platform_reads import PlatformReads
from indilog_pipeline.spark.reading import Gap, LogReads, ReadPart


class GapError(IndilogError):
    """A read found trimmed or lost records; the message says how to continue."""


def columns_of(options: ReadOptions, schema: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the columns that a schema (names and Spark types) asks for.

    Raises:
        ConfigError: a column is not known, or has another type.
    """
    return check_columns(GAPS if options.shows_gaps else COLUMNS, schema)


def reads_of(options: ReadOptions) -> LogReads:
    """Return the reads of the platform or the directory that options name.

    Raises:
        ConfigError, ValueError: the platform cannot be reached with these options.
    """
    sizes = {"partition_bytes": options.partition_bytes, "batch_rows": options.batch_rows}
    if options.access is None:
        return DirectoryReads(options.path, options.tag, **sizes)
    return PlatformReads(with_token(options.access), options.tag, **sizes)


def read_part(
    reads: LogReads, part: ReadPart, options: ReadOptions, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the records of a part, or with its gaps if options ask for gaps.

    A line on standard error counts the skipped gaps of a part. `option("rows", "gaps")` returns
    gaps as rows.

    Raises:
        GapError: records are trimmed or lost, and options do not say to skip them.
    """
    # Imported objects live as long as the process, so exclude them from garbage collection.
    gc.freeze()
    if part.start >= part.end:
        return
    # Even if only gaps are wanted, records are read, because only reading checks their data.
    found = reads.batches(part, options.bounds, ["data"] if options.shows_gaps else columns)
    skipped: list[Gap] = []
    for each in found:
        if not isinstance(each, Gap):
            if not options.shows_gaps:
                yield each
        elif options.shows_gaps:
            yield _row(each, columns)
        elif options.skips_gaps:
            skipped.append(each)
        else:
            raise GapError(_refusal(each)) from each.error
    if skipped:
        _report(skipped)


def _row(gap: Gap, columns: Sequence[str]) -> pa.RecordBatch:
    values = {"kind": gap.kind, "start": gap.start, "end": gap.end}
    return pa.RecordBatch.from_pylist(
        [{name: values[name] for name in columns}], schema=arrow_schema(GAPS, columns)
    )


def _refusal(gap: Gap) -> str:
    where = f"Records at seqnums [{gap.start}, {gap.end}) are {gap.kind}"
    if isinstance(gap.error, DataLossError):
        return f"{where}: {gap.error} Option on_loss=skip reads on after them."
    return f"{where}; start at option seqnum_start={gap.end}, or skip them with on_loss=skip."


def _report(skipped: Sequence[Gap]) -> None:
    for kind in ("trimmed", "lost"):
        of_kind = [gap for gap in skipped if gap.kind == kind]
        if of_kind:
            seqnums = sum(gap.end - gap.start for gap in of_kind)
            sys.stderr.write(
                f"indilog: skipped {seqnums} {kind} seqnums in "
                f"[{of_kind[0].start}, {of_kind[-1].end})\n"
            )
