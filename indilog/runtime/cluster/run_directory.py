"""The temporary directory of a run: it has the sockets of a cluster of processes on one machine.

The run directory is in the system's temporary directory, because the path of a Unix socket must be
short. The supervisor and the processes that it starts hold a shared lock on a file in the
directory. The operating system releases the lock when the last of these processes has ended, even
by a crash. So a starting supervisor can detect and remove the directories of ended runs.
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
"""Prefix of a new directory until its lock is held, so that no supervisor removes it as stale."""
_OWNER: Final = "owner"


class RunDirectory:
    """The directory of one run. While one of the run's processes lives, no other run removes it.

    Attributes:
        path: path of the directory; only this user may enter it.
        lock: descriptor that holds the lock; the processes of the run inherit it.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(self) -> None:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX_UNLOCKED))
        self.lock = os.open(made / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_SH)
        self.path = made.rename(made.with_name(made.name.replace(_PREFIX_UNLOCKED, _PREFIX, 1)))

    @classmethod
    def of_living(cls, path: Path) -> RunDirectory | None:
        """Open and lock the directory of an earlier supervisor's run; None: it cannot be opened.

        The directory of an ended run exists until `remove_stale_directories` removes it. So call
        that function first, if None must mean that the run has ended.
        """
        directory = cls.__new__(cls)
        try:
            directory.lock = os.open(path / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        fcntl.flock(directory.lock, fcntl.LOCK_SH)
        directory.path = path
        return directory

    def remove(self) -> None:
        """Remove the directory with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def remove_stale_directories() -> None:
    """Remove the directories of runs whose processes have all ended."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_stale(directory):
            shutil.rmtree(directory, ignore_errors=True)
            structlog.get_logger().info("removed what a killed run left", directory=str(directory))


def _is_stale(directory: Path) -> bool:
    """Return whether all processes of the directory's run have ended.

    If the lock file cannot be opened, the directory belongs to another program or user. It does not
    count as stale.
    """
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
