"""The metadata store in one file on one machine, for one process at a time (ARCHITECTURE 11).

The module `service` lets other processes use the store. The store has one revision, which each
change of keys increments. The version of a key is the revision of its last write. So a key that was
deleted and created again has a greater version. The file also has the sessions and their keys. It
also has the ids of the last writes whose values were replaced or deleted, so that a resent write is
not applied again (docs/decisions/0092).

Opening the store renews every session for its full `ttl_s`, because no heartbeat could reach the
closed store.

File: magic "ILMD", version u8, CRC32C u32 of all other bytes, body (msgpack). One flipped bit is
corrected by trying all bits, in files of at most `_CORRECTED_BYTES_MAX`. Up to that size, two files
with valid CRCs differ in at least four bits, so only one correction fits.

Each change writes a new file, syncs it, renames it over the old one and syncs the directory. So a
crash leaves the old or the new contents, never a mixture. Such a change is fast enough for facts
that change a few times a day. Each start must write the file, because a process takes an epoch. So
a second file, of zeros, reserves the room for one more write. When the disk is full, the second
file is deleted.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final, Self

import msgspec
import structlog
from crc32c import crc32c

from indilog.base.errors import (
    DataDirectoryError,
    DiskFullError,
    IndilogError,
    OverloadedError,
)
from indilog.base.room_reserve import NO_ROOM, RoomReserve
from indilog.config import KIB, NodeConfig
from indilog.runtime.journal.directory_lock import lock_directory
from indilog.runtime.journal.segment import synced_directory
from indilog.runtime.metadata.session import boot_time_s
from indilog.runtime.metadata.store import (
    Conflict,
    Deleted,
    Listing,
    SessionExpiredError,
    Versioned,
    Write,
    Written,
    check_directory,
    check_key,
    directory_of,
)
from indilog.runtime.metadata.stored_session import SessionKeeper

MAGIC: Final = b"ILMD"
VERSION: Final = 4
_VERSIONS_READ: Final = (2, 3, VERSION)
"""File versions that can be read. Version 2 had no revision, sessions or ephemeral keys. Versions 2
and 3 had no superseded writes.
"""
_HEADER: Final = Struct("<4sBI")
_CORRECTED_BYTES_MAX: Final = 8 * KIB
_RESERVE_BYTES: Final = 256 * KIB
"""Size of the file that reserves room. A start on a full disk deletes it to write its epoch."""
_SUPERSEDED_MAX: Final = 64
"""Number of superseded writes that are remembered. A client resends a write for at most
`metadata_timeout_s`. In that time all processes of a platform write only a few keys.
"""
_EXPIRE_AGAIN_S: Final = 1.0
"""Seconds until the next attempt to write the end of a session, after a full disk."""
_REMEDY: Final = "put it back from a copy of the whole directory, or choose another directory."


log = structlog.get_logger(__name__)


class _Item(msgspec.Struct, frozen=True, array_like=True):
    value: bytes
    version: int
    writer: str
    """Unique id of the write that set the value. A repetition of that write has the same id, and is
    not applied again. Empty: the writer never repeats this write.
    """
    session: str = ""
    """The session with which an ephemeral key vanishes; empty: the key is not ephemeral."""


class _Contents(msgspec.Struct, array_like=True):
    items: dict[str, _Item]
    sequences: dict[str, int]
    revision: int = 0
    """Number of changes of keys so far. The key that was written last has this version."""
    sessions: dict[str, float] = msgspec.field(default_factory=dict)
    """`ttl_s` of each session that has not ended."""
    superseded: dict[str, int] = msgspec.field(default_factory=dict)
    """The last writes whose values were replaced or deleted, oldest first: `writer` and version."""


class EmbeddedMetadataStore(SessionKeeper):
    """A `MetadataStore` in one file, for one process at a time.

    After a failed write or sync it is unknown whether the disk has the old or the new contents. A
    retried sync may report success although data was lost. So the store refuses all writes until it
    is opened again and has read the disk. After `DiskFullError` nothing was changed, and further
    writes are accepted.

    Raises:
        DataDirectoryError: the file is in use by another process, damaged, or of a newer format.
    """

    def __init__(
        self, file: Path, config: NodeConfig, clock: Callable[[], float] = boot_time_s
    ) -> None:
        super().__init__(config)
        self._file = file
        self._clock = clock
        self._watchers: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._failed = False
        self._expiry: asyncio.TimerHandle | None = None
        self._reserve = RoomReserve(file.with_name(file.name + ".reserve"), _RESERVE_BYTES)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(file.with_name(file.name + ".lock"))
        try:
            self._contents = _read(file)
        except BaseException:
            os.close(self._lock)
            raise
        self._changed_at: dict[str, int] = {}
        """The revision of each directory that changed since the store was opened."""
        self._opened_at = self._contents.revision
        self._ends_at = {name: clock() + ttl_s for name, ttl_s in self._contents.sessions.items()}
        """When each session expires unless a heartbeat arrives."""

    def __enter__(self) -> Self:
        """Close the store on leaving."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, so that another process may open it. May be called again."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def get(self, key: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_key(key, b"", self._config)
        self._expire_due()
        return self._found(key)

    async def write(
        self, write: Write, *, session: str = "", writer: str = ""
    ) -> Written | Conflict:
        """See `SessionKeeper.write`.

        Args:
            write: the key, its new value and its expected version.
            session: the write takes effect only while this session is alive; empty: no session is
                needed.
            writer: a unique id of this write. A repetition returns `Written` again, even if the
                value was replaced or deleted since. After 64 further replaced or deleted values,
                the write is no longer remembered.
        """
        key = write.key
        self._check(key, write.value)
        self._check_session(session)
        item = self._contents.items.get(key)
        version = item.version if item else 0
        if item and writer and item.writer == writer:
            return Written(version)
        if writer in self._contents.superseded:
            return Written(self._contents.superseded[writer])
        if version != write.expected_version:
            return Conflict(version)
        owner = item.session if item else session if write.is_ephemeral else ""
        new = _Item(write.value, self._contents.revision + 1, writer, owner)
        self._replace({**self._contents.items, key: new}, [key])
        return Written(new.version)

    def replace(self, key: str, value: bytes) -> None:
        """Set `key` without comparing its version. Sessions and repeated writes are ignored, so
        only commands that run while the platform is stopped may call this.
        """
        self._check(key, value)
        new = _Item(value, self._contents.revision + 1, "", "")
        self._replace({**self._contents.items, key: new}, [key])

    async def remove(
        self, key: str, expected_version: int, *, session: str = ""
    ) -> Deleted | Conflict:
        """See `SessionKeeper.remove`."""
        check_key(key, b"", self._config)
        self._expire_due()
        self._check_session(session)
        item = self._contents.items.get(key)
        if item is None:
            return Deleted()
        if item.version != expected_version:
            return Conflict(item.version)
        self._replace({k: v for k, v in self._contents.items.items() if k != key}, [key])
        return Deleted()

    async def list_keys(self, directory: str) -> Listing:
        """See `MetadataStore.list_keys`."""
        check_directory(directory)
        self._expire_due()
        items = {
            key: Versioned(item.value, item.version)
            for key, item in self._contents.items.items()
            if directory_of(key) == directory
        }
        return Listing(items, self._revision_of(directory))

    async def next_sequence(self, key: str) -> int:
        """See `MetadataStore.next_sequence`."""
        self._check(key, b"")
        number = self._contents.sequences.get(key, 0) + 1
        sequences = {**self._contents.sequences, key: number}
        self._write(msgspec.structs.replace(self._contents, sequences=sequences))
        return number

    def raise_sequence(self, key: str, number: int) -> None:
        """Raise the sequence of `key`, so that it returns only numbers above `number`."""
        self._check(key, b"")
        if number > self._contents.sequences.get(key, 0):
            sequences = {**self._contents.sequences, key: number}
            self._write(msgspec.structs.replace(self._contents, sequences=sequences))

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        """See `MetadataStore.watch`."""
        check_key(key, b"", self._config)
        self._expire_due()
        while _version_of(found := self._found(key)) == after:
            await self._wait_for_change(key)
        return found

    async def watch_directory(self, directory: str, *, after: int) -> Listing:
        """See `MetadataStore.watch_directory`."""
        await self.changed_directory(directory, after=after)
        return await self.list_keys(directory)

    async def changed_directory(self, directory: str, *, after: int) -> int:
        """Wait until the revision of a directory is above `after`; return it."""
        check_directory(directory)
        self._expire_due()
        while (revision := self._revision_of(directory)) <= after:
            await self._wait_for_change(directory + "/")  # no key ends in a slash
        return revision

    async def open_session(self, name: str, ttl_s: float) -> None:
        """See `SessionKeeper.open_session`."""
        self._expire_due()
        if name not in self._contents.sessions:
            if len(self._contents.sessions) >= self._config.metadata.metadata_sessions_max:
                limit = self._config.metadata.metadata_sessions_max
                raise OverloadedError(f"The metadata store has {limit:,} sessions already.")
            sessions = {**self._contents.sessions, name: ttl_s}
            self._write(msgspec.structs.replace(self._contents, sessions=sessions))
        self._ends_at[name] = self._clock() + ttl_s
        self.expire_in_time()

    async def heartbeat(self, name: str) -> bool:
        """See `SessionKeeper.heartbeat`."""
        self._expire_due()
        if name not in self._ends_at:
            return False
        self._ends_at[name] = self._clock() + self._contents.sessions[name]
        return True

    async def close_session(self, name: str) -> None:
        """See `SessionKeeper.close_session`."""
        self._end_sessions({name} & self._ends_at.keys())

    def expire_in_time(self) -> None:
        """Set a timer on the running event loop. The timer ends each session that gets no heartbeat
        for its `ttl_s`, and is then set again.
        """
        if self._expiry is not None:
            self._expiry.cancel()  # a new session may end before the others
            self._expiry = None
        if self._ends_at and self._lock >= 0:
            pause_s = max(0.0, min(self._ends_at.values()) - self._clock())
            self._expiry = asyncio.get_running_loop().call_later(pause_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry = None
        try:
            self._expire_due()
        except IndilogError as error:
            log.warning("the end of a session cannot be written", reason=str(error))
            if not self._failed:  # the disk is full
                loop = asyncio.get_running_loop()
                self._expiry = loop.call_later(_EXPIRE_AGAIN_S, self._on_expiry)
        else:
            self.expire_in_time()

    def _expire_due(self) -> None:
        """End the expired sessions. Called before any answer that depends on sessions."""
        if self._ends_at:
            now = self._clock()
            self._end_sessions({name for name, end in self._ends_at.items() if end <= now})

    def _end_sessions(self, names: AbstractSet[str]) -> None:
        if not names:
            return
        items = self._contents.items
        gone = [key for key, item in items.items() if item.session in names]
        left = {name: ttl for name, ttl in self._contents.sessions.items() if name not in names}
        self._replace({k: v for k, v in items.items() if v.session not in names}, gone, left)
        for name in names:
            del self._ends_at[name]

    def _check_session(self, name: str) -> None:
        if name and name not in self._ends_at:
            raise SessionExpiredError("The session with the metadata store has expired.")

    def _found(self, key: str) -> Versioned | None:
        item = self._contents.items.get(key)
        return Versioned(item.value, item.version) if item else None

    def _revision_of(self, directory: str) -> int:
        return self._changed_at.get(directory, self._opened_at)

    def _replace(
        self,
        items: dict[str, _Item],
        changed: Sequence[str],
        sessions: dict[str, float] | None = None,
    ) -> None:
        """Replace the items, and wake the watches of the changed keys and their directories."""
        before = self._contents
        revision = before.revision + 1
        kept = before.sessions if sessions is None else sessions
        superseded = _superseded_by(before, changed)
        self._write(_Contents(items, before.sequences, revision, kept, superseded))
        for key in changed:
            self._changed_at[directory_of(key)] = revision
            self._wake(key)
        for directory in {directory_of(key) for key in changed}:
            self._wake(directory + "/")

    async def _wait_for_change(self, watched: str) -> None:
        """Wait for the next write of the key `watched`. If `watched` is the name of a directory and
        a slash, wait for the next write of any key in that directory.
        """
        if sum(map(len, self._watchers.values())) >= self._config.metadata.metadata_watchers_max:
            raise OverloadedError(
                f"{self._config.metadata.metadata_watchers_max} watches wait already; "
                "ask again later."
            )
        waiter = asyncio.get_running_loop().create_future()
        self._watchers[watched].add(waiter)
        try:
            await waiter
        finally:
            self._watchers[watched].discard(waiter)
            if not self._watchers[watched]:
                del self._watchers[watched]

    def _wake(self, watched: str) -> None:
        for waiter in self._watchers.get(watched, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _check(self, key: str, value: bytes) -> None:
        """Refuse a write that would exceed a limit, before anything is changed."""
        check_key(key, value, self._config)
        self._expire_due()
        known = key in self._contents.items or key in self._contents.sequences
        count = len(self._contents.items) + len(self._contents.sequences)
        if not known and count >= self._config.metadata.metadata_keys_max:
            raise OverloadedError(f"The metadata store is full: it holds {count:,} keys.")

    def _write(self, contents: _Contents) -> None:
        """Make `contents` durable, then current."""
        if self._failed or self._lock < 0:
            raise DataDirectoryError(f"{self._file} takes no more writes; restart the process.")
        try:
            self._put_in_place(_encode(contents))
        except OSError as error:
            self._failed = True
            raise DataDirectoryError(f"{self._file} cannot be written: {error}.") from error
        self._contents = contents

    def _put_in_place(self, data: bytes) -> None:
        """Replace the file. On a full disk, use the reserved room.

        Raises:
            DiskFullError: there is no room in spite of the reserve; nothing was changed.
        """
        new = self._file.with_name(self._file.name + ".new")
        try:
            _write_file(new, data)
        except OSError as error:
            new.unlink(missing_ok=True)
            if error.errno not in NO_ROOM:
                raise
            self._reserve.release()
            _written_or_full(new, data)
        new.replace(self._file)
        synced_directory(self._file.parent)
        with suppress(OSError):  # the next write tries again
            self._reserve.keep()


def _version_of(found: Versioned | None) -> int:
    return found.version if found else 0


def _superseded_by(before: _Contents, changed: Sequence[str]) -> dict[str, int]:
    """Return the superseded writes after a change of the keys `changed`."""
    replaced = [item for key in changed if (item := before.items.get(key)) and item.writer]
    writes = [*before.superseded.items(), *((item.writer, item.version) for item in replaced)]
    return dict(writes[-_SUPERSEDED_MAX:])


def values_in(file: Path) -> dict[str, bytes]:
    """Return the values in the file of an embedded store. The call takes no lock, so it also works
    while a process uses the file.

    Raises:
        DataDirectoryError: the file is damaged, or of a newer format.
    """
    return {key: item.value for key, item in _read(file).items.items()}


def _encode(contents: _Contents) -> bytes:
    body = msgspec.msgpack.encode(contents)
    return _HEADER.pack(MAGIC, VERSION, _crc_of(VERSION, body)) + body


def _crc_of(version: int, body: bytes | memoryview) -> int:
    return crc32c(body, crc32c(MAGIC + bytes((version,))))


def _is_intact(data: bytes | bytearray) -> bool:
    if len(data) < _HEADER.size:
        return False
    magic, version, crc = _HEADER.unpack_from(data)
    body = memoryview(data)[_HEADER.size :]
    return bool(magic == MAGIC and version in _VERSIONS_READ and crc == _crc_of(version, body))


def _correct_bit(data: bytes) -> bytes:
    """Return the intact file that differs from `data` in one bit; `data` if there is none."""
    if len(data) > _CORRECTED_BYTES_MAX or _is_intact(data):
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
    if (right := _correct_bit(data)) != data:
        log.warning("a flipped bit of the metadata was corrected", file=str(file))
        data = right
    if len(data) < _HEADER.size or data[:4] != MAGIC:
        what = "is no metadata file" if data else "is empty"
        raise DataDirectoryError(f"{file} {what}; {_REMEDY}")
    _, version, crc = _HEADER.unpack_from(data)
    if version not in _VERSIONS_READ:
        raise DataDirectoryError(
            f"{file} has format {version}; this program reads {VERSION}. "
            "Use the program that wrote it, or choose another directory."
        )
    body = memoryview(data)[_HEADER.size :]
    if _crc_of(version, body) != crc:
        raise DataDirectoryError(f"{file} is damaged (its checksum does not fit); {_REMEDY}")
    try:
        contents = msgspec.msgpack.decode(body, type=_Contents)
    except msgspec.DecodeError as error:
        raise DataDirectoryError(f"{file} is damaged ({error}); {_REMEDY}") from error
    # A file of version 2 has no revision, and each key's version counts the writes of that key. The
    # revision must not be below any of these versions, so that later versions are greater.
    newest = max((item.version for item in contents.items.values()), default=0)
    return msgspec.structs.replace(contents, revision=max(contents.revision, newest))


def _write_file(file: Path, data: bytes) -> None:
    """Write a new file, or replace the content of an existing one, and sync it."""
    with file.open("wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())


def _written_or_full(file: Path, data: bytes) -> None:
    try:
        _write_file(file, data)
    except OSError as error:
        file.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        raise DiskFullError(
            f"There is no disk space left for {file}; make room and try again."
        ) from error
