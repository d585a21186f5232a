"""What the records of `$invocations` amount to, as records of it: so that a reader can begin where
older ones are trimmed, and come to the same result as one that has read them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from compute.invocations.records import Checkpointed
from indilog.config import KIB
from indilog.ids import SeqNum

PART_BYTES: Final = 256 * KIB


class Invocation(msgspec.Struct, array_like=True, eq=False):
    """One invocation.

    Attributes:
        seqnum: of its `Accepted`, which has the arguments.
        due: nobody runs it before, seconds since 1970.
        node: whose executors come first to claim it.
        size: bytes of arguments and result.
        executor: who runs it, if anybody does.
        tries: how often somebody has begun to run it.
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
    last_at: dict[str, float]


_decode = msgspec.msgpack.Decoder(Checkpoint).decode


def checkpoint_parts(checkpoint: Checkpoint, id: str) -> list[Checkpointed]:  # noqa: A002 - it is called so
    """Return the records that say it."""
    data = msgspec.msgpack.encode(checkpoint)
    pieces = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    return [
        Checkpointed(id, part, len(pieces), checkpoint.count, checkpoint.end, piece)
        for part, piece in enumerate(pieces)
    ]


def newest_checkpoint(records: Iterable[Checkpointed]) -> Checkpoint | None:
    """Return the one that covers most, of those that are whole."""
    found: dict[str, dict[int, Checkpointed]] = {}
    for record in records:
        found.setdefault(record.id, {})[record.part] = record
    whole = [list(parts.values()) for parts in found.values() if _is_whole(parts.values())]
    if not whole:
        return None
    newest = max(whole, key=lambda parts: (parts[0].end, parts[0].id))
    return _decode(b"".join(p.data for p in sorted(newest, key=lambda p: p.part)))


def _is_whole(parts: Iterable[Checkpointed]) -> bool:
    there: Sequence[Checkpointed] = list(parts)
    return len(there) == there[0].parts
