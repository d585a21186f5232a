"""Cold storage as a storage node sees it (decision 0039): the descriptions of objects, and the
requests to the cold store with their answers.

An object holds all records of a range of localids of one shard. A `COLD` frame in the journal, the
*note* of the object, describes it. When the note is durable, the node needs no batch of these
records on its own disk. `indilog.kernel.cold_objects` defines the content of an object.

The storage node sends requests as effects. The shell (`indilog.runtime.cold_store`) serves them in
threads.

`indilog_storage` decides which records move; `indilog.kernel.cold_objects` and the shell use the
values here.
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
"""Prefix of the name of the marker, an empty object that is written once, before the first
object of a journal. If the marker is missing, the place is not mounted, or another place was
configured.
"""
_NAME: Final = re.compile(
    r"shard-(?P<shard>\d{5})/"
    r"(?P<number>\d{10})-(?P<first>\d+)-(?P<end>\d+)-(?P<crc>[0-9a-f]{8})\.parquet"
)


class ColdObject(msgspec.Struct, frozen=True, array_like=True):
    """Describes an object with all records [first, end) of a shard; the content of a `COLD` frame.

    Attributes:
        version: version of this format.
        number: number of the object; a node uses each number once.
        shard, first, end: the shard, its first localid in the object, and the first one after it.
        size_bytes: size of the object.
        footer_crc: CRC of the end of the object.
        witness: seqnum of one of its records; while that record is not trimmed, the object is
            needed.
        witness_tags: the tags of that record, 8 bytes each. Empty: there is no known witness, so
            the tags of all records must be read to decide whether the object is needed.
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
    """Return the object that `name` describes, without a witness; None: `name` is not the name of
    an object.
    """
    if (found := _NAME.fullmatch(name)) is None:
        return None
    number, shard, first, end = (int(found[part]) for part in ("number", "shard", "first", "end"))
    crc = int(found["crc"], 16)
    return ColdObject(VERSION, number, ShardId(shard), first, end, size_bytes, crc)


# --- requests of a storage node, and the answers


class ColdBatch(NamedTuple):
    """A batch that becomes part of an object.

    Attributes:
        payload: all of its bytes.
        seqnum: the seqnum of its first record; the others follow without a gap.
        ordered_us: when it was ordered, in microseconds since 1970.
        position: the metalog position of the entry that ordered it.
    """

    payload: bytes
    seqnum: SeqNum
    ordered_us: int
    position: MetalogPosition


class ListObjects(NamedTuple):
    """Asks for all objects of this node. After a start, the node moves no records before the
    answer.

    `is_first`: no note names an object yet, so the journal may lack the name of the place.
    """

    is_first: bool


class WriteObject(NamedTuple):
    """Asks to write an object durably; answered by `ObjectWritten`."""

    number: int
    shard: ShardId
    batches: Sequence[ColdBatch]


class ReadColdBatch(NamedTuple):
    """Asks for the batch of an object that begins at localid `first`."""

    token: int
    source: ColdObject
    first: LocalId


class ReadColdTags(NamedTuple):
    """Asks for the tags of all records of an object."""

    source: ColdObject


class DeleteObject(NamedTuple):
    """Asks to delete an object, after all frames written so far are synced. So the object exists as
    long as a durable note may need it.
    """

    source: ColdObject


ColdRequest: TypeAlias = ListObjects | WriteObject | ReadColdBatch | ReadColdTags | DeleteObject


class ObjectsListed(NamedTuple):
    """The objects of this node; None: the store did not answer."""

    objects: Sequence[ColdObject] | None


class ObjectWritten(NamedTuple):
    """Whether the object `number` was written.

    Attributes:
        made: the object, now durable; None: it was not written.
        unfit: whether a later attempt would fail in the same way.
    """

    number: int
    made: ColdObject | None
    unfit: bool = False


class ColdBatchRead(NamedTuple):
    """The answer to `ReadColdBatch`.

    Attributes:
        payload: the batch as it was written; empty: the object is damaged; None: the object is
            missing, or `away` is true.
        away: whether the store did not answer in time, so nothing is known about the batch.
    """

    token: int
    payload: bytes | None
    away: bool = False


class ColdTags(NamedTuple):
    """The tags of consecutive records, as little-endian columns.

    Attributes:
        seqnums: the seqnum of each record (u64).
        tag_counts: the number of tags of each record (u8).
        tags: the tags of all records (u64); the first tag of each record is that of its log.
    """

    seqnums: bytes
    tag_counts: bytes
    tags: bytes


class ColdTagsRead(NamedTuple):
    """The tags of an object; None: they could not be read."""

    number: int
    tags: ColdTags | None


class ObjectDeleted(NamedTuple):
    """The answer to `DeleteObject`; `done`: the object does not exist now. If `done` is False, the
    object may exist.
    """

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
