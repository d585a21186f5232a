"""A durable run continues despite failures after its append, and appends in flight of an
interrupted execution have no effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from bokiflow import Flow, Startable, State, Workflow
from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    EXECUTORS_TAG,
    ExecutorDead,
    RunFinished,
    RunParked,
    RunRecord,
    RunTaken,
    StepDecided,
    encode,
    executor_tag,
    run_record,
    run_tag,
)
from bokiflow.takeover.crash_loops import CRASHES_PARKED
from bokiflow.takeover.dead_executors import read_orphaned_runs
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError, OutcomeUnknownError
from indilog.base.ids import SeqNum
from indilog.base.log import After, Entry, Log, Session
from indilog.testing import MemoryLogs
from indilog.testing.memory_log import MemoryLog
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read
from tests.unit.bokiflow.processes import ShopProcess

pytestmark = pytest.mark.asyncio

LEASE_S = 2.0  # a busy machine does not lose it


class BrokenLogs(HookedLogs):
    """Logs that fail as a test says.

    Attributes:
        reads_fail: how many further reads of runs fail.
        fails_after: after such a record is appended, the next read of a run fails.
        is_held: selects appends that stay in flight; their entries are in `held`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_fail = 0
        self.fails_after: type | None = None
        self.held: list[Entry] = []
        self.is_held: Callable[[RunRecord | None], bool] = lambda _: False

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if any(self.is_held(run_record(entry.data)) for entry in entries):
            self.held += entries
            raise AppendOutcomeUnknownError("no answer yet")

    async def after_append(self, entries: Sequence[Entry]) -> None:
        if self.fails_after is None:
            return
        if any(isinstance(run_record(entry.data), self.fails_after) for entry in entries):
            self.fails_after = None
            self.reads_fail = 1

    async def before_read(self, read: Read) -> None:
        if read.is_page and str(read.tag).startswith("flow:") and self.reads_fail:
            self.reads_fail -= 1
            raise NotReadyError("the platform begins")


class Process(ShopProcess):
    """A process with a workflow `two` of two steps."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(logs, LEASE_S)
        self.assigning: list[str] = []
        self.first = 0
        self.on_second: asyncio.Event | None = None
        self.may_end = asyncio.Event()
        self.two: Startable[str] = self.flow.workflow(self._two)

    async def _two(self, wf: Workflow) -> str:
        async def first() -> str:
            self.first += 1
            if self.first == 2 and self.on_second is not None:
                self.on_second.set()
                await self.may_end.wait()
            return f"first {self.first}"

        async def second(before: str) -> str:
            self.assigning.append(before)
            return "12"

        return await wf.step(second, await wf.step(first))

    _two.__name__ = "two"


async def assign(logs: MemoryLogs, run: str, executor: str, crashes: int = 0) -> None:
    """Append a record that assigns a started run to an executor, in the next epoch."""
    taken = RunTaken(2, executor, crashes)
    await logs.log(FLOW_LOG).append(encode(taken), tags=[run_tag(run), executor_tag(executor)])


async def test_a_start_that_fails_after_its_append_continues_in_this_process() -> None:
    logs = BrokenLogs()
    process = Process(logs)
    await (await process.two.start(id="before")).result(10)
    logs.reads_fail = 1
    with pytest.raises(OutcomeUnknownError, match="the platform begins"):
        await process.two.start(id="r")
    assert await process.two.handle("r").result(10) == "12"
    assert (await process.two.handle("r").status()).epoch == 1, "it was not executed before"
    await process.stop()


async def test_a_start_that_fails_after_its_append_may_be_repeated() -> None:
    logs = BrokenLogs()
    process = Process(logs)
    process.flow.runner.lease_s = 3600.0  # no process looks for it meanwhile
    await (await process.two.start(id="before")).result(10)
    logs.reads_fail = 1
    with pytest.raises(OutcomeUnknownError, match="the platform begins"):
        await process.two.start(id="r")
    handle = await process.two.start(id="r")
    assert await handle.result(10) == "12"
    await process.stop()


async def test_a_takeover_that_fails_after_its_append_continues() -> None:
    logs = BrokenLogs()
    dead, other = Process(logs), Process(logs)
    await dead.two.start(id="r")
    await dead.stop()

    @other.flow.workflow
    async def waits(wf: Workflow) -> None:
        await wf.signal("never")

    await waits.start()  # so this process sends heartbeats and keeps its runs
    logs.fails_after = RunTaken
    async with other.driven():
        assert await other.two.handle("r").result(10) == "12"
    assert logs.fails_after is None


async def test_an_interrupted_execution_is_followed_by_one_in_a_new_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No other process would continue the run, because this one still sends heartbeats."""
    process, finish, breaks = Process(MemoryLogs()), Execution._finish, [True]

    async def _finish(self: Execution, finished: RunFinished) -> RunFinished:
        if breaks and breaks.pop():
            raise RuntimeError("a mistake of our own")
        return await finish(self, finished)

    monkeypatch.setattr(Execution, "_finish", _finish)
    with capture_logs():  # to draw the first traceback may take longer than the lease
        handle = await process.two.start(id="r")
        assert await handle.result(10) == "12"
    status = await handle.status()
    assert (status.epoch, status.executor) == (2, process.flow.runner.lease.name)
    await process.stop()


