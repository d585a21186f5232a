"""The plan of a rebuild: which positions each index shard lacks, and which snapshot it extends.

`run` makes the plan, and the engines `local` and `spark_engine` carry it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.kernel.floors import Trimmed
from indilog.kernel.index_schedule import Eras
from indilog.kernel.index_snapshot import (
    IndexSnapshot,
    Rows,
    SnapshotFloors,
    SnapshotInfo,
    check_file,
    opened_snapshot,
    snapshot_files,
)
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.view import View
from indilog.runtime.snapshot_files import rows_left
from indilog_pipeline.index_rows import follows, seqnums_between, snapshot_info
from indilog_pipeline.log_image import LogImage


class BaseSnapshot(NamedTuple):
    """A snapshot that a rebuild continues from."""

    file: Path
    snapshot: IndexSnapshot

    def rows(self, floors: Trimmed) -> Iterator[Rows]:
        """Yield the snapshot's rows, sorted, without rows of trimmed records."""
        logs, tags = floors.logs.columns(), floors.tags.columns()
        below = SnapshotFloors(logs.tags, logs.untils, tags.tags, tags.untils)
        return rows_left(opened_snapshot(self.file), below)


class RebuildPlan(NamedTuple):
    """A rebuild of the index shards of `starts`, up to the end of the image.

    Attributes:
        workspace: an empty folder in the data directory, which is removed after the rebuild.
        image: image of the data directory.
        eras: which positions go to which index shard, in the rebuilt snapshots.
        starts: for each index shard to rebuild, the metalog position where the new rows begin.
        bases: the snapshots with the earlier rows; an index shard without a base begins at 0.
    """

    workspace: Path
    image: LogImage
    eras: Eras
    starts: Mapping[int, MetalogPosition]
    bases: Mapping[int, BaseSnapshot]

    @property
    def end(self) -> MetalogPosition:
        """The metalog position where all snapshots end."""
        return self.image.position

    @property
    def seqnums(self) -> tuple[SeqNum, SeqNum]:
        """The seqnums `[start, end)` to read."""
        return seqnums_between(self.image, self.starts.values(), self.end)

    def folder(self, name: str) -> Path:
        """Make a folder in the workspace."""
        folder = self.workspace / name
        folder.mkdir()
        return folder

    def info(self, index_shard: int, lost: Sequence[LostRange]) -> SnapshotInfo:
        """Return the extent of a snapshot; `lost`: the lost records among the new rows."""
        base = self.bases.get(index_shard)
        before = base.snapshot.info.lost if base is not None else ()
        return snapshot_info(self.image, self.eras, index_shard, self.end, (*before, *lost))


class Built(NamedTuple):
    """The snapshot of an index shard, as an engine wrote it.

    Attributes:
        file: file in the workspace; None: the index shard has no rows.
        rows: number of rows.
    """

    file: Path | None
    rows: int


Engine: TypeAlias = Callable[[RebuildPlan], Mapping[int, Built]]
"""Makes the snapshots of all index shards of a plan."""


def base_of(
    image: LogImage, eras: Eras, shard: int, folders: Sequence[Path]
) -> BaseSnapshot | None:
    """Return the newest intact snapshot of an index shard that the image's metalog continues."""
    found: BaseSnapshot | None = None
    for folder in folders:
        for position, file in snapshot_files(folder):
            if found is not None and position <= found.snapshot.info.position:
                break
            try:
                check_file(file)
                _, snapshot = opened_snapshot(file)
            except (MalformedFrameError, OSError):
                continue  # damaged, or replaced by a running node
            if snapshot.info.index_shard == shard and follows(image, eras, snapshot.info):
                found = BaseSnapshot(file, snapshot)
                break
    return found


def snapshot_folders(directory: Path, view: View, shard: int) -> list[Path]:
    """Return the folders of the snapshots of an index shard, one for each replica."""
    return [directory / "snapshots" / node for node in view.index_shards[shard]]
