"""Decisions of a workflow's own code that are not appended yet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import pytest

from bokiflow import Flow, Workflow
from bokiflow.runs.records import StepDecided, run_record
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from indilog.base.ids import UserTag
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


async def test_decisions_become_durable_although_an_append_was_interrupted(
    flow: Flow, logs: MemoryLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, hangs = MemoryLog.append, True

    async def hang(log: MemoryLog, data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        nonlocal hangs
        if hangs and isinstance(run_record(data), StepDecided):
            hangs = False
            await asyncio.sleep(60)
        return await append(log, data, tags=tags)

    monkeypatch.setattr(MemoryLog, "append", hang)

    async def one() -> int:
        return 1

    @flow.workflow
    async def impatient(wf: Workflow) -> float:
        now = wf.now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await wf.step(one)
        await wf.step(one)
        return now

    now = await (await impatient.start(id="i")).result(5)
    run = await read_run(logs.log("shop/flow"), "i", RunState())
    assert float(run.steps["1"].result) == now


async def test_any_number_of_values_is_decided_between_two_steps() -> None:
    config = ClusterConfig(record_bytes_max=16 * 1024, batch_bytes_max=128 * 1024)
    logs, flow = MemoryLogs(config=config), Flow("shop")
    flow.attach(logs)

    async def one() -> int:
        return 1

    @flow.workflow
    async def clock(wf: Workflow, count: int) -> int:
        for _ in range(count):
            wf.now()
        await wf.step(one)
        for _ in range(count):
            wf.now()
        return count

    assert await (await clock.start(2_000, id="c")).result(30) == 2_000
    assert len((await read_run(logs.log("shop/flow"), "c", RunState())).steps) == 4_001
