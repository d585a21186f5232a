"""Reads past runs: lists them, and finds the outcomes with which a fork begins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog

from bokiflow.runs.errors import FlowSettingsError, FlowVersionError
from bokiflow.runs.execution import RETURN
from bokiflow.runs.records import RUNS_TAG, StepDecided, run_in
from bokiflow.runs.run_log import read_readable, read_run
from bokiflow.runs.run_state import Run
from indilog import DataLossError, Log, TrimmedError
from indilog.sdk import SeqNum


async def list_runs(
    log: Log, bound: SeqNum, open_before: Callable[[SeqNum], Awaitable[list[tuple[SeqNum, str]]]]
) -> AsyncIterator[tuple[str, Run]]:
    """Yield the id and state of the runs that began at seqnum `bound` or later, oldest first.

    The list of starts is trimmed by age. So older runs come from elsewhere: open ones from their
    partitions, ended ones by the records of their ends, which are then in the list. A run that
    cannot be read (damaged, or written by another version) is left out and logged.

    Args:
        log: log of the runs.
        bound: seqnum from which to list.
        open_before: returns place and id of the open runs that began before a seqnum.
    """
    floor = await _floor(log)
    if floor > bound:
        for place, run_id in sorted(await open_before(floor)):
            found = await _read(log, run_id) if place >= bound else None
            if found is not None and found.started_at == place:
                yield run_id, found
    lost: list[SeqNum] = []
    async for record in read_readable(log, RUNS_TAG, bound, lost):
        _log_losses(log, lost)
        named = run_in(record.tags)
        if named is None or (run := await _read(log, named)) is None:
            continue
        is_relisted = bound <= run.started_at < floor and run.end > record.seqnum
        is_end = run.finished is not None and run.ended_at == record.seqnum
        if run.started_at == record.seqnum or (is_relisted and is_end):
            yield named, run
    _log_losses(log, lost)


async def _floor(log: Log) -> SeqNum:
    """Return the seqnum below which the list of runs is trimmed."""
    try:
        await log.read_next(RUNS_TAG)
    except TrimmedError as error:
        return error.first_seqnum
    except DataLossError:
        pass  # the loss is reported where the list is read
    return 0


async def _read(log: Log, run_id: str) -> Run | None:
    """Return a run; None: it is trimmed, or cannot be read."""
    try:
        run = await read_run(log, run_id, Run(), is_reused=True)
    except TrimmedError:
        return None
    except (DataLossError, FlowVersionError) as error:
        structlog.get_logger().error("run is not listed", run=run_id, reason=str(error))
        return None
    return None if run.started is None else run


def _log_losses(log: Log, lost: list[SeqNum]) -> None:
    """Log the lost seqnums of the list of runs, once."""
    if lost:
        structlog.get_logger().error("list of runs is damaged", log=log.name, places=lost[:])
        lost.clear()


def decided_before(run: Run, step: str) -> tuple[str, list[StepDecided]]:
    """Return the number of a step, and the outcomes decided before it, in log order and changed to
    epoch 1.

    The decision by which a workflow ended too early is omitted, because the current code may not
    return there.

    Args:
        run: the old run.
        step: number or name of the step; a name means the first step with that name.

    Raises:
        FlowSettingsError: the run has no such decided step.
    """
    numbers = list(run.steps)
    named = [number for number, record in run.steps.items() if record.name == step]
    if step not in run.steps and not named:
        there = [f"{number} {record.name}" for number, record in run.steps.items()]
        raise FlowSettingsError(
            f"The run has no decided step {step!r}. It has, in the order in which they were "
            f"decided: {', '.join(there)}. If several have the same name, it means the first one."
            if there
            else f"The run has no decided step {step!r}; it has none."
        )
    number = step if step in run.steps else named[0]
    before = [run.steps[kept] for kept in numbers[: numbers.index(number)] if kept != RETURN]
    return number, [msgspec.structs.replace(record, epoch=1) for record in before]
