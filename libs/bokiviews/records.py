"""The records of BokiViews: changes, and checkpoints.

A record holds changes of one group of objects, by concurrent callers of one process. The changes
take effect one after the other, each as a whole. All records of a group have one tag, so one
sub-stream is the history of all its objects. Checkpoints have a tag of their own. `ViewsReplica`
writes the records and `ViewsState` applies them; `indilog.sdk.record_format` defines their frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, TypeAlias

import msgspec

from bokiviews.errors import InvalidValueError, ViewsVersionError
from indilog.replayed import SubStream
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 1
FORMAT: Final = RecordFormat(b"\xb0V", VERSION, of="BokiViews", error=ViewsVersionError)
DIGEST_BYTES: Final = 8
"""Bytes of the digest of a place. If two places have one digest, needless conflicts follow, and
nothing worse.
"""
NAME_BYTES_MAX: Final = 255
"""Largest size of the name of an object, and of a kind, in bytes."""
DROP: Final = ""
"""The kind of a command that removes an object."""
_TAG_PREFIX: Final = "views:"
_GROUP_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX) - len(":checkpoints")

Digest: TypeAlias = bytes
"""Digest of a place: of a key of an object, or of the whole object (`bokiviews.places`)."""
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_BYTES_MAX)]


class Command(msgspec.Struct, frozen=True, array_like=True):
    """A command for one object.

    Attributes:
        name: the object; its first command creates it.
        kind: the kind of its state machine; `DROP`: remove the object.
        content: the command as the machine's type encodes it (MessagePack).
        keys: digests of the keys that the command writes, joined; empty: it writes the whole
            object.
    """

    name: _Name
    kind: _Name
    content: bytes
    keys: bytes = b""


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Commands that take effect together, or not at all.

    Attributes:
        commands: the commands, in order.
        horizon: the change was computed from the records below this seqnum.
        reads: digests of the places from which the change was computed, joined. The change takes
            effect only if none of these places was written in [horizon, its own seqnum).
    """

    commands: tuple[Command, ...]
    horizon: _SeqNum = 0
    reads: bytes = b""


class ChangeList(msgspec.Struct, frozen=True, array_like=True):
    """The content of a record.

    Attributes:
        changes: changes of several callers, in order.
        is_by_full_host: whether the author of the record keeps views of all objects, so that it can
            write a checkpoint.
    """

    changes: tuple[Change, ...]
    is_by_full_host: bool


class StoredObject(msgspec.Struct, frozen=True, array_like=True):
    """An object in a checkpoint; `content` is the snapshot of its machine."""

    name: _Name
    kind: _Name
    content: msgspec.Raw


class StoredViews(msgspec.Struct, frozen=True, array_like=True):
    """The content of a checkpoint.

    Attributes:
        objects: all objects.
        recent: the last writes of places, in order: the digests of the places, joined, and the
            seqnums of the writes.
        floor: see `RecentWrites.floor`.
    """

    objects: tuple[StoredObject, ...]
    recent: tuple[bytes, tuple[_SeqNum, ...]]
    floor: int


_decode_changes = msgspec.msgpack.Decoder(ChangeList).decode
_decode_stored = msgspec.msgpack.Decoder(StoredViews).decode


def stream_of(log: str, group: str) -> SubStream:
    """Return the tags of a group of objects.

    Raises:
        InvalidValueError: the name of the group is invalid.
    """
    if not can_be_in_tag(group, _GROUP_BYTES_MAX):
        raise InvalidValueError(
            f"The name of a group of views must be 1 to {_GROUP_BYTES_MAX} bytes of text without "
            f"U+001F, not {group!r:.64}."
        )
    base = _TAG_PREFIX + group
    what = f"The group of views {group!r} of log {log!r}"
    return SubStream(f"{base}:changes", f"{base}:checkpoints", FORMAT, what)


def check_name(name: object) -> str:
    """Return the name of an object, if it is valid.

    Raises:
        InvalidValueError: the name is invalid.
    """
    if not isinstance(name, str) or not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise InvalidValueError(
            f"The name of an object must be 1 to {NAME_BYTES_MAX} bytes of text, not {name!r:.64}."
        )
    return name


def encode_changes(changes: ChangeList) -> bytes:
    """Return the data of a record."""
    return FORMAT.encoded(changes)


def decode_changes(data: bytes) -> ChangeList | None:
    """Return the changes in a record; None if the data is not of BokiViews.

    Raises:
        ViewsVersionError: another version wrote the record.
    """
    return FORMAT.decoded(data, _decode_changes)


def decode_stored(content: bytes) -> StoredViews:
    """Return the content of a checkpoint."""
    return _decode_stored(content)


def digests_in(joined: bytes) -> Iterator[Digest]:
    """Return the digests in a field of a record."""
    return (joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES))
