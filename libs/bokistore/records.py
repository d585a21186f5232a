"""The records of BokiStore. Each has one command, and cached views as its aux data.

A record's data is JSON:

- `store`: the version of this format;
- `writes`: a list of writes for each object (`bokistore.document`);
- `reads` and `horizon`, in a transaction that read objects: the names of these objects, and the
  seqnum below which the transaction saw all records;
- `token`, `enters` and `leaves`: a place in the lines of objects (`bokistore.log_lines`);
- `ids` and `horizon`, in a transaction with an id: `ids` has the result by id;
- `held`: those of these ids that stay known until they are released;
- `released`: ids of earlier transactions that this record releases.

The record has a tag for each written object, and one for each id and released id. So an object's
sub-stream is its whole history (thesis 2.3.3). The tag of an object is `store:` and its name. Ids
share 65,536 tags, `ids:` and a hash of the id, so that the floors of collected ids are bounded,
too. These prefixes avoid collisions with tags of other programs.

A checkpoint is a record without writes, with the field `checkpoint`: an object's value as of an
earlier record. It has two tags: the object's tag, and `ckpt:` followed by the name. The value of a
large object is in earlier records, the parts. Each part has the field `part` and the tag `ckpt:`
followed by the name; the checkpoint names the first part. The record of a garbage collection has
the field `collected`. For a part of the log, this field lists the transactions that did not take
effect (`bokistore.collection`).

Aux data is JSON, too: `committed` is the decision about the command, and `views` has object views.
A view has an object's version (seqnum of the last committed write, or null) and its value after the
record (or null). It also has the number of records since the last checkpoint. Aux data is a cache
derived from the log; data of any other form is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple
from zlib import crc32

import msgspec

from bokistore.document import Json, Write
from bokistore.errors import InvalidObjectError, StoreVersionError
from bokistore.log_lines import Line
from indilog.sdk import TAG_BYTES_MAX, SeqNum, can_be_in_tag

VERSION: Final = 3
"""Version of the records that are written. Version 2 has no lines. Version 1 has no conditional
writes, parts and released ids, and a tag for each id. Both are read, too.
"""
_VERSIONS: Final = (1, 2, VERSION)
AUX_BYTES_MAX: Final = 1024 * 1024
"""Largest aux data that is stored, in bytes; the log's default limit."""
_TAG_PREFIX: Final = "store:"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_TAG_PREFIX)
_ID_TAG_PREFIX: Final = "ids:"
_ID_TAGS: Final = 65_536
_OLD_ID_TAG_PREFIX: Final = "txn:"
_ID_BYTES_MAX: Final = TAG_BYTES_MAX - len(_OLD_ID_TAG_PREFIX)
_CHECKPOINT_TAG_PREFIX: Final = "ckpt:"
_NULL: Final = b"null"


class ObjectCheckpoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """An object as of the record at `seqnum`, stored in a later record.

    Attributes:
        version: seqnum of the last committed write up to `seqnum`; None if there was none.
        value: the object, null if it does not exist, or if it is in parts.
        parts: number of records with the parts of the object's JSON; 0: it is in `value`.
        first: seqnum of the first part.
        line: the places in the object's line.
    """

    name: str
    seqnum: Annotated[SeqNum, msgspec.Meta(ge=0)]
    version: SeqNum | None
    value: msgspec.Raw
    parts: Annotated[int, msgspec.Meta(ge=0)] = 0
    first: SeqNum = 0
    line: Line = ()


class ObjectCheckpointPart(msgspec.Struct, frozen=True):
    """A part of the JSON of an object, stored before the checkpoint that names it.

    Attributes:
        first: seqnum of the first part; None in the first part.
        part: number of this part, from 0.
        text: the bytes of this part.
    """

    name: str
    first: SeqNum | None
    part: Annotated[int, msgspec.Meta(ge=0)]
    text: bytes


class Collected(msgspec.Struct, frozen=True):
    """All transactions in [start, end) took effect, except those in `aborted`."""

    start: SeqNum
    end: SeqNum
    aborted: tuple[SeqNum, ...] = ()


class ConflictCheck(NamedTuple):
    """A condition on the records in [horizon, seqnum of a transaction).

    Attributes:
        tag: the sub-stream to search.
        id: the check fails if another transaction with this id committed there; None: it fails if
            a write of the object took effect there.
    """

    tag: str
    id: str | None = None


