"""Frames missing at the end of a journal are reported, and a used journal never restarts empty
(A5).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from indilog.base.errors import DataLossError
from indilog.config import MIB, Config, node_config
from indilog.roles.role import FrameKind
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_scan import SegmentScan
from tests.unit.runtime.journals import SEGMENT_BYTES, STREAM, damage_in, flip, started

Damaged = list[tuple[int, int, int]]


def written(directory: Path, opened: list[Journal], frames: int) -> None:
    """Write the given number of frames of 900 bytes, four of which fill a segment; then end."""
    journal, _ = started(directory, opened)
    for _ in range(frames):
        journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
        journal.sync()
    journal.spare.pool.submit(int).result()  # the next segment is prepared
    journal.close()


def end_of(directory: Path, number: int) -> int:
    """Return the offset at which the frames of a segment end."""
    scan = SegmentScan(segment_path(directory, number), number, newest=True)
    list(scan)
    return scan.end


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_missing_used_segment_is_reported_as_damage_at_every_start(
    directory: Path, opened: list[Journal], number: int
) -> None:
    written(directory, opened, 10)
    prepared = segment_path(directory, 4)
    assert prepared.exists(), "the newest file is one that was never used"
    segment_path(directory, number).unlink()
    for _ in range(2):
        assert damage_in(directory, opened) == [(number, 0, SEGMENT_BYTES)]
        opened[-1].write(STREAM, FrameKind.METALOG, b"after")


def test_a_missing_newest_segment_is_reported_although_no_later_one_was_prepared(
    directory: Path, opened: list[Journal]
) -> None:
    written(directory, opened, 10)
    for number in (3, 4):
        segment_path(directory, number).unlink()
    assert damage_in(directory, opened) == [(3, 0, SEGMENT_BYTES)]


def test_a_journal_without_its_segments_is_not_treated_as_new(
    directory: Path, opened: list[Journal]
) -> None:
    written(directory, opened, 1)
    for path in directory.glob("segment-*"):
        path.unlink()
    assert damage_in(directory, opened) == [(1, 0, SEGMENT_BYTES)]


def test_a_truncated_newest_segment_is_reported_as_damage_at_every_start(
    directory: Path, opened: list[Journal]
) -> None:
    written(directory, opened, 3)
    os.truncate(segment_path(directory, 1), 1500)
    for _ in range(2):
        assert [place[0] for place in damage_in(directory, opened)] == [1]
        opened[-1].write(STREAM, FrameKind.METALOG, b"after")


@pytest.mark.parametrize("frames_left", [0, 1, 2])
def test_an_older_segment_truncated_between_frames_is_reported_as_damage(
    directory: Path, opened: list[Journal], frames_left: int
) -> None:
    written(directory, opened, 6)
    end = frames_left * (end_of(directory, 1) // 4)
    os.truncate(segment_path(directory, 1), end)
    assert damage_in(directory, opened) == [(1, end, end)]
    assert len(started(directory, opened)[1]) == frames_left + 2


def test_a_closed_or_killed_journal_reports_no_missing_frames(
    directory: Path, opened: list[Journal]
) -> None:
    for frames in range(10):
        assert damage_in(directory, opened) == []
        written(directory, opened, frames)
    assert damage_in(directory, opened) == []


def test_a_damaged_note_of_the_newest_segment_loses_no_frame(
    directory: Path, opened: list[Journal]
) -> None:
    written(directory, opened, 6)
    flip(directory / "NEWEST", 20)
    assert damage_in(directory, opened) == []
    segment_path(directory, 2).unlink()
    assert damage_in(directory, opened) == [(2, 0, SEGMENT_BYTES)]


def removed(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, MIB)


@pytest.mark.parametrize("damage", [removed, cut])
@pytest.mark.asyncio
async def test_a_platform_with_a_damaged_last_segment_does_not_reuse_seqnums(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    config = Config(node=node_config(data_dir=tmp_path, segment_bytes=8 * MIB))
    async with embedded(config) as platform:
        for _ in range(3):
            await platform.logs.log("orders").append(bytes(MIB // 2))
    damage(segment_path(tmp_path / "journal", 1))
    for _ in range(2):
        with pytest.raises(DataLossError, match="restore its directory from a copy"):
            async with embedded(config):
                pass
