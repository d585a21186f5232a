"""Discarded frames: their disk space is freed after a durable mark (PITFALLS 7, decision 0008)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from indilog.base.ids import Epoch, ShardId, TagColumns, pack_tags
from indilog.kernel.records import HEADER_BYTES, BatchBuilder, batch_header
from indilog.roles.role import FrameKind, Location
from indilog.runtime.journal import discards, open_segments
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.segment import mark_gone, punch, segment_path
from indilog.runtime.journal.segment_scan import Damage

STREAM = 7
Recovered = list[tuple[FrameKind, bytes]]


def opened(directory: Path, *, segment_bytes: int = 1 << 20) -> tuple[Journal, Recovered]:
    journal = Journal.open(directory, segment_bytes=segment_bytes, durability="fsync")
    found: Recovered = []
    for frame in journal.recover():
        assert not isinstance(frame, Damage), frame
        found.append((frame[1], frame[2]))
    return journal, found


def batch(first: int, size: int) -> bytes:
    builder = BatchBuilder()
    builder.add(random.Random(first).randbytes(size), TagColumns(pack_tags(1), b"log"))
    return builder.build(shard=ShardId(0), epoch=Epoch(1), first=first, time_us=1)


def written(journal: Journal, *sizes: int) -> list[Location]:
    places = [
        journal.write(STREAM, FrameKind.RECORDS, batch(first, size))
        for first, size in enumerate(sizes)
    ]
    journal.sync()
    return places


def room(directory: Path) -> int:
    """Return the bytes of the first segment on disk; the next segment may be prepared already."""
    return segment_path(directory, 1).stat().st_blocks * 512


def test_the_disk_space_of_discarded_frames_is_freed_and_other_frames_stay(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    places = written(journal, 200_000, 100_000, 200_000)
    before = room(tmp_path)
    for place in (places[0], places[2]):
        journal.discard(place)
    journal.free_discarded()
    assert before - room(tmp_path) > 380_000
    assert journal.read(places[1]) == batch(1, 100_000)
    journal.close()
    again, found = opened(tmp_path)
    again.close()
    assert [kind for kind, _ in found] == [FrameKind.GONE, FrameKind.RECORDS, FrameKind.GONE]
    assert [batch_header(payload).first for _, payload in found] == [0, 1, 2]
    assert found[1][1] == batch(1, 100_000)


def test_frames_of_more_segments_than_open_files_are_freed_together(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path, segment_bytes=8192)
    places = written(journal, *[5000] * 70)
    assert len({place.segment for place in places}) == 70 > open_segments._OPEN_FILES_MAX
    for place in places:
        journal.discard(place)
    journal.free_discarded()
    journal.close()
    again, found = opened(tmp_path, segment_bytes=8192)
    again.close()
    assert [kind for kind, _ in found] == [FrameKind.GONE] * 70


def test_no_space_is_freed_before_earlier_writes_are_synced(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    (place,) = written(journal, 100_000)
    journal.write(STREAM, FrameKind.METALOG, b"the trim")
    journal.discard(place)
    journal.free_discarded()
    assert journal.read(place) == batch(0, 100_000)
    journal.sync()
    journal.free_discarded()
    payload = journal.read(place)
    assert payload is not None
    assert not any(payload[HEADER_BYTES + 4096 : -4096])
    journal.close()


def test_a_start_makes_marks_durable_before_it_frees_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have crashed between the mark and its sync; the machine may crash next."""
    journal, _ = opened(tmp_path)
    for place in written(journal, 100_000, 100_000):
        journal.discard(place)
    journal.free_discarded()
    journal.close()
    story: list[str] = []
    sync = os.fdatasync

    def synced(fd: int) -> None:
        story.append("sync")
        sync(fd)

    def punched(fd: int, place: Location) -> None:
        story.append("punch")
        punch(fd, place)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(discards, "punch", punched)
    again, _ = opened(tmp_path)
    assert story[:3] == ["sync", "punch", "punch"]
    again.close()


def test_the_space_of_a_frame_marked_before_a_crash_is_freed_later(
    tmp_path: Path,
) -> None:
    journal, _ = opened(tmp_path)
    (place,) = written(journal, 200_000)
    journal.close()
    fd = os.open(segment_path(tmp_path, place.segment), os.O_RDWR)
    assert mark_gone([(fd, place)]) == [place]
    os.close(fd)
    before = room(tmp_path)
    again, found = opened(tmp_path)
    again.close()
    assert [kind for kind, _ in found] == [FrameKind.GONE]
    assert before - room(tmp_path) > 190_000


def test_a_file_system_without_hole_punching_frees_no_space_and_loses_no_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(fd: int, place: Location) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(discards, "punch", refused)
    journal, _ = opened(tmp_path)
    (place,) = written(journal, 100_000)
    journal.discard(place)
    journal.free_discarded()
    journal.write(STREAM, FrameKind.METALOG, b"later")
    journal.close()
    again, found = opened(tmp_path)
    again.close()
    assert [kind for kind, _ in found] == [FrameKind.GONE, FrameKind.METALOG]


def test_a_repaired_batch_stays_because_recovery_needs_it_at_its_location(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path)
    place = journal.write(STREAM, FrameKind.REPAIRED, batch(5, 100_000))
    journal.sync()
    journal.discard(place)
    journal.free_discarded()
    journal.close()
    again, found = opened(tmp_path)
    again.close()
    assert found == [(FrameKind.REPAIRED, batch(5, 100_000))]
