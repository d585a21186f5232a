"""Disk space as a shell accounts for it (A35)."""

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
    """Write a frame of 8 KiB; return whether it was accepted."""
    payload = bytes([number]) * (8 * KIB - 32)
    taken = space.write(NODE, 7, Persist(FrameKind.METALOG, payload, number)) is not None
    journal.flush()
    journal.spare.pool.submit(int).result()
    return taken


def _no_room(_path: object) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))


def test_roles_are_notified_when_the_reserve_is_reached_and_frames_wait_when_it_is_used_up(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(journal)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        notices = []
        for number in range(7):
            assert write(space, journal, number)
            notices.append(space.pop_change(T0))
        assert notices == [None] * 5 + [SpaceChanged((16 * KIB - 32) // 2), None]
        assert [write(space, journal, number) for number in (7, 8)] == [False, False]
        assert space.pop_change(T0) is None
        assert space.retry(T0) == []
        assert space.retry(T1) == []
        assert space.pop_change(T1) is None, "a check that finds no free space notifies no role"
    done = space.retry(Instant(T1 + 2))
    assert [(node, persisted.token) for node, persisted in done] == [(NODE, 7), (NODE, 8)]
    assert space.pop_change(Instant(T1 + 2)) == SpaceChanged(None)
    for _, persisted in done:
        assert isinstance(persisted, Persisted)
        assert journal.read(persisted.location) == bytes([persisted.token]) * (8 * KIB - 32)


def test_a_frame_after_a_waiting_frame_waits_too(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery after a crash finds a prefix of the frames that were written."""
    space = space_of(journal)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(7):
            write(space, journal, number)
        assert not write(space, journal, 7)
        assert space.write(NODE, 7, Persist(FrameKind.METALOG, b"small", 9)) is None


def test_the_remaining_space_is_shared_by_all_roles_that_store_batches(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise their batches leave no room for the trim that would free some."""
    space = space_of(journal, sharers=3)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(6):
            assert write(space, journal, number)
        notices = space.pop_change(T0)
    assert notices is not None
    assert notices.room == (16 * KIB - 32) // 2 // 3


@pytest.mark.parametrize("kind", sorted(METALOG_KINDS))
def test_a_sequencers_write_does_not_wait_for_batches_of_another_role(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, kind: FrameKind
) -> None:
    """The write may be the trim that frees space, or what a trim waits for: a copy or a promise."""
    space, small = space_of(journal), b"small"
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        for number in range(7):
            write(space, journal, number)
        for stream, other in ((7, FrameKind.RECORDS), (9, FrameKind.METALOG_STATE)):
            big = Persist(other, bytes(8 * KIB), stream)
            assert space.write(NODE, stream, big) is None
        assert space.write(NODE, 8, Persist(kind, small, 8)) is not None
        assert space.write(NODE, 8, Persist(FrameKind.COLD, small, 9)) is None
        assert space.write(NODE, 8, Persist(kind, small, 10)) is None, "its own waits"
        assert space.write(NODE, 9, Persist(kind, small, 11)) is None
    space.retry(T1)
    journal.spare.pool.submit(int).result()
    space.pop_change(T1)
    written = space.retry(Instant(T1 + 2))
    assert [persisted.token for _, persisted in written] == [7, 9, 9, 10, 11]


def test_a_full_disk_is_not_announced_while_no_role_needs_space(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = space_of(journal)
    with monkeypatch.context() as full:
        full.setattr(os, "statvfs", _no_room)
        write(space, journal, 0)
        assert journal.starved
        assert space.pop_change(T0) is None


def test_a_disk_stays_reported_full_while_a_check_for_free_space_runs(
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
        assert space.pop_change(T0) is not None
        full.setattr(os, "statvfs", slowly)
        space.retry(T1)
        assert space.pop_change(T1) is None
        looking.set()
        journal.spare.pool.submit(int).result()
        assert space.pop_change(T1) is None
        assert space.full


def test_a_start_on_a_full_disk_notifies_roles_before_any_promise(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", _no_room)
    space = space_of(journal)
    space.start()
    assert space.pop_change(T0) is None, "there is enough in the segment"
    for number in range(6):
        assert write(space, journal, number)
    journal.close()
    again = Journal.open(tmp_path, segment_bytes=SEGMENT_BYTES, durability="fsync")
    list(again.recover())
    space = space_of(again)
    space.start()
    assert space.pop_change(T0) == SpaceChanged((16 * KIB - 32) // 2)
    again.close()
