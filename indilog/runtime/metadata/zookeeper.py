"""The metadata store in ZooKeeper (docs/decisions/0040).

These znodes are below `zookeeper_root`, with percent-encoded names:

    keys/D/K       a key K of the directory D: the id of its last write, and its value (msgpack)
    keys/D         its data version counts the keys that were ever created in D; its data is the id
                   of the write that created the last key
    changes/D      its data version counts the changes in D by clients
    sequences/K    its data version is the last number of the sequence, at most 2^31 - 1
    sessions/S     exists until the session S ends

The version of a key is the `mzxid` of its znode: the number of the transaction that wrote it, which
only grows. But ZooKeeper's own conditional writes compare data versions, which restart with each
creation. So each write that expects a version also checks that no key was created in the directory
since the znode was read.

If a connection is lost, it is unknown whether its last transaction was committed. If that
transaction should have created a key and the key does not exist, another client may have deleted
the key. If the data of `keys/D` is the id of this write, the key was created. If several keys were
created meanwhile, the outcome is reported as unknown (docs/decisions/0092).
`cluster.metadata_opening` and `cluster.metadata_address` open the store, over a
`ZooKeeperConnection`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, unquote

import msgspec
from kazoo.client import TransactionRequest
from kazoo.exceptions import (
    BadVersionError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
    ZookeeperError,
)
from kazoo.security import OPEN_ACL_UNSAFE

from indilog.base.errors import (
    DataDirectoryError,
    OverloadedError,
    QuorumUnavailableError,
    TooLargeError,
)
from indilog.config import NodeConfig
from indilog.runtime.metadata.follower import Followers
from indilog.runtime.metadata.session import HeartbeatSession, boot_time_s
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
from indilog.runtime.metadata.zookeeper_connection import ZooKeeperConnection

_REQUEST_BYTES_MAX: Final = 1_000_000
"""Largest value in bytes. ZooKeeper drops the connection of a request above `jute.maxbuffer`, which
is 1,048,575 bytes by default.
"""
_MARK: Final = "="
"""First character of each name, so that no name is empty or a relative path. `quote` never returns
this character.
"""


_CHANGED: Final = (NoNodeError, NodeExistsError, BadVersionError)
"""Answers to a transaction: a znode has changed since it was read."""


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The data of a key's znode."""

    writer: str
    """Unique id of the write that set the value, by which a repetition is recognised."""
    value: bytes


class _Seen(NamedTuple):
    """A key as a watch sees it."""

    found: Versioned | None
    revision: int
    """The revision of the directory, read just before the key."""


class _State(NamedTuple):
    """The state of a key, and the state of its directory, which was read just before the key."""

    created: int
    """Number of keys ever created in the directory; -1: the directory does not exist."""
    creation: Written | None
    """The last creation in the directory, if the write that reads this state made it; otherwise
    None.
    """
    keys: int
    """Number of keys in the directory plus number of sequences."""
    node: _Node | None


class _Node(NamedTuple):
    writer: str
    found: Versioned
    data_version: int


