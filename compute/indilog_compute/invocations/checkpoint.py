"""Encodes a checkpoint of `$invocations`: the invocation table, as records of the same log. A node
that starts from a checkpoint gets the same state as a node that has read all records. So records
that the checkpoint covers can be trimmed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from indilog.base.ids import SeqNum
from indilog.config import KIB
from indilog_compute.invocations.records import Checkpointed

PART_BYTES: Final = 256 * KIB


class RecordedInvocation(msgspec.Struct, array_like=True, eq=False):
    """One invocation.

    Attributes:
        seqnum: seqnum of its `InvocationAccepted` record, which has the arguments.
        due: time before which no executor claims it; seconds since 1970 by the log's time.
        node: the compute node whose executors may claim it first.
        size: bytes of its arguments and result.
        executor: the executor that runs it; None if it waits or has ended.
        tries: how often executors have begun to run it.
        ended: seqnum of its outcome; None until it has ended.
        ended_at: the log's time of its outcome, seconds since 1970; valid after it has ended.
        holder: the run for which its outcome is held; empty if it is not held.
        released_at: the log's time at which it was released, seconds since 1970; 0 if it was not.
    """

    id: str
    seqnum: SeqNum
    function: str
    due: float
    node: str
    stream: str
    key: str
    digest: bytes
    size: int
    executor: str | None = None
    tries: int = 0
    ended: SeqNum | None = None
    ended_at: float = 0.0
    failed: bool = False
    holder: str = ""
    released_at: float = 0.0


class LastDue(NamedTuple):
    """The last accepted due time of a schedule (wall clock), and the time of its record (the log's
    time); both seconds since 1970.
    """

    at: float
    ordered_at: float


class TableCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state of a `InvocationTable`.

    Attributes:
        count: number of applied records, which are the records below seqnum `end`.
        kept: ended invocations whose outcome is kept, oldest outcome first.
        executors: the seqnum of the last record of each executor that runs an invocation.
    """

    end: SeqNum
    count: int
    clock: float
    open: tuple[RecordedInvocation, ...]
    kept: tuple[RecordedInvocation, ...]
    executors: dict[str, SeqNum]
    dead_executors: tuple[str, ...]
    last_due: dict[str, LastDue]


_decode = msgspec.msgpack.Decoder(TableCheckpoint).decode


class NewestCheckpoint(NamedTuple):
    """The newest checkpoint of a log, and the seqnum after its last part."""

    checkpoint: TableCheckpoint
    place: SeqNum


def checkpoint_parts(
    checkpoint: TableCheckpoint,
    id: str,  # noqa: A002 - the field's name
    follows: SeqNum = 0,
    part_bytes: int = PART_BYTES,
) -> list[Checkpointed]:
    """Return the records that hold a checkpoint; `follows` is as in `Checkpointed`."""
    data = msgspec.msgpack.encode(checkpoint)
    pieces = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    return [
        Checkpointed(id, part, len(pieces), checkpoint.count, checkpoint.end, piece, follows)
        for part, piece in enumerate(pieces)
    ]


def newest_checkpoint(records: Iterable[tuple[SeqNum, Checkpointed]]) -> NewestCheckpoint | None:
    """Return the newest valid checkpoint.

    `records` are all parts of checkpoints in the log, ascending by seqnum. A checkpoint is valid if
    it is complete, and one of these holds:

    - It follows the newest valid checkpoint before it.
    - It is the oldest in the log, because a valid checkpoint trims everything before its first
      part.
    - It follows a checkpoint that is newer than all earlier ones in `records`. That checkpoint was
      lost.
    """
    newest: SeqNum | None = None
    found: NewestCheckpoint | None = None
    pieces: dict[str, dict[int, bytes]] = {}
    for seqnum, record in records:
        parts = pieces.setdefault(record.id, {})
        parts[record.part] = record.data
        if newest is None:
            newest = record.follows
        if record.part == record.parts - 1 and record.follows >= newest:
            newest = seqnum + 1
            if len(parts) == record.parts:  # otherwise a part is lost
                found = NewestCheckpoint(
                    _decode(b"".join(parts[n] for n in range(record.parts))), newest
                )
    return found
