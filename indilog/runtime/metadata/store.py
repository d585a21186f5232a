"""The metadata store: the few small facts that a cluster agrees on outside its log (ARCHITECTURE
11).

The store keeps views, addresses and epochs for `indilog.runtime.cluster`. All stores have one
interface: versioned keys that change by compare-and-set, lists, watches, sequences, and sessions
with ephemeral keys. `embedded` keeps the store in one file, and `service` and `client` let other
processes use that file. `zookeeper` keeps the store in ZooKeeper.

A key is text of at most 256 bytes. The directory of a key is the part up to and including its last
`/`. So the directory of `nodes/storage-0` is `nodes/`, and the directory of `view` is `""`.
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

    Versions are above 0 and grow with each write of the key, even if the key was deleted meanwhile.
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
    """Nothing was changed: the key has `version`, not the expected version (0: the key does not
    exist).

    If a connection was lost meanwhile, the write may have taken effect before another client wrote
    the key.
    """

    version: int


class MetadataSession(Protocol):
    """A client's lease on its ephemeral keys, renewed by heartbeats; used on one event loop.

    Ephemeral keys belong to a session and vanish with it. The session ends in the store when it is
    closed, or `ttl_s` after its last heartbeat reached the store. For its owner, the session ends
    two thirds of `ttl_s` after the owner sent the last answered heartbeat. So the session ends for
    the owner first, even if the owner was paused or cannot reach the store. From then on every
    method raises `SessionExpiredError`.

    Clocks only decide when the owner stops. Ownership itself is proven in two other ways. First, a
    write through a session takes effect only while the store knows the session. Second, the version
    of an ephemeral key is greater than the version of every earlier holder's key. So other services
    can use the version as a fencing token.

    Raises:
        SessionExpiredError: the session is over.
        QuorumUnavailableError, TooLargeError, OverloadedError: as in `MetadataStore`.
    """

    ttl_s: float
    """Seconds that the store granted. They may be fewer or more than requested."""

    def check(self) -> None:
        """Raise `SessionExpiredError` if the session is over; never waits."""

    async def wait_until_expired(self) -> None:
        """Wait until the session is over for its owner."""

    async def create(self, key: str, value: bytes) -> Written | Conflict:
        """Create an ephemeral key, unless `key` exists."""

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """Set a key as `MetadataStore.compare_and_set` does, but only while the session lasts.

        An ephemeral key stays ephemeral, and still belongs to its session.
        """

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """Delete a key as `MetadataStore.delete` does, but only while the session lasts."""

    async def close(self) -> None:
        """End the session, and delete its keys. If the store is unreachable, it deletes the keys
        after `ttl_s`.

        May be called again, and may be called after the session expired.
        """


class MetadataStore(Protocol):
    """Versioned keys, lists, watches, sequences and sessions. All answered state is durable.

    Raises:
        QuorumUnavailableError: the store cannot be reached within `metadata_timeout_s`, or a lost
            connection hid the outcome of a creation. In both cases the outcome of a write is
            unknown.
        TooLargeError, OverloadedError: a limit is exceeded; nothing was changed.
        ConfigError: the key has an empty name, or the store refuses this client.
    """

    async def get(self, key: str) -> Versioned | None:
        """Return the newest value of `key`, linearizable; None: the key does not exist."""

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """Set `key` if its version is `expected_version` (0: if the key does not exist)."""

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """Delete `key` if its version is `expected_version`. If `key` does not exist, return
        `Deleted` too.
        """

    async def list_keys(self, directory: str) -> Listing:
        """Return the keys of a directory with their values, all as of one moment.

        Args:
            directory: ends in `/`, or is empty. Keys of its subdirectories are not listed.
        """

    async def next_sequence(self, key: str) -> int:
        """Return a number greater than all numbers that were ever returned for `key`. The first
        number is 1.

        If an answer is lost, its number is skipped. No number is repeated, even after a crash, so
        the numbers can serve as epochs. A sequence is no key, and cannot be deleted.
        """

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        """Wait until `key` has another version than `after` (0: the key does not exist). Return the
        value.

        Returns None if the key was deleted. Intermediate values may be skipped, but never the last
        value. The wait has no limit, even if the store is unreachable; the caller sets a deadline.
        """

    async def watch_directory(self, directory: str, *, after: int) -> Listing:
        """Wait until the revision of a directory is above `after`, and list it.

        Intermediate changes may be skipped, but never the last one. After a restart of the store an
        unchanged listing may be returned.
        """

    async def session(self, ttl_s: float | None = None) -> MetadataSession:
        """Open a session that ends `ttl_s` after its last heartbeat.

        Args:
            ttl_s: requested seconds; None: the setting `metadata_session_s`.
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
