"""The messages between the clients (`client`) and the server (`service`) of the embedded metadata
store.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec


class _Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: int
    """Number of the request, chosen by the client; the answer has the same number."""


class Get(_Request, frozen=True):
    """client → server: asks for the value of `key`."""

    key: str


class CompareAndSet(_Request, frozen=True):
    """client → server: set `key` if its version is `expected_version`; `writer` is the unique id of
    this write.
    """

    key: str
    value: bytes
    expected_version: int
    writer: str
    session: str = ""
    """The key is set only while this session is alive; empty: no session is needed."""
    is_ephemeral: bool = False
    """Whether a new key vanishes with the session."""


class DeleteKey(_Request, frozen=True, tag="Delete"):
    """client → server: delete `key` if its version is `expected_version`."""

    key: str
    expected_version: int
    session: str = ""
    """The key is deleted only while this session is alive; empty: no session is needed."""


class ListPage(_Request, frozen=True):
    """client → server: asks for the keys after `after` in `directory`."""

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


class SessionHeartbeat(_Request, frozen=True, tag="Heartbeat"):
    """client → server: the owner of the session is running."""

    session: str


class CloseSession(_Request, frozen=True):
    """client → server: end the session, and delete its keys."""

    session: str


Request: TypeAlias = (
    Get
    | CompareAndSet
    | DeleteKey
    | ListPage
    | NextSequence
    | Watch
    | WatchDirectory
    | OpenSession
    | SessionHeartbeat
    | CloseSession
)


class Value(_Request, frozen=True):
    """server → client: the value and version of the key; version 0: the key does not exist."""

    value: bytes
    version: int


class Decided(_Request, frozen=True):
    """server → client: whether the value was set, and the present version of the key."""

    written: bool
    version: int


class Removed(_Request, frozen=True):
    """server → client: the version of the key, which was not deleted; 0: the key does not exist."""

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
    """server → client: the next number of the sequence."""

    number: int


class Unchanged(_Request, frozen=True):
    """server → client: there is no change yet; the client asks again."""


class Refused(_Request, frozen=True):
    """server → client: the store raised an error with the message `reason`. If `retryable`, nothing
    was changed.
    """

    reason: str
    retryable: bool


Reply: TypeAlias = (
    Value | Decided | Removed | Page | Changed | SessionState | Sequence | Unchanged | Refused
)

encoder: Final = msgspec.msgpack.Encoder()
requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
replies: Final[msgspec.msgpack.Decoder[Reply]] = msgspec.msgpack.Decoder(Reply)
