"""The owner's side of a session with the metadata store (docs/decisions/0037).

Each store keeps sessions in its own way. All stores share the rule in this module: it decides when
an owner must stop relying on its session. `StoredSession` and `ZooKeeperSession` are subclasses of
`HeartbeatSession`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

from indilog.base.errors import IndilogError
from indilog.runtime.metadata.store import Conflict, Deleted, SessionExpiredError, Write, Written

_BELIEVED_SHARE: Final = 2 / 3
"""After the sending of an answered heartbeat, the owner relies on the session for this share of
`ttl_s`.

The rest of `ttl_s` covers two delays. First, clocks run at different speeds. Second, a ZooKeeper
follower forwards a heartbeat to its leader only after half a tick (a session has at least two
ticks).
"""
_HEARTBEATS_PER_TTL: Final = 6
_UNANSWERED_SHARE: Final = 1 / 3
"""Share of `ttl_s` after which the next heartbeat is sent, although the last one is unanswered."""

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


def boot_time_s() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps, and is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeartbeatSession(ABC):
    """A `MetadataSession` that sends heartbeats, and ends itself if they are not answered in time.

    A subclass defines how to send a heartbeat, how to write, and how to end the session. It calls
    `begin` once, when the store has the session.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._believed_until = 0.0
        self._closing: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, asked_at: float) -> None:
        """Send heartbeats from now on. The request that opened the session counts as the first one.

        Args:
            asked_at: `boot_time_s` before the request that opened the session was sent.
        """
        self._believed_until = asked_at + self.ttl_s * _BELIEVED_SHARE
        for work in (self._send_heartbeats(), self._end_in_time()):
            self._tasks.add(asyncio.create_task(work))

    def check(self) -> None:
        """See `MetadataSession.check`. The call reads the clock, so it also raises directly after
        the process was paused.

        Raises:
            SessionExpiredError: the session is over.
        """
        if not self._over.is_set() and boot_time_s() >= self._believed_until:
            self.expire("no heartbeat was answered in time")
        if self._over.is_set():
            raise SessionExpiredError(
                "The session with the metadata store is over; other processes may own its keys now."
            )

    async def wait_until_expired(self) -> None:
        """See `MetadataSession.wait_until_expired`."""
        await self._over.wait()

    async def create(self, key: str, value: bytes) -> Written | Conflict:
        """See `MetadataSession.create`."""
        return await self._while_alive(self._write(Write(key, value, 0, is_ephemeral=True)))

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """See `MetadataSession.compare_and_set`."""
        return await self._while_alive(self._write(Write(key, value, expected_version)))

    async def delete(self, key: str, *, expected_version: int) -> Deleted | Conflict:
        """See `MetadataSession.delete`."""
        return await self._while_alive(self._delete(key, expected_version))

    async def _while_alive(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a write. If the session ended before or during the write, raise
        `SessionExpiredError`.
        """
        writing, ending = asyncio.create_task(work), asyncio.create_task(self._over.wait())
        try:
            self.check()
            await asyncio.wait({writing, ending}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return writing.result()
        except SessionExpiredError:
            self.expire("the store has ended it")
            raise
        finally:
            writing.cancel()
            ending.cancel()
            await asyncio.gather(writing, ending, return_exceptions=True)

    async def close(self) -> None:
        """See `MetadataSession.close`."""
        if self._closing is None:
            self._over.set()
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(IndilogError):  # an unreachable store ends the session itself
            await self._end()

    def expire(self, reason: str) -> None:
        """End the session for its owner, at once."""
        if not self._over.is_set():
            _log.warning("the session with the metadata store is over", reason=reason)
            self._over.set()

    async def _send_heartbeats(self) -> None:
        pause_s = self.ttl_s / _HEARTBEATS_PER_TTL
        while not self._over.is_set():
            sent_at = boot_time_s()
            try:
                async with asyncio.timeout(self.ttl_s * _UNANSWERED_SHARE):
                    is_known = await self._heartbeat()
            except (TimeoutError, IndilogError) as error:
                _log.info("a heartbeat to the metadata store is unanswered", reason=str(error))
            else:
                if not is_known:
                    self.expire("the store has ended it")
                    return
                self._believed_until = sent_at + self.ttl_s * _BELIEVED_SHARE
            await asyncio.sleep(max(0.0, sent_at + pause_s - boot_time_s()))

    async def _end_in_time(self) -> None:
        """When the last answered heartbeat is too old, expire the session. Then end it in the
        store.
        """
        while not self._over.is_set():
            if (left_s := self._believed_until - boot_time_s()) <= 0:
                self.expire("no heartbeat was answered in time")
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._over.wait()
        # Without this call, a client library could still send heartbeats and so preserve keys that
        # have no owner.
        await self.close()

    @abstractmethod
    async def _heartbeat(self) -> bool:
        """Renew the session; return whether the store still knows it."""

    @abstractmethod
    async def _write(self, write: Write) -> Written | Conflict:
        """Set a key in the store, only if the store still knows the session.

        Raises:
            SessionExpiredError: the store does not know the session.
        """

    @abstractmethod
    async def _delete(self, key: str, expected_version: int) -> Deleted | Conflict:
        """Delete a key in the store, only if the store still knows the session."""

    @abstractmethod
    async def _end(self) -> None:
        """End the session in the store. Called once."""
