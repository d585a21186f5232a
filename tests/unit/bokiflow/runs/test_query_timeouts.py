"""A query has a time limit, and one that does not end stops nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest

import bokiflow
from bokiflow import Flow, FlowSettingsError, Handle, QueryFailedError, Workflow
from bokiflow.queries import _THREADS
from indilog import App, WrongStateError
from indilog.client import Client
from indilog.testing import MemoryLogs

pytestmark = pytest.mark.asyncio

LATE = "Query '{}' of run 'a' did not answer within 0.2 s; make it quicker, or give it more time"


class Counting:
    """A workflow that waits, and queries that do not end; `go_on` ends them."""

    def __init__(self, flow: Flow) -> None:
        self.ended = threading.Event()
        self.go_on = threading.Event()

        @flow.workflow
        async def count(wf: Workflow) -> int:
            wf.vars["steps"] = 0
            while await wf.signal("step"):
                wf.vars["steps"] += 1
                await wf.step(lambda: 1, name="count")
            steps: int = wf.vars["steps"]
            return steps

        @flow.query
        def loops(view: bokiflow.RunView) -> int:
            try:
                while not self.go_on.is_set():
                    pass
                return 1
            finally:
                self.ended.set()

        @flow.query
        def waits(view: bokiflow.RunView) -> int:
            self.go_on.wait()
            return 1

        @flow.query
        def steps(view: bokiflow.RunView) -> int:
            there: int = view.vars["steps"]
            return there

        self.count = count


def limited(logs: MemoryLogs, app: App | str = "shop") -> Flow:
    flow = Flow(app, lease=0.5, query_timeout=0.2)
    flow.attach(logs)
    return flow


async def answered(handle: Handle[int]) -> None:
    """Wait for the answer of a query that a busy machine may give too late."""
    async with asyncio.timeout(60):
        while True:
            try:
                assert await handle.query("steps") == 0
            except QueryFailedError:
                continue
            return


async def test_the_partition_continues_while_a_query_loops(logs: MemoryLogs) -> None:
    flow = Flow("shop", lease=60.0, query_timeout=600.0)
    flow.attach(logs)
    counting = Counting(flow)
    handle = await counting.count.start(id="a")
    epoch = (await handle.status()).epoch
    query = asyncio.create_task(handle.query("loops"))
    for _ in range(10):
        await handle.signal("step", value=True)
    await handle.signal("step", value=False)
    assert await handle.result(60) == 10
    assert not query.done()
    counting.go_on.set()
    assert await query == 1
    assert (await handle.status()).epoch == epoch, "its executor kept its lease"


async def test_the_thread_of_a_query_that_loops_is_ended(logs: MemoryLogs) -> None:
    counting = Counting(limited(logs))
    handle = await counting.count.start(id="a")
    with pytest.raises(QueryFailedError, match=LATE.format("loops")):
        await handle.query("loops")
    assert await asyncio.to_thread(counting.ended.wait, 60)
    await answered(handle)


async def test_queries_that_wait_outside_of_python_keep_few_threads(logs: MemoryLogs) -> None:
    """Further queries fail at their own limit, and are answered once a thread is free."""
    counting = Counting(limited(logs))
    handle = await counting.count.start(id="a")
    before = threading.active_count()
    asked = [handle.query("waits") for _ in range(3 * _THREADS)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, QueryFailedError) for answer in answers)
    assert threading.active_count() - before <= _THREADS
    with pytest.raises(QueryFailedError, match=LATE.format("steps")):
        await handle.query("steps")
    counting.go_on.set()
    await answered(handle)


async def test_people_get_one_sentence(logs: MemoryLogs) -> None:
    app = App("shop")
    counting = Counting(limited(logs, app))
    await counting.count.start(id="a")
    with pytest.raises(WrongStateError, match=LATE.format("loops")):
        await Client(logs).run(app, "a").query("loops")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
async def test_a_limit_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(FlowSettingsError, match="query_timeout must be a number of seconds"):
        Flow("shop", query_timeout=seconds)
