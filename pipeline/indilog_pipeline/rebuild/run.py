"""Runs a rebuild: plans it, lets an engine write the snapshots, and installs them.

The index tier must not run during a rebuild, because its processes also write snapshots. An index
node that starts afterwards begins with the rebuilt snapshot, and fetches only newer index data.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.base.ids import MetalogPosition
from indilog.config import Config
from indilog.kernel.index_schedule import Eras, IndexPositions
from indilog.kernel.view import View, with_index_shards
from indilog.runtime.cluster.cluster_state import (
    MEMBERS_KEY,
    VIEW_KEY,
    decode_members,
    has_copied_layout,
    layout_in,
)
from indilog.runtime.journal.directory_lock import lock_directory
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore, values_in
from indilog.runtime.snapshot_files import SnapshotFolder
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.rebuild.local import LocalEngine
from indilog_pipeline.rebuild.plan import Built, Engine, RebuildPlan, base_of, snapshot_folders

_TEMPORARY: Final = "rebuild-"


class Rebuilt(NamedTuple):
    """The result for one index shard.

    Attributes:
        index_shard: the index shard.
        start: the position of the snapshot that was extended; 0: there was no snapshot.
        position: the position of the new snapshot.
        rows: rows of the new snapshot; 0: the index shard has no records and so no new snapshot.
    """

    index_shard: int
    start: MetalogPosition
    position: MetalogPosition
    rows: int


class Sharding(NamedTuple):
    """A change of the number of index shards.

    Attributes:
        index_shards: the new number of index shards.
        anew: whether to distribute all metalog positions again. If not, only future positions are
            distributed to the new number of index shards, and existing snapshots stay valid.
    """

    index_shards: int
    anew: bool = False

    def of(self, image: LogImage) -> View:
        """Return the view with the new number of index shards.

        Raises:
            ConfigError: the number is below 1.
        """
        return with_index_shards(image.view, self.index_shards, 0 if self.anew else image.position)


def rebuild_index(
    directory: Path, engine: Engine | None = None, *, sharding: Sharding | None = None
) -> list[Rebuilt]:
    """Write a snapshot of everything below the image's end, for each replica of each index shard.

    An index shard continues from its newest intact snapshot of the same metalog and schedule.
    Without an engine, this process rebuilds. With `sharding`, the data directory gets a new view at
    the end; the configuration of later starts must name the new number of index shards.

    Raises:
        ConfigError: `sharding` has fewer than 1 index shard, or ZooKeeper has the layout.
        DataDirectoryError: the index tier is running (with `sharding`: any part of the platform),
            or the disk is full or fails. Also as `LogImage.read`.
        DataLossError, NotReadyError: as `LogImage.read`.
    """
    engine = engine or LocalEngine()
    directory = directory.absolute()  # executors of a cluster have other working directories
    if sharding is not None and has_copied_layout(directory):
        raise ConfigError(
            f"ZooKeeper has the layout of {directory}, so this command cannot change it. Rebuild "
            "without another number of index shards, and set index_shards for the next start."
        )
    with ExitStack() as stack:
        metadata = stack.enter_context(_locked(directory, whole=sharding is not None))
        workspace = stack.enter_context(_workspace(directory))
        image = LogImage.read(directory)
        view = image.view if sharding is None else sharding.of(image)
        plan, folders = _plan(directory, workspace, image, view)
        with _explain_disk_errors(directory):
            built = engine(plan)
            for shard, one in built.items():
                _install(one, image.position, folders[shard])
        if metadata is not None and view != image.view:
            metadata.replace(VIEW_KEY, msgspec.json.encode(view))
            _want_index_shards_of(view, metadata, directory)
        return [_rebuilt(plan, shard, built.get(shard)) for shard in folders]


def _want_index_shards_of(view: View, metadata: EmbeddedMetadataStore, directory: Path) -> None:
    """Keep the next start from changing the index shards back to the number requested before."""
    if (stored := values_in(directory / "metadata").get(MEMBERS_KEY)) is not None:
        asked = decode_members(stored)
        members = msgspec.structs.replace(
            asked,
            index_shards=view.members.index_shards,
            version=max(asked.version, view.members_version) + 1,
        )
        metadata.replace(MEMBERS_KEY, msgspec.json.encode(members))


def _plan(
    directory: Path, workspace: Path, image: LogImage, view: View
) -> tuple[RebuildPlan, dict[int, list[Path]]]:
    """Return the plan, and the folders of the snapshots of each index shard."""
    folders, starts, bases = {}, {}, {}
    for shard in range(len(view.index_shards)):
        folders[shard] = snapshot_folders(directory, view, shard)
        if not _has_positions(view.eras, shard, image.position):
            continue
        base = base_of(image, view.eras, shard, folders[shard])
        start = base.snapshot.info.position if base is not None else 0
        if start < image.position:
            starts[shard] = start
            if base is not None:
                bases[shard] = base
    return RebuildPlan(workspace, image, view.eras, starts, bases), folders


def _rebuilt(plan: RebuildPlan, shard: int, built: Built | None) -> Rebuilt:
    if built is not None:
        return Rebuilt(shard, plan.starts[shard], plan.end, built.rows)
    return Rebuilt(
        shard, plan.end if _has_positions(plan.eras, shard, plan.end) else 0, plan.end, 0
    )


def _has_positions(eras: Eras, shard: int, end: MetalogPosition) -> bool:
    """Whether an index shard has any position below `end`."""
    return IndexPositions.of(eras, shard).first_from(0) < end


def _install(built: Built, position: MetalogPosition, folders: list[Path]) -> None:
    if built.file is not None:
        for folder in folders:
            SnapshotFolder(folder).put_copy(built.file, position)
        built.file.unlink()


@contextmanager
def _locked(directory: Path, *, whole: bool) -> Iterator[EmbeddedMetadataStore | None]:
    """Keep the processes of index nodes from running in the block; if `whole`, all processes.

    Gives the platform's metadata if `whole`, otherwise None.

    Raises:
        DataDirectoryError: such a process is running.
    """
    layout = layout_in(directory)
    nodes = layout.view.nodes if whole else layout.view.index_nodes
    with ExitStack() as stack:
        metadata = None
        if whole:
            metadata = EmbeddedMetadataStore(directory / "metadata", Config().node)
            stack.enter_context(metadata)
        for journal in (directory / name for name in layout.journals(nodes)):
            if journal.is_dir():
                stack.callback(os.close, lock_directory(journal / "LOCK"))
        yield metadata


@contextmanager
def _explain_disk_errors(directory: Path) -> Iterator[None]:
    """Raise a `DataDirectoryError` for an error of the disk in the block."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise DataDirectoryError(
            f"The index cannot be rebuilt in {directory}: {reason}. Nothing is lost: make room "
            "there and rebuild again."
        ) from error


@contextmanager
def _workspace(directory: Path) -> Iterator[Path]:
    """Give a folder for sorted runs, and remove those that killed rebuilds left."""
    for left in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=directory.absolute()) as folder:
        yield Path(folder)