class StoreCommand(msgspec.Struct, frozen=True, omit_defaults=True):
    """The command of a record: a single operation, or a whole transaction.

    Attributes:
        id, result: an id and its result, in records of version 1.
        ids: the results by id, in records of later versions.
        held: ids that are known until they are released.
        released: ids of earlier transactions.
        token: identity of a place in lines.
        enters: objects whose lines the token enters.
        leaves: objects whose lines the token leaves if the command takes effect.
    """

    store: int
    writes: dict[str, tuple[Write, ...]]
    reads: tuple[str, ...] = ()
    horizon: Annotated[SeqNum, msgspec.Meta(ge=0)] = 0
    id: str | None = None
    result: Json = None
    ids: dict[str, Json] = {}
    held: tuple[str, ...] = ()
    released: tuple[str, ...] = ()
    token: str = ""
    enters: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    checkpoint: ObjectCheckpoint | None = None
    part: ObjectCheckpointPart | None = None
    collected: Collected | None = None

    @property
    def is_conditional(self) -> bool:
        """Whether the order of the log decides if the command takes effect. Other commands always
        take effect.
        """
        return bool(self.reads) or bool(self.ids) or self.id is not None

    def checks(self) -> list[ConflictCheck]:
        """Return the checks of the command: it takes effect if none of them fails."""
        checks = [ConflictCheck(_TAG_PREFIX + name) for name in self.reads]
        checks += [ConflictCheck(_id_tag(txn_id), txn_id) for txn_id in self.ids]
        if self.id is not None:
            checks.append(ConflictCheck(_OLD_ID_TAG_PREFIX + self.id, self.id))
        return checks

    def concerns(self, check: ConflictCheck) -> bool:
        """Tell whether the command, if it takes effect, fails a check."""
        if check.id is None:
            return object_of(check.tag) in self.writes
        return check.id in self.ids or check.id == self.id


class ObjectView(NamedTuple):
    """An object as of some record of its sub-stream.

    Attributes:
        seqnum: the last applied record of the sub-stream; -1: none.
        version: seqnum of the last committed write up to `seqnum`; None if there was none.
        document: the object's JSON; None if it does not exist.
        depth: number of records since the last one that has a view as aux data.
        age: number of records since the last checkpoint.
        line: places in the object's line; some may have ended (`bokistore.log_lines.standing`).
    """

    seqnum: SeqNum
    version: SeqNum | None
    document: bytes | None
    depth: int
    age: int = 0
    line: Line = ()


UNWRITTEN: Final = ObjectView(seqnum=-1, version=None, document=None, depth=0)


class Aux(msgspec.Struct, frozen=True):
    """The aux data of a record: the decision about its command, and views."""

    store: int
    committed: bool
    views: dict[str, tuple[SeqNum | None, msgspec.Raw, int]]


class _Version(msgspec.Struct):
    store: int


_decode_command = msgspec.json.Decoder(StoreCommand).decode
_decode_version = msgspec.json.Decoder(_Version).decode
_decode_aux = msgspec.json.Decoder(Aux).decode
_encode = msgspec.json.Encoder().encode


def tag_of(name: str) -> str:
    """Return the tag of the records that write the object `name`.

    Raises:
        InvalidObjectError: the name is empty, too long, or cannot be in a tag.
    """
    if not _is_name(name):
        raise InvalidObjectError(
            f"An object's name must be 1 to {_NAME_BYTES_MAX} bytes of text without U+001F, "
            f"not {name!r:.64}."
        )
    return _TAG_PREFIX + name


def object_of(tag: str) -> str | None:
    """Return the object whose sub-stream a tag names; None: the tag names no object."""
    return tag.removeprefix(_TAG_PREFIX) if tag.startswith(_TAG_PREFIX) else None


def _is_name(name: object) -> bool:
    return can_be_in_tag(name, _NAME_BYTES_MAX)


def id_tag_of(txn_id: str) -> str:
    """Return the tag of the records of transactions with that id.

    Raises:
        InvalidObjectError: the id is empty, too long, or cannot be in a tag.
    """
    if not _is_id(txn_id):
        raise InvalidObjectError(
            f"A transaction's id must be 1 to {_ID_BYTES_MAX} bytes of text without U+001F, "
            f"not {txn_id!r:.64}."
        )
    return _id_tag(txn_id)


def _id_tag(txn_id: str) -> str:
    return f"{_ID_TAG_PREFIX}{crc32(txn_id.encode()) % _ID_TAGS}"


def _is_id(txn_id: object) -> bool:
    return can_be_in_tag(txn_id, _ID_BYTES_MAX)


