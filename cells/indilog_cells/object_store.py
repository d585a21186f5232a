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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from indilog_cells.cells import CellsError

if TYPE_CHECKING:
    from obstore.store import S3Store

_S3_ATTEMPTS: Final = 2

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


def object_store_at(place: str, *, timeout_s: float) -> ObjectStore:
    """Return the store at a place.

    Args:
        place: see the docstring of the module.
        timeout_s: seconds after which a request over the network fails.
    """
    return S3ObjectStore(place, timeout_s) if "://" in place else DirectoryStore(Path(place))


class DirectoryStore:
    """Objects as files of a directory that supports hard links. Each operation runs in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

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
        return True

    def _replace(self, name: str, content: bytes) -> None:
        path = self._directory / name
        self._written(path, content).rename(path)
        _sync_directory(path.parent)

    def _written(self, path: Path, content: bytes) -> Path:
        """Return a synced temporary file with `content` in the directory of `path`."""
        self._check_log(path)
        log = self._directory / path.relative_to(self._directory).parts[0]
        for folder in reversed([path.parent, *path.parent.parents]):
            # Only the first object of a log makes its folder, and the folders above that.
            if not folder.exists() and (path.parent == log or log in folder.parents):
                folder.mkdir(exist_ok=True)
                _sync_directory(folder.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
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


def _failed(error: Exception) -> CellsError:
    """Return an error with the first line of a store's message, which may be long."""
    return CellsError(str(error).partition("\n")[0][:300])
