"""State machine replication: keeps an application's state equal in many processes (CORFU section 3;
Scalog section 5.3).

A command is a record. Each replica applies the commands in log order, so replicas that have applied
the same commands have equal states. Snapshots of the state are records of another sub-stream. A
replica loads the newest snapshot when it starts, or when it lags so far that its next command is
trimmed. Applications use `Replica` directly; `Store` does not.

The data of a snapshot record consists of:

- 1 byte: the version of this format;
- 8 bytes, little-endian: the first seqnum that the state does not include;
- 8 bytes, little-endian: the number of commands that the state includes;
- the state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from struct import Struct
from typing import Final, Generic, TypeVar

from bokistore.errors import InvalidObjectError, StoreVersionError
from indilog import MAX_SEQNUM, DataLossError, IndilogError, Log, Record, TrimmedError
from indilog.sdk import (
    TAG_BYTES_MAX,
    SeqNum,
    append_outcome_unknown,
    can_be_in_tag,
    check_own_append,
    may_go_further,
    name_loss,
    read_surviving_records,
)

SNAPSHOT_EVERY: Final = 1000
_COMMANDS_TAG_PREFIX: Final = "smr:"
_SNAPSHOTS_TAG_PREFIX: Final = "smr-snapshot:"
_NAME_BYTES_MAX: Final = TAG_BYTES_MAX - len(_SNAPSHOTS_TAG_PREFIX)
_VERSION: Final = 1
_HEAD: Final = Struct("<BQQ")
_PAGE: Final = 1000
_SNAPSHOTS_PAGE: Final = 16

_ResultT = TypeVar("_ResultT")


class Replica(Generic[_ResultT]):
    """One replica of a state machine; the caller owns the state.

    Args:
        log: the log with commands and snapshots; it may also hold other records.
        apply: applies one command to the state and returns its result. It must be deterministic: no
            clock, no randomness, no input but the state and the command. If it raises, the proposer
            gets the exception as the command's result, and every replica continues.
        snapshot: returns the state as bytes; equal states as equal bytes.
        restore: replaces the state by one that `snapshot` returned.
        name: name of the state machine, unique in the log.
        snapshot_every: commands between two snapshots, at least 1. The replica that proposed the
            last of these commands appends the snapshot.

    Attributes:
        end: the state includes the commands below this seqnum.
        commands: number of commands that the state includes.

    Raises:
        InvalidObjectError: the name is invalid.
    """

    def __init__(
        self,
        log: Log,
        apply: Callable[[bytes], _ResultT],
        *,
        snapshot: Callable[[], bytes],
        restore: Callable[[bytes], None],
        name: str = "state",
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        if not can_be_in_tag(name, _NAME_BYTES_MAX):
            raise InvalidObjectError(
                f"A state machine's name must be 1 to {_NAME_BYTES_MAX} bytes of text, not "
                f"{name!r:.64}."
            )
        self._log = log
        self._apply = apply
        self._snapshot = snapshot
        self._restore = restore
        self._tag = _COMMANDS_TAG_PREFIX + name
        self._snapshots_tag = _SNAPSHOTS_TAG_PREFIX + name
        self._snapshot_every = max(1, snapshot_every)
        self._has_begun = False
        self._proposals: dict[object, SeqNum] = {}
        """For each proposal in flight, a seqnum at or below that of its command."""
        self._results: dict[SeqNum, tuple[_ResultT | Exception, int]] = {}
        """Results of commands that a proposal in flight may need, with their numbers."""
        self.end: SeqNum = 0
        self.commands = 0

    async def propose(self, command: bytes) -> _ResultT:
        """Append a command, and return the result of applying it here.

        When this returns, the command is durable and has its place in the order of all commands.

        Raises:
            Exception: the exception that `apply` raised for the command.
            AppendOutcomeUnknownError: the command may have been appended; or the command was
                appended, but the commands up to it could not be read. After a `retryable` error the
                command was not appended. Other errors are those of `Log.append`.
            TrimmedError: the command was applied and trimmed at once; its result is unknown here.
        """
        await (
            self._begin()
        )  # loads the snapshot before the append, so that it cannot include the command
        proposal = object()
        self._proposals[proposal] = self.end
        try:
            seqnum = await self._log.append(command, tags=[self._tag])
            with append_outcome_unknown(seqnum):
                await self._advance(seqnum + 1, own=seqnum)
            if seqnum not in self._results:
                raise TrimmedError(self.end)
            result, number = self._results[seqnum]
        finally:
            del self._proposals[proposal]
            self._forget()
        if number % self._snapshot_every == 0:
            # Without a snapshot, a starting replica replays more commands.
            with suppress(IndilogError):
                await self.save()
        if isinstance(result, Exception):
            raise result
        return result

    async def sync(self, until: SeqNum | None = None) -> SeqNum:
        """Apply all commands below `until`, or below the tail, and return `end`.

        Without `until`, the state then includes every command whose `propose` has returned in any
        process, so the next read of the state is linearizable. A replica never goes back, so its
        `end` may be above `until`.

        Raises:
            TrimmedError: commands were trimmed, and no snapshot includes them.
            DataLossError: a command is lost, or the snapshot that includes trimmed commands.
        """
        tail = await self._log.tail()
        await self._advance(tail if until is None else min(until, tail))
        return self.end

    async def follow(self) -> None:
        """Apply commands as they arrive, until cancelled. Load a snapshot if commands were trimmed.

        Raises:
            TrimmedError: commands were trimmed, and no snapshot includes them.
        """
        await self._begin()
        while True:
            try:
                async for record in self._log.subscribe(self._tag, self.end):
                    await self._advance(record.seqnum + 1)
            except TrimmedError as error:
                await self._advance(error.first_seqnum)

    async def save(self) -> SeqNum:
        """Append a snapshot of the state, and return its seqnum.

        Raises:
            TooLargeError: the state is larger than a record; nothing was appended.
        """
        data = _HEAD.pack(_VERSION, self.end, self.commands) + self._snapshot()
        return await self._log.append(data, tags=[self._snapshots_tag])

    async def trim(self) -> SeqNum:
        """Trim the commands that the best snapshot includes, and the snapshots before that one. The
        best snapshot is the one that includes the most commands.

        Returns:
            The first seqnum whose command is kept; 0 if there is no snapshot.

        Raises:
            DataLossError: a snapshot is lost that may be the best one, so nothing was trimmed.
                After a snapshot that includes more commands is saved, the lost one is not needed.
        """
        # The snapshot that covers the most, not the newest one, which may be from a lagging
        # replica. All replicas that trim choose the same snapshot, so the one that remains covers
        # all that was trimmed.
        best: tuple[SeqNum, SeqNum] = 0, 0
        lost: DataLossError | None = None
        async for record in read_surviving_records(
            self._log, self._snapshots_tag, limit=_SNAPSHOTS_PAGE
        ):
            if isinstance(record, DataLossError):
                lost = record
            else:
                best = max(best, (_head_of(record)[0], record.seqnum))
        end, seqnum = best
        if lost is not None and may_go_further(lost, end):
            raise lost
        if end:
            await self._log.trim(end, tag=self._tag)
            await self._log.trim(seqnum, tag=self._snapshots_tag)
        return end

    def state_hash(self) -> str:
        """Return a hash of the state, which is equal for all replicas with equal `end`."""
        return hashlib.sha256(self._snapshot()).hexdigest()

    async def _begin(self) -> None:
        """Load the newest snapshot, once. A concurrent call that finds a snapshot later does not
        load it. That snapshot may include commands that were proposed here meanwhile, and their
        results would be missing.
        """
        if not self._has_begun:
            await self._load()
            self._has_begun = True

    async def _load(self, at_least: SeqNum = 0) -> DataLossError | None:
        """Load the newest snapshot that covers the commands below `at_least`, if it is ahead of the
        state. If no such snapshot is found, return the error of a lost one that may cover the
        commands.
        """
        bound, floor = MAX_SEQNUM, 0
        lost: DataLossError | None = None
        while bound >= 0:
            try:
                found = await self._log.read_prev(self._snapshots_tag, bound)
            except TrimmedError as error:
                if error.first_seqnum <= floor:
                    break
                bound, floor = MAX_SEQNUM, error.first_seqnum  # a newer one was appended meanwhile
                continue
            except DataLossError as error:
                if error.seqnum is None:
                    raise
                bound, lost = error.seqnum - 1, error  # an earlier snapshot may suffice
                continue
            if found is None:
                break
            end, commands = _head_of(found)
            if end >= at_least:
                if end > self.end and (at_least or not self._has_begun):
                    self._restore(found.data[_HEAD.size :])
                    self.end, self.commands = end, commands
                return None
            bound = found.seqnum - 1
        return lost

    async def _advance(self, until: SeqNum, *, own: SeqNum = -1) -> None:
        """Apply the commands below `until`. Concurrent calls are safe.

        Raises:
            NotReadyError: the read did not return the command at `own`, which this replica
                appended; the state includes the commands before it.
        """
        await self._begin()
        while self.end < until:
            start = self.end
            try:
                page = await self._log.read_range(self._tag, start, limit=_PAGE)
            except TrimmedError as error:
                lost = await self._load(error.first_seqnum)
                if self.end == start:
                    await self._log.tail()  # the floor may be visible before the snapshot
                    lost = await self._load(error.first_seqnum)
                if self.end > start:
                    continue
                if lost is None:
                    raise
                raise self._name_machine(lost) from error
            except DataLossError as error:
                raise self._name_machine(error) from error
            ahead = [record for record in page if record.seqnum < until]
            for record in ahead:
                self._apply_record(record)
            if len(ahead) < len(page) or not page:
                check_own_append(own, self.end)
                self.end = max(self.end, until)

    def _name_machine(self, error: DataLossError) -> DataLossError:
        return name_loss(f"State machine {self._tag.removeprefix(_COMMANDS_TAG_PREFIX)!r}", error)

    def _apply_record(self, record: Record) -> None:
        """Apply a command, unless the state includes it."""
        if record.seqnum < self.end:
            return
        try:
            result: _ResultT | Exception = self._apply(record.data)
        except Exception as failure:  # noqa: BLE001, the exception is the command's result
            result = failure
        self.end, self.commands = record.seqnum + 1, self.commands + 1
        if self._proposals:
            self._results[record.seqnum] = result, self.commands

    def _forget(self) -> None:
        """Drop the results that no proposal in flight needs."""
        if not self._proposals:
            self._results.clear()
        elif len(self._results) > 2 * _PAGE:
            low = min(self._proposals.values())
            self._results = {s: kept for s, kept in self._results.items() if s >= low}


def _head_of(record: Record) -> tuple[SeqNum, int]:
    """Return the end and the number of commands of a snapshot.

    Raises:
        StoreVersionError: the snapshot has another format.
    """
    if len(record.data) < _HEAD.size or record.data[0] != _VERSION:
        raise StoreVersionError(f"The snapshot at {record.seqnum} has a format not known here.")
    _, end, commands = _HEAD.unpack_from(record.data)
    return end, commands
