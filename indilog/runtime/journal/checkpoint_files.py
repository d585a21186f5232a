"""Reads and writes checkpoint files: the state of all roles after the frames before one place in
the journal (docs/decisions/0028).

A checkpoint is the file `checkpoint-SEGMENT-OFFSET` in the directory of the journal. It holds the
state of each role, encoded by `Checkpoints.checkpoint`, and the use of each segment file. Layout,
little endian:

- header: magic "ILCP", version u8, segment u32, offset u64, length of the body u64, body CRC32C
  u32, header CRC32C u32
- body: msgpack

When all frames before its place are durable, a checkpoint is written under a temporary name, synced
and renamed. The two newest checkpoints are kept. A start renames a damaged checkpoint and uses the
previous one. `checkpointing` writes checkpoints, and `journal_reader` reads them.
"""

from __future__ import annotations

import os
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

import msgspec
import structlog
from crc32c import crc32c

from indilog.base.errors import DataDirectoryError
from indilog.runtime.journal.segment import synced_directory, write_all

KEPT: Final = 2
VERSION: Final = 1
_MAGIC: Final = b"ILCP"
_HEADER: Final = Struct("<4sBIQQI")
_CRC: Final = Struct("<I")
_HEADER_BYTES: Final = _HEADER.size + _CRC.size
_TEMPORARY: Final = "checkpoint.new"
_DAMAGED: Final = ".damaged"
_CHUNK_BYTES: Final = 1024 * 1024

log = structlog.get_logger(__name__)


class Place(NamedTuple):
    """A place in a journal. It stands for all frames before byte `offset` of segment `segment`."""

    segment: int
    offset: int


class FileUse(NamedTuple):
    """The use of the file with the segments `first` to `last`: `dead_bytes` are in discarded
    frames, and `other_bytes` in frames without batches.
    """

    first: int
    last: int
    dead_bytes: int
    other_bytes: int


class JournalCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The body of a checkpoint file.

    Attributes:
        roles: the encoded state of each role, by the number of its stream.
        derived: the streams of roles without which a process may start (`Checkpoints.derived`).
        files: the use of the segment files, oldest first.
    """

    roles: dict[int, bytes]
    derived: frozenset[int]
    files: tuple[FileUse, ...]


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read, and its place in the journal."""

    place: Place
    checkpoint: JournalCheckpoint


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JournalCheckpoint)


def checkpoint_path(directory: Path, place: Place) -> Path:
    """Return the file of the checkpoint at `place`."""
    return directory / f"checkpoint-{place.segment:08d}-{place.offset:010d}"


def checkpoint_places(directory: Path) -> list[Place]:
    """Return the places of the checkpoints in `directory`, ascending."""
    found = []
    for path in directory.glob("checkpoint-*"):
        segment, _, offset = path.name.removeprefix("checkpoint-").partition("-")
        if segment.isdigit() and offset.isdigit():
            found.append(Place(int(segment), int(offset)))
    return sorted(found)


def needed_from(directory: Path, newest: Place) -> tuple[int, frozenset[int]]:
    """Return the first segment whose frames must all be kept, and the segments with the places of
    kept checkpoints.

    A start may use any of the kept checkpoints, and then needs all frames after it. If there is
    only one checkpoint, segment 0 is returned, because a start needs all frames if this checkpoint
    is damaged.
    """
    kept = [place for place in checkpoint_places(directory) if place <= newest][-KEPT:]
    floor = kept[0].segment if len(kept) == KEPT else 0
    return floor, frozenset(place.segment for place in kept)


def write_checkpoint(directory: Path, place: Place, checkpoint: JournalCheckpoint) -> int:
    """Durably write a checkpoint, and remove checkpoints that are no longer kept; return its size
    in bytes.

    All frames before `place` must be durable. After a crash, either the older checkpoints exist, or
    the new one and at least the newest older one. May run in a thread.

    Raises:
        OSError: an error of the system; the older checkpoints still exist.
    """
    body = _encoder.encode(checkpoint)
    header = _HEADER.pack(_MAGIC, VERSION, *place, len(body), crc32c(body))
    file = b"".join((header, _CRC.pack(crc32c(header)), body))
    temporary = directory / _TEMPORARY
    temporary.unlink(missing_ok=True)
    try:
        _write(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise
    temporary.rename(checkpoint_path(directory, place))
    synced_directory(directory)
    for old in checkpoint_places(directory)[:-KEPT]:
        checkpoint_path(directory, old).unlink()
    return len(file)


def _write(path: Path, content: bytes) -> None:
    """Write a new file in chunks, and sync each chunk separately, so that other syncs stay
    short.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        for offset in range(0, len(content), _CHUNK_BYTES):
            write_all(fd, [content[offset : offset + _CHUNK_BYTES]], offset)
            os.fdatasync(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftover(directory: Path) -> None:
    """Remove a checkpoint that a crash left incomplete."""
    (directory / _TEMPORARY).unlink(missing_ok=True)


def read_checkpoint(directory: Path, place: Place) -> LoadedCheckpoint | None:
    """Return a checkpoint; None: its file is damaged.

    Raises:
        DataDirectoryError: another release wrote it.
    """
    path = checkpoint_path(directory, place)
    try:
        content = path.read_bytes()
    except OSError as error:
        log.warning("a checkpoint cannot be read", file=str(path), error=str(error))
        return None
    header, body = content[: _HEADER.size], memoryview(content)[_HEADER_BYTES:]
    if len(content) < _HEADER_BYTES or _CRC.unpack_from(content, _HEADER.size)[0] != crc32c(header):
        log.error("a checkpoint is damaged", file=str(path), what="its header")
        return None
    magic, version, segment, offset, length, body_crc = _HEADER.unpack(header)
    if version != VERSION or magic != _MAGIC:
        raise DataDirectoryError(
            f"{path} has version {version}, this release reads {VERSION}; "
            "start the release that wrote it."
        )
    if Place(segment, offset) != place or len(body) != length or crc32c(body) != body_crc:
        log.error("a checkpoint is damaged", file=str(path), what="its body")
        return None
    return LoadedCheckpoint(place, _decoder.decode(body))


def read_newest(directory: Path) -> LoadedCheckpoint | None:
    """Return the newest intact checkpoint; None: there is none.

    Raises:
        DataDirectoryError: another release wrote it.
    """
    for place in reversed(checkpoint_places(directory)):
        if (loaded := read_checkpoint(directory, place)) is not None:
            return loaded
    return None


def set_aside_damaged(directory: Path, newest: Place) -> None:
    """Rename the checkpoints after `newest`, the newest intact one, because they are damaged."""
    for place in reversed(checkpoint_places(directory)):
        if place <= newest:
            return
        path = checkpoint_path(directory, place)
        for older in directory.glob(f"checkpoint-*{_DAMAGED}"):
            older.unlink()
        path.rename(path.with_name(path.name + _DAMAGED))
