"""The status of a run, from its last records if they suffice.

The state of a run's partition has the epoch of the run, and all that a list shows of the run. The
last decisions of a run have the number of all its decisions, and the seqnum at which the status was
set (`bokiflow.runs.decision_numbers`). So the status of a run with a long history costs a few
reads.

The last records do not suffice after a takeover, for example, or while branches decide
concurrently. Then the whole run is read. `Handle.status` and `inspection` show statuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bokiflow.operations.progress import status_value_in
from bokiflow.ownership import crash_loops
from bokiflow.ownership.partition_state import OpenRun, Phase
from bokiflow.run_lists import find_open
from bokiflow.runner import Runner
from bokiflow.runs.decision_numbers import STATUS
from bokiflow.runs.records import (
    RunContinued,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    StepDecided,
    partition_of,
    run_record,
    run_tag,
)
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State, end_state
from indilog import DataLossError, Log, TrimmedError
from indilog.sdk import MAX_SEQNUM, SeqNum, plain_value

_LOOK: Final = 12
"""Largest number of records at the end of the run that are read to find its status."""


@dataclass(frozen=True)
class Status:
    """The status of a run, as of a read of the log.

    Attributes:
        steps: number of decided operations.
        epoch: 1 for the first executor, and one more for each later executor.
        executor: name of the current or last executor.
        problem: why the run is parked or failed. For a running run: how many processes in a row
            crashed right after they had begun to execute it. None: there is no problem.
        place: seqnum of the record of its start.
        began: time of the start, seconds since 1970.
        value: the value that the workflow set last with `Workflow.set_status`; None: it has set no
            value.
        round: number of its current round, from 1 (`Workflow.continue_as_new`). `steps` and `value`
            are those of this round.
        version: number of the deployment with whose code the run continues; None: the run was not
            started by a deployed application.
    """

    id: str
    workflow: str
    state: State
    steps: int
    epoch: int
    executor: str
    problem: str | None = None
    place: SeqNum = 0
    began: float = 0.0
    value: object = None
    round: int = 1
    version: int | None = None


def status_of(id: str, run: RunState) -> Status:  # noqa: A002
    """Return the status of a run that has begun."""
    assert run.started is not None, "only a run that has begun has a status"
    assert run.state is not None, "a run that has begun has a state"
    finished, parked = run.finished, run.parked
    problem = parked.reason if parked else None
    if run.state is State.RUNNING and run.crashes:
        problem = crash_loops.problem(run.crashes)
    if finished is not None and finished.failure is not None:
        problem = f"{finished.failure.kind}: {finished.failure.message}"
    return Status(
        id, run.started.workflow, run.state, len(run.steps), run.epoch, run.executor, problem,
        run.started_at, run.began, status_value_in(run), run.round,
        None if run.code is None else run.code.version,
    )  # fmt: skip


class _LastRecords:
    """Collects the facts in the last records of a run, from records that certainly take effect.

    Args:
        open_run: the run in the state of its partition; None: the run has ended.

    Attributes:
        finished: the seqnum and the record of its end; None: not found.
        parked: the record that parked it; None: not found.
        last: its last decision; None: not found.
        is_whole: whether the collected facts are final, so that no more records are needed.
        is_unclear: whether the whole run must be read.
    """

    def __init__(self, open_run: OpenRun | None) -> None:
        self.finished: tuple[SeqNum, RunFinished] | None = None
        self.parked: RunParked | None = None
        self.last: StepDecided | None = None
        self.is_whole = False
        self.is_unclear = False
        self._open = open_run

    @property
    def _epoch(self) -> int | None:
        if self._open is not None:
            return self._open.epoch
        return None if self.finished is None else self.finished[1].epoch

    @property
    def _executor(self) -> str:
        if self._open is not None:
            return self._open.executor
        return "" if self.finished is None else self.finished[1].executor

    def take(self, seqnum: SeqNum, record: RunRecord) -> None:
        """Take the next older record."""
        match record:
            case RunFinished() if self._open is None and self.finished is None:
                self.finished = seqnum, record
                self.is_unclear = not record.executor  # an earlier version wrote the record
            case StepDecided():
                self._take_decision(record)
            case RunTaken() if record.epoch == self._epoch and record.executor == self._executor:
                # Only the first decision of this epoch counts the decisions of earlier epochs.
                self.is_whole = self.last is not None
                self.is_unclear = not self.is_whole
            case RunStarted() | RunContinued():
                self._take_begin(seqnum, record)
            case RunParked() if record.epoch == self._epoch:
                self.parked = self.parked or record
            case RunFinished() | RunTaken() | RunParked():
                self.is_unclear = self._epoch is None or record.epoch >= self._epoch
            case _:
                pass  # such a record does not change the status

    def _take_begin(self, seqnum: SeqNum, record: RunStarted | RunContinued) -> None:
        """Take a record with which a round may have begun, unless it is a copy without effect."""
        if self._open is not None:
            self.is_whole = seqnum == self._open.round_at
        elif self.finished is None:
            self.is_unclear = True
        elif isinstance(record, RunStarted):
            self.is_whole = seqnum == self.finished[1].started_at
        else:
            is_certain = self.last is not None or not self.finished[1].steps
            self.is_whole = is_certain and record.round == self.finished[1].round

    def _take_decision(self, record: StepDecided) -> None:
        if self._epoch is None or record.epoch != self._epoch:
            self.is_unclear = self._epoch is None or record.epoch > self._epoch
        elif self.last is None:
            self.last = record
            self.is_unclear, self.is_whole = not record.nth, record.nth == 1
        else:
            self.is_whole = record.nth == self.last.nth - 1
            self.is_unclear = not self.is_whole


async def brief_status(log: Log, runner: Runner, id: str) -> Status | None:  # noqa: A002
    """Return the status of a run from its last records; None: the whole run must be read."""
    await runner.member.look_once(log)
    state = await runner.read_partition(log, partition_of(id, runner.member.count))
    open_run = await find_open(log, state, id)
    found = _LastRecords(open_run)
    try:
        if not await _read_back(log, id, found):
            return None
        value = await _value(log, found.last)
    except (TrimmedError, DataLossError, ValueError):
        return None
    if open_run is not None:
        return _status_of_open(id, open_run, found, value)
    assert found.finished is not None, "else the run is unclear"
    seqnum, finished = found.finished
    return None if seqnum in state.void_ends else _status_of_ended(id, finished, value)


async def _read_back(log: Log, id_: str, found: _LastRecords) -> bool:
    """Read records backwards from the end of the run; return whether they suffice."""
    bound = MAX_SEQNUM
    for _ in range(_LOOK):
        record = await log.read_prev(run_tag(id_), bound)
        if record is None:
            return False
        if (said := run_record(record.data)) is not None:
            found.take(record.seqnum, said)
        if found.is_unclear or found.is_whole:
            return found.is_whole
        bound = record.seqnum - 1
    return False


async def _value(log: Log, last: StepDecided | None) -> object:
    """Return the value that the run has last set as its status.

    Raises:
        ValueError: the record that should have the value does not have it.
    """
    if last is None or (last.kind != STATUS and last.status_at < 0):
        return None
    if last.kind == STATUS:
        return plain_value(last.result)
    record = await log.read(last.status_at)
    said = None if record is None else run_record(record.data)
    if not isinstance(said, StepDecided) or said.kind != STATUS:
        raise ValueError("no status there")
    return plain_value(said.result)


def _status_of_open(id_: str, run: OpenRun, found: _LastRecords, value: object) -> Status | None:
    is_parked = run.phase == Phase.PARKED
    if is_parked and found.parked is None:
        return None
    return Status(
        id_,
        run.workflow,
        State.PARKED if is_parked else State.RUNNING,
        0 if found.last is None else found.last.nth,
        run.epoch,
        run.executor,
        found.parked.reason if is_parked and found.parked is not None else None,
        run.started_at,
        run.began,
        value,
        run.round,
        None if run.code is None else run.code.version,
    )


def _status_of_ended(id_: str, finished: RunFinished, value: object) -> Status:
    failure = finished.failure
    return Status(
        id_,
        finished.workflow,
        end_state(finished),
        finished.steps,
        finished.epoch,
        finished.executor,
        None if failure is None else f"{failure.kind}: {failure.message}",
        finished.started_at,
        finished.began,
        value,
        finished.round,
        finished.version or None,
    )
