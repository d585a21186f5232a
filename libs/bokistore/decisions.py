"""Decides from the order of the log whether a transaction committed. All processes reach the same
decision.

A transaction commits iff no object that it read has a committed write in [its horizon, its seqnum).
The horizon is the end of the snapshot that it read. This is optimistic concurrency control with
backward validation of the whole read set. So transactions are serializable in log order, without
write skew (PITFALLS 11: Boki checks only the write set).

A transaction's id is validated like an object that the transaction read and wrote. Before the
transaction began, its process checked that no record with this id has committed below its horizon.
So of all records with one id only the first valid one commits.

The records that decide may be trimmed. The decision is then in other records. An object's
checkpoint has the object's version, and the record of a collection has the decisions about trimmed
transactions. `ObjectReplay` calls `Decisions`, which calls `ObjectCheckpoints`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from bokistore.cache import ViewCache
from bokistore.checkpoints import ObjectCheckpoints
from bokistore.records import (
    Collected,
    ConflictCheck,
    StoreCommand,
    decode_aux,
    decode_command,
    object_of,
)
from indilog import Log, Record, TrimmedError
from indilog.sdk import SeqNum

CELL: Final = 1024
"""Seqnums in a cell. A collection keeps the decisions of a cell together. Part of the format."""
_PAGE: Final = 16
"""Records in one read of a search for a conflict."""


def cell_tag_of(seqnum: SeqNum) -> str:
    """Return the tag of the record that keeps the decision about the transaction at `seqnum`."""
    return f"store-decided:{seqnum // CELL}"


@dataclasses.dataclass(slots=True)
class _Trial:
    """A transaction that is being decided.

    Attributes:
        checks: checks that are not finished; the last one is in progress.
        start: the records in [horizon, start) that this check searches are no conflicts.
        has_probed: whether the last record before the transaction was read.
        page: records from `start` on that were read, but not checked.
        crowded: tags that have records between the horizon and the transaction.
    """

    seqnum: SeqNum
    horizon: SeqNum
    checks: list[ConflictCheck]
    start: SeqNum
    has_probed: bool = False
    page: list[Record] = dataclasses.field(default_factory=list)
    crowded: set[str] = dataclasses.field(default_factory=set)

    def next_check(self) -> None:
        """Continue with the next sub-stream, because this one has no conflict."""
        self.checks.pop()
        self.start, self.has_probed, self.page = self.horizon, False, []


class Decisions:
    """Decides the transactions of one log."""

    def __init__(self, log: Log, cache: ViewCache, checkpoints: ObjectCheckpoints) -> None:
        self._log = log
        self._cache = cache
        self._checkpoints = checkpoints

    async def is_committed(
        self, record: Record, command: StoreCommand, crowded: set[str] | None = None
    ) -> bool:
        """Tell whether the command in `record` takes effect. Add to `crowded` the tags of the
        command's checks that may have records between its horizon and `record`.

        The search uses an explicit stack instead of recursion, because each transaction may depend
        on an earlier one, and the chain may be long.

        Raises:
            TrimmedError: the whole log was trimmed, with the records that decide.
        """
        outcome = self._outcome(record, command)
        if outcome is not None:
            return outcome
        decided: dict[SeqNum, bool] = {}
        first = _trial_of(record.seqnum, command)
        trials = [first]
        while trials:
            trial = trials[-1]
            verdict = await self._step(trial, decided)
            if isinstance(verdict, bool):
                decided[trial.seqnum] = verdict
                self.keep(trial.seqnum, committed=verdict)
                trials.pop()
            elif verdict is not None:
                earlier = decode_command(verdict.data)
                assert earlier is not None, "only a transaction is left undecided"
                assert verdict.seqnum < trial.seqnum, "decisions depend on earlier records only"
                assert verdict.seqnum not in decided, "a transaction is decided once"
                trials.append(_trial_of(verdict.seqnum, earlier))
        if crowded is not None:
            crowded.update(first.crowded)
        return decided[record.seqnum]

    def keep(self, seqnum: SeqNum, *, committed: bool) -> None:
        """Cache a decision."""
        self._cache.keep_decision(self._log.name, seqnum, committed=committed)

    async def _step(self, trial: _Trial, decided: Mapping[SeqNum, bool]) -> bool | Record | None:
        """Advance a trial. Return its decision, or the record that must be decided first, or None.

        The last record before the transaction usually tells that nothing was written since the
        horizon. Otherwise the search runs up from the horizon: of many transactions in conflict,
        the first one has committed, so the search ends there.
        """
        while trial.checks:
            check = trial.checks[-1]
            try:
                if not trial.has_probed and not await self._has_new_records(trial, check):
                    trial.next_check()
                    continue
                trial.crowded.add(check.tag)
                if not trial.page:
                    trial.page = await self._read_page(trial, check)
            except TrimmedError as error:
                verdict = await self._decide_trimmed(trial, check, error)
                if verdict is not None:
                    return verdict
                trial.has_probed = True
                trial.start = max(trial.start, error.first_seqnum)
                if trial.start >= trial.seqnum:
                    trial.next_check()
                continue
            if not trial.page:
                trial.next_check()
                continue
            record = trial.page[0]
            outcome = self._write_outcome(record, check, decided)
            if outcome is None:
                return record
            if outcome:
                return False
            assert trial.start <= record.seqnum < trial.seqnum, "a search runs up to the trial"
            trial.start = record.seqnum + 1
            del trial.page[0]
        return True

    async def _has_new_records(self, trial: _Trial, check: ConflictCheck) -> bool:
        """Tell whether the sub-stream has records between the horizon and the transaction."""
        last = await self._log.read_prev(check.tag, trial.seqnum - 1)
        trial.has_probed = True
        return last is not None and last.seqnum >= trial.horizon

    async def _read_page(self, trial: _Trial, check: ConflictCheck) -> list[Record]:
        """Return records of the sub-stream from `start` on, before the transaction."""
        page = await self._log.read_range(check.tag, trial.start, limit=_PAGE)
        return [record for record in page if record.seqnum < trial.seqnum]

    async def _decide_trimmed(
        self, trial: _Trial, check: ConflictCheck, error: TrimmedError
    ) -> bool | None:
        """Decide a trial whose history is trimmed in part; None: no conflict in this sub-stream.

        An id that was trimmed since the horizon counts as a conflict: the transaction lasted longer
        than ids are kept.

        Raises:
            TrimmedError: no record has the decision either.
        """
        if error.first_seqnum <= trial.horizon:
            return None
        kept = await self._read_collected(trial.seqnum)
        if kept is None:  # the floor may become visible before that record
            await self._log.tail()
            kept = await self._read_collected(trial.seqnum)
        if kept is not None:
            assert kept.start <= trial.seqnum < kept.end, "collections keep whole cells"
            return trial.seqnum not in kept.aborted
        name, floor = object_of(check.tag), error.first_seqnum
        if floor > trial.seqnum:
            raise error
        if name is None:
            await self._checkpoints.check_log_not_trimmed(floor)
            return False
        try:
            view = await self._checkpoints.at_floor(name, floor)
        except TrimmedError as again:
            if again.first_seqnum <= floor:
                raise
            return await self._decide_trimmed(trial, check, again)
        return False if view.version is not None and view.version >= trial.horizon else None

    async def _read_collected(self, seqnum: SeqNum) -> Collected | None:
        """Return the decisions that a collection recorded for the cell of `seqnum`, if they are
        visible.
        """
        record = await self._log.read_prev(cell_tag_of(seqnum))
        command = None if record is None else decode_command(record.data)
        return None if command is None else command.collected

    def _write_outcome(
        self, record: Record, check: ConflictCheck, decided: Mapping[SeqNum, bool]
    ) -> bool | None:
        """Tell whether `record` fails a check because it committed; None: it must be decided
        first.
        """
        command = decode_command(record.data)
        if command is None or not command.concerns(check):
            return False
        outcome = decided.get(record.seqnum)
        return self._outcome(record, command) if outcome is None else outcome

    def _outcome(self, record: Record, command: StoreCommand) -> bool | None:
        """Return the outcome of a command if it is cached or follows from the command; None: the
        log must be read.
        """
        if not command.is_conditional or command.horizon >= record.seqnum:
            return True
        outcome = self._cache.decision(self._log.name, record.seqnum)
        if outcome is None and (aux := decode_aux(record.aux)):
            outcome = aux.committed
        return outcome


def _trial_of(seqnum: SeqNum, command: StoreCommand) -> _Trial:
    return _Trial(seqnum, command.horizon, command.checks(), start=command.horizon)
