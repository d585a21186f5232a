"""Locks a directory for one process. The lock ends when the process ends, even by a crash.

The journal and the embedded metadata store lock their directories. A backup locks them too.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from indilog.base.errors import DataDirectoryError


def lock_directory(file: Path) -> int:
    """Lock the directory that contains the lock file `file`, until the returned descriptor is
    closed.

    Raises:
        DataDirectoryError: another process holds the lock.
    """
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise DataDirectoryError(
            f"{file.parent} is in use by another process; stop it, or choose another directory."
        ) from None
    return fd
