"""Keeps the index snapshots of the index nodes of a process: files, and the threads that read and
write them (ARCHITECTURE 9.6; format in `indilog.kernel.index_snapshot`).

Each index node has a directory. A snapshot is written under a temporary name, synced and renamed;
the two newest are kept. A start skips a damaged snapshot with a warning. If damage is found while a
snapshot is in use, the snapshot is renamed. Snapshots are derived data: the loss of one costs time,
but changes no answer. `NodeShell` passes requests to `SnapshotFiles`. The rebuild of an index
(`indilog_pipeline.rebuild`) writes snapshots with `SnapshotFolder`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import structlog

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import MetalogPosition, NodeId
from indilog.kernel.index_snapshot import (
    IndexSnapshot,
    OpenSnapshot,
    ReadRows,
    Rows,
    RowsRead,
    SnapshotAnswer,
    SnapshotFloors,
    SnapshotInfo,
    SnapshotOpened,
    SnapshotRequest,
    SnapshotWritten,
    WriteSnapshot,
    check_file,
    dead_in,
    file_crc,
    merged,
    opened_snapshot,
    read_rows,
    regrouped,
    snapshot_files,
    snapshot_name,
    untrimmed,
    without_snapshots,
    write_rows,
)
from indilog.kernel.tag_filter import TagFilterBuilder
from indilog.runtime.journal.segment import synced_directory

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_KEPT: Final = 2
_TEMPORARY: Final = "writing.tmp"
_DAMAGED: Final = ".damaged"

log = structlog.get_logger(__name__)


class _StoppedError(Exception):
    """The process is ending, so the snapshot is not completed."""


class SnapshotFolder:
    """The snapshots of one node. Calls may take long, so they run in threads; only one thread
    writes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[MetalogPosition, ParquetFile] = {}
        self.stopped = False

    def open_newest(self, below: MetalogPosition) -> IndexSnapshot | None:
        """Return the newest intact snapshot of a position below `below`."""
        for position, file in snapshot_files(self._directory):
            if position >= below:
                continue
            try:
                check_file(file)
                self._open[position], snapshot = opened_snapshot(file)
            except (MalformedFrameError, OSError) as error:
                log.warning("index snapshot skipped", file=str(file), error=str(error))
                continue
            return snapshot
        return None

    def rows(self, position: MetalogPosition, group: int) -> Rows | None:
        """Return a row group of an open snapshot; None: the file is damaged, and was renamed."""
        parquet = self._open.get(position)
        if parquet is None:
            return None
        try:
            return read_rows(parquet, group)
        except MalformedFrameError as error:
            log.warning("damaged index snapshot renamed", position=position, error=str(error))
            self._put_aside(position)
            return None

    def write(self, request: WriteSnapshot) -> SnapshotWritten:
        """Write a snapshot, and keep the newest two. If the previous one is damaged, rename it."""
        position = request.info.position
        try:
            return SnapshotWritten(position, self._write(request))
        except _StoppedError:
            return SnapshotWritten(position, None)
        except MalformedFrameError as error:
            log.warning("index snapshot not written, previous one renamed", error=str(error))
            if request.base is not None:
                self._put_aside(request.base)
            return SnapshotWritten(position, None, base_lost=True)
        except OSError as error:
            log.warning("index snapshot not written", error=str(error))
            return SnapshotWritten(position, None)

    def _write(self, request: WriteSnapshot) -> IndexSnapshot:
        recent, before = request.recent(), self._base_of(request)
        rows_max = len(recent.tags) + (before[1].rows if before is not None else 0)
        tags = TagFilterBuilder(rows_max, bytes_max=request.filter_bytes_max)
        rows = merged(rows_left(before, request.floors), recent)
        snapshot = self.put(request.info, self._until_stopped(regrouped(rows)), tags)
        position = request.info.position
        log.info("index snapshot written", position=position, rows=snapshot.rows)
        return snapshot

    def put(
        self, info: SnapshotInfo, rows: Iterable[Rows], tags: TagFilterBuilder
    ) -> IndexSnapshot:
        """Write a snapshot of sorted rows, and keep the newest ones.

        Raises:
            OSError: an error of the system; the earlier snapshots are kept.
        """
        return self._put(info.position, lambda file: write_rows(file, info, rows, tags))

    def put_copy(self, file: Path, position: MetalogPosition) -> IndexSnapshot:
        """Write a copy of a snapshot of `position`, and keep the newest ones.

        Raises:
            OSError: an error of the system; the earlier snapshots are kept.
        """
        return self._put(position, lambda copy: _write_copy(file, copy))

    def _put(self, position: MetalogPosition, write: Callable[[Path], object]) -> IndexSnapshot:
        directory = self._directory
        if not directory.exists():
            directory.mkdir(parents=True)
            synced_directory(directory.parent)
        temporary = directory / _TEMPORARY
        try:
            write(temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)  # the disk may be full
            raise
        file = directory / snapshot_name(position, file_crc(temporary))
        temporary.rename(file)
        synced_directory(directory)
        self._open[position], snapshot = opened_snapshot(file)
        self._remove_others(file, position)
        return snapshot

    def _remove_others(self, newest: Path, position: MetalogPosition) -> None:
        """Remove all snapshots except `newest` and the earlier ones that are kept.

        A file of the same or a later position was written before `newest`. Such a file is damaged,
        or it covers metalog entries that have been replaced since.
        """
        kept = 1
        for at, path in snapshot_files(self._directory):
            if at < position and kept < _KEPT:
                kept += 1
            elif path != newest:
                if at != position:
                    self._open.pop(at, None)
                path.unlink()

    def _base_of(self, request: WriteSnapshot) -> tuple[ParquetFile, IndexSnapshot] | None:
        """Open and return the previous snapshot; None: there is none."""
        base = request.base
        if base is None:
            return None
        found = [path for position, path in snapshot_files(self._directory) if position == base]
        if not found:
            raise MalformedFrameError(f"the snapshot of position {base} is gone")
        return opened_snapshot(found[0])

    def _until_stopped(self, groups: Iterable[Rows]) -> Iterator[Rows]:
        for rows in groups:
            if self.stopped:
                raise _StoppedError
            yield rows

    def _put_aside(self, position: MetalogPosition) -> None:
        self._open.pop(position, None)
        for found, path in snapshot_files(self._directory):
            if found == position:
                path.rename(path.with_name(path.name + _DAMAGED))


