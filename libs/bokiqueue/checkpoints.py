"""Writes the checkpoints of a shard to the log, and chooses the one to use.

Any process may write a checkpoint, so a lagging process may append an older state after a newer
one. Hence records are trimmed up to the end of the checkpoint that covers the most, not of the
newest one. All processes that trim choose the same checkpoint, so the remaining checkpoint covers
all that was trimmed.

A checkpoint of many messages consists of several records. It is used only if all of them exist.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import msgspec

from bokiqueue.records import QueueCheckpoint, decode_checkpoint, encode
from indilog import DataLossError, Log, TooLargeError
from indilog.sdk import SeqNum, may_go_further, read_surviving_records

_PAGE: Final = 16
_HELD_MAX: Final = 10_000
"""Largest number of messages in one record, each at most 45 bytes; fewer if the log's limit is
lower.
"""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint and its seqnum."""

    seqnum: SeqNum
    checkpoint: QueueCheckpoint

    @property
    def needed_from(self) -> SeqNum:
        """The first record of the shard that a process starting from this checkpoint needs."""
        checkpoint = self.checkpoint
        return min((held.seqnum for held in checkpoint.messages), default=checkpoint.end)


class ShardCheckpoints(NamedTuple):
    """The surviving checkpoints of a shard.

    Attributes:
        furthest: the checkpoint that covers the most records; None: there is none.
        lost: the loss, if a lost record may belong to a checkpoint that covers more.
    """

    furthest: StoredCheckpoint | None
    lost: DataLossError | None


async def write(log: Log, tag: str, checkpoint: QueueCheckpoint) -> None:
    """Append a checkpoint, in parts that fit into records."""
    held_max = _HELD_MAX
    while True:
        try:
            return await _write_parts(log, tag, checkpoint, held_max)
        except TooLargeError:
            if held_max == 1:
                raise
            held_max //= 2


async def _write_parts(log: Log, tag: str, checkpoint: QueueCheckpoint, held_max: int) -> None:
    held = checkpoint.messages
    parts = max(1, -(-len(held) // held_max))
    first: SeqNum | None = None
    for part in range(parts):
        record = msgspec.structs.replace(
            checkpoint, messages=held[part * held_max :][:held_max], parts=parts, part=part,
            first=first,
        )  # fmt: skip
        seqnum = await log.append(encode(record), tags=[tag])
        first = seqnum if first is None else first


async def find_furthest(log: Log, tag: str) -> ShardCheckpoints:
    """Return the surviving checkpoint that covers the most records."""
    best: StoredCheckpoint | None = None
    lost: DataLossError | None = None
    parts: defaultdict[SeqNum, dict[int, QueueCheckpoint]] = defaultdict(dict)
    async for record in read_surviving_records(log, tag, limit=_PAGE):
        if isinstance(record, DataLossError):
            lost = record  # an earlier or later checkpoint may suffice
            continue
        part = decode_checkpoint(record.data)
        if part is None or part.part >= part.parts:
            continue
        if best is not None and part.end < best.checkpoint.end:
            continue
        first = record.seqnum if part.first is None else part.first
        parts[first][part.part] = part
        if len(parts[first]) == part.parts:
            best = StoredCheckpoint(first, _join_parts(parts.pop(first)))
    is_lost = may_go_further(lost, 0 if best is None else best.checkpoint.end)
    return ShardCheckpoints(best, lost if is_lost else None)


def _join_parts(parts: dict[int, QueueCheckpoint]) -> QueueCheckpoint:
    if len(parts) == 1:
        return parts[0]
    held = chain.from_iterable(parts[number].messages for number in range(len(parts)))
    return QueueCheckpoint(parts[0].end, parts[0].clock, tuple(held))
