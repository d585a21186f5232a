"""Records on cold storage, as storage nodes know them (decision 0039): objects, their notes, and
what a node asks of its cold store. `indilog.kernel.cold_objects` defines the content of an object.

An object holds all records of a range of localids of one shard. A note in the journal names the
object. From then on, the node needs no batch of these records on its own disk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import LocalId, MetalogPosition, SeqNum, ShardId

VERSION: Final = 1
MARKER: Final = "indilog-cold"
"""Prefix of the name of the marker: an empty object. A place without it is not reachable, or not
the right one.
"""
_NAME: Final = re.compile(
    r"shard-(?P<shard>\d{5})/"
    r"(?P<number>\d{10})-(?P<first>\d+)-(?P<end>\d+)-(?P<crc>[0-9a-f]{8})\.parquet"
)


class ColdObject(msgspec.Struct, frozen=True, array_like=True):
    """An object: all records [first, end) of a shard. Also the content of a `COLD` frame.

    Attributes:
        version: of this form.
        number: of the object; a node uses each number once.
        shard, first, end: the records that it holds.
        size_bytes: of the object.
        footer_crc: CRC of the end of the object.
        witness: seqnum of one of its records; while that record is not trimmed, the object is
            needed.
        witness_tags: the tags of that record, 8 bytes each; none: whether all records are trimmed
            is not known.
    """

    version: int
    number: int
    shard: ShardId
    first: LocalId
    end: LocalId
    size_bytes: int
    footer_crc: int
    witness: SeqNum = 0
    witness_tags: bytes = b""

    @property
    def name(self) -> str:
        """The name of the object in the folder of its node."""
        records = f"{self.first}-{self.end}-{self.footer_crc:08x}"
        return f"shard-{self.shard:05}/{self.number:010}-{records}.parquet"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ColdObject)


def encode_cold_object(made: ColdObject) -> bytes:
    """Return the payload of a `COLD` frame."""
    return _encoder.encode(made)


def decode_cold_object(payload: bytes) -> ColdObject:
    """Return the object in the payload of a `COLD` frame.

    Raises:
        MalformedFrameError: the payload names no object, or is of another version.
    """
    try:
        made = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not a cold object: {error}") from error
    if made.version != VERSION or made.first >= made.end:
        raise MalformedFrameError(f"a cold object of version {made.version}")
    return made


def object_named(name: str, size_bytes: int) -> ColdObject | None:
    """Return the object of a name; None: it is not the name of an object."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    number, shard, first, end = (int(found[part]) for part in ("number", "shard", "first", "end"))
    crc = int(found["crc"], 16)
    return ColdObject(VERSION, number, ShardId(shard), first, end, size_bytes, crc)


# --- what a storage node asks, and the answers


class ColdBatch(NamedTuple):
    """A batch that becomes part of an object.

    Attributes:
        payload: all of its bytes.
        seqnum: of its first record; the others follow without a gap.
        ordered_us: when it was ordered, in microseconds since 1970.
        position: of the entry that ordered it.
    """

    payload: bytes
    seqnum: SeqNum
    ordered_us: int
    position: MetalogPosition


class ListObjects(NamedTuple):
    """Return the objects of this node; the first request to a store. `is_first`: the node knows of
    no object.
    """

    is_first: bool


class WriteObject(NamedTuple):
    """Write an object durably."""

    number: int
    shard: ShardId
    batches: Sequence[ColdBatch]


class ReadColdBatch(NamedTuple):
    """Return the batch of an object that begins at localid `first`."""

    token: int
    source: ColdObject
    first: LocalId


class ReadColdTags(NamedTuple):
    """Return the tags of all records of an object."""

    source: ColdObject


class DeleteObject(NamedTuple):
    """Delete an object when all that was written so far is synced."""

    source: ColdObject


ColdRequest: TypeAlias = ListObjects | WriteObject | ReadColdBatch | ReadColdTags | DeleteObject


class ObjectsListed(NamedTuple):
    """The objects of this node; None: the store could not be asked."""

    objects: Sequence[ColdObject] | None


class ObjectWritten(NamedTuple):
    """The object `number`.

    Attributes:
        made: it is durable; None: it was not written.
        unfit: whether a later attempt would fail in the same way.
    """

    number: int
    made: ColdObject | None
    unfit: bool = False


class ColdBatchRead(NamedTuple):
    """A batch as it was written; None: the object has no intact batch there.

    `away`: the store did not answer in time, so nothing is known about the batch.
    """

    token: int
    payload: bytes | None
    away: bool = False


class ColdTags(NamedTuple):
    """The tags of consecutive records: the seqnums (u64), the number of tags of each record (u8),
    and the tags (u64, that of the log first).
    """

    seqnums: bytes
    tag_counts: bytes
    tags: bytes


class ColdTagsRead(NamedTuple):
    """The tags of an object; None: they could not be read."""

    number: int
    tags: ColdTags | None


class ObjectDeleted(NamedTuple):
    """Whether an object does not exist any more, or never existed."""

    number: int
    done: bool


ColdAnswer: TypeAlias = ObjectsListed | ObjectWritten | ColdBatchRead | ColdTagsRead | ObjectDeleted


def without_store(request: ColdRequest) -> ColdAnswer:
    """Return the answer of a process that cannot reach a cold store."""
    match request:
        case ListObjects():
            return ObjectsListed(None)
        case WriteObject(number):
            return ObjectWritten(number, None)
        case ReadColdBatch(token):
            return ColdBatchRead(token, None, away=True)
        case ReadColdTags(source):
            return ColdTagsRead(source.number, None)
        case DeleteObject(source):
            return ObjectDeleted(source.number, done=False)
