"""Executions of one run by several executors that do not coordinate: for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bokiflow import Workflow
from bokiflow.operations.compensation import run_compensated
from bokiflow.runs.execution import Execution
from bokiflow.runs.records import (
    PARTITIONS,
    RunFinished,
    RunStarted,
    RunTaken,
    StepDecided,
    encode,
    partition_of,
    partition_tag,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.apps.app import Context
from indilog.apps.signature import ResultType
from indilog.base.log import Log, Session
from indilog.testing import MemoryLogs

FLOW_LOG = "shop/flow"
Body = Callable[[Workflow], Awaitable[object]]


class NeverSure:
    """The lease of an executor that checks after each append whether the record counts."""

    def is_sure(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return False


class NothingHeld:
    """The part of a caller of functions that holds outcomes, for callers that keep all of them."""

    async def release(self, holder: str, keys: Sequence[str]) -> None:
        pass

    async def holders(self, prefix: str, after: str, session: Session) -> Sequence[str]:
        return ()


class OneLog:
    """Returns one log for any name."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def log(self, name: str) -> Log:
        return self._log


def _tags(run_id: str) -> list[str]:
    return [run_tag(run_id), partition_tag(partition_of(run_id, PARTITIONS))]


async def begin(log: Log, run_id: str) -> None:
    """Append the start of a run, owned by executor `first`."""
    started = RunStarted("tested", b"{}", "first", "version")
    await log.append(encode(started), tags=_tags(run_id))


async def take(log: Log, run_id: str, executor: str) -> None:
    """Assign the run to an executor."""
    run = await read_run(log, run_id, RunState())
    await log.append(encode(RunTaken(run.epoch + 1, executor)), tags=_tags(run_id))


async def execute(
    log: Log, run_id: str, body: Body, *, context: Context | None = None
) -> RunFinished:
    """Execute the run in its newest epoch, in a function's context if there is one."""
    run = await read_run(log, run_id, RunState())
    execution = Execution(log, run_id, run, NeverSure())
    wf = Workflow(execution, context or OneLog(log))

    async def text() -> bytes:
        return ResultType("it", Any).text(await body(wf))

    return await execution.execute(run_compensated(wf.compensations, text()))


async def decided(logs: MemoryLogs, run: str, count: int) -> list[StepDecided]:
    """Wait until a run has `count` decisions, and return them."""
    log, bound = logs.log(FLOW_LOG), 0
    found: list[StepDecided] = []
    while len(found) < count:
        record = await log.read_next(run_tag(run), bound, wait=10)
        assert record is not None
        bound = record.seqnum + 1
        if isinstance(said := run_record(record.data), StepDecided):
            found.append(said)
    return found
