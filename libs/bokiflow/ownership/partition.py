"""A partition that this process owns, and the lease on its runs.

An `OwnedPartition` is a replica of the partition's open runs. `executor` keeps the owned
partitions; lists of runs also read partitions of other executors through this class.
"""

from __future__ import annotations

from typing import Final

from bokiflow.ownership.lease import Lease
from bokiflow.ownership.partition_state import PartitionState, partition_stream
from bokiflow.ownership.skip_unreadable import catch_up_readable
from indilog import Log
from indilog.replayed import Replica
from indilog.sdk import SeqNum

_SAVE_EVERY: Final = 256


class OwnedPartition:
    """A partition that this process owns.

    Attributes:
        number: its number, from 0.
        since: seqnum of the claim.
        is_owned: whether this process still owns the partition under this claim.
        is_releasing: whether the partition is about to be released to another executor, so that no
            body of its runs may begin.
        is_loaded: whether its open runs are being executed, or are scheduled.
    """

    def __init__(self, number: int, since: SeqNum) -> None:
        self.number = number
        self.since = since
        self.is_owned = True
        self.is_releasing = False
        self.is_loaded = False
        self._appended = 0
        self._applied = 0
        self._replica = new_replica(number)

    @property
    def state(self) -> PartitionState:
        """The open runs after the records read so far."""
        return self._replica.state

    @property
    def unread(self) -> int:
        """Number of records that are known to be in the log and may not be applied yet."""
        return self._appended - self._applied

    def note_record(self) -> None:
        """Note that the partition has one more record, which is not applied yet."""
        self._appended += 1

    @property
    def is_usable(self) -> bool:
        """Whether runs of the partition may begin here."""
        return self.is_owned and not self.is_releasing

    async def catch_up(self, log: Log, own: SeqNum = -1) -> None:
        """Read new records, and skip lost ones. Each lost record is also a record of a run; that
        run cannot be read.
        """
        appended = self._appended
        await catch_up_readable(self._replica, log, own)
        self._applied = max(self._applied, appended)

    async def save_if_due(self, log: Log) -> None:
        """Write a checkpoint if 256 records (more with over 1,024 open runs) are unsaved."""
        if self._replica.unsaved >= max(_SAVE_EVERY, len(self.state.runs) // 4):
            await self._replica.save(log)


class PartitionLease:
    """The lease on the runs of a partition (`bokiflow.runs.execution.LeaseCheck`)."""

    def __init__(self, lease: Lease, partition: OwnedPartition) -> None:
        self._lease = lease
        self.partition = partition

    def is_sure(self) -> bool:
        """Whether no other executor can have taken over the run yet."""
        return self.partition.is_owned and self._lease.is_sure()

    def has_ended(self) -> bool:
        """Whether no further body of the run may begin here."""
        return not (self.partition.is_usable and self._lease.is_sure())


def new_replica(number: int) -> Replica[PartitionState, None]:
    """Return a replica of a partition's state before its first record."""
    return Replica(partition_stream(number), PartitionState, PartitionState.restore)
