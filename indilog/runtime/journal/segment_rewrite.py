"""Copies the needed frames of old segment files to one new file, in the same order
(docs/decisions/0016).

When the copy is durable, it is renamed to the name that covers the old files. The new name makes it
valid. So after a crash either the old files or the new file is valid. In place of a discarded
batch, the copy has a note that the batch's records are gone. Recovery treats the note like the
discarded batch. Consecutive discarded batches share one note, in place of their first batch.
`Rewriting` decides when to copy which files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import structlog

from indilog.base.ids import ShardId
from indilog.kernel.records import batch_header
from indilog.kernel.tombstones import GoneRecords, decode_gone, encode_gone, gone_of
from indilog.roles.role import ELSEWHERE, FrameKind, Location
from indilog.runtime.journal.moved_frames import MovedFrames, Places
from indilog.runtime.journal.segment import (
    BATCH_KINDS,
    FRAME_HEADER_BYTES,
    SEGMENT_BYTES_MAX,
    FrameHeader,
    RewrittenEnd,
    frame_bytes,
    pack_header,
    pack_rewritten_end,
    payload_crc_of,
    rewritten_end_in,
    synced_directory,
    write_all,
)
from indilog.runtime.journal.segment_files import SegmentFile, joined_path, replaced_files
from indilog.runtime.journal.segment_scan import Damage, SegmentScan, header_at

_TEMPORARY: Final = "rewritten.new"
_SLICE_BYTES: Final = 512 * 1024
_SLICE_FRAMES: Final = 128
"""Largest number of frames that one step reads; `_SLICE_BYTES` limits the bytes of a step."""
_WRITE_BYTES: Final = 256 * 1024
"""Smallest number of bytes that are written and synced together."""

log = structlog.get_logger(__name__)

Needed: TypeAlias = Callable[[int, FrameKind, bytes, Location], bytes | None]
"""Takes the stream, kind, payload and name of a batch. Returns the payload that must remain, which
may be smaller. None: only a note of the batch's records remains. `ELSEWHERE`: nothing remains (see
`Shrinks`).
"""


class DamagedSegmentError(Exception):
    """A file is damaged, so it is not rewritten."""

    def __init__(self, file: SegmentFile, what: str) -> None:
        super().__init__(f"{file.path} {what}")
        self.file = file


class Slice(NamedTuple):
    """The next part of the copy, to be written at `offset`. It has no `buffers` while too few bytes
    have accumulated. `read_bytes` and `frames` count the input read since the previous slice.
    """

    offset: int
    buffers: Sequence[bytes]
    read_bytes: int
    frames: int


class _Run(NamedTuple):
    """Consecutive gone records, and the offset of their note in the copy."""

    offset: int
    gone: GoneRecords


def remove_leftovers(directory: Path) -> None:
    """Remove the files that a rewrite left when it was interrupted.

    Raises:
        OSError: an error of the system.
    """
    (directory / _TEMPORARY).unlink(missing_ok=True)
    if replaced := replaced_files(directory):
        synced_directory(directory)
        for path in replaced:
            path.unlink()


def rewritten_end(file: SegmentFile) -> RewrittenEnd | None:
    """Return the content of the frame that ends a file; None: the file was never rewritten."""
    size = file.path.stat().st_size
    if size < FRAME_HEADER_BYTES:
        return None
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = header_at(fd, size - FRAME_HEADER_BYTES)
    finally:
        os.close(fd)
    if header is None or header.segment != file.first:
        return None
    return rewritten_end_in(header)


def places_in(file: SegmentFile, names_at: int) -> Places:
    """Return the places of the batches of a rewritten file. Places in damaged `MOVED` frames are
    missing.
    """
    places = Places()
    for found in SegmentScan(file.path, file.first, newest=False, start=names_at):
        if isinstance(found, Damage) or found[0].kind != FrameKind.MOVED:
            log.error("names of batches in a segment are damaged", file=str(file.path))
            continue
        places.decode(found[1])
    return places


class SegmentRewrite:
    """One copy: write its `slices` in order, then call `finish` and `give_name`.

    Args:
        batches_only: whether only batches are needed, because the kept checkpoints cover all other
            frames.

    Attributes:
        places: where the remaining batches are.
        bytes: the length of the copy so far.
        other_bytes: bytes of its frames without batches, except `MOVED` frames.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[SegmentFile],
        moved: MovedFrames,
        needed: Needed,
        *,
        batches_only: bool = False,
    ) -> None:
        self._batches_only = batches_only
        self._directory = directory
        self._files = files
        self._moved = moved
        self._needed = needed
        self._number = files[0].first
        self._path = directory / _TEMPORARY
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(self._path, flags, 0o644)
        self._open = True
        self._buffers: list[bytes] = []
        self._runs: dict[tuple[int, ShardId], _Run] = {}
        """The newest note of each stream and shard. It may still grow."""
        self._grown: dict[int, tuple[int, GoneRecords]] = {}
        """Notes that grew after they were added to the copy, by offset, each with its stream."""
        self.places = Places()
        self.bytes = 0
        self.other_bytes = 0

    # --- content of the copy

    def slices(self) -> Generator[Slice]:
        """Yield the copy in small parts.

        Raises:
            DamagedSegmentError: a file is damaged; the caller must abandon the copy.
            OSError: an error of the system.
        """
        start = read = frames = 0
        for frame in self._frames():
            header, payload, place = frame
            self._take(header, payload, place)
            read += len(payload) + FRAME_HEADER_BYTES
            frames += 1
            if read >= _SLICE_BYTES or frames >= _SLICE_FRAMES:
                enough = self.bytes - start >= _WRITE_BYTES
                yield Slice(start, self._take_buffers() if enough else (), read, frames)
                start, read, frames = self.bytes if enough else start, 0, 0
        names_at = self.bytes
        for payload in self.places.encode():
            self._put(FrameKind.MOVED, 0, payload)
        self._end(names_at)
        yield Slice(start, self._take_buffers(), read, frames)

    def _frames(self) -> Iterator[tuple[FrameHeader, bytes, Location]]:
        for file in self._files:
            scan = SegmentScan(file.path, file.first, newest=False)
            for found in scan:
                if isinstance(found, Damage) or self.bytes > SEGMENT_BYTES_MAX // 2:
                    raise DamagedSegmentError(file, "is damaged")
                yield found
            if not scan.sealed:
                raise DamagedSegmentError(file, "has no end")

    def _take_buffers(self) -> list[bytes]:
        buffers, self._buffers = self._buffers, []
        return buffers

    def _take(self, header: FrameHeader, payload: bytes, place: Location) -> None:
        match header.kind:
            case FrameKind.RECORDS | FrameKind.REPAIRED as kind:
                self._take_batch(header.stream, FrameKind(kind), payload, place)
            case FrameKind.GONE:
                self._note(header.stream, gone_of(batch_header(payload), repaired=False))
            case FrameKind.GONE_RECORDS:
                self._note(header.stream, decode_gone(payload))
            case FrameKind.MOVED:
                pass  # the copy gets its own `MOVED` frames
            case _ if self._batches_only:
                pass
            case kind:
                self._put(kind, header.stream, payload)

    def _take_batch(self, stream: int, kind: FrameKind, payload: bytes, place: Location) -> None:
        if (name := self._moved.name(*place)) is None:
            raise DamagedSegmentError(self._file_of(place), "has no name for one of its batches")
        kept = self._needed(stream, kind, payload, name)
        header = batch_header(payload)
        if kept == ELSEWHERE:
            if self._batches_only:
                return
            # If recovery has no readable checkpoint, it must find the batch first, and then the
            # frame that places the batch's records elsewhere.
            kept = payload
            self.other_bytes += frame_bytes(len(payload))
        if kept is None:
            self._note(stream, gone_of(header, repaired=kind is FrameKind.REPAIRED))
            return
        self._runs.pop((stream, header.shard), None)
        self.places.add(name, self.bytes + FRAME_HEADER_BYTES)
        self._put(kind, stream, kept)

    def _note(self, stream: int, gone: GoneRecords) -> None:
        """Add a note of gone records. If these records follow the records of the previous note,
        extend the previous note instead.
        """
        if self._batches_only:
            return
        key = (stream, gone.shard)
        run = self._runs.get(key)
        if run is not None and (joined := run.gone.joined(gone)) is not None:
            self._grown[run.offset] = (stream, joined)
            self._runs[key] = _Run(run.offset, joined)
            return
        self._runs[key] = _Run(self.bytes, gone)
        self._put(FrameKind.GONE_RECORDS, stream, encode_gone(gone))

    def _file_of(self, place: Location) -> SegmentFile:
        return next(file for file in self._files if file.first == place.segment)

    def _put(self, kind: int, stream: int, payload: bytes) -> None:
        frame = self._frame(kind, stream, payload)
        self._buffers += frame
        size = sum(map(len, frame))
        self.bytes += size
        if kind not in BATCH_KINDS and kind != FrameKind.MOVED:
            self.other_bytes += size

    def _frame(self, kind: int, stream: int, payload: bytes) -> list[bytes]:
        crc = payload_crc_of(FrameKind(kind), payload)
        header = pack_header(kind, len(payload), stream, self._number, 0, crc)
        return [header, payload, bytes(-len(payload) % 8)]

    def _end(self, names_at: int) -> None:
        """End the copy with its `RewrittenEnd`."""
        end = RewrittenEnd(names_at, batches_only=self._batches_only)
        header = pack_rewritten_end(self._number, end)
        self._buffers.append(header)
        self.bytes += len(header)

    # --- on disk

    def write(self, part: Slice) -> None:
        """Write a part, durably; may run in another thread.

        Raises:
            OSError: an error of the system.
        """
        write_all(self._fd, part.buffers, part.offset)
        self._sync()

    def finish(self) -> None:
        """Make the whole copy durable; may run in another thread.

        Raises:
            OSError: an error of the system.
        """
        for offset, (stream, gone) in self._grown.items():
            frame = self._frame(FrameKind.GONE_RECORDS, stream, encode_gone(gone))
            write_all(self._fd, frame, offset)
        self._sync()

    def _sync(self) -> None:
        os.fdatasync(self._fd)

    def give_name(self) -> SegmentFile:
        """Give the copy its final name, which makes it valid. Return the file.

        Raises:
            OSError: an error of the system; the old files stay valid.
        """
        first, last = self._files[0].first, self._files[-1].last
        path = joined_path(self._directory, first, last)
        self._path.rename(path)
        self._close()
        return SegmentFile(first, last, path)

    def clean(self) -> None:
        """Make the new name durable, then remove the replaced files; may run in a thread.

        Raises:
            OSError: the journal has failed, because it is unknown which files are valid after a
                crash.
        """
        synced_directory(self._directory)
        path = joined_path(self._directory, self._files[0].first, self._files[-1].last)
        for file in self._files:
            if file.path != path:
                file.path.unlink()

    def give_up(self) -> None:
        """Remove the copy; the old files stay valid."""
        if self._open:
            self._close()
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._fd)
