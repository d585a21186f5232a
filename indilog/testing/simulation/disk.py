"""Simulated disks. A power loss loses the unsynced writes of a process, all or in part.

The files are real files in a directory in memory, so the journal's own code reads and writes them.
`installed` replaces `os` in the modules of `indilog.runtime` that write files. The replacement
records every write until `fdatasync` or `fsync` makes it durable. It also causes faults: a failed
write-back, a kill during a sync, a full disk, an unreadable sector. A kill leaves written bytes in
the page cache: the restart reads them, and a power loss may still lose them. After a power loss,
each sector that was not synced has either its old or its new content, and one sector may be torn. A
failed write-back is reported as in Linux, to one sync of each descriptor. Its pages are then marked
clean, so no later sync writes them.

Names in a directory (create, rename, unlink) are durable at once, because the journal syncs them
before it relies on them. The journal's file operations have separate tests.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from indilog.testing.simulation.threads import Killed, Threading, current_thread

SECTOR_BYTES: Final = 512
_SHELLS: Final = "indilog.runtime."


class _Write(NamedTuple):
    offset: int
    data: bytes


class _File:
    """A file: its durable bytes, and the writes after the last sync.

    Attributes:
        errors: how many write-backs have failed; their bytes are not on the disk.
        reported: whether a sync has reported the last one.
    """

    __slots__ = ("durable", "errors", "pending", "reported")

    def __init__(self, durable: bytes) -> None:
        self.durable = bytearray(durable)
        self.pending: list[_Write] = []
        self.errors = 0
        self.reported = True

    def write_back(self, count: int | None = None) -> None:
        """Make the first `count` pending writes durable, or all of them."""
        for write in self.pending[:count]:
            _put(self.durable, write.offset, write.data)
        del self.pending[:count]

    def fail_write_back(self) -> None:
        """Fail the write-back of the pending writes; the page cache still shows them."""
        self.pending.clear()
        self.errors += 1
        self.reported = False


def _put(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset:
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data


class SimulatedDisk:
    """The disk of one process: everything below `directory`.

    Attributes:
        full: whether there is no room to create or extend a file.
        sync_fails: whether the next sync that has unsynced writes fails.
        overlap_fails: whether `sync_fails` applies only to a sync that overlaps with another sync
            of its file.
        syncing: number of syncs of a file for which threads wait, by inode.
        syncs_until_killed: syncs until one kills the process; None: no sync does.
        unreadable: the share of reads that fail with `EIO`.
        syncs: number of syncs.
        overlapping_syncs: number of syncs that began while a thread waited for a sync of the same
            file. Only one of these is notified of a failed write-back (docs/decisions/0022).
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._chance = chance
        self._files: dict[int, _File] = {}
        self._open: dict[int, int] = {}
        self._errors_reported: dict[int, int] = {}
        """Failed write-backs of its file that a descriptor has reported or that preceded its
        opening.
        """
        self.full = False
        self.sync_fails = False
        self.overlap_fails = False
        self.syncing: Counter[int] = Counter()
        self.syncs_until_killed: int | None = None
        self.unreadable = 0.0
        self.syncs = 0
        self.overlapping_syncs = 0
        self.bytes_written = 0

    # --- crashes and damage

    def close_files(self) -> None:
        """Close the files of a process that ended; their locks end too."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    def keep_pages(self) -> None:
        """Kill the process: its writes stay in the page cache.

        Some of them reach the disk by themselves. A page whose write-back failed may be dropped.
        """
        self.close_files()
        for path in self._paths():
            file = self._files.get(path.stat().st_ino)
            if file is None:
                continue
            if file.pending and self._chance.random() < 0.5:
                file.write_back(self._chance.randint(0, len(file.pending)))
            if file.errors and not file.pending and self._chance.random() < 0.3:
                self._show_durable(path, file)

    def lose_unsynced(self) -> int:
        """Cut the power; return how many writes were lost, at least in part."""
        self.close_files()
        lost = 0
        for path in self._paths():
            file = self._files.get(path.stat().st_ino)
            if file is not None and (file.pending or file.errors):
                lost += len(file.pending)
                self._keep_some_writes(file)
                self._show_durable(path, file)
        return lost

    def _show_durable(self, path: Path, file: _File) -> None:
        path.write_bytes(file.durable)
        file.errors, file.reported = 0, True

    def _keep_some_writes(self, file: _File) -> None:
        """Choose which unsynced writes survive: all, none, a prefix, or some sectors."""
        chance = self._chance
        sectors = [sector for write in file.pending for sector in _sectors(write)]
        file.pending.clear()
        manner = chance.randrange(4)
        if manner == 0:
            return
        if manner == 1:
            sectors = sectors[: chance.randint(0, len(sectors))]
        elif manner == 2:
            sectors = [sector for sector in sectors if chance.random() < 0.5]
        if manner == 1 and sectors:
            last = sectors.pop()
            before = bytes(file.durable[last.offset : last.offset + len(last.data)])
            written = chance.randint(0, len(last.data))
            torn = _torn(before.ljust(len(last.data), b"\0"), last.data, written)
            sectors.append(_Write(last.offset, torn))
        for sector in sectors:
            _put(file.durable, sector.offset, sector.data)

    def flip_bit(self, name: str, offset: int, bit: int) -> None:
        """Change one bit of a file permanently, unnoticed."""
        with (self.directory / name).open("rb") as stream:
            stream.seek(offset)
            self.overwrite(name, offset, bytes([stream.read(1)[0] ^ (1 << bit)]))

    def overwrite(self, name: str, offset: int, data: bytes) -> None:
        """Change bytes of a file permanently, unnoticed."""
        path = self.directory / name
        with path.open("r+b") as stream:
            stream.seek(offset)
            stream.write(data)
        file = self._files.get(path.stat().st_ino)
        if file is not None:
            file.write_back()
            _put(file.durable, offset, data)

    def wipe(self) -> None:
        """Lose every file; only for a process that is down."""
        assert not self._open, "no file is open"
        for path in self._paths():
            path.unlink()
        self._files.clear()

    def replace(self, older: Path) -> None:
        """Replace all files by those below `older`; only for a process that is down."""
        self.wipe()
        shutil.copytree(older, self.directory, dirs_exist_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.directory.rglob("*") if path.is_file())

    # --- system calls (`DiskCalls`)

    def opened(self, fd: int, path: Path) -> None:
        """Note a file that was opened."""
        inode = os.fstat(fd).st_ino
        self._open[fd] = inode
        if inode not in self._files or not os.fstat(fd).st_size:
            self._files[inode] = _File(path.read_bytes())
        file = self._files[inode]
        self._errors_reported[fd] = file.errors if file.reported else file.errors - 1

    def closed(self, fd: int) -> None:
        """Note that a file was closed; its unsynced writes may still be lost."""
        inode = self._open.pop(fd)
        file = self._files[inode]
        if inode not in self._open.values() and not file.pending and not file.errors:
            del self._files[inode]

    def has(self, fd: int) -> bool:
        """Return whether `fd` is a file of this disk."""
        return fd in self._open

    def wrote(self, fd: int, data: bytes, offset: int) -> None:
        """Note a write that was made.

        Raises:
            OSError: `ENOSPC` when the disk is full and the file would grow.
        """
        if self.full and offset + len(data) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, "simulated: the disk is full")
        self._files[self._open[fd]].pending.append(_Write(offset, data))
        self.bytes_written += len(data)

    def synced(self, fd: int) -> None:
        """Make the writes to a file durable.

        Raises:
            OSError: `EIO` if a write-back of the file has failed and this descriptor has not
                reported it.
            Killed: the process is killed before or after the writes are durable.
        """
        file = self._files[self._open[fd]]
        if self._is_killed():
            if self._chance.random() < 0.5:
                file.write_back()
            raise Killed
        overlaps = self.syncing[self._open[fd]] > 0
        self.overlapping_syncs += overlaps
        if self.sync_fails and file.pending and (overlaps or not self.overlap_fails):
            self.sync_fails = self.overlap_fails = False
            file.fail_write_back()
        file.write_back()
        self.syncs += 1
        if file.errors > self._errors_reported[fd]:
            self._errors_reported[fd] = file.errors
            file.reported = True
            raise OSError(errno.EIO, "simulated: the disk failed")

    def _is_killed(self) -> bool:
        if self.syncs_until_killed is None:
            return False
        self.syncs_until_killed -= 1
        if self.syncs_until_killed >= 0:
            return False
        self.syncs_until_killed = None
        return True

    @contextmanager
    def waited_for(self, fd: int) -> Generator[None]:
        """Count the sync for which a thread waits inside the block."""
        inode = self._open[fd]
        self.syncing[inode] += 1
        try:
            yield
        finally:
            self.syncing[inode] -= 1

    def check_readable(self) -> None:
        """Raise an `OSError` if this read fails."""
        if self.unreadable and self._chance.random() < self.unreadable:
            raise OSError(errno.EIO, "simulated: an unreadable sector")


def _torn(before: bytes, data: bytes, written: int) -> bytes:
    """Return a torn sector: `written` bytes are new, other changed bytes are zeros."""
    rest = bytes(b if a == b else 0 for a, b in zip(before[written:], data[written:], strict=True))
    return data[:written] + rest


def _sectors(write: _Write) -> list[_Write]:
    """Split a write at the boundaries of sectors; a sector is written whole or not at all."""
    parts, offset, end = [], write.offset, write.offset + len(write.data)
    while offset < end:
        stop = min(end, offset - offset % SECTOR_BYTES + SECTOR_BYTES)
        parts.append(_Write(offset, write.data[offset - write.offset : stop - write.offset]))
        offset = stop
    return parts


class DiskCalls:
    """Replaces the module `os` where files are written; everything else is the real one."""

    def __init__(self) -> None:
        self.disks: list[SimulatedDisk] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 any attribute of `os`
        return getattr(os, name)

    def _of_fd(self, fd: int) -> SimulatedDisk | None:
        return next((disk for disk in self.disks if disk.has(fd)), None)

    def _of_path(self, path: object) -> SimulatedDisk | None:
        text = os.fspath(path)  # type: ignore[call-overload]
        return next((d for d in self.disks if text.startswith(f"{d.directory}/")), None)

    def open(self, path: object, flags: int, mode: int = 0o777) -> int:
        """As `os.open`."""
        fd: int = os.open(path, flags, mode)  # type: ignore[arg-type]
        if not flags & os.O_DIRECTORY and (disk := self._of_path(path)) is not None:
            disk.opened(fd, Path(os.fsdecode(path)))  # type: ignore[arg-type]
        return fd

    def close(self, fd: int) -> None:
        """As `os.close`."""
        if (disk := self._of_fd(fd)) is not None:
            disk.closed(fd)
        os.close(fd)

    def pwritev(self, fd: int, buffers: Sequence[bytes], offset: int) -> int:
        """As `os.pwritev`."""
        return self.pwrite(fd, b"".join(buffers), offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """As `os.pwrite`."""
        if (disk := self._of_fd(fd)) is not None:
            disk.wrote(fd, bytes(data), offset)
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """As `os.pread`."""
        if (disk := self._of_fd(fd)) is not None:
            disk.check_readable()
        return os.pread(fd, length, offset)

    def fdatasync(self, fd: int) -> None:
        """As `os.fdatasync`. In a thread it takes time, and writes halfway through."""
        if (disk := self._of_fd(fd)) is None:
            return
        if (thread := current_thread()) is None:
            disk.synced(fd)
            return
        with disk.waited_for(fd):
            thread.sleep()
        try:
            disk.synced(fd)
        except OSError:
            thread.sleep()
            raise
        thread.sleep()

    fsync = fdatasync

    def statvfs(self, path: object) -> os.statvfs_result:
        """As `os.statvfs`, except that a full disk has no free blocks."""
        real = os.statvfs(path)  # type: ignore[arg-type]
        disk = self._of_path(f"{os.fspath(path)}/")  # type: ignore[call-overload]
        if disk is None or not disk.full:
            return real
        fields = list(real)
        fields[3] = fields[4] = 0  # blocks free, blocks free for us
        return os.statvfs_result(fields)


class AtOnce:
    """Replaces a pool of threads: `submit` runs the function before it returns."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:  # noqa: ANN401 as a pool
        """Do it."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 as a pool does
            future.set_exception(error)
        return future

    def shutdown(self, *_: object, **__: object) -> None:
        """Do nothing: all submitted functions have run."""


@contextmanager
def installed() -> Generator[DiskCalls]:
    """Let the journal write to simulated disks, without further threads, inside the block."""
    import indilog.runtime.journal.journal  # noqa: F401 to load the modules that are changed

    calls = DiskCalls()
    stand_ins: dict[object, object] = {os: calls, _pool(): AtOnce, threading: Threading()}
    replaced: list[tuple[ModuleType, str, object]] = []
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_SHELLS):
            continue
        for attribute in ("os", "ThreadPoolExecutor", "threading"):
            real = getattr(module, attribute, None)
            if real is not None and real in stand_ins:
                replaced.append((module, attribute, real))
                setattr(module, attribute, stand_ins[real])
    try:
        yield calls
    finally:
        for module, attribute, real in replaced:
            setattr(module, attribute, real)


def _pool() -> object:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor
