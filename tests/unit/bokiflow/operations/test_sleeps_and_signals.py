"""Sleeps and signals of workflows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from bokiflow import (
    Flow,
    Handle,
    RunCancelledError,
    RunEndedError,
    RunFailedError,
    UnknownRunError,
    Workflow,
)
from bokiflow.operations.signals import Signals
from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution
from bokiflow.runs.records import Signalled, encode, run_tag
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.base.errors import NotReadyError, OverloadedError
from indilog.base.log import Record
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.elapsing_log import Time
from tests.support.flow_executions import FLOW_LOG as LOG
from tests.support.flow_executions import NeverSure, begin, decided, execute, take
from tests.support.hooked_log import HookedLog, Read


class Waited(HookedLog):
    """A log that notes how long a caller waits for records."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__(LOG, logs=logs)
        self.seconds: asyncio.Queue[float] = asyncio.Queue()

    async def before_read(self, read: Read) -> None:
        if read.wait:
            self.seconds.put_nowait(read.wait)


@pytest.mark.asyncio
async def test_a_sleep_keeps_its_end_when_the_executor_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Time()
    monkeypatch.setattr(waiting, "passed_now", clock)
    logs = MemoryLogs(clock=clock)
    log = logs.log(LOG)
    await begin(log, "nap")

    async def nap(wf: Workflow) -> float:
        await wf.sleep(timedelta(hours=1))
        return clock.now

    first = asyncio.create_task(execute(log, "nap", nap))
    await decided(logs, "nap", 1)
    first.cancel()
    await asyncio.wait([first])
    clock.now += 3599.99
    await take(log, "nap", "second")
    waited = Waited(logs)
    second = asyncio.create_task(execute(waited, "nap", nap))
    assert await asyncio.wait_for(waited.seconds.get(), 10) == pytest.approx(0.01)
    clock.now += 0.02
    finished = await asyncio.wait_for(second, 10)
    assert float(finished.result) == clock.now


@pytest.mark.asyncio
async def test_a_cancellation_wakes_a_sleeping_run(flow: Flow, logs: MemoryLogs) -> None:
    @flow.workflow
    async def nap(wf: Workflow) -> None:
        await wf.sleep(timedelta(days=1))

    handle = await nap.start(id="nap")
    await decided(logs, "nap", 1)
    await handle.cancel()
    with pytest.raises(RunCancelledError):
        await handle.result(10)


@pytest.mark.parametrize("duration", [-1, float("nan"), 1e12, "1"])
@pytest.mark.asyncio
async def test_a_duration_that_cannot_be_is_refused(flow: Flow, duration: float) -> None:
    @flow.workflow
    async def nap(wf: Workflow) -> None:
        await wf.sleep(duration)

    with pytest.raises(RunFailedError, match="A duration must be"):
        await (await nap.start()).result(10)


@pytest.mark.asyncio
async def test_each_signal_is_delivered_once_in_the_order_of_the_log(flow: Flow) -> None:
    @flow.workflow
    async def collect(wf: Workflow, count: int) -> list[object]:
        other = await wf.signal("other")
        return [other, *[await wf.signal("item") for _ in range(count)]]

    handle = await collect.start(3)
    await handle.signal("item", {"n": 1})
    await handle.signal("item", None)
    await handle.signal("other")
    await handle.signal("item", [3], key="third")
    await handle.signal("item", [3], key="third")
    assert await handle.result(10) == [True, {"n": 1}, None, [3]]
    with pytest.raises(RunEndedError):
        await handle.signal("item")
    with pytest.raises(UnknownRunError):
        await collect.handle("unknown").signal("item")


class Counted(list[tuple[int, Signalled]]):
    """Counts what is read of it."""

    read = 0

    def __iter__(self) -> Iterator[tuple[int, Signalled]]:
        for item in super().__iter__():
            self.read += 1
            yield item

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - an index or a slice
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.asyncio
async def test_consuming_a_signal_costs_the_same_after_any_number_of_signals(
    logs: MemoryLogs,
) -> None:
    log = logs.log(LOG)
    await begin(log, "w")
    for n in range(100):
        sent = encode(Signalled("item" if n % 2 else "other", b"%d" % n, str(n)))
        await log.append(sent, tags=[run_tag("w")])
    run = await read_run(log, "w", RunState())
    counted = run.signals = Counted(run.signals)
    signals = Signals(Execution(log, "w", run, NeverSure()))
    assert [signals._take("item") for _ in range(51)][-2:] == [b"[100,99]", None]
    assert [signals._take("other") for _ in range(51)][-2:] == [b"[99,98]", None]
    assert counted.read <= 100


@pytest.mark.asyncio
async def test_a_late_signal_times_the_wait_out_and_is_kept_for_the_next(
    flow: Flow, logs: MemoryLogs
) -> None:
    @flow.workflow
    async def wait(wf: Workflow) -> list[object]:
        first = await wf.signal("paid", timeout=0.01)
        await wf.signal("go")
        return [first, await wf.signal("paid", timeout=timedelta(days=1))]

    handle = await wait.start(id="w")
    await decided(logs, "w", 2)
    await handle.signal("paid", 7)
    await handle.signal("go")
    assert await handle.result(10) == [None, 7]


@pytest.mark.asyncio
async def test_a_signal_stays_consumed_when_executors_change(logs: MemoryLogs) -> None:
    log = logs.log(LOG)
    await begin(log, "w")
    seen: list[object] = []

    async def wait(wf: Workflow) -> list[object]:
        seen.append(await wf.signal("item"))
        await wf.sleep(0)
        seen.append(await wf.signal("item"))
        return seen

    first = asyncio.create_task(execute(log, "w", wait))
    flow = Flow("shop")
    flow.attach(logs)

    @flow.workflow
    async def tested(wf: Workflow) -> None:
        """Only its name counts."""

    sender = tested.handle("w")
    await sender.signal("item", 1)
    await decided(logs, "w", 3)
    first.cancel()
    await asyncio.wait([first])
    await take(log, "w", "second")
    second = asyncio.create_task(execute(log, "w", wait))
    await sender.signal("item", 2)
    await asyncio.wait_for(second, 10)
    assert seen == [1, 1, 2]


@pytest.mark.asyncio
async def test_a_short_outage_of_the_log_fails_no_run(
    logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pause(_: float) -> None:
        await asyncio.sleep(0)

    away = 0
    read_range = MemoryLog.read_range

    async def sometimes(*arguments: Any, **named: Any) -> list[Record]:  # noqa: ANN401
        nonlocal away
        if away > 0:
            away -= 1
            raise NotReadyError("starting")
        return await read_range(*arguments, **named)

    async def go_away() -> int:
        nonlocal away
        away = 5
        return 7

    log = logs.log(LOG)
    await begin(log, "p")
    monkeypatch.setattr(waiting, "pause", pause)
    monkeypatch.setattr(MemoryLog, "read_range", sometimes)

    async def patient(wf: Workflow) -> list[object]:
        return [await wf.step(go_away), await wf.signal("none", timeout=0)]

    finished = await execute(log, "p", patient)
    assert (finished.result, away) == (b"[7,null]", 0)


@pytest.mark.asyncio
async def test_runs_that_only_wait_leave_room_for_others(logs: MemoryLogs) -> None:
    flow = Flow("shop", executions=2)
    flow.attach(logs)
    room = flow.runner.room_changed

    @flow.workflow
    async def wait(wf: Workflow) -> list[object]:
        return await wf.gather(wf.signal("go"), wf.signal("go"))

    handles: list[Handle[list[object]]] = []
    for _ in range(2 * 16):
        handles.append(await wait.start())
        if len(handles) < 2 * 16:
            await asyncio.wait_for(room.wait(), 10)  # it waits
            room.clear()
    with pytest.raises(OverloadedError):  # 16 times as many are enough
        await wait.start()
    for handle in handles:
        await handle.signal("go", 1)
        await handle.signal("go", 2)
        assert sorted(map(str, await handle.result(10))) == ["1", "2"]  # to whom is chance
    assert flow.runner.room == 2
