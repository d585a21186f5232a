"""Segment files: the frames of a journal on disk (ARCHITECTURE 7, decision 0001).

A segment `segment-00000001.log` is a file of fixed size. It is created with zeros, and filled with
frames from its start. A frame never spans two segments. The layout of a frame, little-endian:

    header   magic u16 "IL", version u8, kind u8 (`FrameKind`; 0: end of segment), length u32,
             stream u64, segment u32, synced u32, payload CRC32C u32, header CRC32C u32
    payload  `length` bytes, then zeros up to the next multiple of 8

`segment` is the number of the segment for which the frame was written. So old frames in a reused
file are recognized, although their CRC is valid. `synced` is the number of bytes of this segment
that were known to be on disk when the frame was written. An unreadable frame *below* the `synced`
of a later frame is damage, not a torn tail (`segment_scan`). The payload CRC of a record batch is
the CRC of the batch's header, so that no CRC is computed twice.

A full segment ends with a frame of kind 0, which is synced before the next segment gets its first
frame. So only the newest segment in use can have a torn tail. All modules of this package, and the
programs that write files durably, use the functions here.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from indilog.base.errors import DataDirectoryError, MalformedFrameError
from indilog.kernel.records import HEADER_BYTES, RecordBatch, batch_header, header_crc_stated
from indilog.roles.role import FrameKind, Location

MAGIC: Final = b"IL"
VERSION: Final = 1
END_OF_SEGMENT: Final = 0
BATCH_KINDS: Final = frozenset({FrameKind.RECORDS, FrameKind.REPAIRED, FrameKind.GONE})
"""Frames whose payload is a record batch."""
SEGMENT_BYTES_MAX: Final = 2**32 - 1
"""Largest size of a segment, because `synced` and `length` have 32 bits."""
_HEADER: Final = Struct("<2sBBIQIII")
_CRC: Final = Struct("<I")
_KIND_AT: Final = 3
FRAME_HEADER_BYTES: Final = _HEADER.size + _CRC.size
_ALIGNMENT: Final = 8
_CHUNK_BYTES: Final = 1024 * 1024
_ZEROS: Final = bytes(_CHUNK_BYTES)
_PAGE_BYTES: Final = 4096
_PUNCH_KEEP_SIZE: Final = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE"""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_BUFFERS_MAX: Final = 1024
"""IOV_MAX: largest number of buffers in one system call."""


class FrameHeader(NamedTuple):
    """The header of a frame."""

    kind: int
    length: int
    stream: int
    segment: int
    synced: int
    payload_crc: int


