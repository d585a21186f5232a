"""The file `NEWEST`: the newest segment in use, and how far it was synced (ARCHITECTURE 11,
docs/decisions/0009 and 0022).

If the newest segment is missing, the other segments look like a shorter journal. The segments alone
also do not distinguish damage of the last frames from a torn tail. So `NEWEST` describes the newest
segment that may hold frames. It has one line: a name, the segment's number, its size and its synced
size in bytes, and the CRC32C of the line in hexadecimal.

The line is written before the first frame of a segment, after a time without writes, and at a clean
stop. It is overwritten in place, because a full disk has no room for a second file. `Journal`
writes the file, and `JournalReader` reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from crc32c import crc32c

from indilog.runtime.journal.segment import segment_path, synced_directory, write_all

_FILE: Final = "NEWEST"
_NAME: Final = "indilog-segment"

log = structlog.get_logger(__name__)


class NewestSegment(NamedTuple):
    """The newest segment that may hold frames.

    Attributes:
        size_bytes: the size of its file.
        synced: number of bytes that were certainly synced.
    """

    number: int
    size_bytes: int
    synced: int = 0


def note_newest(directory: Path, newest: NewestSegment) -> None:
    """Durably write which segment is in use, and how far it was synced.

    Raises:
        OSError: an error of the system.
    """
    stated = f"{_NAME} {newest.number:08d} {newest.size_bytes:010d} {newest.synced:010d}"
    path = directory / _FILE
    new = not path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, [f"{stated} {_crc_of(stated)}\n".encode()], 0)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    if new:
        synced_directory(directory)


def newest_noted(directory: Path) -> NewestSegment | None:
    """Return the content of `NEWEST`. None: there is no such file, or the file is unreadable or
    damaged, which is logged.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    try:
        line = path.read_bytes()
    except OSError as error:  # an unreadable sector; the next write overwrites it
        log.warning("the note of the newest segment cannot be read", error=str(error))
        return None
    stated, _, crc = line.decode(errors="replace").strip().rpartition(" ")
    name, _, numbers = stated.partition(" ")
    if crc != _crc_of(stated) or name != _NAME:
        log.warning("the note of the newest segment is damaged", file=str(path))
        return None
    return NewestSegment(*map(int, numbers.split()))


def is_whole(directory: Path, newest: NewestSegment) -> bool:
    """Tell whether the file of the newest segment has its full length."""
    path = segment_path(directory, newest.number)
    return path.exists() and path.stat().st_size >= newest.size_bytes


def _crc_of(stated: str) -> str:
    return f"{crc32c(stated.encode()):08x}"
