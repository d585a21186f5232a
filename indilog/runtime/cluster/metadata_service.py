"""The metadata store for other processes: a server beside the embedded store, and its client
(ARCHITECTURE 11).

The first process of a cluster serves its store at one address (zmq ROUTER); every other process
asks through a `MetadataClient` (zmq DEALER). A request may be lost with a connection, so the client
resends it every `resend_s` until its deadline. Repeated requests are harmless: a read changes
nothing, a sequence skips a number, and a compare-and-set identifies its write.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count
from typing import Final, Self, TypeAlias, assert_never

import msgspec
import structlog
import zmq

from indilog.base.errors import (
    ConfigError,
    DataDirectoryError,
    IndilogError,
    OverloadedError,
    QuorumUnavailableError,
)
from indilog.config import NodeConfig
from indilog.runtime.cluster.metadata import (
    Conflict,
    EmbeddedMetadataStore,
    Versioned,
    Written,
    check_sizes,
)

_FRAME_BYTES_OVER_VALUE: Final = 4096
_CONNECT_S: Final = 0.01
"""Seconds before a request is resent that could not be sent because there was no connection."""

_log = structlog.get_logger(__name__)


class _Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: int
    """Chosen by the client; its answer has the same number."""


class Get(_Request, frozen=True):
    """client → server: what is the value of `key`?"""

    key: str


class CompareAndSet(_Request, frozen=True):
    """client → server: set `key` if its version is `expected_version`; `writer` names this write
    alone.
    """

    key: str
    value: bytes
    expected_version: int
    writer: str


class NextSequence(_Request, frozen=True):
    """client → server: asks for a number for `key` that was never given before."""

    key: str


class Watch(_Request, frozen=True):
    """client → server: asks for an answer when the version of `key` is above `after`."""

    key: str
    after: int


Request: TypeAlias = Get | CompareAndSet | NextSequence | Watch


class Value(_Request, frozen=True):
    """server → client: the value of the key and its version; version 0: it was never set."""

    value: bytes
    version: int


class Decided(_Request, frozen=True):
    """server → client: whether the value was set, and the version of the key now."""

    written: bool
    version: int


class Sequence(_Request, frozen=True):
    """server → client: the number."""

    number: int


class Unchanged(_Request, frozen=True):
    """server → client: nothing new yet; ask again."""


class Refused(_Request, frozen=True):
    """server → client: a limit or a failure, in one sentence; nothing was changed."""

    reason: str
    retryable: bool


Reply: TypeAlias = Value | Decided | Sequence | Unchanged | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class _WatchedSocket:
    """A zmq socket for a few small messages, watched by the event loop.

    After every receive *and* every send, the socket is polled for further messages: both may
    consume the event of its descriptor, which is edge triggered.
    """

    def __init__(
        self, kind: zmq.SocketType, on_message: Callable[[list[bytes]], None], config: NodeConfig
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.SNDHWM, config.metadata.metadata_watchers_max)
        self.socket.setsockopt(zmq.RCVHWM, config.metadata.metadata_watchers_max)
        limit = config.metadata.metadata_value_bytes_max + _FRAME_BYTES_OVER_VALUE
        self.socket.setsockopt(zmq.MAXMSGSIZE, limit)
        self._loop.add_reader(self.socket.fileno(), self._receive)

    def send(self, parts: list[bytes]) -> bool:
        """Send a message; return whether the other side can take it now. If not, the message is
        lost.
        """
        if self._context.closed:
            return False
        self._loop.call_soon(self._receive)
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> None:
        while not self._context.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_message(self.socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        """Stop at once. May be called again."""
        if not self._context.closed:
            self._loop.remove_reader(self.socket.fileno())
            self._context.destroy(linger=0)


class MetadataServer:
    """Answers other processes' requests to an embedded store.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, store: EmbeddedMetadataStore, address: str, config: NodeConfig) -> None:
        self._store = store
        self._waiting_max = config.metadata.metadata_watchers_max
        self._watch_s = config.metadata.metadata_timeout_s / 2
        self._answers: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self.ignored = 0
        """Frames that were no requests, or beyond what may wait."""
        self._link = _WatchedSocket(zmq.ROUTER, self._on_message, config)
        try:
            self._link.socket.bind(address)
        except zmq.ZMQError as error:
            self._link.close()
            raise ConfigError(f"Cannot serve metadata at {address}: {error}.") from error

    async def close(self) -> None:
        """Stop answering. May be called again."""
        self._link.close()
        tasks = list(self._answers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_message(self, parts: list[bytes]) -> None:
        try:
            client, frame = parts
            request = _requests.decode(frame)
        except (ValueError, msgspec.DecodeError) as error:
            self._ignore(f"not a request: {error}")
            return
        asked = (client, request.request)
        if asked in self._answers:
            return  # resent until then
        if len(self._answers) >= self._waiting_max:
            self._ignore("too many requests wait")
            return
        task = asyncio.create_task(self._answer(client, request))
        self._answers[asked] = task
        task.add_done_callback(lambda _: self._answers.pop(asked, None))

    def _ignore(self, reason: str) -> None:
        self.ignored += 1
        _log.warning("metadata request ignored", reason=reason)

    async def _answer(self, client: bytes, request: Request) -> None:
        try:
            reply = await self._reply_to(request)
        except IndilogError as error:
            reply = Refused(request.request, str(error), error.retryable)
        self._link.send([client, _encoder.encode(reply)])

    async def _reply_to(self, request: Request) -> Reply:
        match request:
            case Get():
                value = await self._store.get(request.key)
                return _value(request.request, value)
            case CompareAndSet():
                outcome = await self._store.compare_and_set(
                    request.key,
                    request.value,
                    expected_version=request.expected_version,
                    writer=request.writer,
                )
                return Decided(request.request, isinstance(outcome, Written), outcome.version)
            case NextSequence():
                number = await self._store.next_sequence(request.key)
                return Sequence(request.request, number)
            case Watch():
                return await self._watched(request)
            case unreachable:
                assert_never(unreachable)

    async def _watched(self, watch: Watch) -> Reply:
        try:
            async with asyncio.timeout(self._watch_s):
                value = await self._store.watch(watch.key, after=watch.after)
        except TimeoutError:
            return Unchanged(watch.request)
        return _value(watch.request, value)


def _value(request: int, found: Versioned | None) -> Value:
    return Value(request, found.value, found.version) if found else Value(request, b"", 0)


class MetadataClient:
    """A `MetadataStore` that asks a `MetadataServer`; made and used on one event loop."""

    def __init__(self, address: str, config: NodeConfig) -> None:
        self._address = address
        self._config = config
        self._name = os.urandom(8).hex()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._link = _WatchedSocket(zmq.DEALER, self._on_message, config)
        try:
            self._link.socket.connect(address)
        except zmq.ZMQError as error:
            self._link.close()
            raise ConfigError(f"{address} is no address of a metadata store: {error}.") from error

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
        check_sizes(key, b"", self._config)
        match await self._asked(Get(next(self._numbers), key)):
            case Value(version=0):
                return None
            case Value(value=value, version=version):
                return Versioned(value, version)
            case reply:
                raise self._unexpected(reply)

    async def compare_and_set(
        self, key: str, value: bytes, *, expected_version: int
    ) -> Written | Conflict:
        """See `MetadataStore.compare_and_set`.

        It also returns `Conflict` if the value was written, the answer was lost, and another client
        wrote before the repetition arrived.
        """
        check_sizes(key, value, self._config)
        number = next(self._numbers)
        writer = f"{self._name}-{number}"
        match await self._asked(CompareAndSet(number, key, value, expected_version, writer)):
            case Decided(written=written, version=version):
                return Written(version) if written else Conflict(version)
            case reply:
                raise self._unexpected(reply)

    async def next_sequence(self, key: str) -> int:
        """See `MetadataStore.next_sequence`."""
        check_sizes(key, b"", self._config)
        match await self._asked(NextSequence(next(self._numbers), key)):
            case Sequence(number=number):
                return number
            case reply:
                raise self._unexpected(reply)

    async def watch(self, key: str, *, after: int) -> Versioned:
        """See `MetadataStore.watch`. A watch survives restarts of the server."""
        check_sizes(key, b"", self._config)
        while True:
            try:
                reply = await self._asked(Watch(next(self._numbers), key, after))
            except QuorumUnavailableError:
                continue
            if isinstance(reply, Value):
                return Versioned(reply.value, reply.version)

    async def _asked(self, request: Request) -> Reply:
        """Send `request`, and resend it until the answer or the deadline."""
        limit = self._config.metadata.metadata_watchers_max
        if len(self._waiting) >= limit:
            raise OverloadedError(f"{limit} requests to the metadata store wait already.")
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.request] = answered
        frame = [_encoder.encode(request)]
        try:
            async with asyncio.timeout(self._config.metadata.metadata_timeout_s):
                while not answered.done():
                    sent = self._link.send(frame)
                    pause_s = self._config.messages.resend_s if sent else _CONNECT_S
                    await asyncio.wait([answered], timeout=pause_s)
        except TimeoutError:
            waited_s = self._config.metadata.metadata_timeout_s
            raise QuorumUnavailableError(
                f"The metadata store at {self._address} did not answer for {waited_s:g} s."
            ) from None
        finally:
            del self._waiting[request.request]
        reply = answered.result()
        if isinstance(reply, Refused):
            raise _error(reply)
        return reply

    def _unexpected(self, reply: Reply) -> QuorumUnavailableError:
        return QuorumUnavailableError(
            f"The metadata store at {self._address} answered {type(reply).__name__}, "
            "which is no answer to that; is it of the same version?"
        )

    def _on_message(self, parts: list[bytes]) -> None:
        try:
            reply = _replies.decode(parts[-1])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("metadata reply ignored", reason=str(error))
            return
        answered = self._waiting.get(reply.request)
        if answered is not None and not answered.done():
            answered.set_result(reply)


def _error(refused: Refused) -> IndilogError:
    """Return the error that the store raised at the server's side."""
    if refused.retryable:
        return OverloadedError(refused.reason)
    return DataDirectoryError(refused.reason)
