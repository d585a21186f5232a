"""The records of BokiQueue: commands, snapshots and settings.

A record holds one or more commands of one shard, and takes effect as a whole. Every such record has
the shard's tag, so the sub-stream of this tag is the shard's whole history. Some records have
further tags:

- Records that can make a message ready have the queue's tag `pushed`. So one read waits for the
  records of all shards.
- Records with the bytes of a message that may stay for long have the shard's tag `aside`. So a
  trim of the shard's tag does not remove them.

Settings and checkpoints have separate tags instead. `ShardState` applies the commands, which
`Queue`, `Delivery` and `ShardReplica` create. `indilog.sdk.record_format` defines the frame of a
record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from bokiqueue.errors import QueueSettingsError, QueueVersionError
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 3
FORMAT: Final = RecordFormat(b"\xb0Q", VERSION, of="BokiQueue", error=QueueVersionError)
SHARDS_MAX: Final = 1024
PRIORITY_MAX: Final = 9
TRIES_MAX: Final = 1000
SECONDS_MAX: Final = 366.0 * 86_400
"""Seconds of the longest delay or lease (366 days)."""
ID_CHARACTERS_MAX: Final = 1024
_ID_DIGEST_BYTES: Final = 16
_TAG_PREFIX: Final = "queue:"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX) - len(":checkpoint:1023")

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]


_Attempt = Annotated[int, msgspec.Meta(ge=0)]


class PushMessage(msgspec.Struct, frozen=True, array_like=True, tag="push"):
    """Add a message. The message becomes ready `delay_s` seconds after this record. After
    `tries_max` deliveries without an acknowledgement it becomes a dead letter.

    `id`: digest of the producer's id; None: the push has no id. If the shard remembers the digest
    from an earlier push, this push has no effect.
    """

    data: bytes
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
    delay_s: _Seconds
    tries_max: Annotated[int, msgspec.Meta(ge=1, le=TRIES_MAX)]
    id: Annotated[bytes, msgspec.Meta(max_length=_ID_DIGEST_BYTES)] | None = None


class SetAside(msgspec.Struct, frozen=True, array_like=True, tag="set aside"):
    """Set a message aside: store its bytes again, and read them from this record from now on.

    `message`: seqnum of the message's push. The push and the shard's records after it can then be
    trimmed.
    """

    message: _SeqNum
    data: bytes


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """Lease the first `count` ready messages for `lease_s` seconds.

    `attempt` identifies the claim before its seqnum is known; 0: the claim cannot be cancelled.
    """

    count: Annotated[int, msgspec.Meta(ge=1)]
    lease_s: _Seconds
    attempt: _Attempt = 0


class CancelClaim(msgspec.Struct, frozen=True, array_like=True, tag="cancel claim"):
    """Return the messages held by the claim with this `attempt` to the queue. The cancelled
    delivery does not count as a try. If the claim comes later in the log, it gets no message.
    """

    attempt: _Attempt


class Acknowledge(msgspec.Struct, frozen=True, array_like=True, tag="acknowledge"):
    """Remove the named messages, if the claim at seqnum `claim` holds them."""

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]


class Requeue(msgspec.Struct, frozen=True, array_like=True, tag="requeue"):
    """Make the named messages ready again after `delay_s` seconds, if the claim holds them.

    `is_no_try`: whether the delivery does not count as a try, because no consumer got the messages.
    """

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]
    delay_s: _Seconds
    is_no_try: bool = False


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


class Purge(msgspec.Struct, frozen=True, array_like=True, tag="purge"):
    """Remove all dead letters (`is_dead`), or all other messages, including those under a lease."""

    is_dead: bool


Command: TypeAlias = (
    PushMessage
    | SetAside
    | Claim
    | CancelClaim
    | Acknowledge
    | Requeue
    | ExtendClaim
    | ReviveDeadLetters
    | DiscardDeadLetters
    | Purge
)


class Commands(msgspec.Struct, frozen=True, array_like=True):
    """Commands of one shard that take effect one after the other, with nothing in between."""

    commands: tuple[Command, ...]


class QueueSettings(msgspec.Struct, frozen=True, array_like=True):
    """The settings of a queue. Only the first such record of a queue takes effect."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]


class HeldMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message or dead letter, as part of a snapshot (`shard_state.Message`).

    Attributes:
        until: end of the lease or delay, seconds since 1970; None: the message has neither.
        claim: seqnum of the claim that holds the message; None: no claim holds it.
        attempt: `Claim.attempt` of that claim; 0 after an extension, or without a claim.
        aside_at: seqnum of the record with the message's bytes and the tag `aside`; None: the bytes
            are in the push, which lacks this tag.
    """

    seqnum: _SeqNum
    pushed_at: float
    priority: int
    tries: int
    tries_max: int
    until: float | None
    claim: _SeqNum | None
    attempt: int
    is_dead: bool
    aside_at: _SeqNum | None


class RememberedId(NamedTuple):
    """The digest of the id of a push, and when the push was ordered (seconds since 1970)."""

    digest: bytes
    pushed_at: float


class ShardSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state of a shard, as the content of a checkpoint (`indilog.replayed`).

    `clock`: log time of the last record, seconds since 1970. `ids`: the remembered ids, the oldest
    first. `cancelled`: each `attempt` whose claim gets no message if it comes later in the log.
    """

    clock: float
    messages: tuple[HeldMessage, ...]
    ids: tuple[RememberedId, ...]
    cancelled: tuple[int, ...]


class QueueTags(NamedTuple):
    """The tags of one queue."""

    settings: str
    pushed: str
    shards: tuple[str, ...]
    checkpoints: tuple[str, ...]
    aside: tuple[str, ...]


_decode_commands = msgspec.msgpack.Decoder(Commands).decode
_decode_settings = msgspec.msgpack.Decoder(QueueSettings).decode
decode_snapshot = msgspec.msgpack.Decoder(ShardSnapshot).decode


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
        aside=tuple(f"{base}:aside:{shard}" for shard in range(shards)),
    )


def _is_name(name: object) -> bool:
    return can_be_in_tag(name, _NAME_BYTES_MAX)


def id_digest(push_id: str) -> bytes:
    """Return the digest (16 bytes) of a producer's id."""
    return hashlib.blake2b(push_id.encode(), digest_size=_ID_DIGEST_BYTES).digest()


def encode(*commands: Command) -> bytes:
    """Return the data of a record with these commands."""
    return FORMAT.encoded(Commands(commands))


def encode_settings(settings: QueueSettings) -> bytes:
    """Return the data of a record with the settings of a queue."""
    return FORMAT.encoded(settings)


def decode_commands(data: bytes) -> tuple[Command, ...]:
    """Return the commands in a record; no commands if the data is not of BokiQueue.

    Raises:
        QueueVersionError: another version wrote the record.
    """
    content = FORMAT.decoded(data, _decode_commands)
    return () if content is None else content.commands


def decode_settings(data: bytes) -> QueueSettings | None:
    """Return the settings in a record; None if the data is not of BokiQueue. Errors are as in
    `decode_commands`.
    """
    return FORMAT.decoded(data, _decode_settings)


def shard_in(tags: Sequence[object], of: QueueTags) -> int | None:
    """Return the number of the shard that a record's tags name; None if they name no shard."""
    for tag in tags:
        if tag in of.shards:
            return of.shards.index(str(tag))
    return None
