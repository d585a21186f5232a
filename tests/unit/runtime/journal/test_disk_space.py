"""What a shell knows of the room on its disk (A35)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from indilog.base.ids import Instant, NodeId
from indilog.config import KIB, node_config
from indilog.roles.role import METALOG_KINDS, FrameKind, Persist, Persisted, SpaceChanged
from indilog.runtime.journal.disk_space import DiskSpace
from indilog.runtime.journal.journal import Journal

NODE = NodeId("storage-0")
SEGMENT_BYTES = 64 * KIB
T0, T1 = Instant(100.0), Instant(102.0)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES, durability="fsync")
    list(opened.recover())
    yield opened
    opened.close()


def space_of(journal: Journal, *, sharers: int = 1) -> DiskSpace:
    config = node_config(segment_bytes=SEGMENT_BYTES)
    return DiskSpace(journal, config, lambda _seconds: None, sharers=sharers)


def write(space: DiskSpace, journal: Journal, number: int) -> bool:
    """Write a frame of 8 KiB; tell whether it was taken."""
    payload = bytes([number]) * (8 * KIB - 32)
    taken = space.write(NODE, 7, Persist(FrameKind.METALOG, payload, number)) is not None
    journal.flush()
    journal.spare.pool.submit(int).result()
    return taken


def _no_room(_path: object) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))


def test_roles_are_told_when_the_reserve_is_reached_and_frames_wait_when_it_is_used_up(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(journal)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        told = []
        for number in range(7):
            assert write(space, journal, number)
            told.append(space.news(T0))
        assert told == [None] * 5 + [SpaceChanged((16 * KIB - 32) // 2), None]
        assert [write(space, journal, number) for number in (7, 8)] == [False, False]
        assert space.news(T0) is None
        assert space.retried(T0) == []
        assert space.retried(T1) == []
        assert space.news(T1) is None, "looking for room is not finding it"
    done = space.retried(Instant(T1 + 2))
    assert [(node, persisted.token) for node, persisted in done] == [(NODE, 7), (NODE, 8)]
    assert space.news(Instant(T1 + 2)) == SpaceChanged(None)
    for _, persisted in done:
        assert isinstance(persisted, Persisted)
        assert journal.read(persisted.location) == bytes([persisted.token]) * (8 * KIB - 32)


def test_a_frame_behind_one_that_waits_waits_too(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes back after a crash is a prefix of what was written."""
    space = space_of(journal)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(7):
            write(space, journal, number)
        assert not write(space, journal, 7)
        assert space.write(NODE, 7, Persist(FrameKind.METALOG, b"small", 9)) is None


def test_what_is_left_is_promised_once_to_all_roles_that_keep_batches(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their batches leave no room for the trim that would give some back."""
    space = space_of(journal, sharers=3)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(6):
            assert write(space, journal, number)
        told = space.news(T0)
    assert told is not None
    assert told.room == (16 * KIB - 32) // 2 // 3


@pytest.mark.parametrize("kind", sorted(METALOG_KINDS))
def test_what_a_sequencer_writes_waits_for_no_batch_of_another_role(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, kind: FrameKind
) -> None:
    """It may be the trim that gives room back, or what a trim waits for: a copy or a promise."""
    space, small = space_of(journal), b"small"
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(7):
            write(space, journal, number)
        for stream, other in ((7, FrameKind.RECORDS), (9, FrameKind.METALOG_STATE)):
            big = Persist(other, bytes(8 * KIB), stream)
            assert space.write(NODE, stream, big) is None
        assert space.write(NODE, 8, Persist(kind, small, 8)) is not None
        assert space.write(NODE, 8, Persist(FrameKind.SHARD_STATE, small, 9)) is None
        assert space.write(NODE, 8, Persist(kind, small, 10)) is None, "its own waits"
        assert space.write(NODE, 9, Persist(kind, small, 11)) is None
    space.retried(T1)
    journal.spare.pool.submit(int).result()
    space.news(T1)
    written = space.retried(Instant(T1 + 2))
    assert [persisted.token for _, persisted in written] == [7, 9, 9, 10, 11]


def test_a_full_disk_that_nobody_needs_is_no_news(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(journal)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        write(space, journal, 0)
        assert journal.starved
        assert space.news(T0) is None


def test_a_full_disk_stays_full_while_room_is_looked_for(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(journal)
    looking = threading.Event()

    def slowly(_path: object) -> os.statvfs_result:
        looking.wait(10)
        return _no_room(_path)

    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(6):
            write(space, journal, number)
        assert space.news(T0) is not None
        full.setattr(os, "statvfs", slowly)
        space.retried(T1)
        assert space.news(T1) is None
        looking.set()
        journal.spare.pool.submit(int).result()
        assert space.news(T1) is None
        assert space.full


def test_a_start_on_a_full_disk_is_told_before_anything_is_promised(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", _no_room)
    space = space_of(journal)
    space.start()
    assert space.news(T0) is None, "there is enough in the segment"
    for number in range(6):
        assert write(space, journal, number)
    journal.close()
    again = Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES, durability="fsync")
    list(again.recover())
    space = space_of(again)
    space.start()
    assert space.news(T0) == SpaceChanged((16 * KIB - 32) // 2)
    again.close()
