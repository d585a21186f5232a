"""Stores the checkpoints of a replayed state in the log, and finds the one to start from.

Any process may write a checkpoint, and a lagging process may append an older state after a newer
one. So a reader starts from the checkpoint that covers the most records, not from the newest one.

A large checkpoint consists of several records. It is used only if all of them can be read; a crash
between two parts leaves the previous checkpoint in use. `Replica` calls these functions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec

from indilog.base.errors import DataLossError, TooLargeError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, Record
from indilog.sdk.record_format import RecordFormat
from indilog.sdk.surviving_records import may_go_further, read_surviving_records

PART_BYTES: Final = 256 * 1024
"""Bytes of the state in one record; fewer if the log's limit for a record is lower."""
_PART_BYTES_MIN: Final = 512
_PAGE: Final = 16

_Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class SubStream:
    """The records of one replayed state.

    Attributes:
        tag: tag of its commands.
        checkpoints_tag: tag of its checkpoints; they have no other tag.
        format: frame of its checkpoints. Later versions are refused.
        what: the state, for error messages, such as "Lock 'x'".
    """

    tag: str
    checkpoints_tag: str
    format: RecordFormat
    what: str


class CheckpointPart(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """A part of the state as of the records below `end`.

    Attributes:
        end: records below this seqnum are in the state.
        count: number of records applied since the sub-stream began.
        marked: the value of `count` when a checkpoint last became due.
        parts: number of parts.
        part: number of this part, from 0.
        first: seqnum of part 0; None in part 0.
        content: a piece of the encoded state. The pieces, joined in the order of the parts, are the
            whole.
    """

    end: Annotated[SeqNum, msgspec.Meta(ge=0)]
    count: _Count
    marked: _Count
    parts: Annotated[int, msgspec.Meta(ge=1)]
    part: _Count
    first: SeqNum | None
    content: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint to be appended.

    Attributes:
        end, count, marked: as in `CheckpointPart`.
        content: the encoded state.
    """

    end: SeqNum
    count: int
    marked: int
    content: bytes


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A complete checkpoint in the log, without its content, which `read_content` reads.

    Attributes:
        place: seqnum of its first part.
        end, count, marked: as in `CheckpointPart`.
        parts: seqnums of its parts, in their order.
    """

    place: SeqNum
    end: SeqNum
    count: int
    marked: int
    parts: tuple[SeqNum, ...]


class FoundCheckpoints(NamedTuple):
    """The surviving checkpoints of a sub-stream.

    Attributes:
        furthest: the complete checkpoint that covers the most records; None: there is none.
        lost: the loss, if a lost record may belong to a checkpoint that covers more than
            `furthest`.
    """

    furthest: StoredCheckpoint | None
    lost: DataLossError | None


_decode: Final = msgspec.msgpack.Decoder(CheckpointPart).decode


async def find_furthest(log: Log, stream: SubStream) -> FoundCheckpoints:
    """Return the surviving checkpoint that covers the most records.

    The search keeps no content in memory. The parts of several checkpoints may be mixed, and
    processes that crashed may have left many incomplete checkpoints.
    """
    best: StoredCheckpoint | None = None
    lost: DataLossError | None = None
    parts: defaultdict[SeqNum, dict[int, SeqNum]] = defaultdict(dict)
    async for record in read_surviving_records(log, stream.checkpoints_tag, limit=_PAGE):
        if isinstance(record, DataLossError):
            lost = record  # an earlier or later checkpoint may suffice
            continue
        part: CheckpointPart | None = stream.format.decoded(record.data, _decode)
        if part is None or part.part >= part.parts or (best is not None and part.end < best.end):
            continue
        first = record.seqnum if part.first is None else part.first
        places = parts[first]
        places[part.part] = record.seqnum
        if len(places) == part.parts:
            ordered = tuple(places[number] for number in range(part.parts))
            best = StoredCheckpoint(first, part.end, part.count, part.marked, ordered)
            del parts[first]
    is_lost = may_go_further(lost, 0 if best is None else best.end)
    return FoundCheckpoints(best, lost if is_lost else None)


async def read_content(log: Log, stream: SubStream, stored: StoredCheckpoint) -> bytes | None:
    """Return the encoded state of a checkpoint. None: since the checkpoint was found, a later one
    has replaced it, or a part was lost.
    """
    contents: dict[SeqNum, bytes] = {}
    async for record in read_surviving_records(
        log, stream.checkpoints_tag, stored.place, limit=_PAGE
    ):
        if isinstance(record, Record) and record.seqnum in stored.parts:
            part: CheckpointPart | None = stream.format.decoded(record.data, _decode)
            assert part is not None, "it was decoded when it was found"
            contents[record.seqnum] = part.content
            if len(contents) == len(stored.parts):
                return b"".join(map(contents.__getitem__, stored.parts))
    return None


async def append_checkpoint(log: Log, stream: SubStream, checkpoint: Checkpoint) -> None:
    """Append a checkpoint, in parts that fit into records.

    Raises:
        TooLargeError: not even small parts fit into a record of this log.
    """
    part_bytes = PART_BYTES
    while True:
        try:
            return await _append_parts(log, stream, checkpoint, part_bytes)
        except TooLargeError:
            if part_bytes <= _PART_BYTES_MIN:
                raise
            part_bytes //= 2


async def _append_parts(
    log: Log, stream: SubStream, checkpoint: Checkpoint, part_bytes: int
) -> None:
    content = checkpoint.content
    parts = max(1, -(-len(content) // part_bytes))
    first: SeqNum | None = None
    for number in range(parts):
        part = CheckpointPart(
            checkpoint.end, checkpoint.count, checkpoint.marked, parts, number, first,
            content[number * part_bytes :][:part_bytes],
        )  # fmt: skip
        seqnum = await log.append(stream.format.encoded(part), tags=[stream.checkpoints_tag])
        first = seqnum if first is None else first
