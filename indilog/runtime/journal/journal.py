"""The journal: one sequence of frames on disk, which all roles of a process write (ARCHITECTURE 6
and 7, docs/decisions/0001).

All roles of a process share one journal. So one `fdatasync` per iteration of the event loop covers
a batch, the metalog entry that orders it, and the ordering journal. The file format is in
`indilog.runtime.journal.segment`.

The journal gives two guarantees. First, after any crash `recover` returns all frames that were
written before a completed `sync`, or reports them as damaged (docs/decisions/0009). Second, of the
frames written after that sync, `recover` returns a prefix and makes it durable; no returned frame
lacks its predecessor. After a failed write or sync the journal refuses all calls permanently
(PITFALLS 16).

One thread uses the journal. Only `sync_flushed` and `record_synced_end` may run in another thread.
The operating system reports a failed write-back to only one sync of a descriptor. So syncs must not
overlap: one lock covers each sync and its outcome. `NodeShell` owns the journal, and uses it
through `DiskSpace`, `Checkpointing` and `Rewriting`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import structlog
from xxhash import xxh3_64_intdigest

from indilog.base.ids import NodeId
from indilog.roles.role import Discard, FrameKind, Location
from indilog.runtime.journal.checkpoint_files import (
    FileUse,
    JournalCheckpoint,
    Place,
    needed_from,
    remove_leftover,
    set_aside_damaged,
)
from indilog.runtime.journal.directory_lock import lock_directory
from indilog.runtime.journal.discards import Discards
from indilog.runtime.journal.journal_directory import check_format, create_directory
from indilog.runtime.journal.journal_reader import FileRead, Frame, JournalReader
from indilog.runtime.journal.old_segments import OldSegments
from indilog.runtime.journal.open_segments import OpenSegments
from indilog.runtime.journal.segment import (
    BATCH_KINDS,
    END_OF_SEGMENT,
    FRAME_HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    frame_bytes,
    pack_header,
    payload_crc_of,
    payload_intact,
    prepare_segment,
    segment_path,
    write_all,
    zero_tail,
)
from indilog.runtime.journal.segment_files import SegmentFile
from indilog.runtime.journal.segment_rewrite import remove_leftovers
from indilog.runtime.journal.segment_scan import (
    Damage,
    header_at,
    is_clean,
    newest_used,
    write_again,
    write_back,
)
from indilog.runtime.journal.segment_use import (
    NewestSegment,
    note_newest,
)
from indilog.runtime.journal.spare_segment import SpareSegment

_BUFFERS_MAX: Final = 1024
"""Number of buffers that are collected before a flush, if no sync is requested."""
_SPARE_FROM: Final = 16
"""The next segment is prepared when 1/16 of the active segment is full. Earlier, a segment would be
wasted if the process writes little. Later, the segment would not be ready at full load, because
writing its zeros takes longer than filling half a segment.
"""
_PADDING: Final = tuple(bytes(-length % 8) for length in range(8))

Durability = Literal["fsync", "memory"]

log = structlog.get_logger(__name__)


def stream_of(node: NodeId) -> int:
    """Return the number of the stream that holds the frames of `node`."""
    return xxh3_64_intdigest(node.encode())


class Journal:
    """Frames of several streams in segment files. The module's docstring states the guarantees.

    With durability `memory`, only promises that must never be broken (`METALOG_STATE`) are synced
    before they are acknowledged. All other frames are only written to the operating system
    (`flush_promised`), so they survive a crash of the process, but not of the machine.
    """

    def __init__(self, directory: Path, segment_bytes: int, durability: Durability) -> None:
        assert 2 * FRAME_HEADER_BYTES <= segment_bytes <= SEGMENT_BYTES_MAX
        self._must_sync = (
            frozenset(FrameKind) - {FrameKind.ORDERING}
            if durability == "fsync"
            else frozenset({FrameKind.METALOG_STATE, FrameKind.CHECKPOINT})
        )
        self._always_synced = durability == "fsync"
        self._lock_fd = lock_directory(directory / "LOCK")
        # The active segment: its number, its size, and the offsets up to which frames are laid out,
        # flushed, synced, and recorded as synced.
        self._number = 0
        self._capacity = 0
        self._end = 0
        self._flushed = 0
        self._synced = 0
        self._noted = 0
        self._buffers: list[bytes] = []
        self._promised = False
        """Whether the buffers hold a frame that needs no sync, but must survive a crash of the
        process.
        """
        # Numbers of frames that need a sync: written, flushed, synced.
        self._frames_written = 0
        self._frames_flushed = 0
        self._frames_synced = 0
        self._rolled_bytes = 0
        """Bytes written to full segments in this incarnation."""
        # Shared with `indilog.runtime.journal.rewriting`.
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.files = OpenSegments(directory)
        self._reader = JournalReader(directory, segment_bytes=segment_bytes)
        self.moved = self._reader.moved
        self.old = OldSegments()
        self.discards = Discards(self.files, self.moved, self.old)
        self._lock = threading.Lock()
        """Held during a sync, until its outcome is stored."""
        self._known: dict[tuple[int, int], FileUse] = {}
        """The use of segment files as of the loaded checkpoint, by their first and last segment."""
        self._failed = False
        self._closing = False
        self.created = False
        """Whether the directory held no journal before `open`."""
        self.damaged = 0
        """Number of places where `recover` could not read synced bytes."""
        self.corrected = 0
        """Number of flipped bits that `recover` corrected."""
        self.frames = 0
        """Number of frames replayed and written in this incarnation."""
        self.spare = SpareSegment(directory, segment_bytes)

    @classmethod
    def open(cls, directory: Path, *, segment_bytes: int, durability: Durability) -> Journal:
        """Open the journal in `directory`, and create it if missing. Call `recover` next.

        Raises:
            DataDirectoryError: another process uses it, or a newer release wrote it.
            OSError: an error of the system.
        """
        create_directory(directory)
        journal = cls(directory, segment_bytes, durability)
        try:
            journal.created = check_format(directory)
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def dirty(self) -> bool:
        """Whether a written frame still needs a sync before messages leave the process.

        A frame that can be fetched again (`ORDERING`) needs no sync of its own; the next sync
        covers it.
        """
        return self._frames_written != self._frames_synced

    @property
    def failed(self) -> bool:
        """Whether a write or sync has failed. If so, the journal refuses all calls."""
        return self._failed

    @property
    def starved(self) -> bool:
        """Whether the last attempt to prepare the next segment found no room."""
        return self.spare.starved

    @property
    def room(self) -> int:
        """Bytes left in the active segment."""
        return self._capacity - self._end - FRAME_HEADER_BYTES

    def prepare_next(self) -> None:
        """Prepare the next segment, or detect that there is no room for it. The call blocks, so use
        it only at a start.
        """
        self.spare.prepare(self._number + 1)
        with contextlib.suppress(OSError):
            self.spare.wait()

    def look_for_room(self) -> None:
        """Prepare the next segment again, if there was no room for it before."""
        if not self._closing:
            self.spare.look_for_room(self._number + 1)

    def holds_nothing(self) -> bool:
        """Whether no segment has a frame; call it before the first write."""
        return not newest_used(self.directory)

    # --- recovery

    def load_checkpoint(self) -> JournalCheckpoint | None:
        """Read and return the newest intact checkpoint; `recover` then begins after it. None: there
        is no checkpoint, and `recover` yields all frames.

        Raises:
            DataDirectoryError: a newer release wrote the checkpoint.
        """
        remove_leftover(self.directory)
        checkpoint = self._reader.load_checkpoint()
        set_aside_damaged(self.directory, self._reader.start)
        if checkpoint is not None:
            self._known = {(use.first, use.last): use for use in checkpoint.files}
            self.old.keep_from(*needed_from(self.directory, self._reader.start))
        return checkpoint

    def missing_segments(self) -> frozenset[int]:
        """Return the segments before the loaded checkpoint whose files are missing."""
        return self._reader.missing_segments()

    def recover(self) -> Iterator[Frame | Damage]:
        """Yield all intact frames in order, and all damage.

        Iteration begins after the checkpoint, if one was loaded, and must be exhausted once before
        the first `write`. A torn tail is cut with a warning. Yielded frames are durable when the
        iteration ends. Damage stays on disk, so the next start finds it again.

        Raises:
            DataDirectoryError: a newer release wrote a frame.
        """
        assert not self._number, "a journal recovers once"
        remove_leftovers(self.directory)
        reader = self._reader
        reader.open_files()
        for file in reader.files.values():
            self.files.named(file)
            known = self._known.get((file.first, file.last))
            dead, other = (known.dead_bytes, known.other_bytes) if known is not None else (0, 0)
            self.old.add(file, file.path.stat().st_size, dead, other)
        for found in reader.frames():
            if isinstance(found, FileRead):
                self._make_durable(found)
                continue
            self.damaged += isinstance(found, Damage)
            yield found
        self._activate(reader.active, reader.end)

    def _make_durable(self, read: FileRead) -> None:
        """Make the frames read from a file durable, correct flipped bits, and count its bytes."""
        file, scan = read.file, read.scan
        self.frames += read.frames
        self.old.add_other(file.first, read.other_bytes)
        for location in read.gone:
            self.old.add_dead(file.first, frame_bytes(location.length))
        if read.damaged:
            self.old.exclude_damaged(file)
        if scan.corrected:
            self.corrected += write_back(self.files.fd(file.first), file.path, scan.corrected)
        # The process may have crashed before it synced the written frames or `GONE` marks.
        again_from = scan.synced if read.newest else scan.written
        write_again(self.files.fd(file.first), again_from, scan.written)
        for location in read.gone:
            self.discards.punch(location)

    def _activate(self, number: int, end: int) -> None:
        """Continue in segment `number` at offset `end`. Overwrite the bytes after `end` with
        zeros.
        """
        path = segment_path(self.directory, number)
        if not path.exists():
            prepare_segment(self.directory, number, self.segment_bytes, lambda: False)
        fd = self.files.fd(number)
        if not is_clean(fd, number, end):
            log.warning("torn tail of the journal cut", file=str(path), offset=end)
        self._capacity = max(self.segment_bytes, os.fstat(fd).st_size)
        zero_tail(fd, end, self._capacity)
        note_newest(self.directory, NewestSegment(number, self._capacity, end))
        self._number = self.files.active = number
        self._end = self._flushed = self._synced = self._noted = end
        self._rolled_bytes = -end
        if not self.old.has(number):
            self.old.add(SegmentFile(number, number, path), self._capacity)

    # --- writing

    def write(self, stream: int, kind: FrameKind, payload: bytes) -> Location:
        """Append a frame to the buffers, and return its location.

        Raises:
            OSError: with `ENOSPC` there is no room for another segment: nothing was written, and a
                later call may succeed. Otherwise the journal has failed permanently.
        """
        assert self._number, "recover() must be exhausted before the first write"
        length = len(payload)
        size = frame_bytes(length)
        # There is always room for the frame that ends the segment.
        if self._end + size + FRAME_HEADER_BYTES > self._capacity:
            self._roll(size + FRAME_HEADER_BYTES)
        buffers = self._buffers
        buffers.append(
            pack_header(
                kind, length, stream, self._number, self._synced, payload_crc_of(kind, payload)
            )
        )
        buffers.append(payload)
        if length % 8:
            buffers.append(_PADDING[length % 8])
        location = Location(self._number, self._end + FRAME_HEADER_BYTES, length)
        self._end += size
        self.frames += 1
        if kind not in BATCH_KINDS:
            self.old.add_other(self._number, size)
        if kind in self._must_sync:
            self._frames_written += 1
        elif kind is not FrameKind.ORDERING:
            self._promised = True
        if len(buffers) >= _BUFFERS_MAX:
            self.flush()
        return location

    def flush(self) -> None:
        """Hand buffered frames to the operating system, in one system call.

        Raises:
            OSError: the journal has failed permanently.
        """
        self._check_alive()
        if self._buffers:
            buffers, self._buffers = self._buffers, []
            self._write(buffers)
            self._promised = False
            self._flushed = self._end
            self._frames_flushed = self._frames_written
            if self._end > self._capacity // _SPARE_FROM and not self._closing:
                self.spare.begin(self._number + 1)

    def flush_promised(self) -> None:
        """Flush if the buffers hold a frame that may be acknowledged after a flush, without a sync.

        Raises:
            OSError: the journal has failed permanently.
        """
        if self._promised:
            self.flush()

    def _write(self, buffers: list[bytes]) -> None:
        try:
            write_all(self.files.fd(self._number), buffers, self._flushed)
        except OSError:
            self._failed = True
            raise

    def sync(self) -> None:
        """Make all written frames durable; blocks.

        Raises:
            OSError: the journal has failed permanently.
        """
        self.flush()
        self.sync_flushed()

    def sync_flushed(self) -> None:
        """Make all flushed frames durable; blocks, and may run in another thread.

        Raises:
            OSError: the journal has failed permanently.
        """
        with self._lock:
            self._check_alive()
            if self._frames_flushed > self._frames_synced:
                self._sync_active()

    def record_synced_end(self) -> None:
        """Make all flushed frames durable, and record in `NEWEST` how far the segment is synced.

        With this record a start can distinguish damage of the last frames from a torn tail. Blocks;
        may run in another thread.

        Raises:
            OSError: the journal has failed permanently.
        """
        with self._lock:
            self._check_alive()
            if self._flushed > self._synced:
                self._sync_active()
            if self._synced > self._noted:
                self._note(NewestSegment(self._number, self._capacity, self._synced))
                self._noted = self._synced

    def _sync_active(self) -> None:
        frames, flushed = self._frames_flushed, self._flushed
        self._sync(self.files.fd(self._number))
        self._frames_synced = frames
        self._synced = flushed

    def _sync(self, fd: int) -> None:
        """Sync a file. The caller holds the lock."""
        try:
            os.fdatasync(fd)
        except OSError:
            self._failed = True
            raise

    def _check_alive(self) -> None:
        if self._failed:
            raise OSError(errno.EIO, "the journal failed before; restart to recover from disk")

    # --- segments

    def _roll(self, size_bytes: int) -> None:
        """End the active segment durably and begin the next one, of at least `size_bytes`.

        The sync precedes the first frame of the next segment, so only the newest segment can have a
        torn tail.
        """
        self._check_alive()
        following = self._number + 1
        self.spare.make(following, size_bytes)
        fd = self.files.fd(following)
        self._buffers.append(
            pack_header(END_OF_SEGMENT, 0, 0, self._number, self._synced, payload_crc=0)
        )
        self.flush()
        capacity = os.fstat(fd).st_size
        with self._lock:
            self._check_alive()
            if self._always_synced or self.dirty:
                self._sync(self.files.fd(self._number))
            self._note(NewestSegment(following, capacity))
            self._frames_synced = self._frames_flushed
            self._number = self.files.active = following
            self._capacity = capacity
            self._rolled_bytes += self._end
            self._end = self._flushed = self._synced = self._noted = 0
        self.spare.used()
        path = segment_path(self.directory, following)
        self.old.add(SegmentFile(following, following, path), capacity)

    def _note(self, newest: NewestSegment) -> None:
        try:
            note_newest(self.directory, newest)
        except OSError:
            self._failed = True
            raise

    # --- reading

    def read(self, location: Location) -> bytes | None:
        """Return the payload of a written or buffered frame; None: the payload is gone or
        unreadable.

        If the frame is damaged, the result may be bytes that are not an intact payload. So the
        caller verifies record batches (`RecordBatch`).
        """
        if location.segment == self._number and location.offset + location.length > self._flushed:
            self.flush()
        if (place := self.moved.place(location)) is None:
            return None
        number, offset = place
        try:
            fd = self.files.fd(number)
            header = header_at(fd, offset - FRAME_HEADER_BYTES)
            moved = header is not None and self.moved.has_moved(location.segment)
            length = header.length if header is not None and moved else location.length
            payload = os.pread(fd, length, offset)
        except OSError as error:
            log.warning("journal not readable", location=location, error=str(error))
            return None
        if header is None or header.segment != number or len(payload) != header.length:
            return b""  # readable but damaged; no intact frame has an empty payload
        if header.kind not in BATCH_KINDS and not payload_intact(header, payload):
            return None
        return payload

    # --- freeing space

    def discard(self, location: Location, *, elsewhere: bool = False) -> None:
        """Mark a frame as unneeded; this takes effect when all frames written so far are synced.

        Then `free_discarded` frees the frame's space, and recovery finds the frame as `GONE`. With
        `elsewhere`, only a rewrite of the segment frees the space (see `Discard`).
        """
        self.discards.add(Discard(location, elsewhere), self._frames_written)

    def free_discarded(self) -> None:
        """Free the space of discarded frames. A frame is marked durably before its pages are freed.

        Raises:
            OSError: the journal has failed permanently.
        """
        if not self.discards.due(self._frames_synced):
            return
        self.flush()
        with self._lock:
            self._check_alive()
            try:
                self.discards.free_discarded(self._frames_synced)
            except OSError:
                self._failed = True
                raise

    # --- checkpoints

    def begin_checkpoint(self) -> Place:
        """Write a `CHECKPOINT` frame after all written frames; return its place.

        The frame is durable when the next `mark` is reached.

        Raises:
            OSError: as `write`.
        """
        location = self.write(0, FrameKind.CHECKPOINT, b"")
        return Place(location.segment, location.offset)

    def uses(self) -> tuple[FileUse, ...]:
        """Return the use of all segment files."""
        return tuple(
            FileUse(old.file.first, old.file.last, old.dead_bytes, old.other_bytes)
            for old in self.old
        )

    def checkpointed(self, place: Place) -> None:
        """Note that a checkpoint at `place` is durable."""
        self.old.keep_from(*needed_from(self.directory, place))

    # --- progress

    @property
    def written_bytes(self) -> int:
        """Bytes of frames written in this incarnation."""
        return self._rolled_bytes + self._end

    def mark(self) -> int:
        """Return a number for the current end of the journal, for `reached`."""
        return self._frames_written

    def reached(self, mark: int) -> bool:
        """Tell whether all frames written before `mark` are synced."""
        return self._frames_synced >= mark

    def close(self) -> None:
        """Make written frames durable, unless the journal has failed, and release the directory."""
        if self._closing:
            return
        self._closing = True
        self.spare.close()
        try:
            if self._number and not self._failed:
                self.flush()
                self.record_synced_end()
        finally:
            self.files.close()
            os.close(self._lock_fd)
            self._failed = True