async def test_an_abandoned_append_has_no_effect_once_the_run_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = BrokenLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)

    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    logs.is_held = lambda record: isinstance(record, StepDecided) and record.result == b'"first 1"'
    process.on_second = again = asyncio.Event()
    handle = await process.two.start(id="r")
    monkeypatch.setattr(waiting, "pause", pause)
    await again.wait()  # the first execution gave its append up, the next one begins
    monkeypatch.undo()
    await MemoryLogs.log(logs, FLOW_LOG).append(logs.held[0].data, tags=logs.held[0].tags)
    process.may_end.set()
    assert await handle.result(10) == "12"
    decided = [run_record(r.data) for r in await log.read_range(run_tag("r"))]
    epoch, steps = 1, dict[str, bytes]()
    for record in decided:
        if isinstance(record, RunTaken):
            epoch = record.epoch
        if isinstance(record, StepDecided) and record.epoch == epoch:
            steps.setdefault(record.number, record.result)
    assert [f'"{given}"'.encode() for given in process.assigning] == [steps["1"]]
    assert (await handle.status()).epoch == 2
    await process.stop()


@pytest.mark.parametrize(
    ("crashes", "why"), [(CRASHES_PARKED, "ended right after"), (0, "has no workflow")]
)
async def test_a_run_assigned_without_notice_is_parked_like_one_taken_over(
    crashes: int, why: str
) -> None:
    logs = MemoryLogs()
    dead, process = Process(logs), Process(logs)
    await (await process.two.start()).result(10)
    await dead.two.start(id="r")
    await dead.stop()
    runner = process.flow.runner
    if not crashes:
        del runner.definitions["two"]
    with suppress(Stopped):
        async with runner.assigning(logs, "r") as lease:
            await assign(logs, "r", lease.name, crashes)
            raise Stopped("the platform is away")
    handle = process.two.handle("r")
    async with asyncio.timeout(10):
        while (status := await handle.status()).state is not State.PARKED:
            await logs.log(FLOW_LOG).read_next(run_tag("r"), logs.position, wait=0.1)
    assert status.problem is not None
    assert why in status.problem
    assert process.first == 1
    await process.stop()


async def test_a_heartbeat_after_the_choice_of_a_new_owner_renews_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(waiting, "passed_now", lambda: now[0])
    logs = MemoryLogs(clock=lambda: now[0])
    flow = Flow("shop", lease=5)
    runner, log = flow.runner, logs.log(FLOW_LOG)
    lease = runner.current_lease()
    await runner.append_with_heartbeat(log, lease, [])
    assert lease.is_sure()

    class Late(MemoryLog):
        async def append_batch(
            self, entries: Sequence[Entry], *, after: After | None = None
        ) -> list[SeqNum]:
            now[0] = 1005.01
            await super().append(
                encode(ExecutorDead(lease.name, "new_owner", 1)), tags=[EXECUTORS_TAG]
            )
            now[0] = 1005.12
            return await super().append_batch(entries, after=after)

    now[0] = 1004.5
    assert runner.current_lease() is lease
    late: Log = Late(FLOW_LOG, logs=logs, session=Session())
    await runner.append_with_heartbeat(
        late, lease, [Entry(encode(RunParked(1, "v", "")), (run_tag("r"),))]
    )
    assert runner.executors.has_new_owner(lease.name)
    assert not lease.is_sure()


async def test_a_takeover_in_progress_is_not_trimmed() -> None:
    logs = MemoryLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)
    runner = process.flow.runner
    await (await process.two.start()).result(10)
    async with runner.assigning(logs, "r") as lease:
        await assign(logs, "r", lease.name)
        await (await process.two.start()).result(10)
        gate = asyncio.Event()

        async def waits(wf: Workflow) -> str:
            return str(await wf.step(gate.wait))

        process.two.definition.body = waits
        running = await process.two.start()
        runner._beats_since_trim = 1000
        await runner.look(log)
        await runner._trim(log)
        left = await log.read_range(executor_tag(lease.name))
        assert any(isinstance(run_record(r.data), RunTaken) for r in left)
        gate.set()
        await running.result(10)
    await process.stop()


async def test_a_run_interrupted_without_a_record_is_kept_for_the_new_owner() -> None:
    logs = MemoryLogs()
    process, log = Process(logs), logs.log(FLOW_LOG)
    runner = process.flow.runner
    never = asyncio.Event()

    async def stops_itself(wf: Workflow) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return str(await wf.step(never.wait))

    await (await process.two.start(id="before")).result(10)
    process.two.definition.body = stops_itself
    await process.two.start(id="r")
    while "r" in runner.running:
        await asyncio.wait(runner._tasks())
    runner._beats_since_trim = 1000
    await runner._renew(log)
    await runner._trim(log)
    name = runner.lease.name
    assert (await read_orphaned_runs(log, name)).runs == ["r"]
    await process.stop()
