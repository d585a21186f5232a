"""The engine `spark`: a Spark session makes the rows of all index shards (decision 0041).

Three jobs run the code of the engine `local`, in parallel tasks:

1. A task decodes a part of the log into sorted rows, and cuts them into blocks, one for each range
   of (tag, seqnum).
2. Spark moves each block to the task of its range, which merges the blocks and writes the rows.
3. A task for each index shard writes the ranges, one after the other, as a snapshot.

Nothing is sorted in the JVM, and no row is a Python object. All files are in the workspace of the
plan. So executors must see the data directory at the same path, and must be able to write there.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from indilog.base.errors import IndilogError
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.kernel.floors import Trimmed
from indilog.kernel.index_schedule import Eras
from indilog.kernel.index_snapshot import Rows, SnapshotInfo, no_rows
from indilog.kernel.lost_ranges import LostRange
from indilog_index.rebuild.ranges import RangeBounds, bounds_of, split
from indilog_index.rebuild.sorted_runs import SortedRuns, mapped_run, write_run
from indilog_pipeline.index_rows import RowsOfImage
from indilog_pipeline.log_image import BatchPlaces, LogImage
from indilog_pipeline.rebuild.local import write_snapshot
from indilog_pipeline.rebuild.plan import BaseSnapshot, Built, RebuildPlan
from indilog_pipeline.record_batches import parts_of
from indilog_pipeline.spark_errors import sentence_of
from indilog_storage.ordering import OrderedColumns

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import SparkSession

TASK_MEMORY_BYTES: Final = 256 * 1024 * 1024
"""Bytes of rows that a task holds in memory while it sorts."""
PART_BYTES: Final = 64 * 1024 * 1024
_PART_BYTES_MIN: Final = 8 * 1024 * 1024
RANGE_ROWS: Final = 2_000_000
_RANGE_ROWS_MIN: Final = 200_000
_SAMPLES: Final = 512
_SAMPLES_MIN: Final = 16
_SAMPLE_RECORDS: Final = 50_000
"""The sample has 16 to 512 batches, with about this many records in all."""
_PIECE_ROWS: Final = 1 << 20
_TASKS_EACH: Final = 3
"""Tasks for each core, so that they end at about the same time."""


class _Job(NamedTuple):
    """The data that every task gets.

    Attributes:
        bounds: bounds of the ranges of each index shard.
        first_range: the number of the first range of each index shard.
        image: image of the data directory, without batches and spans.
    """

    workspace: Path
    eras: Eras
    starts: Mapping[int, MetalogPosition]
    end: MetalogPosition
    bounds: Mapping[int, RangeBounds]
    first_range: Mapping[int, int]
    image: LogImage

    def part_file(self, part: int) -> Path:
        """The file with the batches and spans of a part of the log."""
        return self.workspace / f"part-{part}.npz"

    def range_folder(self, number: int) -> Path:
        """The folder with the rows of a range."""
        return self.workspace / f"range-{number}"


class _Block(NamedTuple):
    """Sorted rows of one range, from one part of the log.

    Attributes:
        order: sort key of the blocks of a range; ascending in log order.
        lost: records of the index shard that are lost in this part.
    """

    order: tuple[int, int]
    rows: Rows
    lost: tuple[LostRange, ...]


class _Range(NamedTuple):
    """A range that was written."""

    number: int
    rows: int
    lost: tuple[LostRange, ...]


class SparkFailedError(IndilogError):
    """A task of Spark failed; the message is the error of this task."""


@contextmanager
def _explain_failures() -> Iterator[None]:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        sentence = f"Spark could not rebuild the index: {sentence_of(error)}"
        raise SparkFailedError(sentence) from error


class SparkEngine:
    """Writes the index snapshots of a rebuild in tasks of a Spark session.

    Args:
        spark: the session. Its executors need Python with IndiLog, and the data directory at the
            same place.
        part_bytes: bytes of segments that one task reads; None: the size of the log decides.
        range_rows: rows that one task sorts; None: the size of the log decides.
    """

    def __init__(
        self, spark: SparkSession, *, part_bytes: int | None = None, range_rows: int | None = None
    ) -> None:
        self._context: SparkContext = spark.sparkContext
        self._part_bytes = part_bytes
        self._range_rows = range_rows

    def __call__(self, plan: RebuildPlan) -> dict[int, Built]:
        """Write the snapshots of a plan.

        Raises:
            DataDirectoryError, DataLossError, NotReadyError: as `LogImage.read`.
            SparkFailedError: a task failed as often as Spark repeats it, or the session ended.
        """
        if not plan.starts:
            return {}
        with _explain_failures():
            return self._built(plan)

    def _built(self, plan: RebuildPlan) -> dict[int, Built]:
        bounds = self._bounds(plan)
        firsts = np.cumsum([0, *(one.ranges for one in bounds.values())]).tolist()
        job = _Job(
            plan.workspace,
            plan.eras,
            plan.starts,
            plan.end,
            bounds,
            dict(zip(bounds, firsts, strict=False)),
            plan.image.between(0, 0),
        )
        parts = self._write_parts(plan, job)
        blocks = self._spread(range(parts)).flatMap(partial(_blocks_of, job))
        placed = blocks.partitionBy(firsts[-1], _same)
        self._describe("sort the rows of the records")
        ranges = placed.mapPartitionsWithIndex(partial(_merge, job)).collect()
        return self._write_snapshots(plan, job, ranges)

    def _spread(self, tasks: Sequence[int]) -> RDD[int]:
        """Return an RDD of the numbers, each in a separate partition."""
        return self._context.parallelize(tasks, max(1, len(tasks)))

    def _describe(self, what: str) -> None:
        self._context.setJobDescription(f"indilog rebuild-index: {what}")

    def _bounds(self, plan: RebuildPlan) -> dict[int, RangeBounds]:
        """Read a sample, and return ranges of about equal size for each index shard."""
        samples = {shard: _Sample() for shard in plan.starts}
        rows = RowsOfImage(plan.image, plan.eras, plan.starts, plan.end, samples)
        start, end = plan.seqnums
        of_log = plan.image.rows_of(start, end)
        batches = plan.image.batches.part(of_log.start, of_log.stop)
        count = max(_SAMPLES_MIN, min(_SAMPLES, _SAMPLE_RECORDS * len(of_log) // (end - start + 1)))
        places = np.unique(np.linspace(0, len(of_log), count, endpoint=False, dtype=np.int64))
        firsts = batches.seqnums[places] if len(of_log) else places[:0]
        sizes = batches.records[places] if len(of_log) else places[:0]
        for first, after, size in zip(
            firsts.tolist(), [*firsts[1:].tolist(), end], sizes.tolist(), strict=True
        ):
            for sample in samples.values():
                sample.stands_for(first, (after - first) / size)
            rows.collect(first, first + size)
        scale = (end - start) / max(1, int(sizes.sum()))
        total = scale * sum(sample.count for sample in samples.values())
        tasks = _TASKS_EACH * self._context.defaultParallelism
        wanted = self._range_rows or min(RANGE_ROWS, max(_RANGE_ROWS_MIN, total / tasks))
        return {
            shard: bounds_of(sample.joined(), max(1, round(scale * sample.count / wanted)))
            for shard, sample in samples.items()
        }

    def _write_parts(self, plan: RebuildPlan, job: _Job) -> int:
        """Write a file with each task's part of the image; return how many parts there are.

        An image may be large, so it does not go through the memory of the JVM.
        """
        start, end = plan.seqnums
        size = self._part_bytes
        if size is None:
            rows = plan.image.rows_of(start, end)
            total = int(plan.image.batches.part(rows.start, rows.stop).bytes.sum())
            tasks = _TASKS_EACH * self._context.defaultParallelism
            size = min(PART_BYTES, max(_PART_BYTES_MIN, total // tasks))
        parts = parts_of(plan.image, start, end, size)
        for number, part in enumerate(parts):
            image = plan.image.between(part.start, part.end)
            seqnums = np.array([part.start, part.end])
            np.savez(job.part_file(number), seqnums, *image.batches, *image.ordered)
        return len(parts)

    def _write_snapshots(
        self, plan: RebuildPlan, job: _Job, ranges: Sequence[_Range]
    ) -> dict[int, Built]:
        """Write the ranges of each index shard, and the rows of its base, as a snapshot."""
        lost: dict[int, list[LostRange]] = {shard: [] for shard in plan.starts}
        for found in ranges:
            lost[_owner(job, found.number)] += found.lost
        # Tasks get the numbers of files and rows; all other data is in the workspace.
        counts = {found.number: found.rows for found in ranges}
        writers = {
            shard: partial(
                _write_snapshot,
                job,
                counts,
                plan.info(shard, lost[shard]),
                plan.bases.get(shard),
                plan.image.floors,
            )
            for shard in plan.starts
        }
        self._describe("write the snapshots")
        built = self._spread([*plan.starts]).map(lambda shard: (shard, writers[shard]())).collect()
        return dict(built)


class _Sample:
    """Takes the rows of sampled batches.

    Each sampled batch represents all records up to the next sampled batch. So the seqnums of its
    rows are spread over the range of these records.

    Attributes:
        count: number of rows.
    """

    def __init__(self) -> None:
        self._pieces = [no_rows()]
        self._first: SeqNum = 0
        self._records_each = 1.0
        self.count = 0

    def stands_for(self, first: SeqNum, records_each: float) -> None:
        """Set the seqnum at which the next rows begin, and how many records each row represents."""
        self._first, self._records_each = first, records_each

    def add(self, rows: Rows) -> None:
        """Take rows."""
        of_batch = (rows.seqnums - np.uint64(self._first)) * self._records_each
        seqnums = of_batch.astype(np.uint64) + np.uint64(self._first)
        self._pieces.append(Rows(rows.tags, seqnums, rows.shards))
        self.count += len(rows.tags)

    def joined(self) -> Rows:
        """Return all rows, in any order."""
        return Rows(*(np.concatenate(column) for column in zip(*self._pieces, strict=True)))


# --- in tasks


def _blocks_of(job: _Job, number: int) -> Iterator[tuple[int, _Block]]:
    """Yield the rows of a part of the log, with the ranges that they belong to."""
    # Imported objects live as long as the process, so exclude them from garbage collection.
    gc.freeze()
    with np.load(job.part_file(number)) as file:
        seqnums, *columns = (file[name] for name in file.files)
    batches = BatchPlaces._make(columns[: len(BatchPlaces._fields)])
    ordered = OrderedColumns._make(columns[len(BatchPlaces._fields) :])
    image = job.image._replace(batches=batches, ordered=ordered)
    with tempfile.TemporaryDirectory(prefix="indilog-rebuild-") as folder:
        share = TASK_MEMORY_BYTES // len(job.starts)
        runs = {
            shard: SortedRuns(_make_folder(Path(folder, str(shard))), memory_bytes_max=share)
            for shard in job.starts
        }
        rows = RowsOfImage(image, job.eras, job.starts, job.end, runs)
        rows.collect(*seqnums.tolist())
        for shard, of_shard in runs.items():
            lost = tuple(rows.lost[shard])
            for place, piece in enumerate(of_shard.merged()):
                for of_range, block in split(piece, job.bounds[shard]):
                    key = job.first_range[shard] + of_range
                    yield key, _Block((number, place), Rows(*map(np.asarray, block)), lost)
                    lost = ()


def _merge(job: _Job, number: int, blocks: Iterable[tuple[int, _Block]]) -> Iterator[_Range]:
    """Merge the blocks of a range, and write its rows."""
    gc.freeze()
    found = sorted((block for _, block in blocks), key=lambda block: block.order)
    with tempfile.TemporaryDirectory(prefix="indilog-rebuild-") as folder:
        runs = SortedRuns(Path(folder), memory_bytes_max=TASK_MEMORY_BYTES)
        for block in found:
            runs.add(block.rows)
        # Spark may repeat a task or run it twice. The folder still appears once, with all its rows.
        attempt = Path(tempfile.mkdtemp(prefix=f"attempt-{number}-", dir=job.workspace))
        write_run(attempt, "all", runs.merged())
        if runs.rows:
            _put_in_place(attempt, job.range_folder(number))
    yield _Range(number, runs.rows, tuple(one for block in found for one in block.lost))


def _write_snapshot(
    job: _Job,
    counts: Mapping[int, int],
    info: SnapshotInfo,
    base: BaseSnapshot | None,
    floors: Trimmed,
) -> Built:
    """Write the snapshot of an index shard."""
    gc.freeze()
    shard = info.index_shard
    first = job.first_range[shard]
    numbers = range(first, first + job.bounds[shard].ranges)
    pieces = _pieces_of(job, [number for number in numbers if counts.get(number)])
    rows = sum(counts.get(number, 0) for number in numbers)
    with tempfile.TemporaryDirectory(prefix=f"attempt-{shard}-", dir=job.workspace) as attempt:
        if base is not None:
            runs = SortedRuns(Path(attempt), memory_bytes_max=TASK_MEMORY_BYTES)
            runs.add_run(base.rows(floors))
            runs.add_run(pieces)
            pieces, rows = runs.merged(), runs.rows
        built = write_snapshot(Path(attempt, "snapshot"), info, pieces, rows)
        if built.file is None:
            return built
        return Built(built.file.rename(job.workspace / f"{shard}.parquet"), rows)


def _pieces_of(job: _Job, numbers: Iterable[int]) -> Iterator[Rows]:
    for number in numbers:
        rows = mapped_run(job.range_folder(number), "all")
        for start in range(0, len(rows.tags), _PIECE_ROWS):
            yield rows.part(start, start + _PIECE_ROWS)


def _put_in_place(attempt: Path, folder: Path) -> None:
    try:
        attempt.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(attempt)  # another attempt was faster; its rows are the same


def _owner(job: _Job, number: int) -> int:
    """Return the index shard that a range belongs to."""
    return max((first, shard) for shard, first in job.first_range.items() if first <= number)[1]


def _same(number: int) -> int:
    return number


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder
