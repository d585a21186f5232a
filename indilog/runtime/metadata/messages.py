"""What the clients and the server of the embedded metadata store say to each other, and the sockets
that carry it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec
import zmq

from indilog.config import NodeConfig

_FRAME_BYTES_OVER_VALUE: Final = 4096


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
    session: str = ""
    """Must be alive; empty: none needs to be."""
    is_ephemeral: bool = False
    """Whether a new key vanishes with the session."""


class Delete(_Request, frozen=True):
    """client → server: delete `key` if its version is `expected_version`."""

    key: str
    expected_version: int
    session: str = ""
    """Must be alive; empty: none needs to be."""


class ListPage(_Request, frozen=True):
    """client → server: which keys after `after` are in `directory`?"""

    directory: str
    after: str


class NextSequence(_Request, frozen=True):
    """client → server: asks for a number for `key` that was never given before."""

    key: str


class Watch(_Request, frozen=True):
    """client → server: asks for an answer when the version of `key` is above `after`."""

    key: str
    after: int


class WatchDirectory(_Request, frozen=True):
    """client → server: asks for an answer when the revision of `directory` is above `after`."""

    directory: str
    after: int


class OpenSession(_Request, frozen=True):
    """client → server: keep a session for `ttl_s` after each heartbeat."""

    session: str
    ttl_s: float


class Heartbeat(_Request, frozen=True):
    """client → server: the owner of the session lives."""

    session: str


class CloseSession(_Request, frozen=True):
    """client → server: end the session, and delete its keys."""

    session: str


Request: TypeAlias = (
    Get
    | CompareAndSet
    | Delete
    | ListPage
    | NextSequence
    | Watch
    | WatchDirectory
    | OpenSession
    | Heartbeat
    | CloseSession
)


class Value(_Request, frozen=True):
    """server → client: the value of the key and its version; version 0: it does not exist."""

    value: bytes
    version: int


class Decided(_Request, frozen=True):
    """server → client: whether the value was set, and the version of the key now."""

    written: bool
    version: int


class Removed(_Request, frozen=True):
    """server → client: the version that the key still has; 0: it does not exist (any more)."""

    version: int


class Page(_Request, frozen=True):
    """server → client: keys of a directory in order, with their values and versions."""

    items: dict[str, tuple[bytes, int]]
    revision: int
    is_last: bool


class Changed(_Request, frozen=True):
    """server → client: the revision of the directory."""

    revision: int


class SessionState(_Request, frozen=True):
    """server → client: whether the session is alive."""

    is_alive: bool


class Sequence(_Request, frozen=True):
    """server → client: the number."""

    number: int


class Unchanged(_Request, frozen=True):
    """server → client: nothing new yet; ask again."""


class Refused(_Request, frozen=True):
    """server → client: a limit or a failure, in one sentence; nothing was changed."""

    reason: str
    retryable: bool


Reply: TypeAlias = (
    Value | Decided | Removed | Page | Changed | SessionState | Sequence | Unchanged | Refused
)

encoder: Final = msgspec.msgpack.Encoder()
requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)


class WatchedSocket:
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
