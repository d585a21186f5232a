"""The engine `local`: this process writes the index snapshots of a rebuild (`rebuild.run`).

A snapshot has a row for each tag of each record, sorted by tag and seqnum. Rows that do not fit in
memory are sorted in parts, which are files and are merged at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from indilog.base.ids import SeqNum
from indilog.config import Config
from indilog.kernel.index_snapshot import Rows, SnapshotInfo, write_rows
from indilog.kernel.tag_filter import TagFilterBuilder
from indilog_index.rebuild.sorted_runs import SortedRuns
from indilog_pipeline.index_rows import RowsOfImage
from indilog_pipeline.rebuild.plan import Built, RebuildPlan

MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Bytes of rows in memory during a sort, for all index shards together."""
_FILTER_SHARE: Final = 16
"""A snapshot's filter of tags takes at most an index node's memory divided by this number."""

Note = Callable[[SeqNum, SeqNum], None]


class LocalEngine:
    """Writes the index snapshots of a rebuild in this process.

    Args:
        note: called with two numbers: the seqnums read so far, and all seqnums to read.
        memory_bytes_max: bytes of rows in memory, for all index shards together.
    """

    def __init__(
        self,
        note: Note = lambda _done, _total: None,
        *,
        memory_bytes_max: int = MEMORY_BYTES,
    ) -> None:
        self._note = note
        self._memory_bytes_max = memory_bytes_max

    def __call__(self, plan: RebuildPlan) -> dict[int, Built]:
        """Write the snapshots of a plan.

        Raises:
            DataDirectoryError, DataLossError, NotReadyError: as `LogImage.read`.
        """
        share = self._memory_bytes_max // max(1, len(plan.starts))
        runs = {
            shard: SortedRuns(plan.folder(f"runs-{shard}"), memory_bytes_max=share)
            for shard in plan.starts
        }
        for shard, base in plan.bases.items():
            runs[shard].add_run(base.rows(plan.image.floors))
        start, end = plan.seqnums
        rows = RowsOfImage(plan.image, plan.eras, plan.starts, plan.end, runs)
        rows.collect(start, end, lambda done: self._note(done - start, end - start))
        return {
            shard: write_snapshot(
                plan.workspace / f"{shard}.parquet",
                plan.info(shard, [*rows.lost[shard]]),
                of_shard.merged(),
                of_shard.rows,
            )
            for shard, of_shard in runs.items()
        }


def write_snapshot(file: Path, info: SnapshotInfo, pieces: Iterable[Rows], rows: int) -> Built:
    """Write a snapshot of sorted rows; `rows` is their number."""
    if not rows:
        return Built(None, 0)
    filter_bytes = Config().node.index_tier.index_memory_bytes_max // _FILTER_SHARE
    write_rows(file, info, pieces, TagFilterBuilder(rows, bytes_max=filter_bytes))
    return Built(file, rows)
