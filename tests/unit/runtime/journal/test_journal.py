"""The journal and its segment files."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog.testing

from indilog.base.errors import DataDirectoryError
from indilog.base.ids import NodeId
from indilog.roles.role import FrameKind
from indilog.runtime.journal import segment
from indilog.runtime.journal.journal import Journal, stream_of
from indilog.runtime.journal.journal_directory import FORMAT_VERSION, format_line
from tests.unit.runtime.journals import (
    SEGMENT_BYTES,
    STREAM,
    batch,
    flip,
    kill,
    spoil,
    started,
)


def test_frames_are_recovered_in_order_with_their_stream_and_location(
    directory: Path, opened: list[Journal]
) -> None:
    journal, recovered = started(directory, opened)
    assert recovered == []
    written = [
        (stream, kind, payload, journal.write(stream, kind, payload))
        for stream, kind, payload in [
            (1, FrameKind.RECORDS, batch()),
            (2, FrameKind.METALOG, b"entry"),
            (1, FrameKind.ORDERING, b""),
            (3, FrameKind.METALOG_STATE, b"x" * 8),
        ]
    ]
    journal.sync()
    _, recovered = started(directory, opened)
    assert recovered == written


def test_a_frame_that_does_not_fit_rolls_the_segment(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    payloads = [bytes([number]) * 900 for number in range(20)]
    locations = [journal.write(STREAM, FrameKind.METALOG, payload) for payload in payloads]
    assert [location.segment for location in locations] == [1 + n // 4 for n in range(20)]
    journal.sync()
    journal, recovered = started(directory, opened)
    assert [payload for _, _, payload, _ in recovered] == payloads
    assert [journal.read(location) for location in locations] == payloads


def test_the_largest_frame_fills_a_segment_and_a_larger_one_gets_a_segment_of_its_size(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    largest = b"x" * (SEGMENT_BYTES - 2 * segment.FRAME_HEADER_BYTES)
    larger = b"y" * (3 * SEGMENT_BYTES)
    for payload in (largest, largest, larger, b"z", largest):
        journal.write(STREAM, FrameKind.METALOG, payload)
    sizes = [segment.segment_path(directory, n).stat().st_size for n in (1, 2, 3, 4)]
    assert sizes[:2] == [SEGMENT_BYTES] * 2
    assert 3 * SEGMENT_BYTES < sizes[2] < 4 * SEGMENT_BYTES
    assert sizes[3] == SEGMENT_BYTES
    journal, recovered = started(directory, opened)
    assert [frame[2] for frame in recovered] == [largest, largest, larger, b"z", largest]


def test_an_unflushed_frame_is_readable(directory: Path, opened: list[Journal]) -> None:
    journal, _ = started(directory, opened)
    location = journal.write(STREAM, FrameKind.METALOG, b"entry")
    assert journal.read(location) == b"entry"


def test_a_damaged_frame_reads_as_no_payload(directory: Path, opened: list[Journal]) -> None:
    journal, _ = started(directory, opened)
    locations = [journal.write(STREAM, FrameKind.METALOG, b"entry %d" % n) for n in range(3)]
    journal.sync()
    path = segment.segment_path(directory, 1)
    flip(path, locations[0].offset)
    spoil(path, locations[1].offset - 9, 2)
    assert [journal.read(location) for location in locations] == [None, b"", b"entry 2"]


def test_a_location_without_a_frame_reads_as_no_payload(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    location = journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal.sync()
    assert journal.read(location._replace(offset=location.offset + 8)) == b""
    assert journal.read(location._replace(length=3)) == b""
    assert journal.read(location._replace(segment=9)) is None


def test_records_are_not_checked_twice(directory: Path, opened: list[Journal]) -> None:
    """The frame carries the batch's own CRC, so a reader verifies the batch."""
    journal, _ = started(directory, opened)
    location = journal.write(STREAM, FrameKind.RECORDS, batch())
    journal.sync()
    flip(segment.segment_path(directory, 1), location.offset + location.length - 1)
    read = journal.read(location)
    assert read is not None
    assert read != batch()


