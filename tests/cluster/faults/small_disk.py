"""A disk of a few MiB, to be filled and freed."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1024 * 1024


class SmallDisk:
    """A file system of its own; the file `balloon` fills the free space."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._balloon = directory / "balloon"

    def fill(self, leave_bytes: int = 0) -> None:
        """Fill the disk up to `leave_bytes` of free space, or whole if others fill it, too."""
        free = os.statvfs(self.directory)
        size = free.f_bavail * free.f_frsize - leave_bytes
        with self._balloon.open("ab", buffering=0) as file:
            while size > 0:
                try:
                    size -= file.write(bytes(min(MIB, size))) or 0
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self) -> None:
        """Free the space."""
        self._balloon.unlink()


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system in memory; skips the test where that is not permitted."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
