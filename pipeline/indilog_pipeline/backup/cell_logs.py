"""Logs of other kinds than `shared` in a backup (decision 0094). `create` copies them from the
disks of storage nodes and from object stores; `restore` writes them into a new platform.

Each copy is a prefix of its log, with all records that were acknowledged before the backup's
position. The copies are made one after the other, after the records of shared logs.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from indilog.base.errors import DataDirectoryError, DataLossError, NotReadyError
from indilog.base.ids import NodeId
from indilog.base.log_kinds import OBJECT_STORE, STRIPES
from indilog.config import Config
from indilog.kernel.view import View
from indilog.runtime.cell_store import CellReader, CellStore, cells_path
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.journal.segment import synced_directory
from indilog.wire.cell_messages import (
    CellAnswer,
    CellKeysWanted,
    CellOutcome,
    CellsSeal,
    CellWanted,
)
from indilog_cells.cells import CellsAndNotes, CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.copies import CopyOvertakenError, LogCopy, write_copy
from indilog_cells.index import GENERATION_LIMITS
from indilog_cells.layout_changes import Asks
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at
from indilog_cells.opening import new_part, platform_place
from indilog_cells.stored_cells import FixedLayout, StoredCells
from indilog_compute.log_kinds.catalog_records import NewSegment, segment_on_nodes
from indilog_compute.log_kinds.kinds import new_folder
from indilog_pipeline.backup.catalog import OtherSegment
from indilog_pipeline.backup.files import (
    Manifest,
    StoredSegment,
    cell_pieces,
    cells_head,
    cells_in,
    digest_of,
    segment_name,
    write_file,
)

_COPIES_MAX: Final = 16
"""Attempts to copy a log while its oldest cells are being trimmed."""


# --- making a backup


class _Disks:
    """The cells on the disks of a data directory: a `CellNodes`.

    Args:
        data: the data directory.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._layout = layout_in(data)
        self._readers: dict[NodeId, CellReader | None] = {}

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        """See `CellNodes.ask_all`; None: the node's file cannot be read."""
        return [self._ask(node, question) for node, question in asks]

    def _ask(self, node: NodeId, question: object) -> CellAnswer | None:
        assert isinstance(question, CellWanted | CellKeysWanted), "a backup changes nothing"
        try:
            if node not in self._readers:
                (journal,) = self._layout.journals([node])
                path = cells_path(self._data / journal, node)
                self._readers[node] = CellReader(path) if path.exists() else None
            reader = self._readers[node]
            return None if reader is None else reader.answer(question)
        except sqlite3.Error:
            return None

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            if reader is not None:
                reader.close()


