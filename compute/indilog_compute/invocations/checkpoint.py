"""What the records of `$invocations` amount to, as records of it: so that a reader can begin where
older ones are trimmed, and come to the same result as one that has read them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from indilog.base.ids import SeqNum
from indilog.config import KIB
from indilog_compute.invocations.records import Checkpointed

PART_BYTES: Final = 256 * KIB


class Invocation(msgspec.Struct, array_like=True, eq=False):
    """One invocation.

    Attributes:
        seqnum: of its `Accepted`, which has the arguments.
        due: no executor claims it before, seconds since 1970 by the log's time.
        node: whose executors come first to claim it.
        size: bytes of arguments and result.
        executor: the executor that runs it; None: it waits, or it has ended.
        tries: how often an executor has begun to run it.
        ended: seqnum of its outcome; `ended_at` is when. Valid when it is over.
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


class LastDue(NamedTuple):
    """The due time of a schedule that was accepted last, by the wall clock, and when that was
    ordered, by the log's time; both seconds since 1970.
    """

    at: float
    ordered_at: float


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state of a `Fold`.

    Attributes:
        count: records that were applied; those below seqnum `end`.
        over: those that are over and remembered, oldest outcome first.
        executors: the seqnum of the last record of each that runs something.
    """

    end: SeqNum
    count: int
    clock: float
    open: tuple[Invocation, ...]
    over: tuple[Invocation, ...]
    executors: dict[str, SeqNum]
    given_up: tuple[str, ...]
    last_due: dict[str, LastDue]


_decode = msgspec.msgpack.Decoder(Checkpoint).decode


class Found(NamedTuple):
    """The newest checkpoint of a log, and the seqnum behind its last part."""

    checkpoint: Checkpoint
    place: SeqNum


def checkpoint_parts(
    checkpoint: Checkpoint,
    id: str,  # noqa: A002 - it is called so
    follows: SeqNum = 0,
    part_bytes: int = PART_BYTES,
) -> list[Checkpointed]:
    """Return the records that say it; `follows` as in `Checkpointed`."""
    data = msgspec.msgpack.encode(checkpoint)
    pieces = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    return [
        Checkpointed(id, part, len(pieces), checkpoint.count, checkpoint.end, piece, follows)
        for part, piece in enumerate(pieces)
    ]


def newest_checkpoint(records: Iterable[tuple[SeqNum, Checkpointed]]) -> Found | None:
    """Return the one that counts, of those that are whole.

    `records` are all that are left, ascending by seqnum. Trims leave nothing before the first part
    of one that counts, so the first that is left follows the newest of its time. One that follows a
    later one than is known here counts too: that one is lost.
    """
    newest: SeqNum | None = None
    found: Found | None = None
    pieces: dict[str, dict[int, bytes]] = {}
    for seqnum, record in records:
        parts = pieces.setdefault(record.id, {})
        parts[record.part] = record.data
        if newest is None:
            newest = record.follows
        if record.part == record.parts - 1 and record.follows >= newest:
            newest = seqnum + 1
            if len(parts) == record.parts:  # otherwise one of them is lost
                found = Found(_decode(b"".join(parts[n] for n in range(record.parts))), newest)
    return found
