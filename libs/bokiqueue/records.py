"""What BokiQueue keeps in the log: a command per record, and checkpoints.

The commands of a shard have the shard's tag, so its sub-stream is all that can have changed it.
Pushes have the queue's tag `pushed` too, so that one read can wait for any of them. Settings and
checkpoints have tags of their own. The frame is that of `indilog.sdk.record_format`.
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
"""The longest delay or lease."""
_TAG_PREFIX: Final = "queue:"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX) - len(":checkpoint:1023")

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]


class PushMessage(msgspec.Struct, frozen=True, array_like=True, tag="push"):
    """A message. It becomes ready `delay_s` after the log ordered it, and is dead after
    `tries_max` deliveries without acknowledgement.
    """

    data: bytes
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
    delay_s: _Seconds
    tries_max: Annotated[int, msgspec.Meta(ge=1, le=TRIES_MAX)]


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """Give me the first `count` ready messages for `lease_s`."""

    count: Annotated[int, msgspec.Meta(ge=1)]
    lease_s: _Seconds


class Acknowledge(msgspec.Struct, frozen=True, array_like=True, tag="acknowledge"):
    """What the claim at seqnum `claim` holds of these messages is done."""

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag="give back"):
    """What the claim holds of these messages is not done; ready again after `delay_s`."""

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]
    delay_s: _Seconds


class ExtendClaim(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """What the claim holds of these messages it holds for `lease_s` from now."""

    claim: _SeqNum
    messages: tuple[_SeqNum, ...]
    lease_s: _Seconds


class ReviveDeadLetters(msgspec.Struct, frozen=True, array_like=True, tag="revive"):
    """These dead letters are ready again, with all their tries."""

    messages: tuple[_SeqNum, ...]


class DiscardDeadLetters(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """These dead letters are not wanted any more."""

    messages: tuple[_SeqNum, ...]


Command: TypeAlias = (
    PushMessage
    | Claim
    | Acknowledge
    | GiveBack
    | ExtendClaim
    | ReviveDeadLetters
    | DiscardDeadLetters
)


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """What a queue was made with; the first such record of a queue counts."""

    shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]


class HeldMessage(msgspec.Struct, frozen=True, array_like=True):
    """An outstanding message in a checkpoint.

    `until`: when its lease or delay ends; None: it is ready. `claim`: which consumer holds it, if
    any does.
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
    """A shard as its records below seqnum `end` leave it, or one of `parts` records that are it
    together: the other parts say by `first` where the first one is.
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


def tags_of(name: str, shards: int) -> QueueTags:
    """Return the tags of the queue `name`.

    Raises:
        QueueSettingsError: no queue can have this name, or so many shards.
    """
    if not _is_name(name):
        raise QueueSettingsError(
            f"A queue's name is 1 to {_NAME_BYTES_MAX} bytes of text without U+001F, "
            f"not {name!r:.64}."
        )
    if type(shards) is not int or not 1 <= shards <= SHARDS_MAX:
        raise QueueSettingsError(f"A queue has 1 to {SHARDS_MAX} shards, not {shards!r:.40}.")
    base = _TAG_PREFIX + name
    return QueueTags(
        settings=f"{base}:settings",
        pushed=f"{base}:pushed",
        shards=tuple(f"{base}:shard:{shard}" for shard in range(shards)),
        checkpoints=tuple(f"{base}:checkpoint:{shard}" for shard in range(shards)),
    )


def _is_name(name: object) -> bool:
    return can_be_in_tag(name, _NAME_BYTES_MAX)


def encoded(content: Command | Settings | QueueCheckpoint) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(content)


def command_decoded(data: bytes) -> Command | None:
    """Return the command in a record, or None for what BokiQueue did not write.

    Raises:
        QueueVersionError: a later version wrote it, so it must not be skipped.
    """
    command: Command | None = _FORMAT.decoded(data, _decode_command)
    return command


def settings_decoded(data: bytes) -> Settings | None:
    """Return the settings in a record; None and errors as `command_decoded`."""
    return _FORMAT.decoded(data, _decode_settings)


def checkpoint_decoded(data: bytes) -> QueueCheckpoint | None:
    """Return the checkpoint in a record; None and errors as `command_decoded`."""
    return _FORMAT.decoded(data, _decode_checkpoint)


def shard_in(tags: Sequence[object], of: QueueTags) -> int | None:
    """Return which shard the tags of a push name, or None."""
    for tag in tags:
        if tag in of.shards:
            return of.shards.index(str(tag))
    return None
