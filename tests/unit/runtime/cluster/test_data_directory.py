"""The data directory: a metadata file that is gone, damaged or old is one sentence."""

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
from indilog.runtime.cluster.data_directory import journal_lost, opened_metadata
from indilog.runtime.cluster.metadata import EmbeddedMetadataStore
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.recovery import recover
from indilog.runtime.journal.segment import segment_path


def config_in(directory: Path, sequencers: int = 1) -> Config:
    return Config(
        cluster=ClusterConfig(sequencers=sequencers),
        node=node_config(data_dir=directory, segment_bytes=8 * MIB),
    )


def started_in(directory: Path, sequencers: int = 1) -> None:
    """Start a platform and append; what is refused is raised."""

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
def test_a_metadata_file_that_is_lost_or_damaged_is_one_sentence_and_nothing_changes(
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


def test_a_metadata_file_older_than_the_journal_is_one_sentence(tmp_path: Path) -> None:
    started_in(tmp_path)
    old = (tmp_path / "metadata").read_bytes()
    started_in(tmp_path)
    (tmp_path / "metadata").write_bytes(old)
    with pytest.raises(DataDirectoryError, match="older than the journals: it gave epoch 2"):
        started_in(tmp_path)


def test_the_journals_of_processes_count_too(tmp_path: Path) -> None:
    segment_path(tmp_path / "storage-0", 1).parent.mkdir()
    segment_path(tmp_path / "storage-0", 1).touch()
    with pytest.raises(DataDirectoryError, match="such as storage-0"):
        opened_metadata(NodeConfig(data_dir=tmp_path))


def test_a_start_that_died_before_it_had_metadata_is_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "metadata.lock").touch()
    opened_metadata(NodeConfig(data_dir=tmp_path)).close()


def test_a_file_in_place_of_the_directory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(indilog.DataDirectoryError, match="file cannot be used"):
        opened_metadata(NodeConfig(data_dir=tmp_path / "file"))


def reopened(directory: Path, *frames: bytes) -> Journal:
    """Open a journal, write to it, and open it again."""
    journal = Journal.open(directory, segment_bytes=4096, durability="fsync")
    list(journal.recover())
    for frame in frames:
        journal.write(7, FrameKind.METALOG, frame)
    journal.close()
    return journal


def test_a_lost_journal_is_distinguished_from_a_new_one(tmp_path: Path) -> None:
    """A4: else a sequencer would begin the log anew."""
    directory = tmp_path / "a"

    async def told(*frames: bytes) -> bool:
        with EmbeddedMetadataStore(tmp_path / "metadata", NodeConfig()) as store:
            return await journal_lost(store, "a", reopened(directory, *frames))

    assert not asyncio.run(told()), "it is made"
    assert not asyncio.run(told()), "it is empty still"
    shutil.rmtree(directory)
    assert asyncio.run(told())
    assert asyncio.run(told()), "until something is in it"
    assert not asyncio.run(told(b"put back"))
    assert not asyncio.run(told())


def test_a_journal_that_is_gone_is_logged_once_per_loss(tmp_path: Path) -> None:
    """An index node's stays empty for long: its first frames are a snapshot."""

    def told() -> int:
        journal = Journal.open(tmp_path / "a", segment_bytes=4096, durability="fsync")
        with capture_logs() as lines:
            recover(journal, {}, lost=True)
        journal.close()
        return sum("journal is gone" in line["event"] for line in lines)

    assert [told(), told()] == [1, 0]
    shutil.rmtree(tmp_path / "a")
    assert [told(), told()] == [1, 0]


@pytest.mark.parametrize(
    ("sequencers", "words"),
    [
        (1, "restore its directory from a copy"),
        (3, "of sequencer-0, and on that of sequencer-1 and sequencer-2 too"),
    ],
)
def test_a_platform_whose_journal_is_gone_does_not_begin_anew(
    tmp_path: Path, sequencers: int, words: str
) -> None:
    """All sequencers of one process share its journal."""
    started_in(tmp_path, sequencers)
    shutil.rmtree(tmp_path / "journal")
    for _ in range(2):
        with pytest.raises(DataLossError, match=words):
            started_in(tmp_path, sequencers)
