"""A record of every file operation, and the directories that a power loss could leave.

POSIX promises little. Data written to a file is on disk after an `fsync` or `fdatasync` of that
file returned. A name that was created, changed or removed is on disk after an `fsync` of its
directory. Everything else may be there or not, whole or in part, in any order.

`Recorder` records the operations of a process below a directory. `Recorder.after` builds the
directory as it could be found after a power loss after any operation. `Recorder.killed` builds the
directory as the next process finds it after a kill, with all written data in the page cache. It
records that process too, so that a power loss can follow.

Not recorded: sizes changed by `truncate` (nothing here does that) and reads.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import pytest

SECTOR_BYTES = 512


class Wrote(NamedTuple):
    """Bytes were written to a file, identified by its number, not by its name."""

    file: int
    offset: int
    data: bytes


class Synced(NamedTuple):
    """A file was synced."""

    file: int


class SyncedNames(NamedTuple):
    """A directory was synced."""

    directory: Path


class Named(NamedTuple):
    """A name was given to a file, or removed (None)."""

    path: Path
    file: int | None


class Promised(NamedTuple):
    """A promise was made: not an operation, but a point in time."""

    promise: object


Operation: TypeAlias = Wrote | Synced | SyncedNames | Named | Promised


@dataclasses.dataclass
class _File:
    """A file: the content that is certainly on disk, and the content that may be."""

    content: bytearray = dataclasses.field(default_factory=bytearray)
    unsynced: list[Wrote] = dataclasses.field(default_factory=list)


class Recorder:
    """Intercepts the file operations below one directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        self._files: dict[int, int] = {}
        """Numbers of files by inode."""
        self.operations: list[Operation] = []
        for name in ("open", "pwritev", "pwrite", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
        for name in ("rename", "replace", "unlink", "open"):
            monkeypatch.setattr(Path, name, getattr(self, f"_path_{name}")(getattr(Path, name)))

    def stop(self) -> None:
        """Stop recording."""
        self._monkeypatch.undo()

    def promise(self, promise: object) -> None:
        """Note that from now on `promise` must hold after every crash."""
        self.operations.append(Promised(promise))

    def killed(self, count: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
        """Return a recorder of the process that starts after a kill after `count` operations.

        The new process finds in `directory` all written data, synced or not.
        """
        moved = [self._moved(operation, directory) for operation in self.operations[:count]]
        cache = _Disk()
        for operation in moved:
            cache.perform(operation)
        numbers = cache.names | {name.path: name.file for name in cache.unsynced}
        inodes: dict[int, int] = {}
        for path, number in numbers.items():
            if number is not None:
                file = cache.files[number]
                for write in file.unsynced:
                    _put(file.content, write)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.content)
                inodes[path.stat().st_ino] = number
        again = Recorder(directory, monkeypatch)
        again.operations += moved
        again._files |= inodes
        return again

    def _moved(self, operation: Operation, root: Path) -> Operation:
        match operation:
            case Named(path, file):
                return Named(root / path.relative_to(self._root), file)
            case SyncedNames(directory):
                return SyncedNames(root / directory.relative_to(self._root))
            case _:
                return operation

    # --- what the code calls

    def _known(self, fd: int) -> int | None:
        """Return the number of a file below the root that is open as `fd`."""
        return self._files.get(os.fstat(fd).st_ino)

    def _new(self, path: Path, inode: int) -> None:
        self._files[inode] = len(self.operations)
        self.operations.append(Named(path, self._files[inode]))

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777) -> int:  # noqa: ANN401 as the system's
            there = Path(path).exists()
            fd = real(path, flags, mode)
            if self._below(path) and not there and flags & os.O_CREAT:
                self._new(Path(path), os.fstat(fd).st_ino)
            return fd

        return opened

    def _pwritev(self, real: Callable[..., int]) -> Callable[..., int]:
        def written(fd: int, buffers: Sequence[bytes], offset: int) -> int:
            self._note(fd, offset, b"".join(buffers))
            return real(fd, buffers, offset)

        return written

    def _pwrite(self, real: Callable[..., int]) -> Callable[..., int]:
        def written(fd: int, data: bytes, offset: int) -> int:
            self._note(fd, offset, bytes(data))
            return real(fd, data, offset)

        return written

    def _note(self, fd: int, offset: int, data: bytes) -> None:
        if (file := self._known(fd)) is not None:
            self.operations.append(Wrote(file, offset, data))

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def synced(fd: int) -> None:
            real(fd)
            path = Path(f"/proc/self/fd/{fd}").readlink()
            if path == self._root or (path.is_dir() and self._below(path)):
                self.operations.append(SyncedNames(path))
            elif (file := self._known(fd)) is not None:
                self.operations.append(Synced(file))

        return synced

    _fdatasync = _fsync

    def _path_rename(self, real: Callable[..., Path]) -> Callable[..., Path]:
        def renamed(path: Path, target: Path) -> Path:
            file = self._files.get(path.stat().st_ino)
            if Path(target).exists():
                self._files.pop(Path(target).stat().st_ino, None)
            result = real(path, target)
            if file is not None:
                # One step for the file system: the new name is there, or the old one is.
                self.operations.append(Named(Path(target), file))
                self.operations.append(Named(path, None))
            return result

        return renamed

    _path_replace = _path_rename

    def _path_unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        def unlinked(path: Path, *, missing_ok: bool = False) -> None:
            inode = path.stat().st_ino if path.exists() else None
            real(path, missing_ok=missing_ok)
            if inode is not None and self._below(path):
                del self._files[inode]
                self.operations.append(Named(path, None))

        return unlinked

    def _path_open(self, real: Callable[..., IO[Any]]) -> Callable[..., IO[Any]]:
        def opened(path: Path, mode: str = "r", *args: Any, **named: Any) -> IO[Any]:  # noqa: ANN401
            there = path.exists()
            file = real(path, mode, *args, **named)
            if self._below(path) and "w" in mode:
                assert not there, "a file that has a name is never written in place"
                self._new(path, os.fstat(file.fileno()).st_ino)
                self._watch(file)
            return file

        return opened

    def _watch(self, file: IO[Any]) -> None:
        """Record the writes of a Python file: at its flushes."""
        number = self._files[os.fstat(file.fileno()).st_ino]
        whole = file.write

        def written(data: Any) -> int:  # noqa: ANN401 as the system's
            raw = data.encode() if isinstance(data, str) else bytes(data)
            self.operations.append(Wrote(number, 0, raw))
            return whole(data)

        file.write = written  # type: ignore[method-assign]

    def _below(self, path: object) -> bool:
        return isinstance(path, str | Path) and self._root in Path(path).parents

    # --- what the disk may have

    def after(self, count: int, directory: Path, chaos: random.Random) -> list[object]:
        """Build in `directory` a state that could be found after the first `count` operations;
        return the promises made until then.
        """
        disk = _Disk()
        for operation in self.operations[:count]:
            disk.perform(operation)
        # Names reach the disk in order, as with a journaling file system, and any part of them.
        for name in disk.unsynced[: chaos.randint(0, len(disk.unsynced))]:
            disk.names[name.path] = name.file
        contents = {number: _found(file, chaos) for number, file in disk.files.items()}
        for path, number in disk.names.items():
            if number is not None:
                target = directory / path.relative_to(self._root)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(contents[number])
        return disk.promises