def frame_bytes(length: int) -> int:
    """Return how many bytes a frame with a payload of `length` bytes takes."""
    return FRAME_HEADER_BYTES + (length + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


def pack_header(
    kind: int, length: int, stream: int, segment: int, synced: int, payload_crc: int
) -> bytes:
    """Return the bytes of a frame's header."""
    header = _HEADER.pack(MAGIC, VERSION, kind, length, stream, segment, synced, payload_crc)
    return header + _CRC.pack(crc32c(header))


class RewrittenEnd(NamedTuple):
    """The content of the frame that ends a rewritten file.

    Attributes:
        names_at: offset of the file's `MOVED` frames.
        batches_only: whether the rewrite omitted all frames except batches.
    """

    names_at: int
    batches_only: bool


_REWRITTEN: Final = 1 << 63
_BATCHES_ONLY: Final = 1 << 62


def pack_rewritten_end(number: int, end: RewrittenEnd) -> bytes:
    """Return the frame that ends a rewritten file whose first segment is `number`.

    The stream field holds the content, because an end frame belongs to no stream.
    """
    said = _REWRITTEN | (_BATCHES_ONLY if end.batches_only else 0) | end.names_at
    return pack_header(END_OF_SEGMENT, 0, said, number, 0, 0)


def rewritten_end_in(header: FrameHeader) -> RewrittenEnd | None:
    """Return the content of the frame that ends a file; None: the file was never rewritten."""
    if header.kind != END_OF_SEGMENT or not header.stream & _REWRITTEN:
        return None
    names_at = header.stream & (_BATCHES_ONLY - 1)
    return RewrittenEnd(names_at, bool(header.stream & _BATCHES_ONLY))


def unpack_header(buffer: bytes) -> FrameHeader | None:
    """Return the frame header that `buffer` starts with; None: there is no intact header.

    Raises:
        DataDirectoryError: the header is intact, but has a version that this release does not know.
    """
    if len(buffer) < FRAME_HEADER_BYTES or not buffer.startswith(MAGIC):
        return None
    header = bytes(buffer[: _HEADER.size])
    if gone := header[_KIND_AT] == FrameKind.GONE:
        header = header[:_KIND_AT] + bytes((FrameKind.RECORDS,)) + header[_KIND_AT + 1 :]
    if _CRC.unpack_from(buffer, _HEADER.size)[0] != crc32c(header):
        return None
    _, version, *fields = _HEADER.unpack(header)
    if version != VERSION:
        raise DataDirectoryError(
            f"A journal frame has version {version}, this release reads {VERSION}; "
            "start the release that wrote it."
        )
    return FrameHeader(*fields)._replace(kind=FrameKind.GONE) if gone else FrameHeader(*fields)


def payload_crc_of(kind: FrameKind, payload: bytes) -> int:
    """Return the checksum of a payload, as stored in frame headers."""
    return header_crc_stated(payload) if kind in BATCH_KINDS else crc32c(payload)


def payload_intact(header: FrameHeader, payload: bytes | bytearray) -> bool:
    """Tell whether `payload` is the intact payload of the frame with `header`."""
    if len(payload) != header.length:
        return False
    if header.kind not in BATCH_KINDS:
        return crc32c(payload) == header.payload_crc
    try:
        if header.kind != FrameKind.GONE:
            RecordBatch(bytes(payload))
        return is_batch_of(header, bytes(payload))
    except MalformedFrameError:
        return False


def is_batch_of(header: FrameHeader, payload: bytes) -> bool:
    """Tell whether `payload` begins with the header of the record batch in the frame with
    `header`.
    """
    try:
        batch_header(payload)
    except MalformedFrameError:
        return False
    return header_crc_stated(payload) == header.payload_crc


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of segment `number`."""
    return directory / f"segment-{number:08d}.log"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments in `directory`, ascending."""
    names = (path.stem.removeprefix("segment-") for path in directory.glob("segment-*.log"))
    return sorted(int(name) for name in names if name.isdigit())


def synced_directory(directory: Path) -> None:
    """Sync the names in `directory`."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prepare_segment(
    directory: Path, number: int, size_bytes: int, cancelled: Callable[[], bool]
) -> None:
    """Durably create segment `number`, filled with zeros. After a crash, either the whole segment
    exists, or no part of it.

    The zeros are actually written, because allocating a page later would cost more than a sync.
    Each chunk is synced separately, so that concurrent syncs of the journal stay short.

    Raises:
        OSError: there is no room (`ENOSPC`); no file remains.
    """
    temporary = directory / "segment.new"
    temporary.unlink(missing_ok=True)  # a killed process may have left the file
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < size_bytes:
        raise OSError(
            errno.ENOSPC, f"no room for another segment of {size_bytes:,} bytes", str(directory)
        )
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for offset in range(0, size_bytes, _CHUNK_BYTES):
            if cancelled():
                temporary.unlink()
                return
            write_all(fd, [_ZEROS[: min(_CHUNK_BYTES, size_bytes - offset)]], offset)
            os.fdatasync(fd)
        os.fsync(fd)
    except OSError:
        temporary.unlink()
        raise
    finally:
        os.close(fd)
    temporary.rename(segment_path(directory, number))
    synced_directory(directory)


def mark_gone(places: Sequence[tuple[int, Location]]) -> list[Location]:
    """Durably mark `RECORDS` frames as gone; return the marked frames.

    The mark changes one byte of each frame, so a crash leaves either the old byte or the new one.
    The header's CRC is not changed, because `unpack_header` computes it for the old byte. Frames of
    other kinds, such as repaired batches, are not marked: recovery expects only a `RECORDS` frame
    to be gone.

    Raises:
        OSError: an error of the system.
    """
    kind_was, kind_is = bytes((FrameKind.RECORDS,)), bytes((FrameKind.GONE,))
    marked: list[tuple[int, Location]] = []
    for fd, place in places:
        kind_at = place.offset - FRAME_HEADER_BYTES + _KIND_AT
        if os.pread(fd, 1, kind_at) == kind_was:
            os.pwrite(fd, kind_is, kind_at)
            marked.append((fd, place))
    for fd in {fd for fd, _ in marked}:
        os.fdatasync(fd)
    return [place for _, place in marked]


def punch(fd: int, place: Location) -> None:
    """Free the whole pages of a batch after its header. The freed pages then read as zeros.

    Raises:
        OSError: the file system cannot punch holes, or another error of the system.
    """
    first = -(-(place.offset + HEADER_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
    length = (place.offset + place.length) // _PAGE_BYTES * _PAGE_BYTES - first
    if length > 0 and _LIBC.fallocate(fd, _PUNCH_KEEP_SIZE, first, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_all(fd: int, buffers: Sequence[bytes], offset: int) -> None:
    """Write the buffers consecutively from `offset`, in as few system calls as possible.

    Raises:
        OSError: an error of the system; how much was written is unknown.
    """
    for first in range(0, len(buffers), _BUFFERS_MAX):
        group = buffers[first : first + _BUFFERS_MAX]
        size = sum(map(len, group))
        written = os.pwritev(fd, group, offset)
        if written < size:
            rest = memoryview(b"".join(group))
            while written < size:
                written += os.pwrite(fd, rest[written:], offset + written)
        offset += size


def zero_tail(fd: int, start: int, end: int) -> None:
    """Durably overwrite [start, end) of a file with zeros.

    Otherwise, if new frames end exactly where an old frame begins, a later recovery could find the
    old frame. Only chunks that are not zero are written.
    """
    for offset in range(start, end, _CHUNK_BYTES):
        zeros = _ZEROS[: min(_CHUNK_BYTES, end - offset)]
        if not _is_zero(fd, len(zeros), offset):
            write_all(fd, [zeros], offset)
    os.fsync(fd)


def _is_zero(fd: int, size: int, offset: int) -> bool:
    try:
        return os.pread(fd, size, offset) == _ZEROS[:size]
    except OSError:
        return False  # unreadable sectors may become readable when written
