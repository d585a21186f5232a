"""Reads a journal: its newest checkpoint, and the frames after it, in order (decisions 0009, 0028).

The reader changes no byte and takes no lock. `Journal.recover` uses it, then corrects flipped bits
and cuts the torn tail, because its process continues to write. Programs that only read a data
directory (`indilog_pipeline`) use the reader alone. The directory's process may be running
meanwhile (`running`, docs/decisions/0035).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from indilog.base.errors import DataDirectoryError
from indilog.roles.role import FrameKind, Location
from indilog.runtime.journal.checkpoint_files import (
    JournalCheckpoint,
    Place,
    checkpoint_places,
    read_newest,
)
from indilog.runtime.journal.moved_frames import MovedFrames
from indilog.runtime.journal.segment import (
    BATCH_KINDS,
    FRAME_HEADER_BYTES,
    RewrittenEnd,
    frame_bytes,
)
from indilog.runtime.journal.segment_files import SegmentFile, segment_files
from indilog.runtime.journal.segment_rewrite import places_in, rewritten_end
from indilog.runtime.journal.segment_scan import (
    Damage,
    Scanned,
    SegmentScan,
    newest_used,
    synced_end,
)
from indilog.runtime.journal.segment_use import NewestSegment, is_whole, newest_noted

_NO_SEGMENT: Final = 2**32 - 2
"""Segment number in the name of a batch whose real name cannot be read."""

Frame: TypeAlias = tuple[int, FrameKind, bytes, Location]
"""Stream, kind, payload, and the location by which the role knows the frame (a batch's name)."""


class FileRead(NamedTuple):
    """A file whose frames were all yielded.

    Attributes:
        scan: the scan of the file, after iteration.
        newest: whether the file may end in a torn tail.
        gone: locations of frames marked as gone.
        damaged: whether the file has damage.
        frames: number of intact frames, including `CHECKPOINT` frames and without `MOVED` frames.
        other_bytes: bytes of frames without batches.
    """

    file: SegmentFile
    scan: SegmentScan
    newest: bool
    gone: list[Location]
    damaged: bool = False
    frames: int = 0
    other_bytes: int = 0


class JournalReader:
    """Reads the content of a journal.

    Args:
        directory: the directory of the journal.
        segment_bytes: the assumed size of a missing segment.
        running: whether a process may be writing to the journal. If so, the newest segment is read
            up to the first incomplete frame, and then synced. So every yielded frame is durable,
            even if the process has not synced it. A file may disappear before it is opened
            (`OSError`). `changed` tells whether the caller must start over.

    Attributes:
        start: the place of the checkpoint that was loaded.
        moved: locations of moved batches; valid after `open_files`.
        files: the files up to the newest segment in use, by first segment; valid after
            `open_files`.
        ends: the content of the last frame of each file; None: the file was never rewritten.
        active: after iteration, the segment in which a writer continues.
        end: after iteration, the offset in `active` at which a writer continues.
    """

    def __init__(self, directory: Path, *, segment_bytes: int, running: bool = False) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._running = running
        self.start = Place(0, 0)
        self.moved = MovedFrames()
        self.files: dict[int, SegmentFile] = {}
        self.ends: dict[int, RewrittenEnd | None] = {}
        self.active = 0
        self.end = 0
        self._newest = 0
        self._noted = NewestSegment(0, 0)
        self._seen: list[tuple[SegmentFile, int]] = []
        self._unread: frozenset[Place] = frozenset()

    def load_checkpoint(self) -> JournalCheckpoint | None:
        """Read and return the newest intact checkpoint; `frames` then begins after it. None: there
        is no intact checkpoint, and `frames` yields all frames.

        Raises:
            DataDirectoryError: a newer release wrote the checkpoint.
        """
        there = frozenset(checkpoint_places(self.directory))
        loaded = read_newest(self.directory)
        if loaded is None:
            self._unread = there
            return None
        self.start = loaded.place
        return loaded.checkpoint

    def missing_segments(self) -> frozenset[int]:
        """Return the segments before the loaded checkpoint whose files are missing."""
        there = {n for f in segment_files(self.directory) for n in range(f.first, f.last + 1)}
        return frozenset(range(1, self.start.segment)) - there

    def open_files(self) -> None:
        """Find the files and the names of moved batches; call it before `frames`."""
        self._noted = newest_noted(self.directory) or NewestSegment(0, 0)
        self._newest = max(newest_used(self.directory), self._noted.number, self.start.segment)
        # A later segment was only prepared, and has no frames yet.
        found = [file for file in segment_files(self.directory) if file.first <= self._newest]
        self._seen = [(file, file.path.stat().st_ino) for file in found]
        self.files = {file.first: file for file in found}
        self.ends = {file.first: rewritten_end(file) for file in found}
        for file in found:
            if (end := self.ends[file.first]) is not None:
                segments = range(file.first, file.last + 1)
                self.moved.moved(segments, file.first, places_in(file, end.names_at))

    def changed(self) -> bool:
        """Tell whether files were replaced since `open_files`, or the loaded checkpoint was
        removed.

        If there was no intact checkpoint to load, a new checkpoint counts as a change.
        """
        places = checkpoint_places(self.directory)
        if self.start not in places if self.start.segment else not self._unread.issuperset(places):
            return True
        now = {(file, file.path.stat().st_ino) for file in segment_files(self.directory)}
        return not now.issuperset(self._seen)

    def frames(self) -> Iterator[Frame | Damage | FileRead]:
        """Yield all intact frames in order, all damage, and a `FileRead` after each file.

        Raises:
            DataDirectoryError: a newer release wrote a frame.
        """
        newest, noted, number = self._newest, self._noted, max(1, self.start.segment)
        if not self.start.segment and any(end and end.batches_only for end in self.ends.values()):
            # A rewrite dropped frames because checkpoints covered them, but no checkpoint can be
            # read now.
            yield Damage(1, 0, self._segment_bytes, None, b"")
        self.active, self.end = newest + 1, 0
        while number <= newest:
            if (file := self.files.get(number)) is None:
                yield Damage(number, 0, self._segment_bytes, None, b"")
                number += 1
                continue
            number = file.last + 1
            read = yield from self._file(file)
            if read.scan.sealed:
                yield read
                continue
            alone = file.first == file.last == newest
            if alone and (newest != noted.number or is_whole(self.directory, noted)):
                self.active, self.end = newest, read.scan.end
            elif not read.scan.damaged_end:
                # The end of the file is missing. The file stays as it is, so each start finds this
                # damage again.
                size = noted.size_bytes if file.first == noted.number else read.scan.end
                yield Damage(file.first, read.scan.end, size, None, b"")
                read = read._replace(damaged=True)
            yield read

    def _file(self, file: SegmentFile) -> Generator[Frame | Damage, None, FileRead]:
        """Yield the frames and damage of a file; return its `FileRead`."""
        newest = file.last == self._newest
        start = self.start.offset if file.first == self.start.segment else 0
        synced = max(start, self._noted.synced if file.first == self._noted.number else 0)
        growing = newest and self._running
        if growing:
            synced = max(synced, synced_end(file.path, file.first, start))
        scan = SegmentScan(
            file.path, file.first, newest=newest, synced=synced, start=start, growing=growing
        )
        read = FileRead(file, scan, newest, [])
        damaged, frames, other_bytes = False, 0, 0
        for found in scan if not growing else _made_durable(scan, file.path):
            if isinstance(found, Damage):
                damaged = True
                yield self._named(found)
                continue
            header, payload, location = found
            if header.kind == FrameKind.GONE:
                read.gone.append(location)
            if header.kind == FrameKind.MOVED:
                continue
            frames += 1
            if header.kind not in BATCH_KINDS:
                other_bytes += frame_bytes(header.length)
                if header.kind != FrameKind.CHECKPOINT:
                    yield header.stream, _kind_of(header.kind), payload, location
            elif (name := self.moved.name(*location)) is not None:
                yield header.stream, _kind_of(header.kind), payload, name
            else:
                damaged = True
                at = location.offset - FRAME_HEADER_BYTES
                lost = Damage(file.first, at, at + frame_bytes(header.length), header, payload)
                yield self._named(lost)
        return read._replace(damaged=damaged, frames=frames, other_bytes=other_bytes)

    def _named(self, damage: Damage) -> Damage:
        """Return the damage with the name by which a role knows the damaged batch."""
        header, place = damage.header, damage.location
        if header is None or header.kind not in BATCH_KINDS:
            return damage
        name = self.moved.name(*place)
        return damage._replace(name=name or place._replace(segment=_NO_SEGMENT))


def _made_durable(scan: SegmentScan, path: Path) -> list[Scanned | Damage]:
    """Return all frames and damage of a scan, after syncing the file.

    Without the sync, a crash of the machine might lose frames that were already returned. A start
    syncs the frames that it finds for the same reason (docs/decisions/0022). On a file system that
    is mounted read-only, the failed sync is ignored, because no frame can be lost or written.

    Raises:
        OSError: an error of the system.
    """
    found = list(scan)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    finally:
        os.close(fd)
    return found


def _kind_of(kind: int) -> FrameKind:
    try:
        return FrameKind(kind)
    except ValueError:
        raise DataDirectoryError(
            f"The journal holds a frame of kind {kind}, which this release does not know; "
            "start the release that wrote it."
        ) from None
