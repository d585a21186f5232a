"""The server that lets other processes use the embedded metadata store (ARCHITECTURE 11).

The supervisor serves its `EmbeddedMetadataStore` at one address. Every other process of the cluster
asks through a `MetadataClient`.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias, assert_never

import msgspec
import structlog

from indilog.base.errors import IndilogError
from indilog.config import NodeConfig
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.links import MetadataConnection, MetadataListener
from indilog.runtime.metadata.messages import (
    Changed,
    CloseSession,
    CompareAndSet,
    Decided,
    DeleteKey,
    Get,
    ListPage,
    NextSequence,
    OpenSession,
    Page,
    Refused,
    Removed,
    Reply,
    Request,
    Sequence,
    SessionHeartbeat,
    SessionState,
    Unchanged,
    Value,
    Watch,
    WatchDirectory,
    encoder,
    requests,
)
from indilog.runtime.metadata.store import (
    Deleted,
    Listing,
    SessionExpiredError,
    Versioned,
    Write,
    Written,
)

_ITEM_BYTES: Final = 32
"""Bytes of one item of a page in addition to its key and its value."""

_AtOnce: TypeAlias = Get | CompareAndSet | DeleteKey | ListPage | NextSequence

_log = structlog.get_logger(__name__)


class MetadataServer:
    """Answers other processes' requests to an embedded store.

    Raises:
        ConfigError: the address cannot be bound, or needs keys that do not exist.
    """

    def __init__(self, store: EmbeddedMetadataStore, address: str, config: NodeConfig) -> None:
        self._store = store
        self._page_bytes = config.metadata.metadata_value_bytes_max
        self._waiting_max = config.metadata.metadata_watchers_max
        self._watch_s = config.metadata.metadata_timeout_s / 2
        self._answers: dict[tuple[MetadataConnection, int], asyncio.Task[None]] = {}
        self.ignored = 0
        """Number of messages that were not requests."""
        self._listener = MetadataListener(address, self._on_message, config)
        self.counts = self._listener.counts
        store.expire_in_time()  # sessions that the previous server process left

    async def close(self) -> None:
        """Stop answering. May be called again."""
        self._listener.close()
        tasks = list(self._answers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_message(self, client: MetadataConnection, message: bytes) -> None:
        try:
            request = requests.decode(message)
        except (ValueError, msgspec.DecodeError) as error:
            self.ignored += 1
            _log.warning("metadata request ignored", reason=f"not a request: {error}")
            return
        asked = (client, request.request)
        if asked in self._answers:
            return  # the client sent the request twice over one connection
        if len(self._answers) >= self._waiting_max:
            overload = f"{self._waiting_max} requests to the metadata store wait already."
            client.send(encoder.encode(Refused(request.request, overload, retryable=True)))
            return
        task = asyncio.create_task(self._answer(client, request))
        self._answers[asked] = task
        task.add_done_callback(lambda _: self._answers.pop(asked, None))

    async def _answer(self, client: MetadataConnection, request: Request) -> None:
        reply: Reply
        try:
            reply = await self._reply_to(request)
        except SessionExpiredError:
            reply = SessionState(request.request, is_alive=False)
        except IndilogError as error:
            reply = Refused(request.request, str(error), error.retryable)
        client.send(encoder.encode(reply))

    async def _reply_to(self, request: Request) -> Reply:
        match request:
            case Get() | ListPage() | CompareAndSet() | DeleteKey() | NextSequence():
                return await self._done(request)
            case Watch() | WatchDirectory():
                return await self._wait_for_change(request)
            case OpenSession() | SessionHeartbeat() | CloseSession():
                return await self._session_of(request)
            case unreachable:
                assert_never(unreachable)

    async def _done(self, request: _AtOnce) -> Reply:
        """Answer a request that needs no waiting."""
        number, store = request.request, self._store
        match request:
            case Get(key=key):
                return _value(number, await store.get(key))
            case ListPage(directory=directory, after=after):
                return self._page(number, await store.list_keys(directory), after)
            case CompareAndSet(_, key, value, expected_version, writer, session, is_ephemeral):
                write = Write(key, value, expected_version, is_ephemeral)
                outcome = await store.write(write, session=session, writer=writer)
                return Decided(number, isinstance(outcome, Written), outcome.version)
            case DeleteKey(key=key, expected_version=expected, session=session):
                deleted = await store.remove(key, expected, session=session)
                return Removed(number, 0 if isinstance(deleted, Deleted) else deleted.version)
            case NextSequence(key=key):
                return Sequence(number, await store.next_sequence(key))
            case unreachable:
                assert_never(unreachable)

    def _page(self, number: int, listing: Listing, after: str) -> Page:
        items: dict[str, tuple[bytes, int]] = {}
        used = 0
        for key in sorted(key for key in listing.items if key > after):
            found = listing.items[key]
            used += len(found.value) + len(key.encode()) + _ITEM_BYTES
            if items and used > self._page_bytes:
                return Page(number, items, listing.revision, is_last=False)
            items[key] = (found.value, found.version)
        return Page(number, items, listing.revision, is_last=True)

    async def _session_of(self, request: OpenSession | SessionHeartbeat | CloseSession) -> Reply:
        alive = True
        match request:
            case OpenSession(session=name, ttl_s=ttl_s):
                await self._store.open_session(name, ttl_s)
            case SessionHeartbeat(session=name):
                alive = await self._store.heartbeat(name)
            case CloseSession(session=name):
                await self._store.close_session(name)
                alive = False
            case unreachable:
                assert_never(unreachable)
        return SessionState(request.request, is_alive=alive)

    async def _wait_for_change(self, watch: Watch | WatchDirectory) -> Reply:
        number = watch.request
        try:
            async with asyncio.timeout(self._watch_s):
                if isinstance(watch, Watch):
                    return _value(number, await self._store.watch(watch.key, after=watch.after))
                after = watch.after
                return Changed(
                    number, await self._store.changed_directory(watch.directory, after=after)
                )
        except TimeoutError:
            return Unchanged(number)


def _value(request: int, found: Versioned | None) -> Value:
    return Value(request, found.value, found.version) if found else Value(request, b"", 0)
