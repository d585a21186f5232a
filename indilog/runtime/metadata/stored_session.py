"""Sessions of the embedded store and of its clients in other processes."""

from __future__ import annotations

import os
from typing import Protocol

from indilog.runtime.metadata.session import HeartbeatSession, boot_time_s
from indilog.runtime.metadata.store import Conflict, Deleted, Written


class SessionKeeper(Protocol):
    """A keeper of sessions: the embedded store, or a client of it."""

    async def open_session(self, name: str, ttl_s: float) -> None:
        """Open a session; may be repeated."""

    async def heartbeat(self, name: str) -> bool:
        """Renew a session; return whether it still existed."""

    async def close_session(self, name: str) -> None:
        """End a session, and delete its keys; may be repeated."""

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_version: int,
        session: str = "",
        is_ephemeral: bool = False,
    ) -> Written | Conflict:
        """Set a key, unless the session has ended."""

    async def delete(
        self, key: str, *, expected_version: int, session: str = ""
    ) -> Deleted | Conflict:
        """Delete a key, unless the session has ended."""


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
    """Open a session with a unique name."""
    name = os.urandom(8).hex()
    asked_at = boot_time_s()
    await keeper.open_session(name, ttl_s)
    session = StoredSession(keeper, name, ttl_s)
    session.begin(asked_at)
    return session
