"""Creates the directory of a journal, and checks its format version (ARCHITECTURE 7).

The file `FORMAT` has one line: a name, a version, and the CRC32C of both in hexadecimal. If the CRC
does not match, the line is damaged. A damaged line is rewritten if it differs in one bit from the
line of this release, or if the segments hold frames of this release. Each frame has its own
version, so this is safe. `Journal.open` uses this module; `indilog_pipeline` checks the version
before it reads a journal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import structlog
from crc32c import crc32c

from indilog.base.errors import DataDirectoryError
from indilog.runtime.journal.segment import synced_directory
from indilog.runtime.journal.segment_scan import newest_used

FORMAT_VERSION: Final = 6
"""The format of this release. Formats 1 and 2 had record batches of version 1, with one checksum
for tags and data, and lacked checkpoints and the file `NEWEST`. Format 3 lacked the promises and
learner marks of sequencers. Format 4 had the writers of shards in frames of their own. Format 5 had
views without zones and finalized shards.
"""
_OLDEST_READ: Final = 5
"""The oldest format that is read. A start changes an older format to the format of this release."""
_FORMAT_NAME: Final = "indilog-journal"

log = structlog.get_logger(__name__)


def create_directory(directory: Path) -> None:
    """Create the directory and its missing parents, durably."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        synced_directory(path.parent)


def check_format(directory: Path) -> bool:
    """Check the format of a directory, and return whether the directory is new. Write the format of
    this release into a new directory, or in place of an older format that can be read.

    Raises:
        DataDirectoryError: the directory is of a newer, an older or an unknown format.
    """
    path = directory / "FORMAT"
    if not path.exists():
        used = newest_used(directory) > 0
        if used:
            log.warning("the FORMAT file of the journal was missing", file=str(path))
        _write(path)
        return not used
    if (version := _version_in(path)) is None:
        line = path.read_bytes().decode("latin-1").removesuffix("\n")
        if _one_bit_apart(line, format_line(FORMAT_VERSION).strip()) or newest_used(directory):
            log.warning("the FORMAT file of the journal was damaged", file=str(path))
            _write(path)
            return False
        raise DataDirectoryError(f"{path} has unexpected content; the directory is damaged.")
    _refuse_other(directory, version)
    if version < FORMAT_VERSION:
        _write(path)
    return False


def check_version(directory: Path) -> None:
    """Raise for a directory whose format cannot be read. A missing or damaged `FORMAT` is accepted,
    because each frame has its own version.

    Raises:
        DataDirectoryError: the directory is of a newer, an older or an unknown format.
    """
    path = directory / "FORMAT"
    if path.exists() and (version := _version_in(path)) is not None:
        _refuse_other(directory, version)


def _version_in(path: Path) -> int | None:
    """Return the version that a `FORMAT` file states; None: its CRC does not match.

    Raises:
        DataDirectoryError: the file belongs to another program.
    """
    line = path.read_bytes().decode("latin-1").removesuffix("\n")
    stated, _, crc = line.rpartition(" ")
    if crc != _crc_of(stated):
        return None
    name, _, version = stated.partition(" ")
    if name != _FORMAT_NAME or not version.isdecimal():
        raise DataDirectoryError(f"{path} has unexpected content; the directory is damaged.")
    return int(version)


def _refuse_other(directory: Path, version: int) -> None:
    if version > FORMAT_VERSION:
        raise DataDirectoryError(
            f"{directory} has format {version}, this release reads {FORMAT_VERSION}; "
            "start a newer release."
        )
    if version < _OLDEST_READ:
        raise DataDirectoryError(
            f"{directory} has format {version}, this release reads {_OLDEST_READ} and "
            f"{FORMAT_VERSION}: "
            "start the release that wrote it, or begin with another data directory."
        )


def _one_bit_apart(line: str, right: str) -> bool:
    apart = int.from_bytes(line.encode("latin-1")) ^ int.from_bytes(right.encode())
    return apart.bit_count() == 1


def format_line(version: int) -> str:
    """Return the content of the file in that version."""
    stated = f"{_FORMAT_NAME} {version}"
    return f"{stated} {_crc_of(stated)}\n"


def _crc_of(stated: str) -> str:
    return f"{crc32c(stated.encode('latin-1')):08x}"


def _write(path: Path) -> None:
    temporary = path.with_name("FORMAT.new")
    with temporary.open("w") as file:
        file.write(format_line(FORMAT_VERSION))
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    synced_directory(path.parent)