class SegmentCopies:
    """Copies the logs of other kinds of a data directory into a backup.

    Args:
        data: the data directory.
        destination: directory of the backup.
        without: names of logs that are not copied.
    """

    def __init__(self, data: Path, destination: Path, without: Collection[str]) -> None:
        self._data, self._destination, self._without = data, destination, without
        self._disks = _Disks(data)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close all files."""
        self._disks.close()
        self._runner.close()

    def stored(self, number: int, other: OtherSegment) -> StoredSegment:
        """Copy a segment, unless its file exists and is intact.

        Raises:
            DataLossError: a record is damaged or lost.
            NotReadyError: the object store does not answer, or trims overtake the copy.
        """
        log, segment, _, is_begun = other
        if log in self._without:
            return StoredSegment(log, segment.kind, segment.folder, "", is_left_out=True)
        digest = self._digest(number, other) if is_begun else ""
        return StoredSegment(log, segment.kind, segment.folder, digest)

    def _digest(self, number: int, other: OtherSegment) -> str:
        path = self._destination / segment_name(number)
        if path.exists():
            try:
                return digest_of(path)
            except DataDirectoryError:
                path.unlink()  # damaged; the platform still has the records
        for _ in range(_COPIES_MAX):
            try:
                return write_file(path, self._pieces(other))
            except CopyOvertakenError:
                continue
            except DataLossError as error:
                raise DataLossError(
                    f"Log {other.log} cannot be copied: {error} There can be no whole backup. "
                    "Repair the log, restore the data directory from an older backup, or make a "
                    f"backup of all other logs (`--without {shlex.quote(other.log)}`)."
                ) from error
            except CellsError as error:
                raise NotReadyError(
                    f"Log {other.log} cannot be copied now: {error}; run the same command again."
                ) from error
        raise NotReadyError(
            f"Log {other.log} was trimmed faster than it was copied, in {_COPIES_MAX} attempts; "
            "run the same command again."
        )

    def _pieces(self, other: OtherSegment) -> Iterator[bytes]:
        run, segment = self._runner.run, other.segment
        cells = run(self._cells(other))
        copy = LogCopy(cells, is_open=segment.local_end is None)
        run(copy.begin())
        yield cells_head(copy.start, cells.generation_limits)
        pages = copy.pages()
        while (page := run(anext(pages, None))) is not None:
            for copied in page:
                yield from cell_pieces(copied)
        if segment.local_end is not None and copy.tail < segment.local_end:
            raise DataLossError(f"Records from {copy.tail} on are missing.")

    async def _cells(self, other: OtherSegment) -> CellsAndNotes:
        segment = other.segment
        if segment.kind != OBJECT_STORE:
            if other.layout is None:
                raise DataLossError("Its layout is not in the catalog.")
            return StoredCells(self._disks, other.layout)
        place = platform_place(segment.place, self._data)
        timeout_s = Config().node.object_logs.object_timeout_s
        store = object_store_at(place, timeout_s=timeout_s)
        return await ObjectCells.opened(store, segment.folder)


# --- restoring a backup


class _NewDisks:
    """The cells of the storage nodes of a new platform: a `CellNodes`.

    Args:
        data: the data directory.
        nodes: the storage nodes.
    """

    def __init__(self, data: Path, nodes: Sequence[NodeId]) -> None:
        journals = layout_in(data).journals(nodes)
        self._paths = {
            node: cells_path(data / name, node) for name, of in journals.items() for node in of
        }
        self._stores: dict[NodeId, CellStore] = {}

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        """See `CellNodes.ask_all`. Answers are durable when `close` has returned."""
        return [self._store(node).serve([question])[0] for node, question in asks]

    def _store(self, node: NodeId) -> CellStore:
        if (store := self._stores.get(node)) is None:
            path = self._paths[node]
            path.parent.mkdir(parents=True, exist_ok=True)
            store = self._stores[node] = CellStore(path, syncs=False)
        return store

    def close(self) -> None:
        """Write everything to the disks."""
        for node, store in self._stores.items():
            store.close()
            path = self._paths[node]
            with path.open("rb") as file:
                os.fsync(file.fileno())
            synced_directory(path.parent)
            synced_directory(path.parent.parent)


def new_segments(manifest: Manifest, config: Config, view: View) -> dict[str, NewSegment]:
    """Return where a new platform keeps the segments of a backup, by their folders in the backup.

    Args:
        manifest: manifest of the backup.
        config: configuration of the new platform.
        view: view of the new platform.
    """
    found = {}
    for each in manifest.segments:
        log, kind, folder = each.log, each.kind, each.folder
        if kind == OBJECT_STORE or each.is_left_out:
            # A folder of its own, because the old platform may still use the old folder. A log that
            # was left out is lost, which an object store without the folder reports.
            place = config.node.object_logs.object_place
            found[folder] = NewSegment(
                kind=OBJECT_STORE, place=place, folder=new_folder(log), stripes=STRIPES
            )
        else:
            copies = config.cluster.replicas
            found[folder] = segment_on_nodes(kind, folder, view.storage_nodes, copies)
    return found


def write_segments(
    source: Path,
    manifest: Manifest,
    config: Config,
    view: View,
    segments: Mapping[str, NewSegment],
) -> None:
    """Write the logs of other kinds of a backup into a new platform, durably.

    Args:
        source: directory of the backup.
        manifest: manifest of the backup, whose files were checked.
        config: configuration of the new platform; its data directory already has the metadata.
        view: view of the new platform.
        segments: what `new_segments` returned.

    Raises:
        NotReadyError: the object store does not answer.
        OSError: the disk cannot be written.
    """
    with closing(_NewDisks(config.node.data_dir, view.storage_nodes)) as disks:

        async def write_all() -> None:
            for number, stored in enumerate(manifest.segments):
                if stored.is_left_out:
                    continue
                await _write_segment(source, number, stored, segments[stored.folder], config, disks)

        try:
            asyncio.run(write_all())
        except CellsError as error:
            raise NotReadyError(
                f"The store of the new platform's logs cannot be written: {error}; restore again."
            ) from error
        except sqlite3.Error as error:
            raise OSError(str(error)) from error


async def _write_segment(
    source: Path,
    number: int,
    stored: StoredSegment,
    new: NewSegment,
    config: Config,
    disks: _NewDisks,
) -> None:
    file = cells_in(source, number) if stored.digest else None
    cells: CellsAndNotes
    if new.layout is not None:
        seals = [
            (node, CellsSeal(0, space, new.layout.epoch, opens=True))
            for node, space in sorted(new.layout.replicas)
        ]
        answers = await disks.ask_all(seals)
        assert {each.outcome for each in answers if each} == {CellOutcome.DONE}, "they are new"
        part_bytes = config.cluster.batch_bytes_max
        layout = FixedLayout(new.layout)
        cells = ChainCells(disks, layout, part_bytes=part_bytes, new_part=new_part)
        if file is not None:
            await cells.trim(0, file.start)
    else:
        place = platform_place(new.place, config.node.data_dir)
        store = object_store_at(place, timeout_s=config.node.object_logs.object_timeout_s)
        limits = GENERATION_LIMITS if file is None else file.limits
        cells = await ObjectCells.created(
            store, new.folder, stripes=new.stripes, generation_limits=limits
        )
    if file is not None:
        await write_copy(cells, file.cells)
