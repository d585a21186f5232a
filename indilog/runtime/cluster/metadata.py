"""The metadata store: the few small facts that a cluster agrees on outside its log (ARCHITECTURE
11).

Views, addresses and epochs are kept here: keys with versioned values that change by
compare-and-set, sequences that never give a number twice, and watches. This module has the
interface, and a store in one file on one machine; `metadata_service` lets other processes use it.
The store has no ephemeral nodes (heartbeats): no component detects failures through it yet.

File: magic "ILMD", version u8, CRC32C u32 of all else, body (msgpack). One flipped bit is corrected
by trying all bits; two valid files of this size differ in at least four bits. Each change writes a
new file, syncs it, renames it over the old one and syncs the directory. So a crash leaves the old
or the new contents, never a mixture. A file of zeros reserves the room for this, so that a process
can start on a full disk. These facts change a few times in a day.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, Protocol, Self

import msgspec
import structlog
from crc32c import crc32c

from indilog.base.errors import DataDirectoryError, DiskFullError, OverloadedError, TooLargeError
from indilog.config import KIB, NodeConfig
from indilog.runtime.journal.directory_lock import lock_directory
from indilog.runtime.journal.segment import NO_ROOM, synced_directory

MAGIC: Final = b"ILMD"
VERSION: Final = 2
_HEADER: Final = Struct("<4sBI")
_MENDED_BYTES_MAX: Final = 8 * KIB
_RESERVE_BYTES: Final = 256 * KIB
"""Bytes reserved on the disk, so that a platform on a full disk can still start."""
KEY_BYTES_MAX: Final = 256
_REMEDY: Final = "put it back from a copy of the whole directory, or choose another directory."


log = structlog.get_logger(__name__)


class Versioned(NamedTuple):
    """A value and how often it was written: 1, 2, ..."""

    value: bytes
    version: int


class Written(NamedTuple):
    """The value was set; this is its version now."""

    version: int


class Conflict(NamedTuple):
    """Nothing was set: the version is this one, not the expected one (0: there is no value)."""

    version: int


class MetadataStore(Protocol):
    """Versioned keys, sequences, watches. Everything in an answer is durable.

    Raises:
        QuorumUnavailableError: the store cannot be reached within `metadata_timeout_s`. The outcome
            of a write in flight is then unknown.
        TooLargeError, OverloadedError: a limit; nothing was changed.
    """

    async def get(self, key: str) -> Versioned | None:
        """Return the newest value of `key`, linearizable; None: it was never set."""

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """Set `key` if its version is `expected_version` (0: if it was never set)."""

    async def next_sequence(self, key: str) -> int:
        """Return a number greater than all that were ever returned for `key`; the first is 1.

        Numbers may be skipped, if an answer was lost. They are never repeated, also after a crash,
        so they can serve as epochs.
        """

    async def watch(self, key: str, *, after: int) -> Versioned:
        """Wait until the version of `key` is above `after`, and return the newest value.

        Values in between may be skipped. It waits without limit; the caller sets the deadline.
        """


def check_sizes(key: str, value: bytes, config: NodeConfig) -> None:
    """Refuse a key or a value that is over its limit.

    Raises:
        TooLargeError: it is; the limit is in the message.
    """
    key_bytes = len(key.encode())
    if key_bytes > KEY_BYTES_MAX:
        raise TooLargeError("A metadata key", size=key_bytes, limit=KEY_BYTES_MAX)
    if len(value) > config.metadata.metadata_value_bytes_max:
        limit = config.metadata.metadata_value_bytes_max
        raise TooLargeError("A metadata value", size=len(value), limit=limit)


class _Item(msgspec.Struct, frozen=True, array_like=True):
    value: bytes
    version: int
    writer: str
    """Identifies the write that set the value, so that a repetition is recognised; empty: writes
    are not repeated.
    """


class _Contents(msgspec.Struct, array_like=True):
    items: dict[str, _Item]
    sequences: dict[str, int]


class EmbeddedMetadataStore:
    """A `MetadataStore` in one file, for one process at a time.

    After a failed write it is unknown whether the disk has the old or the new contents. The store
    then refuses all writes until it is opened again, because a failed sync is never retried.

    Raises:
        DataDirectoryError: the file is in use by another process, damaged, or of a newer format.
    """

    def __init__(self, file: Path, config: NodeConfig) -> None:
        self._file = file
        self._config = config
        self._watchers: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._failed = False
        self._reserve = file.with_name(file.name + ".reserve")
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(file.with_name(file.name + ".lock"))
        try:
            self._contents = _read(file)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        """Close the store on leaving."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others open the file. May be called again."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def get(self, key: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_sizes(key, b"", self._config)
        item = self._contents.items.get(key)
        return Versioned(item.value, item.version) if item else None

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int, writer: str = ""
    ) -> Written | Conflict:
        """See `MetadataStore.compare_and_set`.

        With `writer`, a repetition of the write that set the present value answers `Written` again.
        If another client wrote in between, the repetition gets `Conflict`.
        """
        self._check(key, value)
        item = self._contents.items.get(key)
        version = item.version if item else 0
        if item and writer and item.writer == writer:
            return Written(version)
        if version != expected_version:
            return Conflict(version)
        items = {**self._contents.items, key: _Item(value, version + 1, writer)}
        self._write(_Contents(items, self._contents.sequences))
        self._wake(key)
        return Written(version + 1)

    async def next_sequence(self, key: str) -> int:
        """See `MetadataStore.next_sequence`."""
        self._check(key, b"")
        number = self._contents.sequences.get(key, 0) + 1
        sequences = {**self._contents.sequences, key: number}
        self._write(_Contents(self._contents.items, sequences))
        return number

    async def watch(self, key: str, *, after: int) -> Versioned:
        """See `MetadataStore.watch`."""
        self._check(key, b"")
        while (item := self._contents.items.get(key)) is None or item.version <= after:
            await self._changed(key)
        return Versioned(item.value, item.version)

    async def _changed(self, key: str) -> None:
        """Wait for the next write of `key`."""
        if sum(map(len, self._watchers.values())) >= self._config.metadata.metadata_watchers_max:
            raise OverloadedError(
                f"{self._config.metadata.metadata_watchers_max} watches wait already; "
                "ask again later."
            )
        waiter = asyncio.get_running_loop().create_future()
        self._watchers[key].add(waiter)
        try:
            await waiter
        finally:
            self._watchers[key].discard(waiter)
            if not self._watchers[key]:
                del self._watchers[key]

    def _wake(self, key: str) -> None:
        for waiter in self._watchers.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _check(self, key: str, value: bytes) -> None:
        """Refuse what is over a limit, before anything is changed."""
        check_sizes(key, value, self._config)
        known = key in self._contents.items or key in self._contents.sequences
        count = len(self._contents.items) + len(self._contents.sequences)
        if not known and count >= self._config.metadata.metadata_keys_max:
            raise OverloadedError(f"The metadata store is full: it holds {count:,} keys.")

    def _write(self, contents: _Contents) -> None:
        """Make `contents` durable, then current."""
        if self._failed or self._lock < 0:
            raise DataDirectoryError(f"{self._file} takes no more writes; start the process anew.")
        try:
            self._put_in_place(_encoded(contents))
        except OSError as error:
            self._failed = True
            raise DataDirectoryError(f"{self._file} cannot be written: {error}.") from error
        self._contents = contents

    def _put_in_place(self, data: bytes) -> None:
        """Replace the file; on a full disk, in the reserved room.

        Raises:
            DiskFullError: there is no room in spite of the reserve; nothing was changed.
        """
        new = self._file.with_name(self._file.name + ".new")
        try:
            _written(new, data)
        except OSError as error:
            new.unlink(missing_ok=True)
            if error.errno not in NO_ROOM:
                raise
            self._reserve.unlink(missing_ok=True)
            _written_or_full(new, data)
        new.replace(self._file)
        synced_directory(self._file.parent)
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Write the file that reserves room for the next write; on a full disk, do nothing."""
        if not self._reserve.exists():
            try:
                _written(self._reserve, bytes(_RESERVE_BYTES))
            except OSError:
                self._reserve.unlink(missing_ok=True)


def values_in(file: Path) -> dict[str, bytes]:
    """Return the values in the file of an embedded store, also while a process uses it; takes no
    lock.

    Raises:
        DataDirectoryError: the file is damaged, or of a newer format.
    """
    return {key: item.value for key, item in _read(file).items.items()}


def _encoded(contents: _Contents) -> bytes:
    body = msgspec.msgpack.encode(contents)
    return _HEADER.pack(MAGIC, VERSION, _crc_of(VERSION, body)) + body


def _crc_of(version: int, body: bytes | memoryview) -> int:
    return crc32c(body, crc32c(MAGIC + bytes((version,))))


def _is_intact(data: bytes | bytearray) -> bool:
    if len(data) < _HEADER.size:
        return False
    magic, version, crc = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    return bool(magic == MAGIC and version == VERSION and crc == _crc_of(version, body))


def _mended(data: bytes) -> bytes:
    """Return the intact file from which `data` differs in one bit; `data` if there is none."""
    if len(data) > _MENDED_BYTES_MAX or _is_intact(data):
        return data
    tried = bytearray(data)
    for bit in range(8 * len(tried)):
        tried[bit >> 3] ^= 1 << (bit & 7)
        if _is_intact(tried):
            return bytes(tried)
        tried[bit >> 3] ^= 1 << (bit & 7)
    return data


def _read(file: Path) -> _Contents:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return _Contents({}, {})
    if (right := _mended(data)) != data:
        log.warning("a flipped bit of the metadata put right", file=str(file))
        data = right
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        what = "is no metadata file" if data else "is empty"
        raise DataDirectoryError(f"{file} {what}; {_REMEDY}")
    _, version, crc = _HEADER.unpack_from(data)
    if version != VERSION:
        raise DataDirectoryError(
            f"{file} has format {version}; this program reads {VERSION}. "
            "Use the program that wrote it, or choose another directory."
        )
    body = memoryview(data)[_HEADER.size :]
    if _crc_of(version, body) != crc:
        raise DataDirectoryError(f"{file} is damaged (its checksum does not fit); {_REMEDY}")
    try:
        return msgspec.msgpack.decode(body, type=_Contents)
    except msgspec.DecodeError as error:
        raise DataDirectoryError(f"{file} is damaged ({error}); {_REMEDY}") from error


def _written(file: Path, data: bytes) -> None:
    """Write a file anew and sync it."""
    with file.open("wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())


def _written_or_full(file: Path, data: bytes) -> None:
    try:
        _written(file, data)
    except OSError as error:
        file.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        raise DiskFullError(
            f"There is no disk space left for {file}; make room and try again."
        ) from error
