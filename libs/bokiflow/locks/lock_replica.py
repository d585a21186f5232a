"""The copies of locks that a process keeps: what their records say, as far as it has read them.

One copy of a lock serves all who want it in a process. After a few hundred records whoever releases
writes a checkpoint and trims what nobody needs any more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from bokiflow.locks.lock_fold import LockFold
from bokiflow.locks.lock_records import (
    Command,
    LockCheckpoint,
    LockTags,
    checkpoint_decoded,
    command_decoded,
    encoded,
    tags_of,
)
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
"""Outcomes that a lock remembers while appends are under way; some ten seconds of a busy lock."""
_LOCKS_MAX: Final = 4096
"""Locks of one platform that a process keeps in memory; the one used longest ago goes first."""
_PAGE: Final = 1000
_CHECKPOINTS_PAGE: Final = 16


class CommandOutcome(NamedTuple):
    """What a command had an effect on, and when its record was ordered, seconds since 1970."""

    token: SeqNum | None
    ordered_at: float


class LockCheckpoints(NamedTuple):
    """What is left of a lock's checkpoints.

    Attributes:
        place: of the one that goes furthest.
        furthest: that one; None: there is none.
        lost: says which records are lost, if one of them may go further.
    """

    place: SeqNum
    furthest: LockCheckpoint | None
    lost: DataLossError | None


class LockReplica:
    """One lock, in one process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tags: LockTags = tags_of(name)
        self.fold = LockFold()
        self._unsaved = 0
        self._appending: dict[object, SeqNum] = {}
        """Of each append that is under way a seqnum below which its record is not; these grow."""
        self._outcomes: OrderedDict[SeqNum, CommandOutcome] = OrderedDict()
        """Of records that may be those of the appends under way."""

    async def append(self, log: Log, command: Command) -> CommandOutcome | None:
        """Append a command, catch up with it, and return what came of it.

        None: that is not known any more, since hundreds of records came in between and were
        trimmed.

        Raises:
            AppendOutcomeUnknownError: as `Log.append`; or it was appended, and what came of it
                cannot be read now.
        """
        telling = object()
        self._appending[telling] = self.fold.end
        try:
            seqnum = await log.append(encoded(command), tags=[self.tags.commands])
            with append_outcome_unknown(seqnum):
                await self.catch_up(log, own=seqnum)
            return self._outcomes.get(seqnum)
        finally:
            del self._appending[telling]
            self._forget()

    def _forget(self) -> None:
        """Drop the outcomes that no append under way can ask for."""
        needed_from = next(iter(self._appending.values()), MAX_SEQNUM)
        while self._outcomes and next(iter(self._outcomes)) < needed_from:
            self._outcomes.popitem(last=False)

    async def catch_up(self, log: Log, own: SeqNum = -1) -> None:
        """Apply what is new, at least up to and with `own`: a command that the session of `log`
        appended.

        Raises:
            DataLossError: a record is lost that is needed.
            NotReadyError: the record at `own` is not shown.
            TrimmedError: the log itself was trimmed, with the history of the lock.
        """
        while True:
            start = self.fold.end
            try:
                page = await log.read_range(self.tags.commands, start, limit=_PAGE)
            except TrimmedError as error:
                # A floor can be seen ahead of the checkpoint that was appended before it rose.
                await log.tail()
                lost = await self._load(log)
                if self.fold.end > start:
                    continue
                if lost is None:
                    raise
                raise name_loss(f"Lock {self._name!r}", lost) from error
            except DataLossError as error:
                raise name_loss(f"Lock {self._name!r}", error) from error
            for record in page:
                self._apply(record)
            if not page:
                check_own_append(own, self.fold.end)
            if self.fold.end > own and len(page) < _PAGE:
                return

    def _apply(self, record: Record) -> None:
        if record.seqnum < self.fold.end:
            return
        command = command_decoded(record.data)
        token = self.fold.apply(record.seqnum, record.ordered_at, command)
        self._unsaved += 1
        if self._appending:
            self._outcomes[record.seqnum] = CommandOutcome(token, record.ordered_at)
        if len(self._outcomes) > _OUTCOMES_MAX:
            self._outcomes.popitem(last=False)

    async def _load(self, log: Log) -> DataLossError | None:
        """Begin at the furthest checkpoint, if it is further; return what may be lost of a better
        one.
        """
        left = await self._furthest(log)
        if left.furthest is not None and left.furthest.end > self.fold.end:
            self.fold, self._unsaved = LockFold(left.furthest), 0
        return left.lost

    async def _furthest(self, log: Log) -> LockCheckpoints:
        """Return which checkpoint goes furthest.

        It need not be the newest: a process may have stood still between making one and its append.
        """
        place, furthest = 0, None
        lost: DataLossError | None = None
        async for record in read_surviving_records(
            log, self.tags.checkpoints, limit=_CHECKPOINTS_PAGE
        ):
            if isinstance(record, DataLossError):
                lost = record  # one before or behind it may do
                continue
            checkpoint = checkpoint_decoded(record.data)
            if checkpoint and (furthest is None or checkpoint.end >= furthest.end):
                place, furthest = record.seqnum, checkpoint
        is_lost = may_go_further(lost, 0 if furthest is None else furthest.end)
        return LockCheckpoints(place, furthest, lost if is_lost else None)

    async def save(self, log: Log) -> None:
        """After many records, write a checkpoint and trim what the one before stands for.

        So whoever has just appended can still read what came of it. Processes that do it at the
        same time do no harm: each checkpoint is true, and the one that goes furthest stays, so
        there is always one that goes on where the commands were trimmed. While one that is lost may
        go further, nothing is trimmed: it may come back.
        """
        if self._unsaved < CHECKPOINT_EVERY:
            return
        self._unsaved = 0
        checkpoint = self.fold.checkpoint()
        before = (await self._furthest(log)).furthest
        try:
            await log.append(encoded(checkpoint), tags=[self.tags.checkpoints])
        except TooLargeError:
            return  # too many wait; once there are fewer, it fits
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
    """Return the copy that all of a platform in this process share (`Log.scope`)."""
    replicas = _REPLICAS.setdefault(log.scope, OrderedDict())
    key = (log.name, name)
    replica = replicas.get(key)
    if replica is None:
        replica = replicas[key] = LockReplica(name)
        if len(replicas) > _LOCKS_MAX:
            replicas.popitem(last=False)
    replicas.move_to_end(key)
    return replica
