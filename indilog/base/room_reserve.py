"""Files that keep room on a disk, for what must still be written when the disk is full.

Records that arrive while the disk is full are refused. What is in progress must be completed, and
trims must be written, because they make room. The metadata store has a reserve; the cells of
storage nodes, and object stores in directories, have two (decision 0099). The journal has one in
its last segment.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or an exhausted quota."""
SMALL_CELL_BYTES: Final = 4096
"""Largest cell with records that may use the room for trims, which are cells too."""
_PROBE_BYTES: Final = 64 * 1024


class RoomReserve:
    """Keeps `size_bytes` free on the disk of `path`, by a file of this size.

    Several processes may share one reserve.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path, self._size_bytes = path, size_bytes

    @property
    def is_kept(self) -> bool:
        """Whether the room is reserved. False: it was released, and other writes may use it."""
        try:
            return self._path.stat().st_size >= self._size_bytes
        except FileNotFoundError:
            return False

    def keep(self) -> bool:
        """Reserve the room unless it is reserved; return whether it is reserved now.

        Raises:
            OSError: the file cannot be created for another reason than a full disk.
        """
        if self.is_kept:
            return True
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self._size_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            if error.errno not in NO_ROOM:
                raise
            return False
        return True

    def has_room(self) -> bool:
        """Whether a small file can still be written."""
        try:
            with NamedTemporaryFile(dir=self._path.parent, prefix=".room-") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
        except OSError as error:
            return error.errno not in NO_ROOM
        return True

    def release(self) -> bool:
        """Make the room usable; return whether it was reserved."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


class TwoReserves:
    """The first reserve is for what is in progress when the disk gets full. The second one is for
    trims, and for what makes them effective.
    """

    def __init__(self, first: RoomReserve, for_trims: RoomReserve) -> None:
        self._first, self._for_trims = first, for_trims

    @property
    def are_kept(self) -> bool:
        """Whether nothing uses the room; the first reserve is always released first."""
        return self._first.is_kept

    def keep(self) -> bool:
        """Reserve the room; return whether all of it is reserved. Raises as `RoomReserve.keep`."""
        return self._for_trims.keep() and self._first.keep()

    def has_room(self) -> bool:
        """See `RoomReserve.has_room`."""
        return self._first.has_room()

    def release(self, *, is_large: bool) -> bool:
        """Make room for a write that found none; return whether there is more room now.

        Args:
            is_large: the write is a cell of more than `SMALL_CELL_BYTES` with records.
        """
        return self._first.release() or (not is_large and self._for_trims.release())
