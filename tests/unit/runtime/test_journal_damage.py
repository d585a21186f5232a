"""The journal on damaged files: what it repairs, reports and keeps (A5)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from indilog.roles.role import FrameKind
from indilog.runtime.journal import segment, segment_scan
from indilog.runtime.journal.journal import Journal
from tests.unit.runtime.journals import (
    SEGMENT_BYTES,
    STREAM,
    batch,
    damage_in,
    flip,
    kill,
    spoil,
    started,
)


def test_one_flipped_bit_is_repaired_on_disk_and_counted(
    directory: Path, opened: list[Journal]
) -> None:
    """A5: a bit anywhere in a header or in a small payload."""
    journal, _ = started(directory, opened)
    payloads = [b"entry %d" % number for number in range(40)]
    locations = [journal.write(STREAM, FrameKind.METALOG, payload) for payload in payloads]
    journal.close()
    path = segment.segment_path(directory, 1)
    intact = path.read_bytes()
    for bit, location in enumerate(locations):
        flip(path, location.offset - segment.FRAME_HEADER_BYTES + bit)
    journal, recovered = started(directory, opened)
    assert [payload for _, _, payload, _ in recovered] == payloads
    assert journal.corrected == 40
    journal.close()
    assert path.read_bytes() == intact


def test_a_flipped_bit_in_a_batch_header_hides_no_later_frame(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    location = journal.write(STREAM, FrameKind.RECORDS, batch())
    journal.sync()
    flip(segment.segment_path(directory, 1), location.offset - 20)
    assert journal.read(location) == batch()
    assert started(directory, opened)[1] == [(STREAM, FrameKind.RECORDS, batch(), location)]


def test_damage_before_the_synced_position_is_not_treated_as_a_torn_tail(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    damaged = journal.write(STREAM, FrameKind.METALOG, b"synced")
    journal.sync()
    later = journal.write(STREAM, FrameKind.METALOG, b"later")
    journal.close()
    path = segment.segment_path(directory, 1)
    spoil(path, damaged.offset, 4)
    before = path.read_bytes()
    journal, recovered = started(directory, opened)
    assert recovered == [(STREAM, FrameKind.METALOG, b"later", later)]
    assert path.read_bytes() == before, "damaged bytes are kept for inspection"
    journal.write(STREAM, FrameKind.METALOG, b"after")
    assert [payload for _, _, payload, _ in started(directory, opened)[1]] == [b"later", b"after"]


@pytest.mark.parametrize("payload_only", [True, False])
def test_frames_after_a_damaged_one_in_its_segment_are_recovered(
    directory: Path, opened: list[Journal], *, payload_only: bool
) -> None:
    """A5: a damaged header, and with it the length, loses this frame and no other."""
    journal, _ = started(directory, opened)
    locations = [journal.write(STREAM, FrameKind.METALOG, b"x" * 900) for _ in range(9)]
    journal.close()
    place = locations[2]
    start = place.offset - segment.FRAME_HEADER_BYTES
    spoil(segment.segment_path(directory, 1), place.offset if payload_only else start)
    assert damage_in(directory, opened) == [(1, start, locations[3].offset - 32)]
    assert len(started(directory, opened)[1]) == 8


def test_a_damaged_end_of_a_segment_hides_no_later_segment(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    locations = [journal.write(STREAM, FrameKind.METALOG, b"x" * 900) for _ in range(9)]
    journal.close()
    spoil(segment.segment_path(directory, 1), locations[3].offset + 904)
    assert len(started(directory, opened)[1]) == 9


def test_a_newest_segment_with_a_damaged_start_is_recovered(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    locations = []
    for _ in range(7):
        locations.append(journal.write(STREAM, FrameKind.METALOG, b"x" * 900))
        journal.sync()
    journal.close()
    spoil(segment.segment_path(directory, 2), 0, 1000)
    assert damage_in(directory, opened) == [(2, 0, locations[6].offset - 32)]


@pytest.mark.parametrize("spoilt", ["a bit of the batch", "the header", "all that was written"])
@pytest.mark.parametrize("clean", [True, False])
def test_damage_of_the_last_frame_is_reported_after_it_was_noted_as_synced(
    directory: Path, opened: list[Journal], spoilt: str, *, clean: bool
) -> None:
    """D11: after a clean stop, and after an idle process was killed."""
    journal, _ = started(directory, opened)
    kept = journal.write(STREAM, FrameKind.METALOG, b"kept")
    last = journal.write(STREAM, FrameKind.RECORDS, batch())
    journal.sync()
    if not clean:
        journal.record_synced_end()
        kill(journal)
    journal.close()
    path = segment.segment_path(directory, 1)
    end = last.offset + segment.frame_bytes(last.length) - segment.FRAME_HEADER_BYTES
    start = last.offset - segment.FRAME_HEADER_BYTES
    if spoilt == "a bit of the batch":
        flip(path, last.offset + last.length - 1)
    elif spoilt == "the header":
        spoil(path, start, 16)
    else:
        start = kept.offset - segment.FRAME_HEADER_BYTES
        spoil(path, start, end)
    for _ in range(2):
        assert damage_in(directory, opened) == [(1, start, end)]
        opened[-1].write(STREAM, FrameKind.METALOG, b"after")
    assert opened[-1].write(STREAM, FrameKind.METALOG, b"").offset > end


def test_damaged_frames_after_the_synced_note_are_a_torn_tail(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.METALOG, b"kept")
    journal.sync()
    journal.record_synced_end()
    torn = journal.write(STREAM, FrameKind.RECORDS, batch())
    kill(journal)
    flip(segment.segment_path(directory, 1), torn.offset + torn.length - 1)
    assert damage_in(directory, opened) == []


def test_a_missing_segment_is_reported_as_damage(directory: Path, opened: list[Journal]) -> None:
    journal, _ = started(directory, opened)
    for _ in range(9):
        journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    journal.close()
    segment.segment_path(directory, 2).unlink()
    assert damage_in(directory, opened) == [(2, 0, SEGMENT_BYTES)]


def test_unreadable_sectors_are_reported_as_damage(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = started(directory, opened)
    for _ in range(9):
        journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
        journal.sync()
    journal.close()
    whole = os.pread

    def unreadable(fd: int, size: int, offset: int) -> bytes:
        if offset < 2048 < offset + size or offset == 2048:
            raise OSError(errno.EIO, "sector")
        return whole(fd, size, offset)

    monkeypatch.setattr(os, "pread", unreadable)
    monkeypatch.setattr(segment_scan, "_SECTOR_BYTES", 512)
    monkeypatch.setattr(segment_scan, "_read", _sectors)
    assert [segment for segment, _, _ in damage_in(directory, opened)] == [1, 2]


def _sectors(file: BinaryIO, size: int) -> bytes:
    buffer = segment_scan._pread(file.fileno(), size, file.tell())
    file.seek(len(buffer), os.SEEK_CUR)
    return buffer
