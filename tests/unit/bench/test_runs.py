"""The records that `bench.runs` writes are those of runs."""

from __future__ import annotations

import pytest

from bench.runs import measures
from bokiflow import Flow, State, Workflow
from indilog.testing import MemoryLogs


@pytest.mark.asyncio
async def test_written_runs_are_listed_and_continue() -> None:
    logs = MemoryLogs()
    flow = Flow("bench", log="runs")
    flow.attach(logs)
    log = logs.log("runs")
    await measures.write_waiting(log, 3)
    await measures.write_ended(log, 101)

    @flow.workflow
    async def waits(wf: Workflow) -> object:
        return await wf.signal("go")

    running = await flow.runs(state=State.RUNNING)
    assert [(run.id, run.waits) for run in running] == [
        (f"wait-{number}", "signal 'go' (operation 1)") for number in (2, 1, 0)
    ]
    assert [run.id for run in await flow.runs(state=State.FAILED)] == ["order-100", "order-0"]
    assert len(await flow.runs(workflow="quick", limit=1000)) == 101
    handle = waits.handle("wait-1")
    await handle.signal("go", 7)
    assert (await handle.status()).state is State.RUNNING
