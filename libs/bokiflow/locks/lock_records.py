"""What a lock keeps in the log: a command per record, and checkpoints.

All commands of a lock have its tag, so its sub-stream is all that can have changed it; checkpoints
have a tag of their own. The frame is that of `indilog.sdk.record_format`.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from bokiflow.runs.errors import FlowVersionError, LockSettingsError
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 1
_FORMAT: Final = RecordFormat(b"\xb0L", VERSION, of="a lock", error=FlowVersionError)
SECONDS_MAX: Final = 366.0 * 86_400
"""The longest lease or wait."""
OWNER_CHARACTERS_MAX: Final = 1024
_TAG_PREFIX: Final = "lock:"
_TAG_SUFFIX: Final = ":checkpoint"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX) - len(_TAG_SUFFIX)

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_Owner = Annotated[str, msgspec.Meta(max_length=OWNER_CHARACTERS_MAX)]


class Acquire(msgspec.Struct, frozen=True, array_like=True, tag="acquire"):
    """Put `owner` into the line, unless it stands in it: then it keeps its place, and who holds the
    lock already holds it for `lease_s` from now.

    `wait_s`: for how long it stands in the line; None: until it is its turn.
    """

    owner: _Owner
    lease_s: _Seconds
    wait_s: _Seconds | None


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Who got `token` holds the lock, or waits for it, no longer."""

    token: _SeqNum


class ExtendLease(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """Who got `token`, and holds the lock, holds it for `lease_s` from now."""

    token: _SeqNum
    lease_s: _Seconds


class Remind(msgspec.Struct, frozen=True, array_like=True, tag="remind"):
    """Look when this record was ordered: a lease may be over. Has no other effect."""


Command: TypeAlias = Acquire | Release | ExtendLease | Remind


class LinePlace(msgspec.Struct, frozen=True, array_like=True):
    """A place in the line of a checkpoint: of the first one `until` is the end of its lease, of the
    others the end of their waiting.
    """

    token: _SeqNum
    owner: _Owner
    lease_s: _Seconds
    until: float | None


class LockCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag="checkpoint"):
    """A lock as its records below seqnum `end` leave it."""

    end: _SeqNum
    clock: float
    line: tuple[LinePlace, ...]


class LockTags(NamedTuple):
    """The tags of one lock."""

    commands: str
    checkpoints: str


_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_checkpoint = msgspec.msgpack.Decoder(LockCheckpoint).decode


def tags_of(name: str) -> LockTags:
    """Return the tags of the lock `name`.

    Raises:
        LockSettingsError: no lock can have this name.
    """
    if not can_be_in_tag(name, _NAME_BYTES_MAX):
        raise LockSettingsError(
            f"A lock's name is 1 to {_NAME_BYTES_MAX} bytes of text without U+001F, "
            f"not {name!r:.64}."
        )
    return LockTags(_TAG_PREFIX + name, _TAG_PREFIX + name + _TAG_SUFFIX)


def encoded(content: Command | LockCheckpoint) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(content)


def command_decoded(data: bytes) -> Command | None:
    """Return the command in a record, or None for what no lock wrote.

    Raises:
        FlowVersionError: a later version wrote it, so it must not be passed over.
    """
    command: Command | None = _FORMAT.decoded(data, _decode_command)
    return command


def checkpoint_decoded(data: bytes) -> LockCheckpoint | None:
    """Return the checkpoint in a record; None and errors as `command_decoded`."""
    return _FORMAT.decoded(data, _decode_checkpoint)
