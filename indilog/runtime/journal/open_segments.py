"""Opens the files of a journal's segments, and keeps at most 64 open (ARCHITECTURE 7).

`Journal` and `Discards` use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from indilog.runtime.journal.segment import segment_path
from indilog.runtime.journal.segment_files import SegmentFile

_OPEN_FILES_MAX: Final = 64


class OpenSegments:
    """Opens files on demand, and closes the least recently opened ones.

    One thread uses it. Another thread may only call `fd` for the active segment, whose file stays
    open.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._paths: dict[int, Path] = {}
        """Files that hold more than one segment, by their first segment."""
        self._fds: dict[int, int] = {}
        self.active = 0
        """The segment being written; its file stays open."""

    def __len__(self) -> int:
        """Return how many files are open."""
        return len(self._fds)

    def path(self, number: int) -> Path:
        """Return the file whose first segment is `number`."""
        return self._paths.get(number) or segment_path(self._directory, number)

    def fd(self, number: int) -> int:
        """Return the descriptor of an existing file, opened if necessary.

        Raises:
            OSError: an error of the system.
        """
        fd = self._fds.get(number)
        if fd is not None:
            return fd
        fd = os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)
        self._fds[number] = fd
        if len(self._fds) > _OPEN_FILES_MAX:
            keep = {number, self.active}
            oldest = next(other for other in self._fds if other not in keep)
            os.close(self._fds.pop(oldest))
        return fd

    def named(self, file: SegmentFile) -> None:
        """Register a file that may hold more than one segment."""
        if file.first != file.last:
            self._paths[file.first] = file.path

    def replaced(self, firsts: Iterable[int], file: SegmentFile) -> None:
        """Close files whose segments are now in `file`."""
        for first in firsts:
            assert first != self.active, "only old segments are replaced"
            self._paths.pop(first, None)
            if (fd := self._fds.pop(first, None)) is not None:
                os.close(fd)
        self.named(file)

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
