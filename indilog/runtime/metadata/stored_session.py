"""Sessions of the embedded metadata store, under unique names.

Clients in other processes send the name of their session with each request that depends on it.
`EmbeddedMetadataStore` and `MetadataClient` are subclasses of `SessionKeeper`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod

from indilog.config import NodeConfig
from indilog.runtime.metadata.session import HeartbeatSession, boot_time_s
from indilog.runtime.metadata.store import Conflict, Deleted, Write, Written


class SessionKeeper(ABC):
    """The part of `MetadataStore` that the embedded store and its clients share."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """See `MetadataStore.compare_and_set`."""
        return await self.write(Write(key, value, expected_version))

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """See `MetadataStore.delete`."""
        return await self.remove(key, expected_version)

    async def session(self, ttl_s: float | None = None) -> StoredSession:
        """See `MetadataStore.session`. A session survives a restart of the store's process that is
        shorter than two thirds of `ttl_s`.
        """
        session = StoredSession(self, ttl_s or self._config.metadata.metadata_session_s)
        await session.open()
        return session

    @abstractmethod
    async def write(self, write: Write, *, session: str = "") -> Written | Conflict:
        """Set a key; see `MetadataStore.compare_and_set`.

        Args:
            write: the key, its new value and its expected version.
            session: the write takes effect only while this session is alive; empty: no session is
                needed.

        Raises:
            SessionExpiredError: the session has ended.
        """

    @abstractmethod
    async def remove(
        self, key: str, expected_version: int, *, session: str = ""
    ) -> Deleted | Conflict:
        """Delete a key; see `MetadataStore.delete`. `session` is as in `write`."""

    @abstractmethod
    async def open_session(self, name: str, ttl_s: float) -> None:
        """Open a session that ends `ttl_s` after its last heartbeat. A repeated call is a
        heartbeat.

        Raises:
            OverloadedError: the limit of sessions is reached.
        """

    @abstractmethod
    async def heartbeat(self, name: str) -> bool:
        """Renew a session for its full `ttl_s`; return whether it still existed."""

    @abstractmethod
    async def close_session(self, name: str) -> None:
        """End a session, and delete its keys; may be repeated."""


class StoredSession(HeartbeatSession):
    """A session that the embedded store keeps, under a unique name."""

    def __init__(self, keeper: SessionKeeper, ttl_s: float) -> None:
        super().__init__(ttl_s)
        self._keeper = keeper
        self._name = os.urandom(8).hex()

    async def open(self) -> None:
        """Open the session in the store, and send heartbeats from now on."""
        asked_at = boot_time_s()
        await self._keeper.open_session(self._name, self.ttl_s)
        self.begin(asked_at)

    async def _heartbeat(self) -> bool:
        return await self._keeper.heartbeat(self._name)

    async def _write(self, write: Write) -> Written | Conflict:
        return await self._keeper.write(write, session=self._name)

    async def _delete(self, key: str, expected_version: int) -> Deleted | Conflict:
        return await self._keeper.remove(key, expected_version, session=self._name)

    async def _end(self) -> None:
        await self._keeper.close_session(self._name)
