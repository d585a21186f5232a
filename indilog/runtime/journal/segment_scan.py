"""Reads segments: finds intact frames, corrects single bits, and finds damage
(docs/decisions/0009).

Unreadable bytes are *damage* if they were once on disk; reading continues at the next header after
them. In every segment except the newest one in use, all bytes were on disk. In the newest segment,
a later frame or the file `NEWEST` (`segment_use`) may show that the bytes were synced. If neither
does, the bytes are a *torn tail*, where the journal ends.

A single flipped bit in a header, or in a small payload, is corrected by trying all bits. At these
lengths, two byte strings with valid CRC32Cs differ in at least four bits, so only one correction
fits. `JournalReader` and `SegmentRewrite` read segments with `SegmentScan`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeAlias

import structlog

from indilog.base.errors import DataDirectoryError
from indilog.roles.role import Location
from indilog.runtime.journal.segment import (
    BATCH_KINDS,
    END_OF_SEGMENT,
    FRAME_HEADER_BYTES,
    MAGIC,
    FrameHeader,
    frame_bytes,
    payload_intact,
    unpack_header,
    write_all,
)
from indilog.runtime.journal.segment_files import segment_files

_ALIGNMENT: Final = 8
_CHUNK_BYTES: Final = 1024 * 1024
_ZEROS: Final = bytes(_CHUNK_BYTES + FRAME_HEADER_BYTES)
"""Content of a chunk in which nothing was written yet."""
_SECTOR_BYTES: Final = 4096
_CORRECTED_BYTES_MAX: Final = 8192
"""Largest payload in bytes that is corrected. A correction takes at most 65,536 tries."""

log = structlog.get_logger(__name__)


class Damage(NamedTuple):
    """Bytes [start, end) of a segment that were once on disk, and are not an intact frame now."""

    segment: int
    start: int
    end: int
    header: FrameHeader | None
    """The header of the frame; None: the header is damaged too."""
    payload: bytes
    """The bytes that were found in place of the payload."""
    name: Location | None = None
    """The location by which roles know the batch, if it was moved."""

    @property
    def location(self) -> Location:
        """The location of the payload or of the unknown bytes; for a moved batch, its name."""
        if self.name is not None:
            return self.name
        length = self.header.length if self.header is not None else self.end - self.start
        return Location(self.segment, self.start + FRAME_HEADER_BYTES, length)


Scanned: TypeAlias = tuple[FrameHeader, bytes, Location]


class SegmentScan:
    """Reads one segment from offset `start`, where a frame begins or the segment ends.

    Args:
        newest: whether the segment may end with a torn tail.
        synced: number of bytes that were certainly synced, known from outside the segment.
        growing: whether a process may be writing to the segment. If so, the caller takes `synced`
            from all frames of the segment (`synced_end`). Unreadable bytes after `synced` may be
            incomplete frames, so they are not damage.

    Attributes:
        end: after iteration, the offset after the last intact frame.
        synced: after iteration, number of bytes that were certainly synced, according to the
            argument and to the frames.
        sealed: after iteration, whether a frame ends the segment.
        damaged_end: after iteration, whether the last item found was damage.
        corrected: corrected bytes, with their offsets, to be written back.
    """

    def __init__(
        self,
        path: Path,
        number: int,
        *,
        newest: bool,
        synced: int = 0,
        start: int = 0,
        growing: bool = False,
    ) -> None:
        self._path = path
        self._number = number
        self._newest = newest
        self._growing = growing
        self.end = start
        self.synced = synced
        self.sealed = False
        self.damaged_end = False
        self.corrected: list[tuple[int, bytes]] = []

    @property
    def written(self) -> int:
        """The offset after the last intact frame. A frame that ends the segment counts."""
        return self.end + FRAME_HEADER_BYTES if self.sealed else self.end

    def __iter__(self) -> Iterator[Scanned | Damage]:
        size = self._path.stat().st_size
        with self._path.open("rb", buffering=_CHUNK_BYTES) as file:
            file.seek(self.end)
            while True:
                header = self._header(file)
                if header is None or self.end + frame_bytes(header.length) > size:
                    if (end := self._after_damage(file.fileno(), size)) is None:
                        return
                    self.damaged_end = True
                    yield Damage(self._number, self.end, end, None, b"")
                    file.seek(end)
                elif header.kind == END_OF_SEGMENT:
                    self.sealed = True
                    return
                elif (frame := self._frame(file, header)) is not None:
                    self.damaged_end = isinstance(frame, Damage)
                    yield frame
                    end = self.end + frame_bytes(header.length)
                else:
                    return
                self.end = end

    def _header(self, file: BinaryIO) -> FrameHeader | None:
        buffer = _read(file, FRAME_HEADER_BYTES)
        header = unpack_header(buffer)
        if header is None and (bytes_corrected := correct_header(buffer)) is not None:
            header = unpack_header(bytes_corrected)
            if header is not None and header.segment == self._number:
                self.corrected.append((self.end, bytes_corrected))
        if header is None or header.segment != self._number:
            return None
        self.synced = max(self.synced, header.synced)
        return header

    def _frame(self, file: BinaryIO, header: FrameHeader) -> Scanned | Damage | None:
        """Return the frame with this header, or its damage; None: the torn tail begins."""
        fd = file.fileno()
        payload = _read(file, header.length)
        _read(file, -header.length % _ALIGNMENT)
        place = Location(self._number, self.end + FRAME_HEADER_BYTES, header.length)
        if payload_intact(header, payload):
            return header, payload, place
        if (payload_right := correct_payload(header, payload)) is not None:
            self.corrected.append((place.offset, payload_right))
            return header, payload_right, place
        following = self.end + frame_bytes(header.length)
        if self._growing and self.synced <= self.end:
            return None
        if self._newest and self._known_synced(headers_in(fd, self._number, following)) <= self.end:
            return None
        return Damage(self._number, self.end, following, header, payload)

    def _after_damage(self, fd: int, size: int) -> int | None:
        """Return where to continue reading; None: the segment ends here."""
        if self._growing and self.synced <= self.end:
            return None
        headers = headers_in(fd, self._number, self.end + _ALIGNMENT)
        following = next(headers, None)
        after = size if following is None else following[0]
        if not self._newest:
            return after if self.end < after else None
        synced = self._known_synced(chain([following] if following else [], headers))
        if following is None:
            after = min(size, synced)
        return after if min(after, synced) > self.end else None

    def _known_synced(self, after: Iterable[tuple[int, FrameHeader]]) -> int:
        """Return how far the segment was synced, according to this scan and to the headers after
        the damage.
        """
        self.synced = max(self.synced, *(header.synced for _, header in after), 0)
        return self.synced


def correct_header(buffer: bytes) -> bytes | None:
    """Return the valid header that differs from `buffer` in one bit; None: there is none."""
    if len(buffer) < FRAME_HEADER_BYTES or not any(buffer):
        return None
    tried = bytearray(buffer[:FRAME_HEADER_BYTES])
    for bit in range(8 * FRAME_HEADER_BYTES):
        tried[bit >> 3] ^= 1 << (bit & 7)
        try:
            if unpack_header(bytes(tried)) is not None:
                return bytes(tried)
        except DataDirectoryError:
            pass  # a header of another version: not corrected
        tried[bit >> 3] ^= 1 << (bit & 7)
    return None


def header_at(fd: int, offset: int) -> FrameHeader | None:
    """Read the header at `offset`, with at most one bit corrected; None: there is none."""
    buffer = os.pread(fd, FRAME_HEADER_BYTES, offset)
    if (header := unpack_header(buffer)) is not None:
        return header
    corrected = correct_header(buffer)
    return unpack_header(corrected) if corrected is not None else None


def write_back(fd: int, path: Path, corrected: Sequence[tuple[int, bytes]]) -> int:
    """Write corrected bytes back to the file; return the number of corrected places."""
    for offset, right in corrected:
        write_all(fd, [right], offset)
        os.fsync(fd)
        log.warning("a flipped bit of the journal was corrected", file=str(path), offset=offset)
    return len(corrected)


def write_again(fd: int, start: int, end: int) -> None:
    """Make bytes [start, end) of a segment durable by writing them again.

    A sync alone is not enough. After a failed write-back, the page cache still holds the bytes but
    marks them clean, so no later sync writes them or fails.

    Raises:
        OSError: an error of the system.
    """
    for offset in range(start, end, _CHUNK_BYTES):
        write_all(fd, [os.pread(fd, min(_CHUNK_BYTES, end - offset), offset)], offset)
    os.fdatasync(fd)


def correct_payload(header: FrameHeader, payload: bytes) -> bytes | None:
    """Return the intact payload that differs from `payload` in one bit; None: there is none, or
    `payload` is too long.

    Record batches are not corrected: they are too long for a unique correction, and other replicas
    have them.
    """
    too_long = header.length > _CORRECTED_BYTES_MAX or len(payload) != header.length
    if header.kind in BATCH_KINDS or too_long:
        return None
    tried = bytearray(payload)
    for bit in range(8 * len(tried)):
        tried[bit >> 3] ^= 1 << (bit & 7)
        if payload_intact(header, tried):
            return bytes(tried)
        tried[bit >> 3] ^= 1 << (bit & 7)
    return None


def headers_in(fd: int, number: int, start: int) -> Iterator[tuple[int, FrameHeader]]:
    """Yield the intact headers of segment `number` from `start` on, at every offset where a frame
    may begin.
    """
    start += -start % _ALIGNMENT
    for offset in range(start, os.fstat(fd).st_size, _CHUNK_BYTES):
        # A header may begin in one chunk and end in the next.
        chunk = _pread(fd, _CHUNK_BYTES + FRAME_HEADER_BYTES, offset)
        if _ZEROS.startswith(chunk):  # a comparison takes a tenth of the time of the search
            continue
        at = chunk.find(MAGIC)
        while 0 <= at < _CHUNK_BYTES:
            if at % _ALIGNMENT == 0:
                header = unpack_header(chunk[at : at + FRAME_HEADER_BYTES])
                if header is not None and header.segment == number:
                    yield offset + at, header
            at = chunk.find(MAGIC, at + 1)


def synced_end(path: Path, number: int, start: int) -> int:
    """Return how many bytes of a segment were synced, according to its frames from `start` on; 0 if
    there are no such frames.
    """
    with path.open("rb") as file:
        headers = headers_in(file.fileno(), number, start)
        return max((header.synced for _, header in headers), default=0)


def holds_frames(path: Path, number: int) -> bool:
    """Tell whether a segment has any frame that was written for it, before or after damage."""
    with path.open("rb") as file:
        return any(headers_in(file.fileno(), number, 0)) or (
            correct_header(_read(file, FRAME_HEADER_BYTES)) is not None
        )


def newest_used(directory: Path) -> int:
    """Return the newest segment with frames; 0: no segment has frames."""
    files = reversed(segment_files(directory))
    return next((file.last for file in files if holds_frames(file.path, file.first)), 0)


def is_clean(fd: int, number: int, start: int) -> bool:
    """Tell whether only zeros, or frames of the file's former use, follow the last intact frame."""
    first = _pread(fd, FRAME_HEADER_BYTES, start)
    header = unpack_header(first)
    former = header is not None and header.segment != number
    return (not any(first) or former) and not any(headers_in(fd, number, start))


def _read(file: BinaryIO, length: int) -> bytes:
    """Read the next bytes. Unreadable sectors read as zeros, which are never an intact frame."""
    at = file.tell()
    try:
        return file.read(length)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        buffer = _pread(file.fileno(), length, at)
        file.seek(at + len(buffer))
        return buffer


def _pread(fd: int, length: int, offset: int) -> bytes:
    try:
        return os.pread(fd, length, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        log.warning("sectors of the journal cannot be read", offset=offset, length=length)
    parts: list[bytes] = []
    end = min(offset + length, os.fstat(fd).st_size)
    while offset < end:
        size = min(_SECTOR_BYTES - offset % _SECTOR_BYTES, end - offset)
        try:
            parts.append(os.pread(fd, size, offset))
        except OSError:
            parts.append(bytes(size))
        offset += size
    return b"".join(parts)
