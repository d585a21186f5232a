"""The metadata store: the few small facts that a cluster agrees on outside its log (ARCHITECTURE
11).

Views, addresses and epochs are kept here. All stores have one interface: versioned keys that change
by compare-and-set, lists, watches, sequences, and sessions with ephemeral keys. `embedded` keeps
the store in one file, `service` and `client` let other processes use it, and `zookeeper` keeps it
in ZooKeeper.

A key is text of at most 256 bytes. Its directory is the part up to and including its last `/`: the
directory of `nodes/storage-0` is `nodes/`, that of `view` is `""`.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from indilog.base.errors import ConfigError, IndilogError, TooLargeError
from indilog.config import NodeConfig

KEY_BYTES_MAX: Final = 256


class SessionExpiredError(IndilogError):
    """The session with the metadata store is over, and its ephemeral keys are gone or soon will be.

    Stop all work that relies on the session, and open a new one. The outcome of a write that was in
    flight when the session expired is unknown.
    """


class Versioned(NamedTuple):
    """A value and its version.

    Versions are above 0 and grow with each write of the key, also after it was deleted.
    """

    value: bytes
    version: int


class Listing(NamedTuple):
    """All keys of one directory at one moment."""

    items: dict[str, Versioned]
    revision: int
    """Grows with each change in the directory; 0: there was no change yet."""


class Write(NamedTuple):
    """A new value of a key that must have the expected version."""

    key: str
    value: bytes
    expected_version: int
    """0: the key must not exist."""
    is_ephemeral: bool = False
    """Whether a new key vanishes with the session that writes it."""


class Written(NamedTuple):
    """The value was set, and has this version."""

    version: int


class Deleted(NamedTuple):
    """The key does not exist (any more)."""


class Conflict(NamedTuple):
    """Nothing was changed: the key has this version, not the expected one (0: it does not exist).

    After a lost connection, the write may have taken effect before another client wrote the key.
    """

    version: int


class MetadataSession(Protocol):
    """A client's lease on its ephemeral keys, renewed by heartbeats; used on one event loop.

    Ephemeral keys belong to a session and vanish with it. The session ends `ttl_s` after its last
    heartbeat reached the store, or when it is closed. Its owner counts from the moment at which it
    sent the last answered heartbeat, and only two thirds of `ttl_s`. So the session ends for its
    owner first, also if the owner was paused or cannot reach the store. After that every method
    raises `SessionExpiredError`, permanently.

    Clocks only decide when the owner stops. Ownership itself is proven in two other ways: a write
    through a session takes effect only while the store knows the session. And the version of an
    ephemeral key is greater than that of every earlier holder, so other services can use it as a
    fencing token.

    Raises:
        SessionExpiredError: the session is over.
        QuorumUnavailableError, TooLargeError, OverloadedError: as in `MetadataStore`.
    """

    ttl_s: float
    """Seconds that the store granted, which may be less or more than requested."""

    def check(self) -> None:
        """Raise `SessionExpiredError` if the session is over; never waits."""

    async def wait_until_expired(self) -> None:
        """Wait until the session is over; returns at once when its owner must stop."""

    async def create(self, key: str, value: bytes) -> Written | Conflict:
        """Create an ephemeral key, unless `key` exists."""

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """Set a key as `MetadataStore.compare_and_set` does, only until the session ends.

        An ephemeral key stays ephemeral, and still belongs to its session.
        """

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """Delete a key as `MetadataStore.delete` does, only until the session ends."""

    async def close(self) -> None:
        """End the session; its keys are deleted now, or after `ttl_s` if the store is unreachable.

        May be called again, and after the session expired.
        """


class MetadataStore(Protocol):
    """Versioned keys, lists, watches, sequences and sessions. All answered state is durable.

    Raises:
        QuorumUnavailableError: the store cannot be reached within `metadata_timeout_s`, or a lost
            connection hid the outcome of a creation. The outcome of the write is then unknown.
        TooLargeError, OverloadedError: a limit is exceeded; nothing was changed.
        ConfigError: the key has an empty name, or the store refuses this client.
    """

    async def get(self, key: str) -> Versioned | None:
        """Return the newest value of `key`, linearizable; None: the key does not exist."""

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """Set `key` if its version is `expected_version` (0: if it does not exist)."""

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """Delete `key` if its version is `expected_version`, or if it does not exist anyway."""

    async def list_keys(self, directory: str) -> Listing:
        """Return the keys of a directory with their values, all as of one moment.

        Args:
            directory: ends in `/`, or is empty. Keys of its subdirectories are not listed.
        """

    async def next_sequence(self, key: str) -> int:
        """Return a number greater than all that were ever returned for `key`; the first is 1.

        Numbers may be skipped if an answer was lost. They are never repeated, also after a crash,
        so they can serve as epochs. A sequence is no key, and cannot be deleted.
        """

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        """Wait until `key` has another version than `after` (0: it does not exist); return it.

        Returns None if the key was deleted. Values in between may be skipped, but never the last
        one. The wait has no limit, also while the store is unreachable; the caller sets a deadline.
        """

    async def watch_directory(self, directory: str, *, after: int) -> Listing:
        """Wait until the revision of a directory is above `after`, and list it.

        As with `watch`, changes in between may be skipped. After a restart of the store a listing
        may be returned that did not change.
        """

    async def session(self, ttl_s: float | None = None) -> MetadataSession:
        """Open a session that ends `ttl_s` after its last heartbeat.

        Args:
            ttl_s: None: `metadata_session_s`.
        """


def check_key(key: str, value: bytes, config: NodeConfig) -> None:
    """Refuse a key without a name, and a key or value above its limit.

    Raises:
        ConfigError: the key is empty, or ends in `/`.
        TooLargeError: the key or value exceeds the limit in the message.
    """
    if (not directory_of(key) and not key) or key.endswith("/"):
        raise ConfigError(f"{key!r} is no key of the metadata store: it has no name.")
    check_directory(directory_of(key))
    key_bytes = len(key.encode())
    if key_bytes > KEY_BYTES_MAX:
        raise TooLargeError("A metadata key", size=key_bytes, limit=KEY_BYTES_MAX)
    if len(value) > config.metadata.metadata_value_bytes_max:
        limit = config.metadata.metadata_value_bytes_max
        raise TooLargeError("A metadata value", size=len(value), limit=limit)


def check_directory(directory: str) -> None:
    """Refuse a name that is no directory of keys.

    Raises:
        ConfigError: the name is not empty and does not end in `/`.
        TooLargeError: the name is longer than keys may be.
    """
    if directory and not directory.endswith("/"):
        raise ConfigError(f"{directory!r} is no directory of the metadata store: add a slash.")
    if len(directory.encode()) > KEY_BYTES_MAX:
        size = len(directory.encode())
        raise TooLargeError("A directory of metadata keys", size=size, limit=KEY_BYTES_MAX)


def directory_of(key: str) -> str:
    """Return the directory of `key`, with its slash; empty if the key has no slash."""
    before, slash, _ = key.rpartition("/")
    return before + slash
