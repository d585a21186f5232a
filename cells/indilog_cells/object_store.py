"""Object stores with conditional writes: a directory, or an S3-compatible store through `obstore`.

A place is an absolute path (`/mnt/logs`) or `s3://bucket/prefix`, with `endpoint_override`,
`scheme` and `region` as parameters, like the place of cold storage. Credentials come from the
environment or the usual AWS files; a place never contains them.

A store must be strongly consistent, and must support `If-None-Match: *` for puts, as Amazon S3
does. A directory must support hard links, with a link(2) that is atomic and fails if the name
exists.

`object_cells` keeps the cells and notes of logs here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from indilog.base.room_reserve import NO_ROOM, SMALL_CELL_BYTES, RoomReserve, TwoReserves
from indilog_cells.cells import CellsError

if TYPE_CHECKING:
    from obstore.store import S3Store

_S3_ATTEMPTS: Final = 2
_TRIMS_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the reserve for trims, and for what makes them effective."""
_LOOK_AGAIN_S: Final = 1.0

_FoundT = TypeVar("_FoundT")


class ObjectStore(Protocol):
    """Objects by name. Every method raises `CellsError` if the store cannot be reached."""

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object durably unless it exists; return whether it was written. The first object
        of a log is directly in the log's folder, all others but this one are in folders in it.
        """

    async def replace(self, name: str, content: bytes) -> None:
        """Write an object durably, replacing an existing one."""

    async def get(self, name: str) -> bytes | None:
        """Return an object; None: it does not exist."""

    async def names(self, folder: str) -> list[str]:
        """Return the last parts of the names of all objects in a folder, sorted."""

    async def delete(self, name: str) -> None:
        """Delete an object, if it exists."""

    async def delete_folder(self, folder: str) -> None:
        """Delete all objects in a folder, and in folders in it. Some may be left after an error."""

    async def full_disks(self) -> Sequence[str]:
        """Return the name of the store if there is no room for records. Then trims and checkpoints
        can still be written, from a reserve.
        """


def object_store_at(place: str, *, timeout_s: float, reserve_bytes: int = 0) -> ObjectStore:
    """Return the store at a place.

    Args:
        place: see the docstring of the module.
        timeout_s: seconds after which a request over the network fails.
        reserve_bytes: see `DirectoryStore`.
    """
    if "://" in place:
        return S3ObjectStore(place, timeout_s)
    return DirectoryStore(Path(place), reserve_bytes=reserve_bytes)


class _Room:
    """The room for objects in a directory, for all stores of this process. It has two reserves: the
    first one for writes in progress when the disk gets full, the second one for trims.

    Attributes:
        is_full: whether the first reserve is not allocated; None: it is not known.
    """

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._reserves = TwoReserves(
            RoomReserve(directory / ".reserve", reserve_bytes),
            RoomReserve(directory / ".trims", _TRIMS_BYTES),
        )
        self.is_full: bool | None = None
        self._look_at = 0.0

    def is_due(self) -> bool:
        """Whether to look now: at first, and once a second on a full disk."""
        now = time.monotonic()
        if self.is_full is False or now < self._look_at:
            return False
        self._look_at = now + _LOOK_AGAIN_S
        return True

    def look(self) -> None:
        """Allocate the reserves, if the disk with the logs is there; find out whether it is full. A
        file system that cannot allocate a file has no reserves.
        """
        try:
            if any(path.is_dir() for path in self._directory.iterdir()):
                self.is_full = not self._reserves.keep()
        except OSError:
            self.is_full = False

    def note_written(self) -> None:
        """Look again if another process uses the reserve."""
        if self.is_full is False and not self._reserves.are_kept:
            self.is_full = None

    def make(self, *, is_large: bool) -> bool:
        """Make room for a write that found none; return whether it is worth another attempt."""
        self.is_full = True
        return self._reserves.release(is_large=is_large)


_rooms: dict[tuple[Path, int], _Room] = {}
"""By directory and size of the reserve."""


class DirectoryStore:
    """Objects as files of a directory that supports hard links. Each operation runs in a thread.

    Args:
        directory: the directory.
        reserve_bytes: room that is reserved on its disk for a time when the disk is full; 0: none.
    """

    def __init__(self, directory: Path, *, reserve_bytes: int = 0) -> None:
        self._directory = directory
        self._room: _Room | None = None
        if reserve_bytes:
            key = directory, reserve_bytes
            self._room = _rooms.setdefault(key, _Room(directory, reserve_bytes))

    async def create(self, name: str, content: bytes) -> bool:
        """See `ObjectStore.create`."""
        return await self._run(partial(self._create, name, content))

    async def replace(self, name: str, content: bytes) -> None:
        """See `ObjectStore.replace`."""
        await self._run(partial(self._replace, name, content))

    async def get(self, name: str) -> bytes | None:
        """See `ObjectStore.get`."""
        return await self._run(partial(self._get, name))

    async def names(self, folder: str) -> list[str]:
        """See `ObjectStore.names`."""
        return await self._run(partial(self._names, folder))

    async def delete(self, name: str) -> None:
        """See `ObjectStore.delete`."""
        await self._run(partial(self._delete, name))

    async def delete_folder(self, folder: str) -> None:
        """See `ObjectStore.delete_folder`."""
        await self._run(partial(self._delete_folder, folder))

    async def full_disks(self) -> Sequence[str]:
        """See `ObjectStore.full_disks`."""
        room = self._room
        if room is None:
            return ()
        if room.is_due():
            await asyncio.to_thread(room.look)
        return [str(self._directory)] if room.is_full else ()

    @staticmethod
    async def _run(work: Callable[[], _FoundT]) -> _FoundT:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise CellsError(str(error)) from error

    def _create(self, name: str, content: bytes) -> bool:
        path = self._directory / name
        temporary = self._written(path, content)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        _sync_directory(path.parent)
        if self._room is not None:
            self._room.note_written()
        return True

    def _replace(self, name: str, content: bytes) -> None:
        path = self._directory / name
        self._written(path, content).rename(path)
        _sync_directory(path.parent)

    def _written(self, path: Path, content: bytes) -> Path:
        """Return a synced temporary file with `content` in the directory of `path`."""
        self._check_log(path)
        is_large = path.parent.parent.name == "cells" and len(content) > SMALL_CELL_BYTES
        while True:
            try:
                return self._write(path, content)
            except OSError as error:
                if error.errno not in NO_ROOM or self._room is None:
                    raise
                if not self._room.make(is_large=is_large):
                    raise

    def _write(self, path: Path, content: bytes) -> Path:
        log = self._directory / path.relative_to(self._directory).parts[0]
        for folder in reversed([path.parent, *path.parent.parents]):
            # Only the first object of a log makes its folder, and the folders above that.
            if not folder.exists() and (path.parent == log or log in folder.parents):
                folder.mkdir(exist_ok=True)
                _sync_directory(folder.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _get(self, name: str) -> bytes | None:
        path = self._directory / name
        try:
            return path.read_bytes()
        except FileNotFoundError:
            self._check_log(path)
            return None

    def _check_log(self, path: Path) -> None:
        """Check that the folder of the log exists, if `path` is in a folder of that folder. A log
        whose folder is absent is not empty: its place is not mounted, or the log was deleted.

        Raises:
            OSError: the folder does not exist.
        """
        log, *rest = path.relative_to(self._directory).parts
        if len(rest) > 1 and not (self._directory / log).is_dir():
            raise OSError(
                errno.ENOENT, "the folder of the log is absent", str(self._directory / log)
            )

    def _names(self, folder: str) -> list[str]:
        try:
            found = [path.name for path in (self._directory / folder).iterdir()]
        except FileNotFoundError:
            self._check_log(self._directory / folder / "any")
            return []
        return sorted(name for name in found if not name.startswith("."))

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self._directory / name).unlink()

    def _delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._directory / folder)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class S3ObjectStore:
    """Objects of an S3-compatible store."""

    def __init__(self, place: str, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._opened: S3Store | None = None

    @property
    def _store(self) -> S3Store:
        if self._opened is None:
            from obstore.store import S3Store

            parts = urlsplit(self._place)
            given = dict(parse_qsl(parts.query))
            scheme = "http" if given.get("scheme") == "http" else "https"
            endpoint = given.get("endpoint_override")
            more = {"endpoint": f"{scheme}://{endpoint}"} if endpoint else {}
            if "region" in given:
                more["region"] = given["region"]
            self._opened = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                client_options={
                    "allow_http": scheme == "http",
                    "timeout": f"{self._timeout_s}s",
                    "connect_timeout": f"{self._timeout_s}s",
                },
                retry_config={"max_retries": _S3_ATTEMPTS - 1},
                **more,  # type: ignore[arg-type]
            )
        return self._opened

    async def create(self, name: str, content: bytes) -> bool:
        """See `ObjectStore.create`."""
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            await self._store.put_async(name, content, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise _failed(error) from error
        return True

    async def replace(self, name: str, content: bytes) -> None:
        """See `ObjectStore.replace`."""
        from obstore.exceptions import BaseError

        try:
            await self._store.put_async(name, content)
        except (BaseError, OSError) as error:
            raise _failed(error) from error

    async def get(self, name: str) -> bytes | None:
        """See `ObjectStore.get`."""
        from obstore.exceptions import BaseError

        try:
            found = await self._store.get_async(name)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _failed(error) from error

    async def names(self, folder: str) -> list[str]:
        """See `ObjectStore.names`."""
        from obstore.exceptions import BaseError

        try:
            found = await self._store.list(folder).collect_async()
        except (BaseError, OSError) as error:
            raise _failed(error) from error
        return sorted(info["path"].rpartition("/")[2] for info in found)

    async def delete(self, name: str) -> None:
        """See `ObjectStore.delete`."""
        from obstore.exceptions import BaseError

        try:
            await self._store.delete_async(name)
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise _failed(error) from error

    async def delete_folder(self, folder: str) -> None:
        """See `ObjectStore.delete_folder`."""
        from obstore.exceptions import BaseError

        try:
            found = await self._store.list(f"{folder}/").collect_async()
            if found:
                await self._store.delete_async([info["path"] for info in found])
        except (BaseError, OSError) as error:
            raise _failed(error) from error

    async def full_disks(self) -> Sequence[str]:
        """See `ObjectStore.full_disks`; a store over the network has room."""
        return ()


def _failed(error: Exception) -> CellsError:
    """Return an error with the first line of a store's message, which may be long."""
    return CellsError(str(error).partition("\n")[0][:300])
