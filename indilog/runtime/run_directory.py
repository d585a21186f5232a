"""The temporary directory of a run: where the sockets of a cluster of processes on one machine are.

It stands below the system's temporary directory, because the path of a Unix socket is short. Its
owner holds a lock on a file in it; the system lets go of the lock however the owner ends. So each
start can remove what killed runs left, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import structlog

_PREFIX: Final = "indilog-run-"
_PREFIX_UNLOCKED: Final = "indilog-new-"
"""A directory has this name until its lock is held, so that nobody takes it for an old one."""
_OWNER: Final = "owner"


class RunDirectory:
    """A directory that exists as long as its owner.

    Attributes:
        path: where it is; ours alone.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX_UNLOCKED))
        self._lock = os.open(made / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name.replace(_PREFIX_UNLOCKED, _PREFIX, 1)))

    def remove(self) -> None:
        """Remove it and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale_directories() -> None:
    """Remove the directories of runs whose owner is gone."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_stale(directory):
            shutil.rmtree(directory, ignore_errors=True)
            structlog.get_logger().info("removed what a killed run left", directory=str(directory))


def _is_stale(directory: Path) -> bool:
    """Tell whether nobody owns it; a directory without a lock file is not one of ours."""
    try:
        lock = os.open(directory / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
