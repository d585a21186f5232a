"""The place of cold objects: a directory or an S3-compatible store, through `pyarrow.fs`
(docs/decisions/0039).

A place is a path (`/mnt/cold`) or `s3://bucket/prefix`, with `endpoint_override`, `scheme` and
`region` as parameters (`s3://bucket/logs?endpoint_override=minio.example:9000`). Credentials come
from the environment or the usual AWS files; a place never contains them.

The file `COLD` of a journal names the place, and the folders in the place that hold the objects of
the journal's nodes. So programs that read a data directory find the objects, and no two journals
use the same folder. `indilog.runtime.cold_store` and `indilog_pipeline` use this module.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from crc32c import crc32c

from indilog.base.errors import DataDirectoryError
from indilog.base.ids import NodeId
from indilog.kernel.cold import MARKER
from indilog.runtime.journal.segment import synced_directory

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

_FILE: Final = "COLD"
_NAME: Final = "indilog-cold 1"
_TEMPORARY: Final = "writing.tmp"
_S3_ATTEMPTS: Final = 2


class ColdStoreError(Exception):
    """The store cannot be reached, or refuses access; the object may exist."""


class MissingObjectError(Exception):
    """The store can be reached, and does not have the object."""


class ColdFolders(NamedTuple):
    """The content of a journal's file `COLD`: the place, and the suffix of its folders' names."""

    place: str
    suffix: str

    def of(self, node: NodeId) -> str:
        """Return the folder of a node."""
        return f"{node}-{self.suffix}"


def folders_noted(journal: Path) -> ColdFolders | None:
    """Return the content of the file `COLD`; None: the journal has no such file.

    Raises:
        DataDirectoryError: the file is damaged, or of another release.
    """
    path = journal / _FILE
    try:
        head, _, place = path.read_text().rstrip("\n").partition("\n")
    except FileNotFoundError:
        return None
    stated, _, crc = head.rpartition(" ")
    name, _, suffix = stated.rpartition(" ")
    if name != _NAME or crc != _crc_of(suffix, place):
        raise DataDirectoryError(
            f"{path} is damaged or of another release. It names the place of old records: restore "
            "it from a copy."
        )
    return ColdFolders(place, suffix)


def new_folders(place: str) -> ColdFolders:
    """Return new folders in `place`, which no other journal uses."""
    return ColdFolders(place, secrets.token_hex(4))


def note_folders(journal: Path, folders: ColdFolders) -> None:
    """Write the file `COLD`, durably."""
    place, suffix = folders
    temporary = journal / f"{_FILE}.new"
    with temporary.open("w") as written:
        written.write(f"{_NAME} {suffix} {_crc_of(suffix, place)}\n{place}\n")
        written.flush()
        os.fsync(written.fileno())
    temporary.replace(journal / _FILE)
    synced_directory(journal)


def _crc_of(suffix: str, place: str) -> str:
    return f"{crc32c(f'{_NAME} {suffix} {place}'.encode()):08x}"


class ColdNote:
    """Writes the file `COLD` of a journal before a node writes its first object.

    Args:
        journal: directory of the journal.
        folders: the content of the file `COLD`.
        is_written: whether the file exists.
    """

    def __init__(self, journal: Path, folders: ColdFolders, *, is_written: bool) -> None:
        self.folders = folders
        self.is_written = is_written
        self._journal = journal

    def write(self, folder: ColdFolder) -> None:
        """Write the marker and the file `COLD`, unless they exist.

        They are written only once, for all nodes of the journal. If the mount of the place is
        missing later, nodes find an empty directory. A second marker would make them write their
        objects into that directory.

        Raises:
            ColdStoreError: the store cannot be reached.
            OSError: the file cannot be written.
        """
        if not self.is_written:
            folder.mark()
            note_folders(self._journal, self.folders)
            self.is_written = True


class ColdFolder:
    """The objects of one node. Every method blocks.

    A *marker* object shows that the right place is reached. Without it, the empty directory of a
    missing mount would look like an empty place.

    Args:
        place: a path or an S3 URL, as described at the top of this module.
        folder: folder of the node in the place.
        timeout_s: seconds after which a request to a store over the network fails.
    """

    def __init__(self, place: str, folder: str, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        self._is_local = "://" not in place
        self._folder = folder
        self._marker = f"{MARKER}-{folder.rpartition('-')[2]}"
        self._opened: tuple[FileSystem, str] | None = None

    def path(self, name: str) -> str:
        """Return the path of an object, for messages and for readers of files."""
        return f"{self._place.partition('?')[0].rstrip('/')}/{self._folder}/{name}"

    def _system(self) -> tuple[FileSystem, str]:
        """Return the file system, and the path of the place in it."""
        if self._opened is None:
            from pyarrow import fs

            if self._is_local:
                self._opened = fs.LocalFileSystem(), self._place.rstrip("/")
            else:
                parts = urlsplit(self._place)
                given = dict(parse_qsl(parts.query))
                system = fs.S3FileSystem(
                    connect_timeout=self._timeout_s,
                    request_timeout=self._timeout_s,
                    retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS),
                    endpoint_override=given.get("endpoint_override"),
                    scheme="http" if given.get("scheme") == "http" else "https",
                    region=given.get("region"),
                )
                self._opened = system, f"{parts.netloc}{parts.path.rstrip('/')}"
        return self._opened

    def list(self) -> list[tuple[str, int]]:
        """Return names and sizes of all objects.

        Raises:
            ColdStoreError: the store cannot be reached.
        """
        from pyarrow import fs

        self._check_marked()
        try:
            system, place = self._system()
            base = f"{place}/{self._folder}"
            selector = fs.FileSelector(base, allow_not_found=True, recursive=True)
            found: list[FileInfo] = system.get_file_info(selector)
        except OSError as error:
            raise ColdStoreError(str(error)) from error
        files = (info for info in found if info.type == fs.FileType.File)
        start = len(base) + 1
        return sorted((info.path[start:], info.size or 0) for info in files)

    def write(self, name: str, content: bytes) -> None:
        """Write an object durably. After an error the object may exist.

        Raises:
            ColdStoreError: the store cannot be reached, or has no room.
        """
        self._check_marked()
        self._write(f"{self._folder}/{name}", content)

    def _write(self, name: str, content: bytes) -> None:
        try:
            system, base = self._system()
            if not self._is_local:
                self._put(system, f"{base}/{name}", content)
                return
            path = Path(base, name)
            new = [folder for folder in path.parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(_TEMPORARY)
            self._put(system, str(temporary), content)
            descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)
            for folder in (path.parent, *(made.parent for made in new)):
                synced_directory(folder)
        except OSError as error:
            raise ColdStoreError(str(error)) from error

    @staticmethod
    def _put(system: FileSystem, path: str, content: bytes) -> None:
        with system.open_output_stream(path) as stream:
            stream.write(content)

    def mark(self) -> None:
        """Write the marker; called once, before the first object of a journal.

        Raises:
            ColdStoreError: the store cannot be reached.
        """
        self._write(self._marker, b"")

    def _check_marked(self) -> None:
        from pyarrow import fs

        try:
            system, base = self._system()
            found = system.get_file_info(f"{base}/{self._marker}").type
        except OSError as error:
            raise ColdStoreError(str(error)) from error
        if found != fs.FileType.File:
            raise ColdStoreError(f"{base}/{self._marker} is not there; is it mounted?")

    def open(self, name: str) -> OpenObject:
        """Open an object.

        Raises:
            MissingObjectError: the object does not exist.
            ColdStoreError: the store cannot be reached.
        """
        try:
            system, base = self._system()
            return OpenObject(system.open_input_file(f"{base}/{self._folder}/{name}"))
        except FileNotFoundError as error:
            self._check_marked()
            raise MissingObjectError(self.path(name)) from error
        except OSError as error:
            raise ColdStoreError(str(error)) from error

    def delete(self, name: str) -> None:
        """Delete an object, if it exists.

        Raises:
            ColdStoreError: the store cannot be reached.
        """
        try:
            system, base = self._system()
            system.delete_file(f"{base}/{self._folder}/{name}")
        except FileNotFoundError:
            self._check_marked()
        except OSError as error:
            raise ColdStoreError(str(error)) from error


class OpenObject:
    """An object whose parts can be read. Several threads may read at the same time, because each
    read states its offset.
    """

    def __init__(self, file: object) -> None:
        self._file = file
        try:
            self.size = int(file.size())  # type: ignore[attr-defined]
        except OSError as error:
            raise ColdStoreError(str(error)) from error

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on.

        Raises:
            ColdStoreError: the store cannot be reached.
        """
        try:
            return bytes(self._file.read_at(size, offset))  # type: ignore[attr-defined]
        except OSError as error:
            raise ColdStoreError(str(error)) from error
