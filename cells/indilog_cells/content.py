"""The content of a cell: items in order, with a checksum (docs/FORMATS.md).

Layout: magic `ILCL`, version u8, CRC32C u32 of what follows, then msgpack. A *junk* cell has the
header alone: it fills a position and changes nothing. Empty bytes are the content of a *trimmed*
cell.

`core` writes contents, and `state` applies them.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, TypeAlias

import msgspec
from crc32c import crc32c

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import SeqNum, TagHash

_HEADER: Final = Struct("<4sBI")
_MAGIC: Final = b"ILCL"
VERSION: Final = 2
"""Version 2 has `End`."""
_VERSION_MIN: Final = 1
ITEM_OVERHEAD_BYTES: Final = 64
"""Bytes of an item besides its records, as an upper bound."""


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """The condition of an append, and the part of it that the writer has checked.

    Attributes:
        log, tag: hashes of the log and of the tag.
        known: the last record with the tag that the caller knows; -1: none.
        checked: the writer knows that no record with the tag has a seqnum above `known` and below
            `checked`. So `state` need not look at records below `checked`.
    """

    log: TagHash
    tag: TagHash
    known: int
    checked: SeqNum


class Records(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """Records at consecutive seqnums.

    Attributes:
        time_us: when the writer accepted them, microseconds since 1970 by its wall clock.
        tags, names: per record, the columns of `indilog.base.ids.TagColumns`.
        data: per record.
        after: the records take effect only if this condition holds.
    """

    time_us: int
    tags: list[bytes]
    names: list[bytes]
    data: list[bytes]
    after: Condition | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that the item takes in a cell, as an upper bound."""
        parts = (self.tags, self.names, self.data)
        return ITEM_OVERHEAD_BYTES + sum(sum(map(len, part)) + 5 * len(part) for part in parts)


class TrimBelow(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Trims a log, or the sub-stream of a tag.

    Attributes:
        tag: hash of the tag; None: the whole log.
    """

    log: TagHash
    tag: TagHash | None
    until: SeqNum

    size_bytes = ITEM_OVERHEAD_BYTES


class Policy(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """Sets the retention policy of a log."""

    log: str
    age_s: float | None
    size_bytes_max: int | None

    size_bytes = 4 * ITEM_OVERHEAD_BYTES


class AskTime(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Asks for the time of the log at this place in its order."""

    size_bytes = ITEM_OVERHEAD_BYTES


class End(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """Ends the log: no records in later items take effect."""

    size_bytes = ITEM_OVERHEAD_BYTES


Item: TypeAlias = Records | TrimBelow | Policy | AskTime | End


class Content(msgspec.Struct, frozen=True, array_like=True):
    """What a writer writes into one cell.

    Attributes:
        epoch: of the writer. A cell whose epoch is smaller than that of an earlier cell is void.
        is_claim: whether the content begins its epoch. Such a content is also void if an earlier
            cell has the same epoch.
        writer, serial: name this content: bytes that only this writer has, and the number of
            contents that it wrote before. With this name, a writer recognizes its own content after
            an unknown outcome.
        stamp_us: the writer's time, microseconds since 1970.
    """

    epoch: int
    is_claim: bool
    writer: bytes
    serial: int
    stamp_us: int
    items: list[Item]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Content)


def encode(content: Content) -> bytes:
    """Return the bytes of a cell."""
    return sealed(_MAGIC, VERSION, _encoder.encode(content))


JUNK: Final = _HEADER.pack(_MAGIC, VERSION, crc32c(b""))
"""The bytes of a junk cell."""


def decode(cell: bytes) -> Content | None:
    """Return the content of a cell; None: it is junk.

    Raises:
        MalformedFrameError: the bytes are damaged, or of another version.
    """
    body = opened(_MAGIC, VERSION, cell, oldest=_VERSION_MIN)
    if not body:
        return None
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise MalformedFrameError(f"a cell has no valid content: {error}") from error


def sealed(magic: bytes, version: int, body: bytes) -> bytes:
    """Return `body` with a header that names its format and checksum."""
    return _HEADER.pack(magic, version, crc32c(body)) + body


def opened(magic: bytes, version: int, stored: bytes, *, oldest: int | None = None) -> bytes:
    """Return the body of what `sealed` returned.

    Args:
        magic: name of the format.
        version: the newest version that the caller reads.
        stored: what `sealed` returned.
        oldest: the oldest version that the caller reads; None: `version`.

    Raises:
        MalformedFrameError: the bytes are damaged, of another version, or something else.
    """
    if len(stored) < _HEADER.size:
        raise MalformedFrameError(f"{len(stored)} bytes are too few")
    found, number, crc = _HEADER.unpack_from(stored)
    if found != magic:
        raise MalformedFrameError(f"it begins with {found!r}, not {magic!r}")
    if not (version if oldest is None else oldest) <= number <= version:
        raise MalformedFrameError(f"it has version {number}; this reader knows {version}")
    body = stored[_HEADER.size :]
    if crc32c(body) != crc:
        raise MalformedFrameError("its CRC is wrong")
    return body