def encode_command(
    writes: Mapping[str, Sequence[msgspec.Raw]],
    reads: Sequence[str] = (),
    horizon: SeqNum = 0,
    *,
    ids: Mapping[str, Json] = MappingProxyType({}),
    held: Sequence[str] = (),
    released: Sequence[str] = (),
    token: str = "",
    enters: Sequence[str] = (),
    leaves: Sequence[str] = (),
) -> bytes:
    """Return a record's data; each write is given as JSON text."""
    command: dict[str, Any] = {"store": VERSION, "writes": writes}
    if reads:
        command["reads"] = reads
    if ids:
        command["ids"] = dict(ids)
    if held:
        command["held"] = held
    if released:
        command["released"] = released
    if reads or ids:
        command["horizon"] = horizon
    if enters or leaves:
        command |= {"token": token, "enters": enters, "leaves": leaves}
    return _encode(command)


def decode_command(data: bytes) -> StoreCommand | None:
    """Return the command in a record; None if BokiStore did not write the record.

    Raises:
        StoreVersionError: a later version wrote the record.
    """
    try:
        command = _decode_command(data)
    except (msgspec.DecodeError, RecursionError):
        command = None
    if command is not None and command.store in _VERSIONS:
        return command if _is_sound(command) else None
    try:
        version = _decode_version(data).store
    except (msgspec.DecodeError, RecursionError):
        return None
    if version > VERSION:
        raise StoreVersionError(
            f"A record of BokiStore has format {version}; this program reads up to {VERSION}."
        )
    return None


def _is_sound(command: StoreCommand) -> bool:
    ids = [*command.ids, *command.held, *command.released]
    if command.id is not None:
        ids.append(command.id)
    return all(map(_is_name, command.reads)) and all(map(_is_id, ids))


def encode_aux(
    views: Mapping[str, ObjectView], *, before: Aux | None, committed: bool
) -> bytes | None:
    """Return the aux data with `views` added, or None if it would be too large."""
    merged = dict(before.views) if before else {}
    for name, view in views.items():
        merged[name] = (view.version, msgspec.Raw(view.document or _NULL), view.age)
    data = _encode(Aux(store=VERSION, committed=committed, views=merged))
    return data if len(data) <= AUX_BYTES_MAX else None


def decode_aux(aux: bytes | None) -> Aux | None:
    """Return the content of aux data, or None if there is none in a known format."""
    if not aux:
        return None
    try:
        decoded = _decode_aux(aux)
    except (msgspec.DecodeError, RecursionError):
        return None
    return decoded if decoded.store == VERSION else None


def view_in(aux: Aux | None, name: str, seqnum: SeqNum) -> ObjectView | None:
    """Return the view of `name` in the aux data of the record at `seqnum`, if there is one."""
    if aux is None or (kept := aux.views.get(name)) is None:
        return None
    version, raw, age = kept
    return ObjectView(seqnum, version, _document_in(raw), depth=0, age=age)


def checkpoint_tag_of(name: str) -> str:
    """Return the tag of the checkpoints of an object."""
    return _CHECKPOINT_TAG_PREFIX + name


def encode_checkpoint(name: str, view: ObjectView, *, parts: int = 0, first: SeqNum = 0) -> bytes:
    """Return the data of a checkpoint: a record with a view of an object.

    Args:
        name: the object.
        view: the view.
        parts: number of records that hold the object's JSON; 0: the checkpoint holds it.
        first: seqnum of the first of these records.
    """
    value = msgspec.Raw(_NULL if parts else view.document or _NULL)
    checkpoint = ObjectCheckpoint(name, view.seqnum, view.version, value, parts, first, view.line)
    return _encode({"store": VERSION, "writes": {}, "checkpoint": checkpoint})


def encode_part(part: ObjectCheckpointPart) -> bytes:
    """Return the data of a record with a part of a checkpoint."""
    return _encode({"store": VERSION, "writes": {}, "part": part})


def checkpoint_in(command: StoreCommand | None, name: str) -> ObjectCheckpoint | None:
    """Return the checkpoint of `name` in a command, or None."""
    kept = None if command is None else command.checkpoint
    return kept if kept is not None and kept.name == name else None


def part_in(command: StoreCommand | None, name: str) -> ObjectCheckpointPart | None:
    """Return the part of a checkpoint of `name` in a command, or None."""
    kept = None if command is None else command.part
    return kept if kept is not None and kept.name == name else None


def view_of(checkpoint: ObjectCheckpoint, text: bytes | None = None) -> ObjectView:
    """Return the view in a checkpoint; `text`: the object's JSON, if it is in parts."""
    document = _document_in(checkpoint.value) if text is None else text
    return ObjectView(
        checkpoint.seqnum, checkpoint.version, document, depth=0, line=checkpoint.line
    )


def encode_collected(collected: Collected) -> bytes:
    """Return the data of a collection's record: the decisions in a part of the log."""
    return _encode({"store": VERSION, "writes": {}, "collected": collected})


def _document_in(raw: msgspec.Raw) -> bytes | None:
    document = bytes(raw)
    return None if document == _NULL else document
