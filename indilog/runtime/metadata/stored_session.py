"""Sessions of the embedded store and of its clients in other processes."""

from __future__ import annotations

import os
from typing import Protocol

from indilog.runtime.metadata.session import HeartbeatSession, boot_time_s
from indilog.runtime.metadata.store import Conflict, Deleted, Written


class SessionKeeper(Protocol):
    """What keeps sessions: the embedded store, or the client that asks it."""

    async def open_session(self, name: str, ttl_s: float) -> None:
        """Keep a session; may be repeated."""

    async def heartbeat(self, name: str) -> bool:
        """Prolong it; return whether it was still alive."""

    async def close_session(self, name: str) -> None:
        """End it, and delete its keys; may be repeated."""

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_version: int,
        session: str = "",
        is_ephemeral: bool = False,
    ) -> Written | Conflict:
        """Set a key while the session lives."""

    async def delete(
        self, key: str, *, expected_version: int, session: str = ""
    ) -> Deleted | Conflict:
        """Delete a key while the session lives."""


class StoredSession(HeartbeatSession):
    """A session that the embedded store keeps."""

    def __init__(self, keeper: SessionKeeper, name: str, ttl_s: float) -> None:
        super().__init__(ttl_s)
        self._keeper = keeper
        self._name = name

    async def _heartbeat(self) -> bool:
        return await self._keeper.heartbeat(self._name)

    async def _write(
        self, key: str, value: bytes, expected_version: int, *, is_ephemeral: bool
    ) -> Written | Conflict:
        return await self._keeper.compare_and_set(
            key,
            value,
            expected_version=expected_version,
            session=self._name,
            is_ephemeral=is_ephemeral,
        )

    async def _delete(self, key: str, expected_version: int) -> Deleted | Conflict:
        return await self._keeper.delete(key, expected_version=expected_version, session=self._name)

    async def _end(self) -> None:
        await self._keeper.close_session(self._name)


async def opened_session(keeper: SessionKeeper, ttl_s: float) -> StoredSession:
    """Open a session with a name that no other has."""
    name = os.urandom(8).hex()
    asked_at = boot_time_s()
    await keeper.open_session(name, ttl_s)
    session = StoredSession(keeper, name, ttl_s)
    session.begin(asked_at)
    return session