class _Disk:
    """The content that is certainly on disk, and the content that may be."""

    def __init__(self) -> None:
        self.files: dict[int, _File] = {}
        self.names: dict[Path, int | None] = {}
        self.unsynced: list[Named] = []
        self.promises: list[object] = []

    def perform(self, operation: Operation) -> None:
        match operation:
            case Wrote(file):
                self.files[file].unsynced.append(operation)
            case Synced(file):
                self._sync(self.files[file])
            case Named(_, file):
                self.unsynced.append(operation)
                if file is not None:
                    self.files.setdefault(file, _File())
            case SyncedNames(parent):
                for name in [name for name in self.unsynced if name.path.parent == parent]:
                    self.names[name.path] = name.file
                    self.unsynced.remove(name)
            case Promised(promise):
                self.promises.append(promise)

    def _sync(self, file: _File) -> None:
        for write in file.unsynced:
            _put(file.content, write)
        file.unsynced.clear()


def _put(content: bytearray, write: Wrote) -> None:
    end = write.offset + len(write.data)
    content.extend(bytes(max(0, end - len(content))))
    content[write.offset : end] = write.data


def _found(file: _File, chaos: random.Random) -> bytes:
    """Return possible content of a file: of unsynced data any sectors, or none, or all."""
    content = bytearray(file.content)
    share = chaos.choice([0.0, 0.5, 0.9, 1.0])
    for write in file.unsynced:
        for start in range(0, len(write.data), SECTOR_BYTES):
            if chaos.random() < share:
                _put(
                    content,
                    Wrote(0, write.offset + start, write.data[start : start + SECTOR_BYTES]),
                )
    return bytes(content)
