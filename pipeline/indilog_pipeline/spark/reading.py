"""The interface of reads for Spark: a plan of partitions, and the batches of one partition.

A platform (`platform_reads`) and a data directory (`directory_reads`) implement `LogReads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from indilog.base.errors import ConfigError, IndilogError
from indilog.base.ids import SeqNum
from indilog_pipeline.spark.options import Bounds


class Gap(NamedTuple):
    """Records that a read cannot return.

    Attributes:
        kind: `trimmed`, or `lost`: no intact copy is left.
        start, end: their seqnums are in [start, end). Trimmed records may have been of any log, and
            lost records, too, if their tags are lost.
        error: the error that a read of the log itself would raise.
    """

    kind: str
    start: SeqNum
    end: SeqNum
    error: IndilogError


class ReadPart(NamedTuple):
    """The part of a read that one task does.

    Attributes:
        start, end: the seqnums in [start, end).
        source: further input for the `LogReads` that planned the part.
    """

    start: SeqNum
    end: SeqNum
    source: object = None


Found: TypeAlias = pa.RecordBatch | Gap


class LogReads(Protocol):
    """A log, or all logs, as parts that tasks read; pickled with each task."""

    def range_of(self, bounds: Bounds) -> tuple[SeqNum, SeqNum]:
        """Return the seqnums [start, end) that bounds name, up to the end of the log now."""

    def parts(self, bounds: Bounds, start: SeqNum, end: SeqNum) -> list[ReadPart]:
        """Split [start, end) into parts of the target size."""

    def end_of_batch(
        self,
        bounds: Bounds,
        start: SeqNum,
        end: SeqNum,
        *,
        records_max: int | None,
        bytes_max: int | None,
    ) -> SeqNum:
        """Return where a batch from `start` ends: the greatest seqnum up to `end` within both
        limits. If there is any record, the batch has at least one.
        """

    def batches(self, part: ReadPart, bounds: Bounds, columns: Sequence[str]) -> Iterator[Found]:
        """Yield the records of a part in log order, and the gaps between them."""


def check_end(end: SeqNum, tail: SeqNum) -> None:
    """Refuse a batch of a stream that ends beyond the log.

    Raises:
        ConfigError: the batch ends beyond the log, so the stream was begun on another log.
    """
    if end > tail:
        raise ConfigError(
            f"The stream has come to seqnum {end}, but this log ends at {tail}: its checkpoint is "
            "of another platform. Give each stream a checkpoint of its own."
        )
