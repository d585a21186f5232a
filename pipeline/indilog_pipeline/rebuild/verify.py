"""Compares the index snapshots of a data directory with its records.

The command `indilog rebuild-index` calls `verify_index`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import MetalogPosition, SeqNum
from indilog.kernel.floors import Trimmed
from indilog.kernel.index_snapshot import (
    Rows,
    opened_snapshot,
    read_rows,
    regrouped,
    snapshot_files,
)
from indilog_index.rebuild.sorted_runs import SortedRuns
from indilog_pipeline.index_rows import RowsOfImage, seqnums_between
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.rebuild.local import MEMORY_BYTES
from indilog_pipeline.rebuild.plan import BaseSnapshot, base_of, snapshot_folders


class Difference(NamedTuple):
    """The first row that a snapshot and the records do not share.

    Attributes:
        file: the snapshot.
        has: the row `(tag, seqnum, shard)` of the snapshot; None: the snapshot has no further row.
        wanted: the row that the records require; None: they require no further row.
    """

    file: Path
    has: tuple[int, int, int] | None
    wanted: tuple[int, int, int] | None


class Compared(NamedTuple):
    """A snapshot that was compared with the records.

    Attributes:
        file: the snapshot.
        position: the metalog position where it ends.
        rows: number of its rows, including those of trimmed records.
    """

    file: Path
    position: MetalogPosition
    rows: int


class Verified(NamedTuple):
    """The result of comparing snapshots with records.

    Attributes:
        compared: the snapshots that were compared.
        difference: the first difference, which ends the comparison; None: all rows are equal.
        unusable: folders of index nodes with snapshots, but without an intact snapshot of this log.
        seqnums: number of ordered seqnums; 0: no snapshot is needed.
    """

    compared: list[Compared]
    difference: Difference | None
    unusable: list[Path]
    seqnums: int


def verify_index(
    directory: Path,
    note: Callable[[SeqNum, SeqNum], None] = lambda _done, _total: None,
    *,
    memory_bytes_max: int = MEMORY_BYTES,
) -> Verified:
    """Compare the newest snapshot of each index node with the records.

    The platform may run meanwhile. Rows of trimmed records count as equal. `note` is called with
    two numbers: the seqnums read so far for a snapshot, and all seqnums to read.

    Raises:
        DataDirectoryError, DataLossError, NotReadyError: as `LogImage.read`.
    """
    image = LogImage.read(directory)
    eras = image.view.eras
    _, tail = seqnums_between(image, [0], image.position)
    compared: list[Compared] = []
    unusable: list[Path] = []
    for shard in range(len(image.view.index_shards)):
        for folder in snapshot_folders(directory, image.view, shard):
            # A running index node may have replaced its files meanwhile, so look again.
            base = base_of(image, eras, shard, [folder]) or base_of(image, eras, shard, [folder])
            if base is None:
                unusable += [folder] if snapshot_files(folder) else []
                continue
            position = base.snapshot.info.position
            compared.append(Compared(base.file, position, base.snapshot.rows))
            end = min(position, image.position)
            with tempfile.TemporaryDirectory(prefix="indilog-verify-") as workspace:
                runs = SortedRuns(Path(workspace), memory_bytes_max=memory_bytes_max)
                rows = RowsOfImage(image, eras, {shard: 0}, end, {shard: runs})
                start, after = seqnums_between(image, [0], end)
                rows.collect(start, after, partial(_note, note, after))
                found = _difference(base, runs, image.floors)
            if found is not None:
                return Verified(compared, found, unusable, tail)
    return Verified(compared, None, unusable, tail)


def _note(note: Callable[[SeqNum, SeqNum], None], total: SeqNum, done: SeqNum) -> None:
    note(done, total)


def _difference(base: BaseSnapshot, runs: SortedRuns, floors: Trimmed) -> Difference | None:
    alive = np.concatenate(
        [np.empty(0, np.uint64), *(rows.seqnums[rows.tags == 0] for rows in runs.merged())]
    )
    parquet, snapshot = opened_snapshot(base.file)
    pieces = map(partial(read_rows, parquet), range(len(snapshot.groups.lowest)))
    has = regrouped(_alive(rows, alive, floors) for rows in pieces)
    wanted = regrouped(_alive(rows, alive, floors) for rows in runs.merged())
    while True:
        of_snapshot, of_records = next(has, None), next(wanted, None)
        if of_snapshot is None and of_records is None:
            return None
        place = _first_difference(of_snapshot, of_records)
        if place is not None:
            return Difference(base.file, _row(of_snapshot, place), _row(of_records, place))


def _alive(rows: Rows, alive: NDArray[np.uint64], floors: Trimmed) -> Rows:
    """Return the rows, without rows of trimmed records and without rows below their tag's floor."""
    if not len(alive):
        return rows.part(0, 0)
    places = np.minimum(np.searchsorted(alive, rows.seqnums), len(alive) - 1)
    return rows.chosen(
        (alive[places] == rows.seqnums)
        & (floors.tags.of_each(rows.tags) <= rows.seqnums)
        & (floors.logs.of_each(rows.tags) <= rows.seqnums)
    )


def _first_difference(one: Rows | None, other: Rows | None) -> int | None:
    if one is None or other is None:
        return 0
    size = min(len(one.tags), len(other.tags))
    differ = np.zeros(size, np.bool_)
    differ |= one.tags[:size] != other.tags[:size]
    differ |= one.seqnums[:size] != other.seqnums[:size]
    differ |= one.shards[:size] != other.shards[:size]
    if differ.any():
        return int(np.argmax(differ))
    return None if len(one.tags) == len(other.tags) else size


def _row(rows: Rows | None, place: int) -> tuple[int, int, int] | None:
    if rows is None or place >= len(rows.tags):
        return None
    return int(rows.tags[place]), int(rows.seqnums[place]), int(rows.shards[place])
