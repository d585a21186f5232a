"""Checkpoints of a shard in the log: which of them counts.

Processes write checkpoints whenever they have seen enough, so one that lags may write an older
state behind a newer one. What is trimmed is decided by the checkpoint that is furthest on, never
by the newest: all who trim agree on it, so it never gives way to one that is behind what was given
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bokiqueue.records import Checkpoint, checkpoint_decoded
from indilog.errors import TrimmedError
from indilog.ids import SeqNum
from indilog.log import Log

_PAGE: Final = 16


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint, and where it is."""

    seqnum: SeqNum
    checkpoint: Checkpoint

    @property
    def needed_from(self) -> SeqNum:
        """The first record of the shard that whoever begins here needs."""
        checkpoint = self.checkpoint
        return min((held.seqnum for held in checkpoint.messages), default=checkpoint.end)


async def furthest(log: Log, tag: str) -> Kept | None:
    """Return the checkpoint that is furthest on, of all that are left; None: there is none."""
    best: Kept | None = None
    start = 0
    while True:
        try:
            page = await log.read_range(tag, start, limit=_PAGE)
        except TrimmedError as error:
            start = error.first_seqnum
            continue
        if not page:
            return best
        for record in page:
            checkpoint = checkpoint_decoded(record.data)
            if checkpoint is None:
                continue
            if best is None or checkpoint.end >= best.checkpoint.end:
                best = Kept(record.seqnum, checkpoint)
        start = page[-1].seqnum + 1
