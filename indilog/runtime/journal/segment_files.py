"""Finds the files that hold the segments of a journal (ARCHITECTURE 7, docs/decisions/0016).

A segment has its own file until it is rewritten together with its neighbours. Then
`segment-00000003-00000007.log` holds the remaining frames of the segments 3 to 7, in their order.
The joined file is valid as soon as it has that name. Then the replaced files are removed. If a
crash prevents the removal, the next start removes them. The other modules of this package use
`segment_files` to find all valid files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from indilog.runtime.journal.segment import segment_path


class SegmentFile(NamedTuple):
    """A file that holds the segments `first` to `last`. The headers of its frames name `first`."""

    first: int
    last: int
    path: Path


def joined_path(directory: Path, first: int, last: int) -> Path:
    """Return the file of the segments `first` to `last`."""
    if first == last:
        return segment_path(directory, first)
    return directory / f"segment-{first:08d}-{last:08d}.log"


def segment_files(directory: Path) -> list[SegmentFile]:
    """Return the valid files, ascending."""
    return _files(directory)[0]


def replaced_files(directory: Path) -> list[Path]:
    """Return the files whose segments are in another valid file."""
    return [file.path for file in _files(directory)[1]]


def _files(directory: Path) -> tuple[list[SegmentFile], list[SegmentFile]]:
    found = []
    for path in directory.glob("segment-*.log"):
        first, _, last = path.stem.removeprefix("segment-").partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            found.append(SegmentFile(int(first), int(last or first), path))
    count: list[SegmentFile] = []
    replaced: list[SegmentFile] = []
    for file in sorted(found, key=lambda file: (file.first, -file.last)):
        within = bool(count) and file.last <= count[-1].last
        (replaced if within else count).append(file)
    return count, replaced
