"""The place of cold objects: what shows that it is the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from indilog.base.ids import NodeId
from indilog.runtime.cold_place import (
    ColdFolder,
    ColdFolders,
    ColdNote,
    ColdStoreError,
    folders_noted,
    new_folders,
)

OBJECT = "shard-00000/object"


def folder_of(node: str, folders: ColdFolders) -> ColdFolder:
    return ColdFolder(folders.place, folders.of(NodeId(node)), timeout_s=1.0)


def test_no_node_of_a_journal_writes_where_the_mount_of_another_is_missing(tmp_path: Path) -> None:
    """The second node begins while the mount is away. Its marker would let the first node write
    into the empty directory, whose objects the mount later hides.
    """
    place = tmp_path / "mounted"
    place.mkdir()
    folders = new_folders(str(place))
    note = ColdNote(tmp_path, folders, is_written=False)
    first, second = folder_of("storage-0", folders), folder_of("storage-1", folders)
    note.write(first)
    assert folders_noted(tmp_path) == folders
    first.write(OBJECT, b"records")
    place.rename(tmp_path / "away")
    place.mkdir()
    note.write(second)
    for folder in (first, second):
        with pytest.raises(ColdStoreError, match="is it mounted"):
            folder.write(OBJECT, b"others")
    assert not any(place.iterdir())
    place.rmdir()
    (tmp_path / "away").rename(place)
    second.write(OBJECT, b"others")
    assert [name for name, _ in first.list()] == [OBJECT]


def test_a_journal_says_nothing_of_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = new_folders(str(tmp_path / "file" / "place"))
    note = ColdNote(tmp_path, folders, is_written=False)
    with pytest.raises(ColdStoreError):
        note.write(folder_of("storage-0", folders))
    assert not note.is_written
    assert folders_noted(tmp_path) is None