class ZooKeeperMetadataStore:
    """A `MetadataStore` in ZooKeeper; created by `open`, and used on one event loop.

    `get` and `list_keys` are answered by one server, after it has caught up with the leader
    (`sync`). A leader that has lost its majority without noticing may answer with an older state,
    for at most `syncLimit` ticks. Compare-and-set is never affected.
    """

    def __init__(self, config: NodeConfig, connection: ZooKeeperConnection) -> None:
        self._config = config
        self._connection = connection
        self._client = connection.client
        self._root = _root_of(config)
        self._name = os.urandom(8).hex()
        self._numbers = count(1)
        self._followers = Followers(config.metadata.metadata_watchers_max)

    @classmethod
    async def open(cls, config: NodeConfig) -> Self:
        """Connect, and create the znodes above all keys.

        Raises:
            QuorumUnavailableError: no server of the ensemble answers.
            ConfigError: ZooKeeper refuses this client, or the configuration is incomplete.
        """
        connection = ZooKeeperConnection(config, session_s=config.metadata.metadata_session_s)
        await connection.open()
        store = cls(config, connection)
        try:
            await connection.decide(store._make_root)
        except BaseException:
            await store.close()
            raise
        return store

    async def __aenter__(self) -> Self:
        """Close the store on leaving."""
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Sessions have connections of their own. May be called again."""
        await self._followers.close()
        await self._connection.close()

    async def get(self, key: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_key(key, b"", self._config)
        return await self._connection.decide(partial(self._read, key))

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """See `MetadataStore.compare_and_set`."""
        return await self.write(self._connection, Write(key, value, expected_version))

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """See `MetadataStore.delete`."""
        return await self.remove(self._connection, key, expected_version)

    async def list_keys(self, directory: str) -> Listing:
        """See `MetadataStore.list_keys`."""
        check_directory(directory)
        return await self._connection.decide(partial(self._list, directory))

    async def next_sequence(self, key: str) -> int:
        """See `MetadataStore.next_sequence`."""
        check_key(key, b"", self._config)
        return await self._connection.decide(partial(self._increment, key))

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        """See `MetadataStore.watch`. All watches of one key share one watch of ZooKeeper."""
        check_key(key, b"", self._config)

        def is_other(seen: _Seen) -> bool:
            if seen.found is None:  # the key was deleted, unless the caller saw a newer state
                return after != 0 and seen.revision >= after
            return seen.found.version > after

        name = self._path_of(key)
        seen = await self._followers.wait_for(name, partial(self._read_armed, key), is_other)
        return seen.found

    async def watch_directory(self, directory: str, *, after: int) -> Listing:
        """See `MetadataStore.watch_directory`. All watches of one directory share two watches of
        ZooKeeper.
        """
        check_directory(directory)
        return await self._followers.wait_for(
            _directory_name(directory),
            partial(self._list_armed, directory),
            lambda listing: listing.revision > after,
        )

    async def session(self, ttl_s: float | None = None) -> ZooKeeperSession:
        """See `MetadataStore.session`. Each session has a connection of its own."""
        return await ZooKeeperSession.open(
            self, self._config, ttl_s or self._config.metadata.metadata_session_s
        )

    async def write(
        self, connection: ZooKeeperConnection, write: Write, *, session: str = ""
    ) -> Written | Conflict:
        """Set a key over a connection; see `MetadataStore.compare_and_set`.

        Args:
            connection: if the key is ephemeral, the ZooKeeper session of this connection owns it.
            write: the key, its new value and its expected version.
            session: the write takes effect only while this session exists; empty: no session is
                needed.

        Raises:
            SessionExpiredError: `session` has ended.
        """
        key, value = write.key, write.value
        check_key(key, value, self._config)
        if len(value) > _REQUEST_BYTES_MAX:
            raise TooLargeError("A metadata value", size=len(value), limit=_REQUEST_BYTES_MAX)
        writer = f"{self._name}-{next(self._numbers)}"
        data = msgspec.msgpack.encode(_Envelope(writer, value))
        unanswered: _State | None = None
        """The state before a transaction whose answer was lost with the connection."""

        async def attempt() -> Written | Conflict:
            nonlocal unanswered
            while True:
                state = await self._state(connection, key, writer)
                if state.node is not None and state.node.writer == writer:
                    return Written(state.node.found.version)
                if state.creation is not None:
                    return state.creation
                if unanswered is not None:
                    _check_outcome(unanswered, state)
                if (version := _version_of(state)) != write.expected_version:
                    return Conflict(version)
                change = _Change(connection.client, self._root, key, session)
                if state.node is None:
                    self._check_room(state)
                    is_first = state.created < 0
                    change.create(data, writer, is_first, is_ephemeral=write.is_ephemeral)
                else:
                    change.set(data, state.created, state.node.data_version)
                unanswered = state
                if (committed := await change.commit(connection)) is not None:
                    return Written(committed)
                unanswered = None

        return await connection.decide(attempt)

    async def remove(
        self,
        connection: ZooKeeperConnection,
        key: str,
        expected_version: int,
        *,
        session: str = "",
    ) -> Deleted | Conflict:
        """Delete a key over a connection; see `write` and `MetadataStore.delete`."""
        check_key(key, b"", self._config)

        async def attempt() -> Deleted | Conflict:
            while True:
                state = await self._state(connection, key)
                if state.node is None:
                    return Deleted()
                if state.node.found.version != expected_version:
                    return Conflict(state.node.found.version)
                change = _Change(connection.client, self._root, key, session)
                change.delete(state.created, state.node.data_version)
                if await change.commit(connection) is not None:
                    return Deleted()

        return await connection.decide(attempt)

    def _check_room(self, state: _State) -> None:
        if state.keys >= (limit := self._config.metadata.metadata_keys_max):
            raise OverloadedError(f"The metadata store is full: it holds {limit:,} keys.")

    async def _make_root(self) -> None:
        client = self._client
        [there] = await self._connection.request(partial(client.exists_async, self._root))
        if there is None:
            parts = self._root.strip("/").split("/")
            for i in range(1, len(parts)):  # other platforms may have their roots there too
                path = "/" + "/".join(parts[:i])
                create = partial(client.create_async, path, b"", acl=OPEN_ACL_UNSAFE)
                await self._connection.request(create)
            await self._connection.request(partial(client.create_async, self._root, b""))
        names = ("keys", "changes", "sequences", "sessions")
        await self._connection.request(
            *(partial(client.create_async, f"{self._root}/{name}", b"") for name in names),
            partial(client.get_children_async, f"{self._root}/keys"),
        )

    async def _read(self, key: str) -> Versioned | None:
        path = self._path_of(key)
        _, answer = await self._connection.request(
            partial(self._client.sync_async, path), partial(self._client.get_async, path)
        )
        return None if isinstance(answer, NoNodeError) else _node_of(path, answer).found

    async def _read_armed(self, key: str) -> _Seen:
        """Read a key, and arrange that its follower is notified of the next change."""
        path, name = self._path_of(key), _directory_name(directory_of(key))
        watcher = self._connection.watcher(self._followers.notify, path)

        async def attempt() -> _Seen:
            # The watch is set before the value is read, so no change between them is missed.
            _, _, changes, keys, answer = await self._connection.request(
                partial(self._client.sync_async, path),
                partial(self._client.exists_async, path, watch=watcher),
                partial(self._client.exists_async, f"{self._root}/changes/{name}"),
                partial(self._client.exists_async, f"{self._root}/keys/{name}"),
                partial(self._client.get_async, path),
            )
            revision = max(changes.mzxid, keys.pzxid) if changes and keys else 0
            if isinstance(answer, NoNodeError):
                return _Seen(None, revision)
            return _Seen(_node_of(path, answer).found, revision)

        return await self._connection.decide(attempt, unlimited=True)

    async def _list_armed(self, directory: str) -> Listing:
        name = _directory_name(directory)
        watcher = self._connection.watcher(self._followers.notify, name)
        return await self._connection.decide(
            partial(self._list, directory, watcher), unlimited=True
        )

    async def _list(self, directory: str, watcher: Callable[[Any], None] | None = None) -> Listing:
        """List a directory. If the directory changes meanwhile, start again.

        A change by a client changes `changes/D`. The end of a session changes the children of
        `keys/D`.
        """
        name = _directory_name(directory)
        keys, changes = f"{self._root}/keys/{name}", f"{self._root}/changes/{name}"
        await self._connection.request(partial(self._client.sync_async, changes))
        while True:
            before, children = await self._connection.request(
                partial(self._client.exists_async, changes, watch=watcher),
                partial(self._client.get_children_async, keys, watch=watcher, include_data=True),
            )
            if before is None or isinstance(children, NoNodeError):
                return Listing({}, 0)
            names, there = children
            paths = [f"{keys}/{child}" for child in names]
            *answers, after, still = await self._connection.request(
                *(partial(self._client.get_async, path) for path in paths),
                partial(self._client.exists_async, changes),
                partial(self._client.exists_async, keys),
            )
            if (before.mzxid, there.pzxid) == (after.mzxid, still.pzxid):
                items = {
                    directory + _name_of(child): _node_of(path, answer).found
                    for child, path, answer in zip(names, paths, answers, strict=True)
                }
                return Listing(items, max(before.mzxid, there.pzxid))

    async def _increment(self, key: str) -> int:
        path = f"{self._root}/sequences/{_MARK}{quote(key, safe='')}"
        while True:
            [answer] = await self._connection.request(partial(self._client.set_async, path, b""))
            if not isinstance(answer, NoNodeError):
                return int(answer.version)
            state = await self._state(self._connection, key)
            self._check_room(state)
            await self._connection.request(partial(self._client.create_async, path, b""))

    async def _state(self, connection: ZooKeeperConnection, key: str, writer: str = "") -> _State:
        """Read the directory of a key, and then the key, for the write with the id `writer`."""
        client, path = connection.client, self._path_of(key)
        _, directory, sequences, answer = await connection.request(
            partial(client.sync_async, path),
            partial(client.get_async, path.rpartition("/")[0]),
            partial(client.exists_async, f"{self._root}/sequences"),
            partial(client.get_async, path),
        )
        node = None if isinstance(answer, NoNodeError) else _node_of(path, answer)
        others = sequences.numChildren if sequences is not None else 0
        if isinstance(directory, NoNodeError):
            return _State(-1, None, others, node)
        creator, there = directory
        creation = Written(there.mzxid) if writer and creator == writer.encode() else None
        return _State(there.version, creation, there.numChildren + others, node)

    def _path_of(self, key: str) -> str:
        return _path_below(self._root, key)


class _Change:
    """One transaction that changes one key."""

    def __init__(self, client: Any, root: str, key: str, session: str) -> None:  # noqa: ANN401 kazoo
        name = _directory_name(directory_of(key))
        self._keys, self._changes = f"{root}/keys/{name}", f"{root}/changes/{name}"
        self._path = _path_below(root, key)
        self._request: Any = TransactionRequest(client)
        self._needs_session = bool(session)
        if session:
            self._request.check(f"{root}/sessions/{session}", -1)

    def create(
        self,
        data: bytes,
        writer: str,
        is_first: bool,  # noqa: FBT001
        *,
        is_ephemeral: bool,
    ) -> None:
        """Create the key. If it is the first key of its directory, also create the directory."""
        if is_first:
            self._request.create(self._keys, b"")
            self._request.create(self._changes, b"")
        self._request.create(self._path, data, ephemeral=is_ephemeral)
        self._request.set_data(self._keys, writer.encode())

    def set(self, data: bytes, created: int, data_version: int) -> None:
        """Set the key, unless it was changed or created again since it was read."""
        self._request.check(self._keys, created)
        self._request.set_data(self._path, data, data_version)

    def delete(self, created: int, data_version: int) -> None:
        """Delete the key, unless it changed since it was read."""
        self._request.check(self._keys, created)
        self._request.delete(self._path, data_version)

    async def commit(self, connection: ZooKeeperConnection) -> int | None:
        """Commit, and return the version of the key. None: nothing was changed, because the key has
        changed since it was read.

        Raises:
            SessionExpiredError: the session has ended.
        """
        self._request.set_data(self._changes, b"")
        [results] = await connection.request(self._request.commit_async)
        failed = [
            result
            for result in results
            if isinstance(result, ZookeeperError)
            and not isinstance(result, RolledBackError | RuntimeInconsistency)
        ]
        if not failed:
            return int(results[-1].mzxid)
        if self._needs_session and results[0] is failed[0]:
            raise SessionExpiredError("The session with ZooKeeper has expired.")
        if isinstance(failed[0], _CHANGED):
            return None
        raise failed[0]


class ZooKeeperSession(HeartbeatSession):
    """A `MetadataSession` in ZooKeeper: a connection of its own, with an ephemeral znode.

    When a ZooKeeper session is over, kazoo opens a new ZooKeeper session by itself. Writes over the
    new ZooKeeper session are refused, because each write checks the znode of this session.
    """

    def __init__(self, store: ZooKeeperMetadataStore, config: NodeConfig, ttl_s: float) -> None:
        super().__init__(ttl_s)
        self._store = store
        self._name = os.urandom(8).hex()
        self._path = f"{_root_of(config)}/sessions/{self._name}"
        self._connection = ZooKeeperConnection(
            config, session_s=ttl_s, on_lost=lambda: self.expire("ZooKeeper has ended it")
        )

    @classmethod
    async def open(cls, store: ZooKeeperMetadataStore, config: NodeConfig, ttl_s: float) -> Self:
        """Connect, and begin the session."""
        session = cls(store, config, ttl_s)
        await session._connection.open()
        try:
            asked_at = await session._connection.decide(session._create)
        except BaseException:
            await session._connection.close()
            raise
        session.ttl_s = session._connection.granted_s
        session.begin(asked_at)
        return session

    async def _create(self) -> float:
        asked_at = boot_time_s()
        client = self._connection.client
        await self._connection.request(
            partial(client.create_async, self._path, b"", ephemeral=True)
        )
        return asked_at

    async def _heartbeat(self) -> bool:
        """Ask the leader (`sync`), because a follower that is cut off still answers for a while."""
        client = self._connection.client

        async def attempt() -> bool:
            _, found = await self._connection.request(
                partial(client.sync_async, self._path), partial(client.exists_async, self._path)
            )
            return found is not None

        return await self._connection.decide(attempt)

    async def _write(self, write: Write) -> Written | Conflict:
        return await self._store.write(self._connection, write, session=self._name)

    async def _delete(self, key: str, expected_version: int) -> Deleted | Conflict:
        return await self._store.remove(self._connection, key, expected_version, session=self._name)

    async def _end(self) -> None:
        await self._connection.close()


def _version_of(state: _State) -> int:
    return state.node.found.version if state.node is not None else 0


def _check_outcome(unanswered: _State, state: _State) -> None:
    """Check that the transaction whose answer was lost did not create the key.

    Args:
        unanswered: the state before that transaction.
        state: the present state, in which another write made the last creation in the directory.

    Raises:
        QuorumUnavailableError: several keys were created meanwhile, so that the outcome is unknown.
    """
    was_possible = unanswered.node is None and state.node is None
    if was_possible and state.created - max(0, unanswered.created) > 1:
        raise QuorumUnavailableError(
            "The connection to ZooKeeper was lost while a key was created, and other clients have "
            "created keys since; the outcome is unknown."
        )


def _node_of(path: str, answer: Any) -> _Node:  # noqa: ANN401 of kazoo
    """Return the content of a znode.

    Raises:
        DataDirectoryError: this program did not write the znode.
    """
    data, stat = answer
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
    except msgspec.DecodeError as error:
        raise DataDirectoryError(
            f"The ZooKeeper node {path} was not written by this program ({error}); remove it, or "
            "choose another zookeeper_root."
        ) from error
    return _Node(envelope.writer, Versioned(envelope.value, stat.mzxid), stat.version)


def _root_of(config: NodeConfig) -> str:
    return "/" + config.metadata.zookeeper_root.strip("/")


def _directory_name(directory: str) -> str:
    """Return the name of a directory's znode; for the directory `""`, the mark alone.

    The slash of a directory is kept, because `""` and `/` differ.
    """
    return _MARK + quote(directory, safe="")


def _path_below(root: str, key: str) -> str:
    directory = directory_of(key)
    name = quote(key.removeprefix(directory), safe="")
    return f"{root}/keys/{_directory_name(directory)}/{_MARK}{name}"


def _name_of(child: str) -> str:
    return unquote(child.removeprefix(_MARK))
