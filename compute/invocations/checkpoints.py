"""Checkpoints in the log: written, read, and what they make superfluous trimmed."""

from __future__ import annotations

import secrets

from compute.invocations.arrivals import Arrivals
from compute.invocations.checkpoint import Checkpoint, checkpoint_parts, newest_checkpoint
from compute.invocations.fold import Fold
from compute.invocations.records import CHECKPOINTS_TAG, Checkpointed, decoded, encoded
from indilog.errors import TrimmedError
from indilog.ids import SeqNum
from indilog.log import Log, Record


class Checkpoints:
    """The checkpoints of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def write(self, fold: Fold, arrivals: Arrivals) -> None:
        """Record what `fold` is now, and trim what nobody needs who begins there.

        A checkpoint that was not finished is not used, and trimmed with the next one.
        """
        checkpoint = fold.checkpoint()
        places: list[SeqNum] = [
            await self._log.append(encoded(part), tags=[CHECKPOINTS_TAG])
            for part in checkpoint_parts(checkpoint, secrets.token_hex(8))
        ]
        await arrivals.seqnum(places[-1], fold.end)
        if fold.checkpointed > checkpoint.count:
            return  # another one has covered more meanwhile: those that it needs stay
        await self._log.trim(places[0], tag=CHECKPOINTS_TAG)
        for stream, until in fold.trimmable(checkpoint.end):
            await self._log.trim(until, tag=stream)

    async def newest(self) -> Checkpoint | None:
        """Return the checkpoint that covers most, None if there is none."""
        parts = [event for record in await self._records() if (event := _part(record)) is not None]
        return newest_checkpoint(parts)

    async def _records(self) -> list[Record]:
        found: list[Record] = []
        bound: SeqNum = 0
        while True:
            try:
                page = await self._log.read_range(CHECKPOINTS_TAG, bound)
            except TrimmedError as error:
                found, bound = [], error.first_seqnum
                continue
            if not page:
                return found
            found += page
            bound = page[-1].seqnum + 1


def _part(record: Record) -> Checkpointed | None:
    event = decoded(record.data)
    return event if isinstance(event, Checkpointed) else None
