"""A run that reuses the id of a trimmed run shares nothing with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from bokiflow import Flow, Startable, Workflow
from bokiflow.runs.records import run_tag
from bokistore import Store, Transaction
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.log import Entry
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLogs
from tests.unit.bokiflow.processes import kill

pytestmark = pytest.mark.asyncio


async def forgotten(logs: MemoryLogs, run: str) -> None:
    """Forget a run, as the cleaning does."""
    await logs.log("shop/flow").trim(logs.position, tag=run_tag(run))


async def test_a_run_of_a_reused_id_is_taken_over_when_its_process_dies(logs: MemoryLogs) -> None:
    dying, other = Flow("shop", lease=0.2), Flow("shop", lease=0.2)
    begun, never = asyncio.Event(), asyncio.Event()

    async def waits(wf: Workflow, is_first: bool) -> str:
        async def step() -> str:
            if not is_first:
                begun.set()
                await never.wait()
            return "dying"

        return await wf.step(step)

    async def goes_on(wf: Workflow, is_first: bool) -> str:
        return await wf.step(lambda: "other", name="step")

    waits.__name__ = goes_on.__name__ = "waits"
    for flow in (dying, other):
        flow.attach(logs)
    here: Startable[str] = dying.workflow(waits)
    there: Startable[str] = other.workflow(goes_on)
    assert await (await here.start(True, id="r")).result(10) == "dying"
    await forgotten(logs, "r")
    await here.start(False, id="r")
    await begun.wait()
    kill(dying)
    driving = asyncio.create_task(other.drive(logs))
    assert await there.handle("r").result(10) == "other"
    driving.cancel()
    with suppress(asyncio.CancelledError):
        await driving


async def test_a_run_of_a_reused_id_has_transactions_and_children_of_its_own(
    flow: Flow, logs: MemoryLogs
) -> None:
    store, ran = Store(logs.log("accounts")), list[int]()

    @flow.workflow
    async def child(wf: Workflow, n: int) -> int:
        ran.append(n)
        return n

    @flow.workflow
    async def pays(wf: Workflow, n: int) -> list[object]:
        async def pay(txn: Transaction) -> int:
            (await txn.get("ann")).increment("balance", n)
            return n

        return [await wf.transact(store, pay), await wf.run(child, n)]

    assert await (await pays.start(1, id="r")).result(10) == [1, 1]
    await forgotten(logs, "r")
    assert await (await pays.start(2, id="r")).result(10) == [2, 2]
    assert (await store.get("ann"))["balance"] == 3
    assert ran == [1, 2]


class UnsureLogs(HookedLogs):
    """Logs that, if `is_unsure`, once do not say that they appended to a run."""

    is_unsure = False

    async def after_append(self, entries: Sequence[Entry]) -> None:
        tags = [str(tag) for entry in entries for tag in entry.tags]
        if self.is_unsure and any(tag.startswith("flow:") for tag in tags):
            self.is_unsure = False
            raise AppendOutcomeUnknownError("no answer")


async def test_a_start_that_was_appended_twice_has_the_keys_of_its_first_copy() -> None:
    """A takeover sees the first copy, so the executor must, too."""
    logs, flow = UnsureLogs(), Flow("shop")
    flow.attach(logs)

    @flow.workflow
    async def key(wf: Workflow) -> str:
        return await wf.step(lambda: wf.key, name="key")

    await (await key.start()).result(10)  # from now on a start is one record
    logs.is_unsure = True
    handle = await key.start()
    assert not logs.is_unsure
    copies = await logs.log("shop/flow").read_range(run_tag(handle.id))
    assert await handle.result(10) == f"shop/flow/{handle.id}@{copies[0].seqnum}/1"
