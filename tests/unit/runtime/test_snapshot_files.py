"""The files of index snapshots, on a real disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import NodeId
from indilog.kernel.index_schedule import IndexEra
from indilog.kernel.index_snapshot import (
    OpenSnapshot,
    Rows,
    RowsRead,
    SnapshotAnswer,
    SnapshotInfo,
    SnapshotOpened,
    SnapshotWritten,
    WriteSnapshot,
    opened_snapshot,
    snapshot_files,
)
from indilog.runtime.snapshot_files import SnapshotFiles, SnapshotFolder

EVERYTHING: Final = 2**62
NODE = NodeId("index-0-0")


def info(position: int) -> SnapshotInfo:
    return SnapshotInfo(index_shard=0, position=position, tail=position, eras=(IndexEra(0, (0,)),))


def rows(first: int, end: int) -> Rows:
    seqnums = np.arange(first, end, dtype=np.uint64)
    return Rows(np.full(len(seqnums), 7, np.uint64), seqnums, np.zeros(len(seqnums), np.uint16))


def written(folder: SnapshotFolder, position: int, base: int | None = None) -> None:
    """Write a snapshot that has a row for each seqnum below its position."""
    request = WriteSnapshot(info(position), base, lambda: rows(base or 0, position))
    snapshot = folder.write(request).snapshot
    assert snapshot is not None
    assert snapshot.rows == position


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def test_the_newest_snapshot_is_loaded_with_all_its_rows(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "snapshots")
    assert folder.open_newest(EVERYTHING) is None
    written(folder, 10)
    written(folder, 30, base=10)
    again = SnapshotFolder(tmp_path / "snapshots")
    snapshot = again.open_newest(EVERYTHING)
    assert snapshot is not None
    assert (snapshot.info, snapshot.rows) == (info(30), 30)
    found = again.rows(30, 0)
    assert found is not None
    assert found.seqnums.tolist() == list(range(30))


def test_only_the_two_newest_snapshots_are_kept(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    (tmp_path / "writing.tmp").write_bytes(b"of a process that died")
    for position, base in ((10, None), (20, 10), (30, 20)):
        written(folder, position, base=base)
    assert [position for position, _ in snapshot_files(tmp_path)] == [30, 20]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("at", [0, 4, 0.3, 0.5, 0.9, -1, -5, -40])
def test_a_flipped_bit_anywhere_in_a_snapshot_falls_back_to_the_older_one(
    tmp_path: Path, at: float
) -> None:
    """A5: damage anywhere in the file is detected and never served."""
    folder = SnapshotFolder(tmp_path)
    written(folder, 10)
    written(folder, 3000, base=10)
    (_, newest), _ = snapshot_files(tmp_path)
    flip(newest, int(at if isinstance(at, int) else at * newest.stat().st_size))
    snapshot = SnapshotFolder(tmp_path).open_newest(EVERYTHING)
    assert snapshot is not None
    assert snapshot.info.position == 10


def test_damage_of_a_snapshot_in_use_is_detected_and_the_file_set_aside(
    tmp_path: Path,
) -> None:
    folder = SnapshotFolder(tmp_path)
    written(folder, 3000)
    ((_, file),) = snapshot_files(tmp_path)
    flip(file, 200)
    assert folder.rows(3000, 0) is None
    assert snapshot_files(tmp_path) == []
    answer = folder.write(WriteSnapshot(info(4000), 3000, lambda: rows(3000, 4000)))
    assert answer == SnapshotWritten(4000, None, base_lost=True)


def test_damage_of_the_base_is_detected_when_the_next_snapshot_is_written(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    written(folder, 3000)
    ((_, file),) = snapshot_files(tmp_path)
    flip(file, 200)
    answer = folder.write(WriteSnapshot(info(4000), 3000, lambda: rows(3000, 4000)))
    assert answer == SnapshotWritten(4000, None, base_lost=True)
    assert snapshot_files(tmp_path) == []


def test_a_snapshot_of_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    folder = SnapshotFolder(tmp_path)
    written(folder, 10)
    ((_, file),) = snapshot_files(tmp_path)
    table = pq.read_table(file)
    newer = {**table.schema.metadata, b"indilog.index_snapshot.version": b"3"}
    pq.write_table(table.replace_schema_metadata(newer), file)
    with pytest.raises(MalformedFrameError, match=r"version b'3'; .* version 2"):
        opened_snapshot(file)


def test_a_failed_snapshot_write_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path / "file" / "below")
    (tmp_path / "file").write_text("not a directory")
    answer = folder.write(WriteSnapshot(info(1), None, lambda: rows(0, 1)))
    assert answer == SnapshotWritten(1, None)


def test_a_snapshot_is_written_only_after_its_entries_are_synced(tmp_path: Path) -> None:
    """A snapshot must never be ahead of the log: unsynced entries may be ordered otherwise
    later.
    """

    async def story() -> None:
        synced = asyncio.Event()
        answers: asyncio.Queue[SnapshotAnswer] = asyncio.Queue()

        async def settled() -> bool:
            await synced.wait()
            return True

        files = SnapshotFiles(tmp_path, settled, lambda _, answer: answers.put_nowait(answer))
        files.ask(NODE, WriteSnapshot(info(5), None, lambda: rows(0, 5)))
        files.ask(NODE, OpenSnapshot(EVERYTHING))
        assert await answers.get() == SnapshotOpened(None)
        synced.set()
        answer = await answers.get()
        assert isinstance(answer, SnapshotWritten)
        assert answer.snapshot is not None
        await files.close()

    asyncio.run(story())


def test_missing_rows_are_reported_as_lost(tmp_path: Path) -> None:
    assert SnapshotFolder(tmp_path).rows(7, 0) is None
    assert RowsRead(7, 0, None).rows is None


def test_a_cancelled_snapshot_write_leaves_no_file(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    folder.stopped = True
    answer = folder.write(WriteSnapshot(info(5), None, lambda: rows(0, 5)))
    assert answer == SnapshotWritten(5, None)
    assert list(tmp_path.iterdir()) == []


def test_a_shell_without_a_snapshot_folder_keeps_no_snapshots() -> None:
    answers: list[SnapshotAnswer] = []

    async def settled() -> bool:
        return True

    files = SnapshotFiles(None, settled, lambda _, answer: answers.append(answer))
    files.ask(NODE, WriteSnapshot(info(5), None, lambda: rows(0, 5)))
    files.ask(NODE, OpenSnapshot(EVERYTHING))
    assert answers == [SnapshotWritten(5, None), SnapshotOpened(None)]


def test_a_snapshot_above_the_newest_position_is_removed(tmp_path: Path) -> None:
    """The snapshot contains metalog entries that were replaced, so the index was rebuilt below
    them.
    """
    folder = SnapshotFolder(tmp_path)
    for position in (10, 30, 40):
        written(folder, position)
    written(folder, 20)
    assert [position for position, _ in snapshot_files(tmp_path)] == [20]
    written(folder, 25, base=20)
    assert [position for position, _ in snapshot_files(tmp_path)] == [25, 20]
