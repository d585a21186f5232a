"""Writes and reads checkpoints in the log `$invocations`, and trims the records that they replace.

`InvocationService` calls `CheckpointLog`; `checkpoint` encodes the records.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final

import structlog

from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.base.log import Log
from indilog_compute.invocations.checkpoint import (
    PART_BYTES,
    NewestCheckpoint,
    TableCheckpoint,
    checkpoint_parts,
    newest_checkpoint,
)
from indilog_compute.invocations.invocation_table import InvocationTable
from indilog_compute.invocations.outcome_waiters import OutcomeWaiters
from indilog_compute.invocations.records import CHECKPOINTS_TAG, Checkpointed, decode, encode

_PART_OVERHEAD_BYTES: Final = 128
"""Largest size of a record, in bytes, without its part of the checkpoint."""


class CheckpointLog:
    """Writes and reads the checkpoints of one log.

    Args:
        waiters: wait until this node has read the appended parts.
        current: returns the table that the node uses now.
        record_bytes_max: largest number of data bytes in a record.
    """

    def __init__(
        self,
        log: Log,
        waiters: OutcomeWaiters,
        *,
        current: Callable[[], InvocationTable],
        record_bytes_max: int,
    ) -> None:
        self._log = log
        self._waiters = waiters
        self._current = current
        self._part_bytes = max(1, min(PART_BYTES, record_bytes_max - _PART_OVERHEAD_BYTES))

    async def write(self) -> None:
        """Record the state of the table as a checkpoint. Then trim the records that a node does not
        need if it starts from this checkpoint.

        Nothing is trimmed if another checkpoint was completed first, or if this node has since
        restored another table, because it had missed records. The next valid checkpoint then trims.
        """
        table = self._current()
        checkpoint = table.checkpoint()
        place = await self._append(checkpoint, table.checkpoint_place)
        if self._current() is not table or table.checkpoint_place != place[-1] + 1:
            return
        await self._log.trim(place[0], tag=CHECKPOINTS_TAG)
        left = dict(table.trimmable(checkpoint.end))
        try:
            for stream, until in list(left.items()):
                await self._log.trim(until, tag=stream)
                del left[stream]
        finally:
            table.not_trimmed(left)

    async def _append(self, checkpoint: TableCheckpoint, follows: SeqNum) -> list[SeqNum]:
        """Append a checkpoint, and wait until this node has read it; return the seqnums of its
        parts.
        """
        parts = checkpoint_parts(checkpoint, secrets.token_hex(8), follows, self._part_bytes)
        places = [await self._log.append(encode(part), tags=[CHECKPOINTS_TAG]) for part in parts]
        await self._waiters.wait_for_record(places[-1], self._current().end)
        return places

    async def newest(self) -> NewestCheckpoint | None:
        """Return the newest valid checkpoint; None if there is none."""
        return newest_checkpoint(await self._parts())

    async def _parts(self) -> list[tuple[SeqNum, Checkpointed]]:
        found: list[tuple[SeqNum, Checkpointed]] = []
        bound: SeqNum = 0
        while True:
            try:
                page = await self._log.read_range(CHECKPOINTS_TAG, bound)
            except TrimmedError as error:
                found, bound = [], error.first_seqnum
                continue
            except DataLossError as error:  # an older checkpoint may be readable
                if error.next_seqnum is None or error.next_seqnum <= bound:
                    raise
                structlog.get_logger().error("part of a checkpoint lost", reason=str(error))
                bound = error.next_seqnum
                continue
            if not page:
                return found
            for record in page:
                event = decode(record.data)
                if isinstance(event, Checkpointed):
                    found.append((record.seqnum, event))
            bound = page[-1].seqnum + 1
