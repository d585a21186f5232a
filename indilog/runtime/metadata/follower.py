"""Serves many watches of one key or directory with one read per change.

A follower reads the key or directory, and in the same request asks to be notified of the next
change. It publishes the state that it read, and waits for the notification. Each watch compares the
newest published state with the state that its caller has seen. So every watch gets the last state,
and nothing is queued, even if changes come fast. `ZooKeeperMetadataStore` uses `Followers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from indilog.base.errors import IndilogError, OverloadedError, QuorumUnavailableError

_T = TypeVar("_T")


class _Follower(Generic[_T]):
    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        self._read = read
        self.changed = asyncio.Event()
        self._last: asyncio.Future[_T] | None = None
        self._next = self._unread()
        self.watchers = 0
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            self.changed.clear()
            try:
                state = await self._read()
            except IndilogError as error:
                self.fail(error)
                return
            self._last, self._next = self._next, self._unread()
            self._last.set_result(state)
            await self.changed.wait()

    def fail(self, error: IndilogError) -> None:
        """Make all watches raise `error`. Only the first call has an effect."""
        self._last = self._next
        if not self._last.done():
            self._last.set_exception(error)

    @staticmethod
    def _unread() -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        # Retrieve the error, because no watch may be left to retrieve it when the read fails.
        future.add_done_callback(lambda done: done.exception())
        return future

    async def wait_for(self, is_wanted: Callable[[_T], bool]) -> _T:
        """Wait for a wanted state, and return it. The state that was read last is checked first."""
        seen: asyncio.Future[_T] | None = None
        while True:
            is_seen = self._last is None or self._last is seen
            seen = self._next if is_seen else self._last
            assert seen is not None, "each state has a next one"
            if is_wanted(state := await asyncio.shield(seen)):
                return state


class Followers:
    """The followers of a store, by the names of keys and directories."""

    def __init__(self, watchers_max: int) -> None:
        self._watchers_max = watchers_max
        self._followers: dict[str, _Follower[Any]] = {}

    async def wait_for(
        self, name: str, read: Callable[[], Awaitable[_T]], is_wanted: Callable[[_T], bool]
    ) -> _T:
        """Wait until the state of `name` is wanted, and return it.

        Args:
            name: name of the key or directory.
            read: reads it, and arranges that `notify` is called at its next change.
            is_wanted: whether a state ends the wait.

        Raises:
            OverloadedError: too many watches wait already.
        """
        if sum(follower.watchers for follower in self._followers.values()) >= self._watchers_max:
            raise OverloadedError(f"{self._watchers_max} watches wait already; ask again later.")
        follower = self._followers.get(name)
        if follower is None or follower.task.done():
            follower = self._followers[name] = _Follower(read)
        follower.watchers += 1
        try:
            state: _T = await follower.wait_for(is_wanted)
            return state
        finally:
            follower.watchers -= 1
            if not follower.watchers:
                follower.task.cancel()
                if self._followers.get(name) is follower:
                    del self._followers[name]

    def notify(self, name: str) -> None:
        """Make the follower of `name` read again, if `name` is watched."""
        if (follower := self._followers.get(name)) is not None:
            follower.changed.set()

    async def close(self) -> None:
        """Stop following. Watches that still wait raise `QuorumUnavailableError`."""
        followers = list(self._followers.values())
        for follower in followers:
            follower.task.cancel()
        await asyncio.gather(*(follower.task for follower in followers), return_exceptions=True)
        for follower in followers:
            follower.fail(QuorumUnavailableError("The metadata store was closed."))
