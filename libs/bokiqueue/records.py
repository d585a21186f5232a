"""The records of BokiQueue: commands, checkpoints and settings.

The commands of a shard have the shard's tag, so the sub-stream of this tag is the shard's whole
history. Commands that can make a message ready also have the queue's tag `pushed`, so that one read
waits for all of them. Settings and checkpoints have separate tags. `indilog.sdk.record_format`
defines the frame of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from bokiqueue.errors import QueueSettingsError, QueueVersionError
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 1
_FORMAT: Final = RecordFormat(b"\xb0Q", VERSION, of="BokiQueue", error=QueueVersionError)
SHARDS_MAX: Final = 1024
PRIORITY_MAX: Final = 9
TRIES_MAX: Final = 1000
SECONDS_MAX: Final = 366.0 * 86_400
"""Seconds of the longest delay or lease (366 days)."""
_TAG_PREFIX: Final = "queue:"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX) - len(":checkpoint:1023")

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]


class PushMessage(msgspec.Struct, frozen=True, array_like=True, tag="push"):
    """A message. It becomes ready `delay_s` seconds after this record, and a dead letter after
    `tries_max` deliveries without an acknowledgement.
    """

    data: bytes
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
    delay_s: _Seconds
    tries_max: Annotated[int, msgspec.Meta(ge=1, le=TRIES_MAX)]


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """Lease the first `count` ready messages for `lease_s` seconds."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    lease_s: _Seconds


class Acknowledge(msgspec.Struct, frozen=True, array_like=True, tag="acknowledge"):
    """Remove the named messages, if the claim at seqnum `claim` holds them."""

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]


class Requeue(msgspec.Struct, frozen=True, array_like=True, tag="give back"):
    """Make the named messages ready again after `delay_s` seconds, if the claim holds them.

    The tag is part of the record format, so it does not change with the name of the class.
    """

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]
    delay_s: _Seconds


class ExtendClaim(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """Extend the lease on the named messages to `lease_s` seconds after this record, if the claim
    holds them.
    """

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]
    lease_s: _Seconds


class ReviveDeadLetters(msgspec.Struct, frozen=True, array_like=True, tag="revive"):
    """Make the named dead letters ready again, with all their tries."""

    messages: tuple[_SeqNum, ...]


class DiscardDeadLetters(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """Remove the named dead letters."""

    messages: tuple[_SeqNum, ...]


Command: TypeAlias = (
    PushMessage
    | Claim
    | Acknowledge
    | Requeue
    | ExtendClaim
    | ReviveDeadLetters
    | DiscardDeadLetters
)


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """The settings of a queue. Only the first such record takes effect."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]


class HeldMessage(msgspec.Struct, frozen=True, array_like=True):
    """An outstanding message, as part of a checkpoint.

    `until`: end of its lease or delay, seconds since 1970; None: it is ready. `claim`: seqnum of
    the claim that holds it, if any.
    """

    seqnum: _SeqNum
    pushed_at: float
    priority: int
    tries: int
    tries_max: int
    until: float | None
    claim: _SeqNum | None
    dead: bool


class QueueCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state of a shard as of its records below seqnum `end`. A large state is split into
    `parts` records. `first` is the seqnum of the first part; the first part itself has None.
    """

    end: _SeqNum
    clock: float
    messages: tuple[HeldMessage, ...]
    parts: Annotated[int, msgspec.Meta(ge=1)] = 1
    part: Annotated[int, msgspec.Meta(ge=0)] = 0
    first: _SeqNum | None = None


class QueueTags(NamedTuple):
    """The tags of one queue."""

    settings: str
    pushed: str
    shards: tuple[str, ...]
    checkpoints: tuple[str, ...]


_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_settings = msgspec.msgpack.Decoder(Settings).decode
_decode_checkpoint = msgspec.msgpack.Decoder(QueueCheckpoint).decode


def queue_tags(name: str, shards: int) -> QueueTags:
    """Return the tags of the queue `name`.

    Raises:
        QueueSettingsError: invalid name or number of shards.
    """
    if not _is_name(name):
        raise QueueSettingsError(
            f"A queue's name must be 1 to {_NAME_BYTES_MAX} bytes of text without U+001F, "
            f"not {name!r:.64}."
        )
    if type(shards) is not int or not 1 <= shards <= SHARDS_MAX:
        raise QueueSettingsError(f"A queue must have 1 to {SHARDS_MAX} shards, not {shards!r:.40}.")
    base = _TAG_PREFIX + name
    return QueueTags(
        settings=f"{base}:settings",
        pushed=f"{base}:pushed",
        shards=tuple(f"{base}:shard:{shard}" for shard in range(shards)),
        checkpoints=tuple(f"{base}:checkpoint:{shard}" for shard in range(shards)),
    )


def _is_name(name: object) -> bool:
    return can_be_in_tag(name, _NAME_BYTES_MAX)


def encode(content: Command | Settings | QueueCheckpoint) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(content)


def decode_command(data: bytes) -> Command | None:
    """Return the command in a record; None if the data is not of BokiQueue.

    Raises:
        QueueVersionError: a later version wrote the record.
    """
    command: Command | None = _FORMAT.decoded(data, _decode_command)
    return command


def decode_settings(data: bytes) -> Settings | None:
    """Return the settings in a record; None and errors are as in `decode_command`."""
    return _FORMAT.decoded(data, _decode_settings)


def decode_checkpoint(data: bytes) -> QueueCheckpoint | None:
    """Return the checkpoint in a record; None and errors are as in `decode_command`."""
    return _FORMAT.decoded(data, _decode_checkpoint)


def shard_in(tags: Sequence[object], of: QueueTags) -> int | None:
    """Return the number of the shard that a record's tags name; None if they name none."""
    for tag in tags:
        if tag in of.shards:
            return of.shards.index(str(tag))
    return None
