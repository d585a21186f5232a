"""The data directory: a missing, damaged or outdated metadata file is reported in one sentence."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import indilog
from indilog.base.errors import DataDirectoryError, DataLossError
from indilog.config import MIB, ClusterConfig, Config, NodeConfig, node_config
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.cluster.data_directory import journal_lost, opened_metadata_file
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.recovery import recover
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore


def config_in(directory: Path, sequencers: int = 1) -> Config:
    return Config(
        cluster=ClusterConfig(sequencers=sequencers),
        node=node_config(data_dir=directory, segment_bytes=8 * MIB),
    )


def started_in(directory: Path, sequencers: int = 1) -> None:
    """Start a platform and append one record; a refused start raises its error."""

    async def started() -> None:
        async with embedded(config_in(directory, sequencers)) as platform:
            await platform.logs.log("orders").append(b"x")

    asyncio.run(started())


def removed(metadata: Path) -> None:
    metadata.unlink()


def emptied(metadata: Path) -> None:
    metadata.write_bytes(b"")


def garbage(metadata: Path) -> None:
    metadata.write_bytes(bytes(range(256)))


def cut(metadata: Path) -> None:
    metadata.write_bytes(metadata.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (removed, "is missing, although"),
        (emptied, "is empty"),
        (garbage, "is no metadata file"),
        (cut, "is damaged"),
    ],
)
def test_a_lost_or_damaged_metadata_file_is_refused_in_one_sentence_without_any_change(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    started_in(tmp_path)
    damage(tmp_path / "metadata")
    for _ in range(2):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
        with pytest.raises(DataDirectoryError, match=words) as caught:
            started_in(tmp_path)
        assert str(tmp_path / "metadata") in str(caught.value)
        assert "a copy of the whole directory, or choose another directory." in str(caught.value)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_metadata_file_older_than_the_journal_is_refused_in_one_sentence(tmp_path: Path) -> None:
    started_in(tmp_path)
    old = (tmp_path / "metadata").read_bytes()
    started_in(tmp_path)
    (tmp_path / "metadata").write_bytes(old)
    with pytest.raises(DataDirectoryError, match="older than the journals: it gave epoch 2"):
        started_in(tmp_path)


def test_a_metadata_file_older_than_a_process_journal_is_refused(tmp_path: Path) -> None:
    segment_path(tmp_path / "storage-0", 1).parent.mkdir()
    segment_path(tmp_path / "storage-0", 1).touch()
    with pytest.raises(DataDirectoryError, match="such as storage-0"):
        opened_metadata_file(NodeConfig(data_dir=tmp_path))


def test_a_directory_of_a_start_that_crashed_before_writing_metadata_is_new(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "metadata.lock").touch()
    opened_metadata_file(NodeConfig(data_dir=tmp_path)).close()


def test_a_file_in_place_of_the_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(indilog.DataDirectoryError, match="file cannot be used"):
        opened_metadata_file(NodeConfig(data_dir=tmp_path / "file"))


def reopened(directory: Path, *frames: bytes) -> Journal:
    """Open a journal, write to it, and open it again."""
    journal = Journal.open(directory, segment_bytes=4096, durability="fsync")
    list(journal.recover())
    for frame in frames:
        journal.write(7, FrameKind.METALOG, frame)
    journal.close()
    return journal


def test_a_missing_journal_is_distinguished_from_a_new_one(tmp_path: Path) -> None:
    """A4: otherwise a sequencer would restart the log from position 0."""
    directory = tmp_path / "a"

    async def is_missing(*frames: bytes) -> bool:
        with EmbeddedMetadataStore(tmp_path / "metadata", NodeConfig()) as store:
            return await journal_lost(store, "a", reopened(directory, *frames))

    assert not asyncio.run(is_missing()), "the directory was just created"
    assert not asyncio.run(is_missing()), "the journal is still empty"
    shutil.rmtree(directory)
    assert asyncio.run(is_missing())
    assert asyncio.run(is_missing()), "until a journal is restored"
    assert not asyncio.run(is_missing(b"put back"))
    assert not asyncio.run(is_missing())


def test_a_missing_journal_is_logged_once_per_loss(tmp_path: Path) -> None:
    """The journal of an index node stays empty for long: its first frames are a snapshot."""

    def logged() -> int:
        journal = Journal.open(tmp_path / "a", segment_bytes=4096, durability="fsync")
        with capture_logs() as lines:
            recover(journal, {}, lost=True)
        journal.close()
        return sum("journal is gone" in line["event"] for line in lines)

    assert [logged(), logged()] == [1, 0]
    shutil.rmtree(tmp_path / "a")
    assert [logged(), logged()] == [1, 0]


@pytest.mark.parametrize(
    ("sequencers", "words"),
    [
        (1, "restore its directory from a copy"),
        (3, "of sequencer-0, and on that of sequencer-1 and sequencer-2 too"),
    ],
)
def test_a_platform_with_a_missing_journal_does_not_restart_the_log(
    tmp_path: Path, sequencers: int, words: str
) -> None:
    """All sequencers of one process share its journal."""
    started_in(tmp_path, sequencers)
    shutil.rmtree(tmp_path / "journal")
    for _ in range(2):
        with pytest.raises(DataLossError, match=words):
            started_in(tmp_path, sequencers)
