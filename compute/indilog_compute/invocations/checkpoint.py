"""Encodes a checkpoint of `$invocations`: the state of the invocation table, as records of this
log. A node that starts from a checkpoint gets the same state as a node that has read all records.
So the records that a checkpoint covers can be trimmed. `CheckpointLog` appends and reads the
checkpoints; `InvocationTable` makes and restores them.
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
    """One invocation, as all compute nodes know it.

    Attributes:
        seqnum: seqnum of the invocation's `InvocationAccepted` record, which has the arguments.
        due: time before which no executor claims the invocation; seconds since 1970 by the log's
            time.
        node: the compute node whose executors may claim the invocation first.
        stream: the tag of the invocation's records.
        digest: digest of the arguments; empty if the invocation has no key.
        size: bytes of the arguments and the result.
        executor: the executor that runs the invocation; None: the invocation waits or has ended.
        tries: how often executors have begun to run the invocation.
        ended: seqnum of the outcome; None: the invocation has not ended.
        ended_at: the log's time of the outcome, seconds since 1970; valid if `ended` is set.
        holder: the run for which the outcome is held; empty: the outcome is not held.
        released_at: the log's time at which the outcome was released, seconds since 1970; 0: it was
            not released.
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
    """The last accepted due time of a schedule; both times are in seconds since 1970.

    Attributes:
        at: the due time, by the wall clock.
        ordered_at: the log's time of the record that accepted the due time.
    """

    at: float
    ordered_at: float


class TableCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state of an `InvocationTable`.

    Attributes:
        count: number of applied records: all records of the log below seqnum `end`.
        kept: ended invocations whose outcome is kept, the oldest outcome first.
        executors: for each executor that runs an invocation, the seqnum of its last record.
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
    """Return the records with the parts of a checkpoint; `follows` is as in `Checkpointed`."""
    data = msgspec.msgpack.encode(checkpoint)
    pieces = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    return [
        Checkpointed(id, part, len(pieces), checkpoint.count, checkpoint.end, piece, follows)
        for part, piece in enumerate(pieces)
    ]


def newest_checkpoint(records: Iterable[tuple[SeqNum, Checkpointed]]) -> NewestCheckpoint | None:
    """Return the newest valid checkpoint.

    `records` are the readable parts of all checkpoints in the log, ascending by seqnum. A
    checkpoint is valid if it is complete and meets one of these conditions:

    - It follows the newest valid checkpoint before it.
    - It is the oldest checkpoint in the log. After a valid checkpoint, all parts before its first
      one are trimmed.
    - It follows a checkpoint that is newer than all earlier ones in `records`: a checkpoint that
      was lost.
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