def _write_copy(file: Path, copy: Path) -> None:
    shutil.copyfile(file, copy)
    with copy.open("rb+") as written:
        os.fsync(written.fileno())


def rows_left(
    before: tuple[ParquetFile, IndexSnapshot] | None, floors: SnapshotFloors | None
) -> Iterator[Rows]:
    """Yield the rows of the previous snapshot that remain in the next one."""
    if before is None:
        return
    parquet, snapshot = before
    read = partial(read_rows, parquet)
    pieces: Iterator[Rows] = map(read, range(len(snapshot.groups.lowest)))
    if floors is not None:
        pieces = untrimmed(pieces, floors, dead_in(snapshot.groups, floors, read))
    yield from pieces


class SnapshotFiles:
    """Serves the snapshot requests of the index nodes of a process, in threads.

    Args:
        directory: has a folder for each node; None: no snapshots are kept.
        wait_synced: waits until everything written to the journal is synced; returns False if the
            process ends.
        deliver: called on the event loop with each answer.
    """

    def __init__(
        self,
        directory: Path | None,
        wait_synced: Callable[[], Awaitable[bool]],
        deliver: Callable[[NodeId, SnapshotAnswer], None],
    ) -> None:
        self._directory = directory
        self._wait_synced = wait_synced
        self._deliver = deliver
        self._folders: dict[NodeId, SnapshotFolder] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: ThreadPoolExecutor | None = None
        self._writing: ThreadPoolExecutor | None = None

    def ask(self, node: NodeId, request: SnapshotRequest) -> None:
        """Serve a request of an index node. Its answer is delivered later; without snapshots, at
        once.
        """
        if self._directory is None or (
            isinstance(request, OpenSnapshot) and not snapshot_files(self._directory / node)
        ):
            self._deliver(node, without_snapshots(request))
            return
        folder = self._folders.get(node)
        if folder is None:
            folder = self._folders[node] = SnapshotFolder(self._directory / node)
        if self._reading is None or self._writing is None:
            self._reading = ThreadPoolExecutor(1, thread_name_prefix="snapshot-read")
            self._writing = ThreadPoolExecutor(1, thread_name_prefix="snapshot-write")
        task = asyncio.get_running_loop().create_task(
            self._serve(node, folder, request, self._reading, self._writing)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop. A snapshot that is being written is dropped."""
        for folder in self._folders.values():
            folder.stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in (self._reading, self._writing):
            if executor is not None:
                executor.shutdown(cancel_futures=True)

    async def _serve(
        self,
        node: NodeId,
        folder: SnapshotFolder,
        request: SnapshotRequest,
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
    ) -> None:
        loop = asyncio.get_running_loop()
        match request:
            case OpenSnapshot(below):
                snapshot = await loop.run_in_executor(reading, folder.open_newest, below)
                self._deliver(node, SnapshotOpened(snapshot))
            case ReadRows(position, group):
                rows = await loop.run_in_executor(reading, folder.rows, position, group)
                self._deliver(node, RowsRead(position, group, rows))
            case WriteSnapshot():
                if await self._wait_synced():
                    written = await loop.run_in_executor(writing, folder.write, request)
                    self._deliver(node, written)
            case unreachable:
                assert_never(unreachable)
