"""Rebuilds the index snapshots of a data directory from its records, and compares snapshots with
them (thesis 5.6.2, decision 0035).

The index tier must not run meanwhile: its processes write snapshots, too. A node that starts then
begins with the rebuilt snapshot, and fetches only what came later.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import MetalogPosition, NodeId, SeqNum
from indilog.config import Config
from indilog.kernel.floors import Trimmed
from indilog.kernel.index_snapshot import (
    Rows,
    Snapshot,
    SnapshotFloors,
    check_file,
    opened_snapshot,
    read_rows,
    regrouped,
    snapshot_files,
)
from indilog.kernel.tag_filter import TagFilterBuilder
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.journal.directory_lock import lock_directory
from indilog.runtime.snapshot_files import SnapshotFolder, rows_left
from indilog_index.rebuild.sorted_runs import SortedRuns
from indilog_pipeline.index_rows import RowsOfImage, follows
from indilog_pipeline.log_image import LogImage

MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Bytes of rows that all index shards hold in memory while they are sorted."""
_TEMPORARY: Final = "rebuild-"
_FILTER_SHARE: Final = 16
"""The share of an index node's memory that the filter of a snapshot's tags may take."""


class Rebuilt(NamedTuple):
    """What became of one index shard.

    Attributes:
        index_shard: the index shard.
        start: the position of the snapshot that it was continued from; 0: there was none.
        position: the position of the new snapshot.
        rows: how many rows it has; 0: it has no records, and no snapshot was written.
    """

    index_shard: int
    start: MetalogPosition
    position: MetalogPosition
    rows: int


class Difference(NamedTuple):
    """The first row that a snapshot and the records do not share.

    Attributes:
        file: the snapshot.
        has: its row `(tag, seqnum, shard)`; None: it ends before.
        wanted: the row that follows from the records; None: there is none.
    """

    file: Path
    has: tuple[int, int, int] | None
    wanted: tuple[int, int, int] | None


class _Base(NamedTuple):
    """A snapshot to continue from."""

    file: Path
    snapshot: Snapshot


def rebuild_index(
    directory: Path,
    note: Callable[[SeqNum, SeqNum], None] = lambda _done, _end: None,
    *,
    memory_bytes_max: int = MEMORY_BYTES,
) -> list[Rebuilt]:
    """Write a snapshot of everything below the image's end, for each replica of each index shard.

    An index shard continues from its newest intact snapshot of the same metalog and schedule.
    `note` is given the seqnum up to which records were read, and the last one's.

    Raises:
        DataDirectoryError: the index tier runs, or as `LogImage.read`.
        DataLossError, NotReadyError: as `LogImage.read`.
    """
    with _index_tier_locked(directory), _workspace(directory) as workspace:
        image = LogImage.read(directory)
        eras = image.view.eras
        bases = {
            shard: _base_of(image, shard, _folders(directory, shard))
            for shard in range(len(image.view.index_shards))
        }
        starts = {s: base.snapshot.info.position if base else 0 for s, base in bases.items()}
        behind = {s: start for s, start in starts.items() if start < image.position}
        share = memory_bytes_max // max(1, len(behind))
        runs = {s: SortedRuns(_made(workspace, s), memory_bytes_max=share) for s in behind}
        for shard, of_shard in runs.items():
            if (base := bases[shard]) is not None:
                of_shard.add_run(_kept_rows(base, image.floors))
        rows = RowsOfImage(image, eras, behind, image.position, runs)
        rows.collect(lambda done: note(done, image.tail))
        for shard, of_shard in runs.items():
            base = bases[shard]
            info = rows.info(shard, base.snapshot.info if base is not None else None)
            if of_shard.rows:
                folders = [SnapshotFolder(folder) for folder in _folders(directory, shard)]
                filter_bytes = Config().node.index_tier.index_memory_bytes_max // _FILTER_SHARE
                for folder in folders:
                    tags = TagFilterBuilder(of_shard.rows, bytes_max=filter_bytes)
                    folder.put(info, of_shard.merged(), tags)
        return [
            Rebuilt(s, start, image.position, runs[s].rows if s in runs else 0)
            for s, start in starts.items()
        ]