def test_a_torn_tail_is_cut_with_a_warning(directory: Path, opened: list[Journal]) -> None:
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.METALOG, b"kept")
    torn = journal.write(STREAM, FrameKind.RECORDS, batch())
    kill(journal)
    flip(segment.segment_path(directory, 1), torn.offset + torn.length - 1)
    with structlog.testing.capture_logs() as logs:
        _, recovered = started(directory, opened)
    assert [payload for _, _, payload, _ in recovered] == [b"kept"]
    assert [(e["log_level"], e["event"], e["offset"]) for e in logs] == [
        ("warning", "torn tail of the journal cut", torn.offset - segment.FRAME_HEADER_BYTES)
    ]


def test_recovery_makes_frames_durable_after_a_kill_between_roll_and_sync(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: the end mark of the segment is in the page cache only."""
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    journal.sync()
    path = segment.segment_path(directory, 1)
    durable = path.read_bytes()
    for _ in range(3):
        journal.write(STREAM, FrameKind.METALOG, b"y" * 900)
    journal.prepare_next()  # else its thread may meet the failing sync instead
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", _failing)
        with pytest.raises(OSError, match="disk"):
            journal.write(STREAM, FrameKind.METALOG, b"y" * 900)
    journal.close()  # as a kill leaves it: it has failed
    written, on_disk = path.read_bytes(), bytearray(durable)
    dirty: list[range] = []  # the write-back failed: its pages count as clean
    inode = path.stat().st_ino
    real_write, real_sync = os.pwritev, os.fdatasync

    def pwritev(fd: int, buffers: list[bytes], offset: int) -> int:
        size = real_write(fd, buffers, offset)
        if os.fstat(fd).st_ino == inode:
            dirty.append(range(offset, offset + size))
        return size

    def fdatasync(fd: int) -> None:
        real_sync(fd)
        if os.fstat(fd).st_ino == inode:
            for pages in dirty:
                on_disk[pages.start : pages.stop] = path.read_bytes()[pages.start : pages.stop]

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    again, recovered = started(directory, opened)
    assert len(recovered) == 4
    assert on_disk == written
    assert again._number == 2


def test_a_frame_cut_as_a_torn_tail_is_never_recovered_later(
    directory: Path, opened: list[Journal]
) -> None:
    """The frame after a torn one is intact; rewriting the torn one must not revive it."""
    journal, _ = started(directory, opened)
    torn = journal.write(STREAM, FrameKind.METALOG, b"first")
    journal.write(STREAM, FrameKind.METALOG, b"second")
    kill(journal)
    spoil(segment.segment_path(directory, 1), torn.offset, 4)
    journal, recovered = started(directory, opened)
    assert recovered == []
    journal.write(STREAM, FrameKind.METALOG, b"first")
    _, recovered = started(directory, opened)
    assert [payload for _, _, payload, _ in recovered] == [b"first"]


def test_frames_of_an_earlier_use_of_the_file_end_the_replay(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    for number in range(8):
        journal.write(STREAM, FrameKind.METALOG, bytes([number]) * 900)
    journal.close()
    first, second = (segment.segment_path(directory, number) for number in (1, 2))
    third = segment.segment_path(directory, 3)
    old = first.read_bytes()
    third.write_bytes(old)
    with structlog.testing.capture_logs() as logs:
        journal, recovered = started(directory, opened)
    assert len(recovered) == 8
    assert logs == []
    journal.write(STREAM, FrameKind.METALOG, b"y" * 900)
    _, recovered = started(directory, opened)
    assert [payload[:1] for _, _, payload, _ in recovered] == [
        *[bytes([number]) for number in range(8)],
        b"y",
    ]
    assert second.exists()


def test_a_sync_is_needed_after_a_write_until_one_succeeds(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    dirty = [journal.dirty]
    journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal.flush()
    dirty.append(journal.dirty)
    journal.write(STREAM, FrameKind.METALOG, b"buffered during the sync")
    journal.sync_flushed()
    dirty.append(journal.dirty)
    journal.sync()
    dirty.append(journal.dirty)
    assert dirty == [False, True, True, False]


def test_a_segment_is_synced_before_the_next_one_is_used(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = started(directory, opened)
    journal.spare.pool.submit(int).result()
    second = segment.segment_path(directory, 2)
    used: list[bool] = []
    whole = os.fdatasync

    def recorded(fd: int) -> None:
        used.append(second.exists() and any(second.read_bytes()))
        whole(fd)

    for _ in range(4):
        journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    journal.flush()
    journal.spare.pool.submit(int).result()
    monkeypatch.setattr(os, "fdatasync", recorded)
    journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    assert used == [False, False], "synced, then noted as used, then used"


def test_derivable_frames_need_no_sync(directory: Path, opened: list[Journal]) -> None:
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.ORDERING, b"entry")
    assert not journal.dirty


def test_memory_durability_syncs_only_irrevocable_promises(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = started(directory, opened, durability="memory")
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    active = journal.files.fd(1)
    journal.write(STREAM, FrameKind.RECORDS, batch())
    journal.sync()
    assert active not in synced
    journal.write(STREAM, FrameKind.METALOG_STATE, b"promise")
    journal.sync()
    assert synced.count(active) == 1


def test_memory_durability_flushes_promised_frames_to_the_page_cache(
    directory: Path, opened: list[Journal]
) -> None:
    """D6: an acknowledged frame survives the end of the process."""
    journal, _ = started(directory, opened, durability="memory")
    journal.write(STREAM, FrameKind.RECORDS, batch())
    assert not journal.dirty
    journal.flush_promised()
    assert batch() in segment.segment_path(directory, 1).read_bytes()
    journal.write(STREAM, FrameKind.ORDERING, b"entry")
    journal.flush_promised()
    assert b"entry" not in segment.segment_path(directory, 1).read_bytes(), "nothing promises it"


def test_buffers_do_not_grow_without_a_sync(directory: Path, opened: list[Journal]) -> None:
    journal = Journal.open(directory, segment_bytes=256 * 1024, durability="fsync")
    opened.append(journal)
    list(journal.recover())
    for _ in range(3000):
        journal.write(STREAM, FrameKind.ORDERING, b"entry   ")
        assert len(journal._buffers) < 1100


def test_a_failed_sync_is_final(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.METALOG, b"entry")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", _failing)
        with pytest.raises(OSError, match="disk"):
            journal.sync()
    with pytest.raises(OSError, match="failed before"):
        journal.sync()
    assert journal.dirty


def test_a_write_back_error_reported_to_one_sync_fails_the_concurrent_sync_too(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: Linux reports it once per open file, and both syncs are of the same descriptor."""
    journal, _ = started(directory, opened)
    for _ in range(4):
        journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    journal.flush()
    disk = FailedWriteBack(journal, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(journal.sync_flushed)
        assert disk.entered.wait(60)
        with pytest.raises(OSError, match="failed before"):
            journal.write(STREAM, FrameKind.METALOG, b"y" * 900)
        assert isinstance(synced.exception(60), OSError)
    assert journal.dirty


def test_no_hole_is_punched_before_the_outcome_of_a_sync_is_known(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: the mark of a discarded frame is synced by the descriptor of a sync that fails."""
    journal, _ = started(directory, opened)
    gone = journal.write(STREAM, FrameKind.RECORDS, batch())
    journal.sync()
    journal.discard(gone)
    journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal.flush()
    disk = FailedWriteBack(journal, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(journal.sync_flushed)
        assert disk.entered.wait(60)
        with pytest.raises(OSError, match="failed before"):
            journal.free_discarded()
        assert isinstance(synced.exception(60), OSError)
    assert journal.read(gone) == batch()


def _failing(_fd: int) -> None:
    raise OSError(errno.EIO, "disk")


class FailedWriteBack:
    """A disk that failed to write pages of the active segment, and reports the error to one sync.

    The sync in a thread continues when the test's own thread syncs too, or waits for the lock. Then
    the sync that began last gets the error.

    Attributes:
        entered: whether a thread's sync has begun.
    """

    def __init__(self, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self._overlaps = threading.Event()
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._active = journal.files.fd(journal.files.active)
        self._unreported = [OSError(errno.EIO, "disk")]
        self._whole = os.fdatasync
        journal._lock = self  # type: ignore[assignment]
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)

    def _fdatasync(self, fd: int) -> None:
        if fd != self._active:
            self._whole(fd)
            return
        if threading.get_ident() == self._main:
            error = self._unreported.pop() if self._unreported else None
            self._overlaps.set()
        else:
            self.entered.set()
            assert self._overlaps.wait(60)
            error = self._unreported.pop() if self._unreported else None
        if error is not None:
            raise error

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._overlaps.set()
            assert self._lock.acquire(timeout=60)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_full_disk_refuses_a_segment_until_space_is_freed(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = started(directory, opened)
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", _no_room)
        for _ in range(4):
            journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
        with pytest.raises(OSError, match="no room") as caught:
            journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
        assert caught.value.errno == errno.ENOSPC
        journal.sync()
    journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    _, recovered = started(directory, opened)
    assert len(recovered) == 5


def _no_room(_path: object) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))


def test_a_directory_has_one_user(directory: Path, opened: list[Journal]) -> None:
    started(directory, opened)
    with pytest.raises(DataDirectoryError, match="in use by another process"):
        Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")


def test_a_newer_format_is_refused(directory: Path, opened: list[Journal]) -> None:
    started(directory, opened)[0].close()
    (directory / "FORMAT").write_text(format_line(FORMAT_VERSION + 1))
    with pytest.raises(DataDirectoryError, match="start a newer release"):
        Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")


def test_an_unknown_format_is_refused_in_a_directory_without_a_journal(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "FORMAT").write_text("something else")
    with pytest.raises(DataDirectoryError, match="damaged"):
        Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")


def test_a_journal_of_an_older_format_is_refused_unchanged(
    directory: Path, opened: list[Journal]
) -> None:
    """Record batches of the older format would count as damaged."""
    journal, _ = started(directory, opened)
    journal.close()
    (directory / "FORMAT").write_text(format_line(4))
    with pytest.raises(DataDirectoryError, match="begin with another data directory"):
        Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
    assert (directory / "FORMAT").read_text() == format_line(4)


def test_a_journal_of_format_5_is_read_and_gets_the_new_format(
    directory: Path, opened: list[Journal]
) -> None:
    """Its views have no zones and no finalized shards; nothing else differs."""
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal.close()
    (directory / "FORMAT").write_text(format_line(5))
    assert len(started(directory, opened)[1]) == 1
    assert (directory / "FORMAT").read_text() == format_line(FORMAT_VERSION)


@pytest.mark.parametrize("bit", [*range(0, 8 * len(format_line(FORMAT_VERSION)), 5), None])
def test_a_damaged_format_file_is_rewritten(
    directory: Path, opened: list[Journal], bit: int | None
) -> None:
    """A5: one flipped bit, also one that makes the version a newer one; or no file at all."""
    journal, _ = started(directory, opened)
    journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal.close()
    file = directory / "FORMAT"
    if bit is None:
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    assert len(started(directory, opened)[1]) == 1
    assert file.read_text() == format_line(FORMAT_VERSION)


def test_a_frame_of_a_newer_version_is_refused(
    directory: Path, opened: list[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = started(directory, opened)
    with monkeypatch.context() as patched:
        patched.setattr(segment, "VERSION", 2)
        journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal.close()
    with pytest.raises(DataDirectoryError, match="version 2, this release reads 1"):
        started(directory, opened)


def test_a_file_created_with_a_smaller_segment_size_is_extended(
    directory: Path, opened: list[Journal]
) -> None:
    journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES // 2, durability="fsync")
    opened.append(journal)
    assert not list(journal.recover())
    journal.write(STREAM, FrameKind.METALOG, b"entry")
    journal, recovered = started(directory, opened)
    assert len(recovered) == 1
    journal.write(STREAM, FrameKind.METALOG, b"x" * 900)
    assert segment.segment_path(directory, 1).stat().st_size == SEGMENT_BYTES


def test_writes_that_the_system_cuts_short_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    whole = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, offset: whole(fd, [buffers[0][:3]], offset)
    )
    with path.open("wb") as file:
        segment.write_all(file.fileno(), [b"abcdef", b"ghi"], 2)
    assert path.read_bytes() == b"\0\0abcdefghi"


def test_streams_differ_by_name() -> None:
    assert stream_of(NodeId("storage-0")) != stream_of(NodeId("storage-1"))


def test_the_number_of_open_files_is_bounded_for_any_number_of_segments(
    directory: Path, opened: list[Journal]
) -> None:
    journal, _ = started(directory, opened)
    locations = [journal.write(STREAM, FrameKind.METALOG, b"x" * 3000) for _ in range(80)]
    assert locations[-1].segment == 80
    assert all(journal.read(location) == b"x" * 3000 for location in locations)
    assert len(journal.files) <= 64
