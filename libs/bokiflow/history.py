"""Reads past runs: lists them, and finds the outcomes with which a fork begins."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import structlog

from bokiflow.runs.errors import FlowSettingsError, FlowVersionError
from bokiflow.runs.execution import RETURN
from bokiflow.runs.records import RUNS_TAG, RunStarted, StepDecided, run_in, run_record
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import Run
from bokiflow.takeover.dead_executors import read_readable
from indilog import DataLossError, Log, TrimmedError
from indilog.sdk import SeqNum


async def list_runs(log: Log, bound: SeqNum) -> AsyncIterator[tuple[str, Run]]:
    """Yield the id and state of the runs that began at seqnum `bound` or later, oldest first.

    A run that cannot be read (damaged, or written by a later version) is left out and logged.
    """
    lost: list[SeqNum] = []
    async for record in read_readable(log, RUNS_TAG, bound, lost):
        _log_losses(log, lost)
        run_id = run_in(record.tags)
        if run_id is None:
            continue
        try:
            if not isinstance(run_record(record.data), RunStarted):
                continue
            run = await read_run(log, run_id, Run(), is_reused=True)
        except TrimmedError:
            continue
        except (DataLossError, FlowVersionError) as error:
            structlog.get_logger().error("run is not listed", run=run_id, reason=str(error))
            continue
        if run.started_at == record.seqnum:
            yield run_id, run
    _log_losses(log, lost)


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
            f"The run has no decided step {step!r}; it has, in the order in which they were "
            f"decided, {', '.join(there)}; if several have the same name, it means the first one."
            if there
            else f"The run has no decided step {step!r}; it has none."
        )
    number = step if step in run.steps else named[0]
    before = [run.steps[kept] for kept in numbers[: numbers.index(number)] if kept != RETURN]
    return number, [msgspec.structs.replace(record, epoch=1) for record in before]
