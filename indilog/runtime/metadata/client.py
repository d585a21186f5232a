"""The client of the embedded metadata store, for other processes (ARCHITECTURE 11).

A request may be lost with a connection, so each new connection carries the unanswered ones again.
Repeated requests are harmless: a read changes nothing, a sequence skips a number, a compare-and-set
identifies its write, and a deleted key stays deleted.

A directory is listed in pages. The client starts again if the directory changed between two pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, Self

import msgspec
import structlog

from indilog.base.errors import (
    DataDirectoryError,
    IndilogError,
    OverloadedError,
    QuorumUnavailableError,
)
from indilog.config import NodeConfig
from indilog.runtime.metadata.links import MetadataLink
from indilog.runtime.metadata.messages import (
    Changed,
    CloseSession,
    CompareAndSet,
    Decided,
    Delete,
    Get,
    Heartbeat,
    ListPage,
    NextSequence,
    OpenSession,
    Page,
    Refused,
    Removed,
    Reply,
    Request,
    Sequence,
    SessionState,
    Unchanged,
    Value,
    Watch,
    WatchDirectory,
    encoder,
    replies,
)
from indilog.runtime.metadata.store import (
    Conflict,
    Deleted,
    Listing,
    SessionExpiredError,
    Versioned,
    Written,
    check_directory,
    check_key,
)
from indilog.runtime.metadata.stored_session import StoredSession, opened_session

_log = structlog.get_logger(__name__)


class _Asked(NamedTuple):
    frame: bytes
    answered: asyncio.Future[Reply]


class MetadataClient:
    """A `MetadataStore` that asks a `MetadataServer`; made and used on one event loop.

    Raises:
        ConfigError: it is no such address, or needs keys that are not there.
    """

    def __init__(self, address: str, config: NodeConfig) -> None:
        self._address = address
        self._config = config
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
        """Stop at once; requests in flight fail at their deadline. May be called again."""
        self._link.close()

    async def get(self, key: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_key(key, b"", self._config)
        match await self._asked(Get(next(self._numbers), key)):
            case Value(version=0):
                return None
            case Value(value=value, version=version):
                return Versioned(value, version)
            case reply:
                raise self._unexpected(reply)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_version: int,
        session: str = "",
        is_ephemeral: bool = False,
    ) -> Written | Conflict:
        """See `MetadataStore.compare_and_set` and, for `session`, `EmbeddedMetadataStore`.

        Raises:
            SessionExpiredError: `session` is not alive.
        """
        check_key(key, value, self._config)
        number = next(self._numbers)
        writer = f"{self._name}-{number}"
        request = CompareAndSet(number, key, value, expected_version, writer, session, is_ephemeral)
        match await self._asked(request):
            case Decided(written=written, version=version):
                return Written(version) if written else Conflict(version)
            case reply:
                raise self._unexpected(reply)

    async def delete(
        self, key: str, *, expected_version: int, session: str = ""
    ) -> Deleted | Conflict:
        """See `MetadataStore.delete` and, for `session`, `EmbeddedMetadataStore`."""
        check_key(key, b"", self._config)
        match await self._asked(Delete(next(self._numbers), key, expected_version, session)):
            case Removed(version=version):
                return Conflict(version) if version else Deleted()
            case reply:
                raise self._unexpected(reply)

    async def list_keys(self, directory: str) -> Listing:
        """See `MetadataStore.list_keys`."""
        check_directory(directory)
        try:
            async with asyncio.timeout(self._config.metadata.metadata_timeout_s):
                while (listing := await self._listed_once(directory)) is None:
                    pass
        except TimeoutError:
            raise QuorumUnavailableError(
                f"The metadata keys of {directory!r} changed while they were listed; try again."
            ) from None
        return listing

    async def _listed_once(self, directory: str) -> Listing | None:
        """List a directory; None: it changed between two pages."""
        items: dict[str, Versioned] = {}
        revision: int | None = None
        while True:
            after = max(items, default="")
            match await self._asked(ListPage(next(self._numbers), directory, after)):
                case Page() as page:
                    if revision is not None and page.revision != revision:
                        return None
                    revision = page.revision
                    items |= {key: Versioned(*found) for key, found in page.items.items()}
                    if page.is_last:
                        return Listing(items, revision)
                case reply:
                    raise self._unexpected(reply)

    async def next_sequence(self, key: str) -> int:
        """See `MetadataStore.next_sequence`."""
        check_key(key, b"", self._config)
        match await self._asked(NextSequence(next(self._numbers), key)):
            case Sequence(number=number):
                return number
            case reply:
                raise self._unexpected(reply)

    async def watch(self, key: str, *, after: int) -> Versioned | None:
        """See `MetadataStore.watch`. A watch survives restarts of the server."""
        check_key(key, b"", self._config)
        reply = await self._watched(lambda number: Watch(number, key, after))
        if not isinstance(reply, Value):
            raise self._unexpected(reply)
        return Versioned(reply.value, reply.version) if reply.version else None

    async def watch_directory(self, directory: str, *, after: int) -> Listing:
        """See `MetadataStore.watch_directory`."""
        check_directory(directory)
        while True:
            reply = await self._watched(lambda number: WatchDirectory(number, directory, after))
            if not isinstance(reply, Changed):
                raise self._unexpected(reply)
            with contextlib.suppress(QuorumUnavailableError):
                return await self.list_keys(directory)

    async def _watched(self, request: Callable[[int], Watch | WatchDirectory]) -> Reply:
        """Ask until there is a change, however long the server is unreachable."""
        while True:
            with contextlib.suppress(QuorumUnavailableError):
                reply = await self._asked(request(next(self._numbers)))
                if not isinstance(reply, Unchanged):
                    return reply

    async def session(self, ttl_s: float | None = None) -> StoredSession:
        """See `MetadataStore.session`. The session survives a restart of the server that is shorter
        than two thirds of `ttl_s`.
        """
        return await opened_session(self, ttl_s or self._config.metadata.metadata_session_s)

    async def open_session(self, name: str, ttl_s: float) -> None:
        """See `EmbeddedMetadataStore.open_session`."""
        await self._session_is_alive(OpenSession(next(self._numbers), name, ttl_s))

    async def heartbeat(self, name: str) -> bool:
        """See `EmbeddedMetadataStore.heartbeat`."""
        return await self._session_is_alive(Heartbeat(next(self._numbers), name))

    async def close_session(self, name: str) -> None:
        """See `EmbeddedMetadataStore.close_session`."""
        await self._session_is_alive(CloseSession(next(self._numbers), name))

    async def _session_is_alive(self, request: OpenSession | Heartbeat | CloseSession) -> bool:
        match await self._asked(request):
            case SessionState(is_alive=is_alive):
                return is_alive
            case reply:
                raise self._unexpected(reply)

    async def _asked(self, request: Request) -> Reply:
        """Send `request`, and wait for its answer until the deadline."""
        limit = self._config.metadata.metadata_watchers_max
        if len(self._waiting) >= limit:
            raise OverloadedError(f"{limit} requests to the metadata store wait already.")
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        asked = self._waiting[request.request] = _Asked(encoder.encode(request), answered)
        try:
            self._link.send(asked.frame)
            async with asyncio.timeout(self._config.metadata.metadata_timeout_s):
                reply = await answered
        except TimeoutError:
            waited_s = self._config.metadata.metadata_timeout_s
            raise QuorumUnavailableError(
                f"The metadata store at {self._address} did not answer for {waited_s:g} s."
            ) from None
        finally:
            del self._waiting[request.request]
        if isinstance(reply, Refused):
            raise _error(reply)
        if isinstance(reply, SessionState) and isinstance(request, CompareAndSet | Delete):
            raise SessionExpiredError("The session with the metadata store has expired.")
        return reply

    def _unanswered(self) -> list[bytes]:
        return [asked.frame for asked in self._waiting.values()]

    def _unexpected(self, reply: Reply) -> QuorumUnavailableError:
        return QuorumUnavailableError(
            f"The metadata store at {self._address} answered {type(reply).__name__}, "
            "which does not answer the request; does it run the same version?"
        )

    def _on_message(self, message: bytes) -> None:
        try:
            reply = replies.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("metadata reply ignored", reason=str(error))
            return
        asked = self._waiting.get(reply.request)
        if asked is not None and not asked.answered.done():
            asked.answered.set_result(reply)


def _error(refused: Refused) -> IndilogError:
    """Return the error that the store raised in the server."""
    if refused.retryable:
        return OverloadedError(refused.reason)
    return DataDirectoryError(refused.reason)
