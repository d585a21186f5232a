"""The rows of index shards, from the records of an image (decision 0035).

The engines and the comparison of `rebuild` call this module. It reads records by `Payloads`, and
makes rows as an index node would (`indilog_index.rebuild.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import MetalogPosition, SeqNum
from indilog.kernel.index_schedule import Eras, eras_below, last_below
from indilog.kernel.index_snapshot import Rows, SnapshotInfo
from indilog.kernel.lost_ranges import LostRange, LostRanges
from indilog_index.rebuild.plan import lineage_of, owners_of, rows_of
from indilog_pipeline.log_image import LogImage, joined_ranges
from indilog_pipeline.payloads import Chunk, Payloads

LOST_MAX = 1024
"""Largest number of ranges of lost records in a snapshot: the default of `lost_ranges_max`."""


class RowSink(Protocol):
    """Takes sorted rows; the seqnums of a tag ascend over all calls."""

    def add(self, rows: Rows) -> None:
        """Take further rows."""


class RowsOfImage:
    """Collects the rows of some index shards below a metalog position.

    Args:
        image: image of the data directory.
        eras: which positions go to which index shard.
        starts: for each index shard to rebuild, the metalog position where its rows begin.
        end: the metalog position where all rows end.
        runs: for each index shard, the sink of its rows.

    Attributes:
        lost: for each index shard, the records whose tags are lost.
    """

    def __init__(
        self,
        image: LogImage,
        eras: Eras,
        starts: Mapping[int, MetalogPosition],
        end: MetalogPosition,
        runs: Mapping[int, RowSink],
    ) -> None:
        self._payloads = Payloads(image)
        self._eras = eras
        self._starts = starts
        self._end = end
        self._runs = runs
        self.lost = {shard: LostRanges(ranges_max=LOST_MAX) for shard in starts}

    def collect(
        self, start: SeqNum, end: SeqNum, note: Callable[[SeqNum], None] = lambda _done: None
    ) -> None:
        """Read the records of `[start, end)` once; call `note` with the seqnum reached.

        Raises:
            DataDirectoryError, DataLossError, NotReadyError: as `LogImage.read`.
        """
        try:
            while start < end:
                chunk = self._payloads.chunk(start, end, with_data=False)
                self._take(chunk)
                start = chunk.stop
                note(start)
        finally:
            self._payloads.close()

    def _take(self, chunk: Chunk) -> None:
        columns, batches = chunk.columns, chunk.batches
        lost = self._lost_in(chunk)
        intact = columns.batches
        firsts = np.cumsum(columns.records) - columns.records
        index = np.arange(int(columns.records.sum())) - np.repeat(firsts, columns.records)
        seqnums = np.repeat(batches.seqnums[intact], columns.records) + index
        shards = np.repeat(batches.shards[intact], columns.records)
        positions = np.repeat(batches.positions[intact], columns.records)
        owners = owners_of(self._eras, positions)
        for owner, runs in self._runs.items():
            mine = (owners == owner) & (positions >= self._starts[owner]) & (positions < self._end)
            rows = rows_of(
                seqnums[mine].astype(np.uint64),
                shards[mine],
                columns.tag_counts[mine],
                columns.tags[np.repeat(mine, columns.tag_counts)],
                chunk.image.floors,
            )
            runs.add(_with_lost(rows, lost.get(owner)))

    def _lost_in(self, chunk: Chunk) -> dict[int, Rows]:
        """Return the rows of lost records of a chunk; lost records have the empty tag only."""
        batches, damaged = chunk.batches, chunk.columns.damaged
        starts = batches.seqnums[damaged]
        unreadable = np.stack((starts, starts + batches.records[damaged]), axis=1)
        ranges = joined_ranges(np.concatenate((chunk.image.lost, unreadable)))
        ranges = np.clip(ranges, chunk.start, chunk.stop)
        ranges = ranges[ranges[:, 0] < ranges[:, 1]]
        if not len(ranges):
            return {}
        seqnums = np.concatenate([np.arange(start, end) for start, end in ranges.tolist()])
        ordered = chunk.image.ordered
        spans = np.searchsorted(ordered.seqnums, seqnums.astype(np.uint64), side="right") - 1
        positions = ordered.positions[spans]
        owners = owners_of(self._eras, positions)
        found: dict[int, Rows] = {}
        for owner, start in self._starts.items():
            mine = (owners == owner) & (positions >= start) & (positions < self._end)
            of_owner = seqnums[mine].astype(np.uint64)
            for first, end in _ranges_in(of_owner):
                self.lost[owner].add(LostRange(first, end))
            tags = np.zeros(len(of_owner), np.uint64)
            found[owner] = Rows(tags, of_owner, ordered.shards[spans][mine])
        return found


def seqnums_between(
    image: LogImage, starts: Iterable[MetalogPosition], end: MetalogPosition
) -> tuple[SeqNum, SeqNum]:
    """Return the seqnums `[start, end)` that the positions from the first of `starts` to `end`
    ordered.
    """
    first = min(starts, default=end)
    return image.tail_before(first), image.tail_before(end)


def snapshot_info(
    image: LogImage,
    eras: Eras,
    index_shard: int,
    end: MetalogPosition,
    lost: Iterable[LostRange],
) -> SnapshotInfo:
    """Return the extent of an index shard's snapshot below `end`; `lost`: its lost records."""
    ordered = image.ordered
    mine = (ordered.positions < end) & (owners_of(eras, ordered.positions) == index_shard)
    last = int(np.flatnonzero(mine)[-1]) if mine.any() else None
    return SnapshotInfo(
        logspace=image.view.logspace,
        index_shard=index_shard,
        position=end,
        tail=0 if last is None else int(ordered.tails[ordered.positions[last]]),
        eras=eras_below(eras, end),
        lost=tuple(LostRanges(lost, ranges_max=LOST_MAX)),
        lineage=lineage_of(eras, index_shard, image.lineage, end),
    )


def follows(image: LogImage, eras: Eras, info: SnapshotInfo) -> bool:
    """Whether a snapshot was made of the image's metalog, with the image's schedule.

    The snapshot of a running index node may end after the image: at the next position of its index
    shard, which has no entry yet.
    """
    return (
        info.logspace == image.view.logspace
        and info.lineage.position <= image.position
        and info.eras == eras_below(eras, info.position)
        and info.lineage == lineage_of(eras, info.index_shard, image.lineage, info.position)
        and info.lineage.position == last_below(eras, info.index_shard, info.position) + 1
    )


def _with_lost(rows: Rows, lost: Rows | None) -> Rows:
    """Return sorted rows, with the rows of lost records first, because these have the empty tag."""
    if lost is None or not len(lost.tags):
        return rows
    joined = Rows(
        np.concatenate((lost.tags, rows.tags)),
        np.concatenate((lost.seqnums, rows.seqnums)),
        np.concatenate((lost.shards, rows.shards)),
    )
    order = np.lexsort((joined.seqnums, joined.tags))
    return Rows(joined.tags[order], joined.seqnums[order], joined.shards[order])


def _ranges_in(seqnums: NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges `[start, end)`."""
    if not len(seqnums):
        return []
    begins = np.flatnonzero(np.diff(seqnums, prepend=seqnums[:1]) != 1)
    begins[0] = 0
    ends = np.append(begins[1:], len(seqnums)) - 1
    return list(zip(seqnums[begins].tolist(), (seqnums[ends] + 1).tolist(), strict=True))
