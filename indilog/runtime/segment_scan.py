"""Reading segments back: intact frames, single bits put right, and what is damaged (decision 0009).

An unreadable place is *damage* if it was on disk once: in all segments but the newest one that is
used, and there if a later frame says that it had been synced. Reading goes on behind it, at the
next header of this segment. In the newest segment any other unreadable place is a *torn tail*,
where the log ends.

One flipped bit in a header, or in a small payload, is put right by trying: two words with a good
CRC32C differ in at least four bits at these lengths, so the wrong bit is the only one that fits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeAlias

import structlog

from indilog.errors import DataDirectoryError
from indilog.roles import Location
from indilog.runtime.segment import (
    BATCH_KINDS,
    END_OF_SEGMENT,
    FRAME_HEADER_BYTES,
    MAGIC,
    FrameHeader,
    frame_bytes,
    header_unpacked,
    payload_intact,
    write_all,
)
from indilog.runtime.segment_files import segment_files

_ALIGNMENT: Final = 8
_CHUNK_BYTES: Final = 1024 * 1024
_SECTOR_BYTES: Final = 4096
_MENDED_BYTES_MAX: Final = 8192
"""Payloads up to this size are mended: 65,536 tries at most."""

log = structlog.get_logger(__name__)


class Damage(NamedTuple):
    """Bytes [start, end) of a segment, which were on disk once and are no intact frame now."""

    segment: int
    start: int
    end: int
    header: FrameHeader | None
    """That of the frame, if it is intact: then only its payload is damaged."""
    payload: bytes
    """What is there instead of it."""

    @property
    def location(self) -> Location:
        """Where the payload is, or what is unknown."""
        length = self.header.length if self.header is not None else self.end - self.start
        return Location(self.segment, self.start + FRAME_HEADER_BYTES, length)


Scanned: TypeAlias = tuple[FrameHeader, bytes, Location]


class SegmentScan:
    """Reads one segment from its start.

    Attributes:
        end: after iteration, the offset behind the last intact frame.
        sealed: after iteration, whether the segment says itself that it ends there.
        damaged_end: after iteration, whether the last thing found was damage.
        mended: what one flipped bit had spoilt, with its offset, to be written back.
    """

    def __init__(self, path: Path, number: int, *, newest: bool) -> None:
        self._path = path
        self._number = number
        self._newest = newest
        self.end = 0
        self.sealed = False
        self.damaged_end = False
        self.mended: list[tuple[int, bytes]] = []

    def __iter__(self) -> Iterator[Scanned | Damage]:
        size = self._path.stat().st_size
        with self._path.open("rb", buffering=_CHUNK_BYTES) as file:
            while True:
                header = self._header(file)
                if header is None or self.end + frame_bytes(header.length) > size:
                    if (end := self._behind_damage(file.fileno(), size)) is None:
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
        header = header_unpacked(buffer)
        if header is None and (bytes_mended := header_mended(buffer)) is not None:
            header = header_unpacked(bytes_mended)
            if header is not None and header.segment == self._number:
                self.mended.append((self.end, bytes_mended))
        return header if header is not None and header.segment == self._number else None

    def _frame(self, file: BinaryIO, header: FrameHeader) -> Scanned | Damage | None:
        """Return the frame whose header was read, or its damage; None: the torn tail."""
        payload = _read(file, header.length)
        _read(file, -header.length % _ALIGNMENT)
        place = Location(self._number, self.end + FRAME_HEADER_BYTES, header.length)
        if payload_intact(header, payload):
            return header, payload, place
        if (payload_right := payload_mended(header, payload)) is not None:
            self.mended.append((place.offset, payload_right))
            return header, payload_right, place
        following = self.end + frame_bytes(header.length)
        if self._newest and synced_behind(file.fileno(), self._number, following) <= self.end:
            return None
        return Damage(self._number, self.end, following, header, payload)

    def _behind_damage(self, fd: int, size: int) -> int | None:
        """Return where to read on; None: here the segment ends."""
        headers = headers_in(fd, self._number, self.end + _ALIGNMENT)
        following = next(headers, None)
        if self._newest:
            if following is None:
                return None
            synced = max(following[1].synced, *(h.synced for _, h in headers), 0)
            return following[0] if synced > self.end else None
        if following is not None:
            return following[0]
        return size if self.end < size else None


def header_mended(buffer: bytes) -> bytes | None:
    """Return the header from which `buffer` differs in one bit; None: there is none."""
    if len(buffer) < FRAME_HEADER_BYTES or not any(buffer):
        return None
    tried = bytearray(buffer[:FRAME_HEADER_BYTES])
    for bit in range(8 * FRAME_HEADER_BYTES):
        tried[bit >> 3] ^= 1 << (bit & 7)
        try:
            if header_unpacked(bytes(tried)) is not None:
                return bytes(tried)
        except DataDirectoryError:
            pass  # of another version: that is not for us to guess
        tried[bit >> 3] ^= 1 << (bit & 7)
    return None


def header_at(fd: int, offset: int) -> FrameHeader | None:
    """Read the header at `offset`, with one bit put right if need be; None: there is none."""
    buffer = os.pread(fd, FRAME_HEADER_BYTES, offset)
    if (header := header_unpacked(buffer)) is not None:
        return header
    mended = header_mended(buffer)
    return header_unpacked(mended) if mended is not None else None


def write_back(fd: int, path: Path, mended: Sequence[tuple[int, bytes]]) -> int:
    """Put right on disk what one flipped bit each had spoilt; return how many there were."""
    for offset, right in mended:
        write_all(fd, [right], offset)
        os.fsync(fd)
        log.warning("a flipped bit of the journal put right", file=str(path), offset=offset)
    return len(mended)


def payload_mended(header: FrameHeader, payload: bytes) -> bytes | None:
    """Return the small payload from which `payload` differs in one bit; None: there is none.

    Record batches are left alone: they are too long to be sure, and other replicas have them.
    """
    too_long = header.length > _MENDED_BYTES_MAX or len(payload) != header.length
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
    """Find the intact headers of segment `number` from `start` on, wherever a frame may begin."""
    start += -start % _ALIGNMENT
    for offset in range(start, os.fstat(fd).st_size, _CHUNK_BYTES):
        # A header may begin in one chunk and end in the next.
        chunk = _pread(fd, _CHUNK_BYTES + FRAME_HEADER_BYTES, offset)
        at = chunk.find(MAGIC)
        while 0 <= at < _CHUNK_BYTES:
            if at % _ALIGNMENT == 0:
                header = header_unpacked(chunk[at : at + FRAME_HEADER_BYTES])
                if header is not None and header.segment == number:
                    yield offset + at, header
            at = chunk.find(MAGIC, at + 1)


def synced_behind(fd: int, number: int, start: int) -> int:
    """Return how far the segment was synced, as the frames from `start` on say; 0: none is."""
    return max((header.synced for _, header in headers_in(fd, number, start)), default=0)


def holds_frames(path: Path, number: int) -> bool:
    """Tell whether a segment has any frame of its own, behind damage too."""
    with path.open("rb") as file:
        return any(headers_in(file.fileno(), number, 0)) or (
            header_mended(_read(file, FRAME_HEADER_BYTES)) is not None
        )


def newest_used(directory: Path) -> int:
    """Return the newest segment that has frames; 0: none has."""
    files = reversed(segment_files(directory))
    return next((file.last for file in files if holds_frames(file.path, file.first)), 0)


def is_clean(fd: int, number: int, start: int) -> bool:
    """Tell whether behind the last intact frame lie only zeros, or frames of a former use."""
    first = _pread(fd, FRAME_HEADER_BYTES, start)
    header = header_unpacked(first)
    former = header is not None and header.segment != number
    return (not any(first) or former) and not any(headers_in(fd, number, start))


def _read(file: BinaryIO, length: int) -> bytes:
    """Read on; sectors that the disk cannot read are zeros, which are never an intact frame."""
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
