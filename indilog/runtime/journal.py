"""The journal: what all roles of one process persist, in one sequence of frames on disk
(ARCHITECTURE 6 and 7, decision 0001).

Roles of one process share it, so that one `fdatasync` a loop turn covers a batch, the metalog entry
that orders it and the ordering journal together. The file format is in `indilog.runtime.segment`.

Two guarantees: what was written before a `sync` that returned comes back from `recover`, whatever
crashed, unless the disk damaged it, which `recover` tells (decision 0009); and of what was written
later exactly a prefix comes back (which `recover` itself makes durable), never a frame whose
predecessor is missing. A failed write or sync is final (PITFALLS 16): nothing is taken any more.

Used by one thread, but for `sync_flushed`, which may run beside `write`, `read` and `flush`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import structlog
from xxhash import xxh3_64_intdigest

from indilog.errors import DataDirectoryError
from indilog.ids import NodeId
from indilog.roles import FrameKind, Location
from indilog.runtime.directory_lock import locked
from indilog.runtime.journal_directory import check_format, created
from indilog.runtime.segment import (
    BATCH_KINDS,
    END_OF_SEGMENT,
    FRAME_HEADER_BYTES,
    NO_ROOM,
    SEGMENT_BYTES_MAX,
    frame_bytes,
    header_packed,
    mark_gone,
    payload_crc_of,
    payload_intact,
    prepare_segment,
    punch,
    segment_numbers,
    segment_path,
    write_all,
    zero_tail,
)
from indilog.runtime.segment_scan import (
    Damage,
    Scanned,
    SegmentScan,
    header_at,
    is_clean,
    newest_used,
    write_back,
)
from indilog.runtime.segment_use import (
    NewestSegment,
    is_whole,
    log_damage,
    newest_noted,
    note_newest,
)

_OPEN_FILES_MAX: Final = 64
_BUFFERS_MAX: Final = 1024
"""Buffers that collect without a flush, when nothing asks for a sync."""
_SPARE_FROM: Final = 16
"""The next segment is prepared when this part (1/16) of the active one is full: writing zeros takes
longer than filling half a segment at full load, and a process that writes little needs no second
segment.
"""
_PADDING: Final = tuple(bytes(-length % 8) for length in range(8))

Durability = Literal["fsync", "memory"]

log = structlog.get_logger(__name__)


def stream_of(node: NodeId) -> int:
    """Return the number under which the frames of `node` stand in a journal."""
    return xxh3_64_intdigest(node.encode())


class Journal:
    """Frames of several streams in segment files; see the module for what is guaranteed.

    With durability `memory` only `SHARD_STATE` frames are really synced: the rest survives the
    death of the process, but not that of the machine.
    """

    def __init__(self, directory: Path, segment_bytes: int, durability: Durability) -> None:
        assert 2 * FRAME_HEADER_BYTES <= segment_bytes <= SEGMENT_BYTES_MAX
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._must_sync = (
            frozenset(FrameKind) - {FrameKind.ORDERING}
            if durability == "fsync"
            else frozenset({FrameKind.SHARD_STATE})
        )
        self._always_synced = durability == "fsync"
        self._lock_fd = locked(directory / "LOCK")
        # The active segment: its number, size, and how far it is decided, flushed, synced (bytes).
        self._number = 0
        self._capacity = 0
        self._end = 0
        self._flushed = 0
        self._synced = 0
        self._buffers: list[bytes] = []
        # How many frames that need a sync were written, flushed, synced.
        self._frames_written = 0
        self._frames_flushed = 0
        self._frames_synced = 0
        self._files: dict[int, int] = {}
        self._syncing = 0
        self._lock = threading.Lock()
        self._failed = False
        self._closing = False
        self.created = False
        """Whether the directory held no journal when this one was opened."""
        self.damaged = 0
        """Places where `recover` could not read what had been synced."""
        self._discarded: deque[tuple[int, Location]] = deque()
        """Frames that may go when so many frames are synced."""
        self._unpunched = 0
        """Frames that were discarded and still take their room."""
        self.mended = 0
        """Flipped bits that it put right."""
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="journal-segment")
        self._spare: Future[None] | None = None
        self._starved = False

    @classmethod
    def open(cls, directory: Path, *, segment_bytes: int, durability: Durability) -> Journal:
        """Open the journal in `directory`, created if it is not there; then call `recover`.

        Raises:
            DataDirectoryError: another process uses it, or a newer release wrote it.
            OSError: as the system says.
        """
        created(directory)
        journal = cls(directory, segment_bytes, durability)
        try:
            journal.created = check_format(directory)
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def dirty(self) -> bool:
        """Whether a frame was written that must be durable before anything leaves the process.

        Frames that can be derived again (`ORDERING`) do not count; they go with the next sync.
        """
        return self._frames_written != self._frames_synced

    @property
    def failed(self) -> bool:
        """Whether a write or sync has failed: nothing works any more."""
        return self._failed

    @property
    def starved(self) -> bool:
        """Whether there was no room for the next segment, when it was looked for last.

        So it stays until looking again has found some.
        """
        if (spare := self._spare) is None:
            self._starved = False
        elif spare.done():
            error = spare.exception()
            self._starved = isinstance(error, OSError) and error.errno in NO_ROOM
        return self._starved

    @property
    def room(self) -> int:
        """Bytes left in the active segment."""
        return self._capacity - self._end - FRAME_HEADER_BYTES

    def prepare_next(self) -> None:
        """Make the next segment, or find that there is no room; waits, so only at a start."""
        self._spare = self._prepared(self._number + 1)
        with contextlib.suppress(OSError):
            self._spare.result()

    def look_for_room(self) -> None:
        """Try again to prepare the next segment, if there was no room for it."""
        if self.starved and self._spare is not None and self._spare.done() and not self._closing:
            self._spare = self._prepared(self._number + 1)

    def holds_nothing(self) -> bool:
        """Whether no segment has a frame; before anything was written."""
        return not newest_used(self._directory, segment_numbers(self._directory))

    # --- recovery

    def recover(self) -> Iterator[tuple[int, FrameKind, bytes, Location] | Damage]:
        """Yield all intact frames in order (stream, kind, payload, location), and what is damaged.

        Must be exhausted once before the first `write`. A torn tail is cut with a warning; what is
        yielded is durable when the iteration ends. Damage stays on disk, and is met again.

        Raises:
            DataDirectoryError: a newer release wrote a frame.
        """
        assert not self._number, "a journal recovers once"
        numbers = segment_numbers(self._directory)
        noted = newest_noted(self._directory) or NewestSegment(0, 0)
        newest = max(newest_used(self._directory, numbers), noted.number)
        active, end = newest + 1, 0
        for number in range(1, newest + 1):
            if number not in numbers:
                yield self._noted(Damage(number, 0, self._segment_bytes, None, b""))
                continue
            path = segment_path(self._directory, number)
            scan = SegmentScan(path, number, newest=number == newest)
            found: Damage | Scanned | None = None
            for found in scan:
                if isinstance(found, Damage):
                    yield self._noted(found)
                else:
                    header, payload, location = found
                    if header.kind == FrameKind.GONE:
                        self._punch(location)  # a crash may have come between mark and punch
                    yield header.stream, _kind_of(header.kind), payload, location
            if scan.mended:
                self.mended += write_back(self._file(number), path, scan.mended)
            if scan.sealed:
                continue
            if number == newest and (number != noted.number or is_whole(self._directory, noted)):
                active, end = number, scan.end
            elif not isinstance(found, Damage):
                # Its end is cut off. It is left as it is, so that this is found again.
                size = noted.size_bytes if number == noted.number else scan.end
                yield self._noted(Damage(number, scan.end, size, None, b""))
        self._activate(active, end)

    def _noted(self, damage: Damage) -> Damage:
        self.damaged += 1
        log_damage(self._directory, damage)
        return damage

    def _activate(self, number: int, end: int) -> None:
        """Continue in segment `number` at `end`; what lies there is cut."""
        path = segment_path(self._directory, number)
        if not path.exists():
            prepare_segment(self._directory, number, self._segment_bytes, lambda: False)
        fd = self._file(number)
        if not is_clean(fd, number, end):
            log.warning("torn tail of the journal cut", file=str(path), offset=end)
        self._capacity = max(self._segment_bytes, os.fstat(fd).st_size)
        zero_tail(fd, end, self._capacity)
        note_newest(self._directory, NewestSegment(number, self._capacity))
        self._number = number
        self._end = self._flushed = self._synced = end

    # --- writing

    def write(self, stream: int, kind: FrameKind, payload: bytes) -> Location:
        """Put a frame at the end; its place is decided now, the bytes are buffered.

        Raises:
            OSError: with `ENOSPC` there is no room for a further segment: nothing was written, a
                later call may succeed. Otherwise the journal has failed for good.
        """
        assert self._number, "recover() must be exhausted before the first write"
        length = len(payload)
        size = frame_bytes(length)
        # There is always room for the frame that ends the segment.
        if self._end + size + FRAME_HEADER_BYTES > self._capacity:
            assert size + FRAME_HEADER_BYTES <= self._segment_bytes, "a frame fits into a segment"
            self._roll()
        buffers = self._buffers
        buffers.append(
            header_packed(
                kind, length, stream, self._number, self._synced, payload_crc_of(kind, payload)
            )
        )
        buffers.append(payload)
        if length % 8:
            buffers.append(_PADDING[length % 8])
        location = Location(self._number, self._end + FRAME_HEADER_BYTES, length)
        self._end += size
        if kind in self._must_sync:
            self._frames_written += 1
        if len(buffers) >= _BUFFERS_MAX:
            self.flush()
        return location

    def flush(self) -> None:
        """Hand what is buffered to the operating system, in one system call.

        Raises:
            OSError: the journal has failed for good.
        """
        self._check_alive()
        if self._buffers:
            buffers, self._buffers = self._buffers, []
            self._write(buffers)
            self._flushed = self._end
            self._frames_flushed = self._frames_written
            if self._end > self._capacity // _SPARE_FROM and not (self._spare or self._closing):
                self._spare = self._prepared(self._number + 1)

    def _write(self, buffers: list[bytes]) -> None:
        try:
            write_all(self._file(self._number), buffers, self._flushed)
        except OSError:
            self._failed = True
            raise

    def sync(self) -> None:
        """Make everything written so far durable; blocks.

        Raises:
            OSError: the journal has failed for good.
        """
        self.flush()
        self.sync_flushed()

    def sync_flushed(self) -> None:
        """Make everything flushed so far durable; blocks, and may run in another thread.

        Raises:
            OSError: the journal has failed for good.
        """
        self._check_alive()
        with self._lock:
            frames, number, flushed = self._frames_flushed, self._number, self._flushed
            self._syncing = number
            fd = self._files[number]
        if needed := frames > self._frames_synced:
            self._sync(fd)
        with self._lock:
            self._syncing = 0
            self._frames_synced = max(self._frames_synced, frames)
            # A segment that was rolled meanwhile is not the one whose frames are written now.
            if needed and number == self._number:
                self._synced = max(self._synced, flushed)

    def _sync(self, fd: int) -> None:
        try:
            os.fdatasync(fd)
        except OSError:
            self._failed = True
            raise

    def _check_alive(self) -> None:
        if self._failed:
            raise OSError(errno.EIO, "the journal failed before; restart to recover from disk")

    # --- segments

    def _roll(self) -> None:
        """End the active segment, durably, and begin the next one.

        The sync comes before the next segment's first frame, so that only the newest segment can
        have a torn tail.
        """
        self._check_alive()
        following = self._number + 1
        if self._spare is None or (self._spare.done() and self._spare.exception()):
            self._spare = self._prepared(following)
        self._spare.result()
        fd = self._file(following)
        self._buffers.append(
            header_packed(END_OF_SEGMENT, 0, 0, self._number, self._synced, payload_crc=0)
        )
        self.flush()
        if self._always_synced or self.dirty:
            self._sync(self._file(self._number))
        capacity = os.fstat(fd).st_size
        self._note(NewestSegment(following, capacity))
        with self._lock:
            self._frames_synced = self._frames_flushed
            self._number = following
            self._capacity = capacity
            self._end = self._flushed = self._synced = 0
            self._spare = None

    def _note(self, newest: NewestSegment) -> None:
        try:
            note_newest(self._directory, newest)
        except OSError:
            self._failed = True
            raise

    def _prepared(self, number: int) -> Future[None]:
        """Have segment `number` made, unless a former run has done so."""

        def prepare() -> None:
            path = segment_path(self._directory, number)
            if not path.exists() or path.stat().st_size < self._segment_bytes:
                prepare_segment(self._directory, number, self._segment_bytes, lambda: self._closing)

        return self._preparer.submit(prepare)

    def _file(self, number: int) -> int:
        """Return the descriptor of a segment that exists, opened if need be."""
        fd = self._files.get(number)
        if fd is not None:
            return fd
        fd = os.open(segment_path(self._directory, number), os.O_RDWR | os.O_CLOEXEC)
        with self._lock:
            self._files[number] = fd
            if len(self._files) > _OPEN_FILES_MAX:
                keep = {number, self._number, self._syncing}
                oldest = next(other for other in self._files if other not in keep)
                os.close(self._files.pop(oldest))
        return fd

    # --- reading

    def read(self, location: Location) -> bytes | None:
        """Return the payload of a frame, written or only buffered; None: damaged or gone.

        The CRC of a record batch is its own: the reader verifies it (`RecordBatch`).
        """
        number, offset, length = location
        if number == self._number and offset + length > self._flushed:
            self.flush()
        try:
            fd = self._file(number)
            header = header_at(fd, offset - FRAME_HEADER_BYTES)
            payload = os.pread(fd, length, offset)
        except OSError as error:
            log.warning("journal not readable", location=location, error=str(error))
            return None
        if header is None or header.segment != number or len(payload) != header.length:
            return None
        if header.kind not in BATCH_KINDS and not payload_intact(header, payload):
            return None
        return payload

    # --- giving room back

    def discard(self, location: Location) -> None:
        """Take a frame for one that nobody will read again, once everything written by now is
        synced; then `give_back` gives its room back, and recovery finds it `GONE`.
        """
        self._discarded.append((self._frames_written, location))

    def give_back(self) -> None:
        """Give back the room of discarded frames; they are marked, durably, before anything goes.

        Raises:
            OSError: the journal has failed for good.
        """
        locations: list[Location] = []
        while self._discarded and self._discarded[0][0] <= self._frames_synced:
            locations.append(self._discarded.popleft()[1])
        if not locations:
            return
        self.flush()
        try:
            marked = mark_gone([(self._file(place.segment), place) for place in locations])
        except OSError:
            self._failed = True
            raise
        for location in marked:
            self._punch(location)

    def _punch(self, location: Location) -> None:
        try:
            punch(self._file(location.segment), location)
        except OSError as error:
            if not self._unpunched:
                log.warning("the room of trimmed records is not given back", error=str(error))
            self._unpunched += 1

    def close(self) -> None:
        """Sync what is written unless the journal failed, and release the directory."""
        if self._closing:
            return
        self._closing = True
        self._preparer.shutdown()
        try:
            if self._number and not self._failed:
                self.sync()
        finally:
            for fd in (*self._files.values(), self._lock_fd):
                os.close(fd)
            self._files.clear()
            self._failed = True


def _kind_of(kind: int) -> FrameKind:
    try:
        return FrameKind(kind)
    except ValueError:
        raise DataDirectoryError(
            f"The journal holds a frame of kind {kind}, which this release does not know; "
            "start the release that wrote it."
        ) from None
