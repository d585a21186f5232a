"""Replicas of locks in a process: their states after the records read so far.

All callers of a lock in one process share a replica. Every few hundred records, a caller that
releases the lock writes a checkpoint and trims superseded commands.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from bokiflow.locks.lock_records import (
    Command,
    LockCheckpoint,
    LockTags,
    decode_checkpoint,
    decode_command,
    encode,
    lock_tags,
)
from bokiflow.locks.lock_state import LockState
from indilog import MAX_SEQNUM, DataLossError, Log, Record, TooLargeError, TrimmedError
from indilog.sdk import (
    SeqNum,
    append_outcome_unknown,
    check_own_append,
    may_go_further,
    name_loss,
    read_surviving_records,
)

CHECKPOINT_EVERY: Final = 256
"""Records of a lock between two checkpoints."""
_OUTCOMES_MAX: Final = 65_536
"""Largest number of outcomes kept while appends are in flight; about ten seconds of a busy lock."""
_LOCKS_MAX: Final = 4096
"""Largest number of replicas in memory for one platform; the least recently used is evicted
first.
"""
_PAGE: Final = 1000
_CHECKPOINTS_PAGE: Final = 16


class CommandOutcome(NamedTuple):
    """The token that a command affected, and the time of its record (seconds since 1970)."""

    token: SeqNum | None
    ordered_at: float


class LockCheckpoints(NamedTuple):
    """The surviving checkpoints of a lock.

    Attributes:
        place: seqnum of the checkpoint that covers the most records.
        furthest: this checkpoint; None if there is none.
        lost: the loss, if a lost checkpoint may cover more.
    """

    place: SeqNum
    furthest: LockCheckpoint | None
    lost: DataLossError | None


class LockReplica:
    """The state of one lock in one process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tags: LockTags = lock_tags(name)
        self.state = LockState()
        self._unsaved = 0
        self._appending: dict[object, SeqNum] = {}
        """For each append in flight, a seqnum at or below that of its record; ascending."""
        self._outcomes: OrderedDict[SeqNum, CommandOutcome] = OrderedDict()
        """Outcomes of records that may belong to appends in flight."""

    async def append(self, log: Log, command: Command) -> CommandOutcome | None:
        """Append a command, catch up with it, and return its outcome.

        None: the outcome is unknown, because hundreds of later records were applied and then
        trimmed.

        Raises:
            AppendOutcomeUnknownError: as for `Log.append`; or the command was appended, and its
                outcome cannot be read now.
        """
        telling = object()
        self._appending[telling] = self.state.end
        try:
            seqnum = await log.append(encode(command), tags=[self.tags.commands])
            with append_outcome_unknown(seqnum):
                await self.catch_up(log, own=seqnum)
            return self._outcomes.get(seqnum)
        finally:
            del self._appending[telling]
            self._forget()

    def _forget(self) -> None:
        """Drop the outcomes that no append in flight needs."""
        needed_from = next(iter(self._appending.values()), MAX_SEQNUM)
        while self._outcomes and next(iter(self._outcomes)) < needed_from:
            self._outcomes.popitem(last=False)

    async def catch_up(self, log: Log, own: SeqNum = -1) -> None:
        """Apply new records, at least up to and including `own`, which is a command that the
        session of `log` appended.

        Raises:
            DataLossError: a needed record is lost.
            NotReadyError: the read did not return the record at `own`.
            TrimmedError: the whole log was trimmed, and with it the history of the lock.
        """
        while True:
            start = self.state.end
            try:
                page = await log.read_range(self.tags.commands, start, limit=_PAGE)
            except TrimmedError as error:
                # The floor may become visible before the checkpoint, although the checkpoint was
                # appended first.
                await log.tail()
                lost = await self._load(log)
                if self.state.end > start:
                    continue
                if lost is None:
                    raise
                raise name_loss(f"Lock {self._name!r}", lost) from error
            except DataLossError as error:
                raise name_loss(f"Lock {self._name!r}", error) from error
            for record in page:
                self._apply(record)
            if not page:
                check_own_append(own, self.state.end)
            if self.state.end > own and len(page) < _PAGE:
                return

    def _apply(self, record: Record) -> None:
        if record.seqnum < self.state.end:
            return
        command = decode_command(record.data)
        token = self.state.apply(record.seqnum, record.ordered_at, command)
        assert self.state.end == record.seqnum + 1, "the state has this record"
        self._unsaved += 1
        if self._appending:
            self._outcomes[record.seqnum] = CommandOutcome(token, record.ordered_at)
        if len(self._outcomes) > _OUTCOMES_MAX:
            self._outcomes.popitem(last=False)

    async def _load(self, log: Log) -> DataLossError | None:
        """Continue from the checkpoint that covers the most, if it is ahead of the state. Return
        the loss if a lost checkpoint may cover even more.
        """
        left = await self._furthest(log)
        if left.furthest is not None and left.furthest.end > self.state.end:
            self.state, self._unsaved = LockState(left.furthest), 0
        return left.lost

    async def _furthest(self, log: Log) -> LockCheckpoints:
        """Return the checkpoint that covers the most records.

        It need not be the newest, because a process may have paused between building a checkpoint
        and appending it.
        """
        place, furthest = 0, None
        lost: DataLossError | None = None
        async for record in read_surviving_records(
            log, self.tags.checkpoints, limit=_CHECKPOINTS_PAGE
        ):
            if isinstance(record, DataLossError):
                lost = record  # an earlier or later checkpoint may suffice
                continue
            checkpoint = decode_checkpoint(record.data)
            if checkpoint and (furthest is None or checkpoint.end >= furthest.end):
                place, furthest = record.seqnum, checkpoint
        is_lost = may_go_further(lost, 0 if furthest is None else furthest.end)
        return LockCheckpoints(place, furthest, lost if is_lost else None)

    async def save(self, log: Log) -> None:
        """After `CHECKPOINT_EVERY` records, write a checkpoint and trim the records that the
        previous one covers.

        Because only records before the previous checkpoint are trimmed, callers with appends in
        flight can still read their outcomes. Concurrent checkpoints are safe: each is correct, and
        the checkpoint that covers the most is kept, so it covers all trimmed commands. While a lost
        checkpoint may cover more, nothing is trimmed, because the lost one may become readable
        again.
        """
        if self._unsaved < CHECKPOINT_EVERY:
            return
        self._unsaved = 0
        checkpoint = self.state.checkpoint()
        before = (await self._furthest(log)).furthest
        try:
            await log.append(encode(checkpoint), tags=[self.tags.checkpoints])
        except TooLargeError:
            return  # the queue is too long for a record; retried when it is shorter
        left = await self._furthest(log)
        if left.lost is not None:
            return
        await log.trim(left.place, tag=self.tags.checkpoints)
        if before is not None:
            await log.trim(before.end, tag=self.tags.commands)


_REPLICAS: Final[WeakKeyDictionary[object, OrderedDict[tuple[str, str], LockReplica]]] = (
    WeakKeyDictionary()
)


def replica_of(log: Log, name: str) -> LockReplica:
    """Return the replica that all callers of a platform share in this process (`Log.scope`)."""
    replicas = _REPLICAS.setdefault(log.scope, OrderedDict())
    key = (log.name, name)
    replica = replicas.get(key)
    if replica is None:
        replica = replicas[key] = LockReplica(name)
        if len(replicas) > _LOCKS_MAX:
            replicas.popitem(last=False)
    replicas.move_to_end(key)
    return replica
