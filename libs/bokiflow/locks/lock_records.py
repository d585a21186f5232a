"""The records of a lock: commands and checkpoints.

All commands of a lock have the lock's tag, so the sub-stream of this tag is the lock's whole
history. The token of a place in the queue is the seqnum of its first `Acquire`; the first place
holds the lock. Checkpoints have a separate tag. `lock` creates the commands, and `LockState`
applies them. `indilog.sdk.record_format` defines the frame of a record.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from bokiflow.runs.errors import FlowVersionError, LockSettingsError
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 2
FORMAT: Final = RecordFormat(b"\xb0L", VERSION, of="a lock", error=FlowVersionError)
SECONDS_MAX: Final = 366.0 * 86_400
"""Seconds of the longest lease or wait (366 days)."""
OWNER_CHARACTERS_MAX: Final = 1024
_TAG_PREFIX: Final = "lock:"
_TAG_SUFFIX: Final = ":checkpoint"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX) - len(_TAG_SUFFIX)

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_Owner = Annotated[str, msgspec.Meta(max_length=OWNER_CHARACTERS_MAX)]


class Acquire(msgspec.Struct, frozen=True, array_like=True, tag="acquire"):
    """Adds `owner` to the queue.

    If the owner is already queued, it keeps its place. If the owner holds the lock, its lease ends
    `lease_s` seconds after this record.

    `wait_s`: seconds for which the owner waits in the queue; None: without limit.
    """

    owner: _Owner
    lease_s: _Seconds
    wait_s: _Seconds | None


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Removes the place with this `token` from the queue, or releases the lock that it holds."""

    token: _SeqNum


class ExtendLease(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """If `token` holds the lock, its lease ends `lease_s` seconds after this record."""

    token: _SeqNum
    lease_s: _Seconds


class Remind(msgspec.Struct, frozen=True, array_like=True, tag="remind"):
    """A reminder. Every record has a log time (`Record.ordered_at`), and a lease that ended by then
    is over for all readers. A reminder has no other effect.
    """


Command: TypeAlias = Acquire | Release | ExtendLease | Remind


class QueuePlace(msgspec.Struct, frozen=True, array_like=True):
    """A place in the queue, as part of a checkpoint.

    `until`: for the first place the end of the lease, for all other places the end of the wait;
    seconds since 1970. None: the wait has no limit.
    """

    token: _SeqNum
    owner: _Owner
    lease_s: _Seconds
    until: float | None


class LockSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state of a lock, as the content of a checkpoint (`indilog.replayed`).

    `clock`: log time of the last record, seconds since 1970. `released`: the tokens that were
    released last, the oldest first.
    """

    clock: float
    queue: tuple[QueuePlace, ...]
    released: tuple[_SeqNum, ...]


class LockTags(NamedTuple):
    """The tags of one lock."""

    commands: str
    checkpoints: str


_decode_command = msgspec.msgpack.Decoder(Command).decode
decode_snapshot = msgspec.msgpack.Decoder(LockSnapshot).decode


def lock_tags(name: str) -> LockTags:
    """Return the tags of the lock `name`.

    Raises:
        LockSettingsError: the name is invalid.
    """
    if not can_be_in_tag(name, _NAME_BYTES_MAX):
        raise LockSettingsError(
            f"A lock's name must be 1 to {_NAME_BYTES_MAX} bytes of text without U+001F, "
            f"not {name!r:.64}."
        )
    return LockTags(_TAG_PREFIX + name, _TAG_PREFIX + name + _TAG_SUFFIX)


def encode(content: Command) -> bytes:
    """Return a record's data."""
    return FORMAT.encoded(content)


def decode_command(data: bytes) -> Command | None:
    """Return the command in a record; None if the data is not of a lock.

    Raises:
        FlowVersionError: another version wrote the record.
    """
    command: Command | None = FORMAT.decoded(data, _decode_command)
    return command
