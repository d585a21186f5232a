"""The client of the embedded metadata store, for other processes (ARCHITECTURE 11).

The server is in `service`. A request may be lost with its connection, so each new connection
(`links`) carries all unanswered requests again. A repeated request is harmless:

- A repeated read changes nothing, and a repeated request for a sequence number skips a number.
- A compare-and-set has a unique id of its write. The server remembers the id. So a repeated request
  gets the result of the original request, even if another client has deleted the key since.
- A key that was deleted stays deleted.
- Opening a session again is a heartbeat, and closing it again does nothing.

A directory is listed in pages. The client starts again if the directory changed between two pages.
Each process of nodes has a `MetadataClient`, which `cluster.metadata_address` creates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Self, TypeVar

import msgspec
import structlog

from indilog.base.errors import (
    DataDirectoryError,
    OverloadedError,
    QuorumUnavailableError,
)
from indilog.config import NodeConfig
from indilog.runtime.metadata import messages
from indilog.runtime.metadata.links import MetadataLink
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
)
from indilog.runtime.metadata.stored_session import SessionKeeper

_Reply = TypeVar("_Reply", bound=messages.Reply)
_log = structlog.get_logger(__name__)


class _Asked(NamedTuple):
    frame: bytes
    answered: asyncio.Future[messages.Reply]


class MetadataClient(SessionKeeper):
    """A `MetadataStore` that asks a `MetadataServer`; created and used on one event loop.

    The base class `SessionKeeper` adds compare-and-set, delete and sessions to the methods here.

    Raises:
        ConfigError: the address is invalid, or needs keys that do not exist.
    """

    def __init__(self, address: str, config: NodeConfig) -> None:
        super().__init__(config)
        self._address = address
        self._name = os.urandom(8).hex()
        self._numbers = count(1)
        self._waiting: dict[int, _Asked] = {}
        self._link = MetadataLink(address, self._on_message, self._unanswered, config)

    async def __aenter__(self) -> Self:
        """Close the client on leaving."""
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop at once. Requests in flight fail at their deadline. May be called again."""
        self._link.close()

    async def get(self, key: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_key(key, b"", self._config)
        return _found(await self._ask(messages.Get(next(self._numbers), key), messages.Value))

    async def write(self, write: Write, *, session: str = "") -> Written | Conflict:
        """See `SessionKeeper.write`."""
        check_key(write.key, write.value, self._config)
        number = next(self._numbers)
        writer = f"{self._name}-{number}"
        key, value, expected, is_ephemeral = write
        request = messages.CompareAndSet(
            number, key, value, expected, writer, session, is_ephemeral
        )
        reply = await self._ask(request, messages.Decided)
        return Written(reply.version) if reply.written else Conflict(reply.version)

    async def remove(
        self, key: str, expected_version: int, *, session: str = ""
    ) -> Deleted | Conflict:
        """See `SessionKeeper.remove`."""
        check_key(key, b"", self._config)
        request = messages.DeleteKey(next(self._numbers), key, expected_version, session)
        reply = await self._ask(request, messages.Removed)
        return Conflict(reply.version) if reply.version else Deleted()

    async def list_keys(self, directory: str) -> Listing:
        """See `MetadataStore.list_keys`."""
        check_directory(directory)
        try:
            async with asyncio.timeout(self._config.metadata.metadata_timeout_s):
                while (listing := await self._list_once(directory)) is None:
                    pass
        except TimeoutError:
            raise QuorumUnavailableError(
                f"The metadata keys of {directory!r} changed while they were listed; try again."
            ) from None
        return listing

    async def _list_once(self, directory: str) -> Listing | None:
        """List a directory; None: it changed between two pages."""
        items: dict[str, Versioned] = {}
        revision: int | None = None
        while True:
            after = max(items, default="")
            request = messages.ListPage(next(self._numbers), directory, after)
            page = await self._ask(request, messages.Page)
            if revision is not None and page.revision != revision:
                return None
            revision = page.revision
            items |= {key: Versioned(*found) for key, found in page.items.items()}
            if page.is_last:
                return Listing(items, revision)

    async def next_sequence(self, key: str) -> int:
        """See `MetadataStore.next_sequence`."""
        check_key(key, b"", self._config)
        request = messages.NextSequence(next(self._numbers), key)
        return (await self._ask(request, messages.Sequence)).number

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        """See `MetadataStore.watch`. A watch survives restarts of the server."""
        check_key(key, b"", self._config)
        return _found(
            await self._wait_for_change(
                lambda number: messages.Watch(number, key, after), messages.Value
            )
        )

    async def watch_directory(self, directory: str, *, after: int) -> Listing:
        """See `MetadataStore.watch_directory`."""
        check_directory(directory)
        while True:
            await self._wait_for_change(
                lambda number: messages.WatchDirectory(number, directory, after), messages.Changed
            )
            with contextlib.suppress(QuorumUnavailableError):
                return await self.list_keys(directory)

    async def _wait_for_change(
        self,
        request: Callable[[int], messages.Watch | messages.WatchDirectory],
        expected: type[_Reply],
    ) -> _Reply:
        """Ask until there is a change, without a time limit. The server may be unreachable
        meanwhile.
        """
        while True:
            with contextlib.suppress(QuorumUnavailableError):
                reply = await self._request(request(next(self._numbers)))
                if not isinstance(reply, messages.Unchanged):
                    break
        return self._check_reply(reply, expected)

    async def open_session(self, name: str, ttl_s: float) -> None:
        """See `SessionKeeper.open_session`."""
        request = messages.OpenSession(next(self._numbers), name, ttl_s)
        await self._ask(request, messages.SessionState)

    async def heartbeat(self, name: str) -> bool:
        """See `SessionKeeper.heartbeat`."""
        request = messages.SessionHeartbeat(next(self._numbers), name)
        return (await self._ask(request, messages.SessionState)).is_alive

    async def close_session(self, name: str) -> None:
        """See `SessionKeeper.close_session`."""
        request = messages.CloseSession(next(self._numbers), name)
        await self._ask(request, messages.SessionState)

    async def _ask(self, request: messages.Request, expected: type[_Reply]) -> _Reply:
        """Ask the server; return its answer, or raise the error that the answer reports."""
        return self._check_reply(await self._request(request), expected)

    async def _request(self, request: messages.Request) -> messages.Reply:
        """Send `request`, and wait for its answer until the deadline."""
        limit = self._config.metadata.metadata_watchers_max
        if len(self._waiting) >= limit:
            raise OverloadedError(f"{limit} requests to the metadata store wait already.")
        answered: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        asked = self._waiting[request.request] = _Asked(messages.encoder.encode(request), answered)
        try:
            self._link.send(asked.frame)
            async with asyncio.timeout(self._config.metadata.metadata_timeout_s):
                return await answered
        except TimeoutError:
            waited_s = self._config.metadata.metadata_timeout_s
            raise QuorumUnavailableError(
                f"The metadata store at {self._address} did not answer for {waited_s:g} s."
            ) from None
        finally:
            del self._waiting[request.request]

    def _check_reply(self, reply: messages.Reply, expected: type[_Reply]) -> _Reply:
        """Return a reply of the expected kind.

        Raises:
            SessionExpiredError: the session of the request has ended.
            OverloadedError, DataDirectoryError: raised by the store in the server.
        """
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, messages.SessionState):
            raise SessionExpiredError("The session with the metadata store has expired.")
        if isinstance(reply, messages.Refused):
            raise (OverloadedError if reply.retryable else DataDirectoryError)(reply.reason)
        raise QuorumUnavailableError(
            f"The metadata store at {self._address} answered {type(reply).__name__}, "
            "which does not answer the request; does it run the same version?"
        )

    def _unanswered(self) -> list[bytes]:
        return [asked.frame for asked in self._waiting.values()]

    def _on_message(self, message: bytes) -> None:
        try:
            reply = messages.replies.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("metadata reply ignored", reason=str(error))
            return
        asked = self._waiting.get(reply.request)
        if asked is not None and not asked.answered.done():
            asked.answered.set_result(reply)


def _found(reply: messages.Value) -> Versioned | None:
    return Versioned(reply.value, reply.version) if reply.version else None