def verify_index(
    directory: Path,
    note: Callable[[SeqNum, SeqNum], None] = lambda _done, _end: None,
    *,
    memory_bytes_max: int = MEMORY_BYTES,
) -> tuple[list[Path], Difference | None]:
    """Compare the newest snapshot of each index node with the records; return the snapshots that
    were compared, and the first difference.

    It may run beside a platform. Rows of trimmed records count as equal.

    Raises:
        DataDirectoryError, DataLossError, NotReadyError: as `LogImage.read`.
    """
    image = LogImage.read(directory)
    compared: list[Path] = []
    for shard in range(len(image.view.index_shards)):
        for folder in _folders(directory, shard):
            base = _base_of(image, shard, [folder])
            if base is None:
                continue
            compared.append(base.file)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as workspace:
                runs = SortedRuns(Path(workspace), memory_bytes_max=memory_bytes_max)
                end = base.snapshot.info.position
                rows = RowsOfImage(image, image.view.eras, {shard: 0}, end, {shard: runs})
                rows.collect(lambda done: note(done, image.tail))
                found = _difference(base, runs, image.floors)
            if found is not None:
                return compared, found
    return compared, None


def _difference(base: _Base, runs: SortedRuns, floors: Trimmed) -> Difference | None:
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
    """Return the rows without those of trimmed records, and those below the floor of their tag."""
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


def _base_of(image: LogImage, shard: int, folders: list[Path]) -> _Base | None:
    """Return the newest intact snapshot of an index shard that the image's metalog continues."""
    found: _Base | None = None
    for folder in folders:
        for position, file in snapshot_files(folder):
            if found is not None and position <= found.snapshot.info.position:
                break
            try:
                check_file(file)
                _, snapshot = opened_snapshot(file)
            except (MalformedFrameError, OSError):
                continue  # damaged, or replaced by a running node
            if snapshot.info.index_shard == shard and follows(
                image, image.view.eras, snapshot.info
            ):
                found = _Base(file, snapshot)
                break
    return found


def _kept_rows(base: _Base, floors: Trimmed) -> Iterator[Rows]:
    logs, tags = floors.logs.columns(), floors.tags.columns()
    below = SnapshotFloors(logs.tags, logs.untils, tags.tags, tags.untils)
    return rows_left(opened_snapshot(base.file), below)


# --- places


def _index_nodes(directory: Path) -> Mapping[NodeId, Path]:
    """Return the folder of the process of each index node."""
    view, arrangement = layout_in(directory)
    return {n: directory if arrangement == "embedded" else directory / n for n in view.index_nodes}


def _folders(directory: Path, shard: int) -> list[Path]:
    """Return the folders of the snapshots of an index shard, one for each replica."""
    view, _ = layout_in(directory)
    nodes = _index_nodes(directory)
    return [nodes[node] / "snapshots" / node for node in view.index_shards[shard]]


@contextmanager
def _index_tier_locked(directory: Path) -> Iterator[None]:
    """Keep the processes of index nodes from running in the block.

    Raises:
        DataDirectoryError: one runs.
    """
    view, arrangement = layout_in(directory)
    names = ["journal"] if arrangement == "embedded" else [*view.index_nodes]
    with ExitStack() as stack:
        for journal in (directory / name for name in names):
            if journal.is_dir():
                stack.callback(os.close, lock_directory(journal / "LOCK"))
        yield


@contextmanager
def _workspace(directory: Path) -> Iterator[Path]:
    """Give a folder for sorted runs, and remove those that killed rebuilds left."""
    for left in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=directory) as folder:
        yield Path(folder)


def _made(workspace: Path, shard: int) -> Path:
    folder = workspace / str(shard)
    folder.mkdir()
    return folder
