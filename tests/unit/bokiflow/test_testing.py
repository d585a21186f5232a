"""`bokiflow.testing`: time that passes at once, forced replay, crashes after any operation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta

import pytest

import bokiflow
import indilog
from bokiflow.testing import RunParkedError, changed, crashed, replayed, skip
from indilog.testing import MemoryLogs, cluster

pytestmark = pytest.mark.asyncio

DAY_S = 86_400
app = indilog.App("post")
flow = bokiflow.Flow(app)


@app.function
async def greet(ctx: indilog.Context, name: str) -> str:
    await ctx.log("greeted").append(name.encode())
    return f"hello {name}"


async def pack(ctx: indilog.Context, what: str) -> int:
    return await ctx.log("parcels").append(what.encode())


@flow.workflow
async def deliver(wf: bokiflow.Workflow, name: str) -> str:
    greeting = await wf.call(greet, name=name)
    await wf.sleep(7 * DAY_S)
    await wf.step(pack, "first")
    await wf.sleep(30 * DAY_S)
    await wf.step(pack, "second")
    return str(greeting)


@flow.workflow
async def pay(wf: bokiflow.Workflow) -> str:
    return "paid" if await wf.signal("paid", timeout=timedelta(days=3)) else "late"


@flow.workflow
async def wait(wf: bokiflow.Workflow) -> None:
    await wf.signal("never")


@flow.workflow
async def broken(wf: bokiflow.Workflow) -> None:
    await wf.step(pack, "x")
    raise KeyError("broken")


numbers: Iterator[int] = itertools.count()


@flow.workflow
async def wander(wf: bokiflow.Workflow) -> None:
    """Each execution names its second step otherwise."""
    await wf.step(pack, "x")
    await wf.step(pack, "y", name=f"step {next(numbers)}")
    await wf.step(pack, "z")


async def packed(logs: MemoryLogs) -> list[bytes]:
    return [record.data for record in await logs.log("parcels").read_range()]


async def test_time_passes_at_once_in_a_cluster_and_not_more_than_asked() -> None:
    async with cluster() as c:
        await c.deploy(app)
        delivery = await deliver.start("ann", id="delivery")
        payment = await pay.start(id="payment")
        await skip(c, flow, days=7)
        assert await payment.result(timeout=30) == "late"
        await c.log("parcels").read_next(wait=30)
        assert (await delivery.status()).state is bokiflow.State.RUNNING
        await skip(c, flow, days=29)
        with pytest.raises(TimeoutError):
            await delivery.result(timeout=0.1)
        await skip(c, flow, days=1)
        assert await delivery.result(timeout=30) == "hello ann"
        assert len(await c.log("parcels").read_range()) == 2


async def test_a_delayed_call_is_due_when_its_time_has_passed() -> None:
    async with cluster() as c:
        await c.deploy(app)
        id_ = await c.send(greet, delay=DAY_S, name="ann")
        await c.skip(hours=23)
        status = await c.invocation(id_, wait=0.1)
        assert status is not None
        assert status.state == "scheduled"
        await c.skip(hours=1)
        status = await c.invocation(id_, wait=30)
        assert status is not None
        assert status.result() == "hello ann"
        before = await c.log("x").now()
        await c.skip(minutes=2, seconds=1)
        assert await c.log("x").now() >= before + 121
        with pytest.raises(ValueError, match="0 or more seconds"):
            await c.skip(days=-1)


async def test_a_run_is_executed_again_after_each_operation_and_each_step_runs_once() -> None:
    logs, executions = MemoryLogs(), itertools.count()

    @flow.workflow
    async def counted(wf: bokiflow.Workflow, name: str) -> str:
        next(executions)
        for n in range(4):
            await wf.step(pack, f"{n}")
        return name

    assert await replayed(flow, counted, "ann", logs=logs) == "ann"
    assert await packed(logs) == [b"0", b"1", b"2", b"3"]
    assert next(executions) >= 4
    assert await replayed(flow, deliver, "ann", fakes={greet: "hi"}) == "hi"
    assert await replayed(flow, pay) == "late"


async def test_code_that_is_not_deterministic_is_named() -> None:
    with pytest.raises(RunParkedError, match=r"not deterministic: .* step 2 was decided as"):
        await replayed(flow, wander)


@pytest.mark.parametrize("after", range(1, 7))
async def test_a_run_survives_a_crash_after_any_operation(after: int) -> None:
    logs = MemoryLogs()
    assert await crashed(flow, deliver, "ann", after=after, fakes={greet: greet}, logs=logs)
    assert await packed(logs) == [b"first", b"second"]
    assert len(await logs.log("greeted").read_range()) == 1


async def test_new_code_continues_a_run_or_is_parked_with_the_first_difference() -> None:
    old_code, new_code = bokiflow.Flow("post"), bokiflow.Flow("post")

    def old_send(flow: bokiflow.Flow) -> bokiflow.Startable[str]:
        @flow.workflow
        async def send(wf: bokiflow.Workflow, name: str) -> str:
            await wf.step(pack, "first")
            await wf.sleep(DAY_S)
            await wf.step(pack, "second")
            return f"old {name}"

        return send

    @new_code.workflow
    async def send(wf: bokiflow.Workflow, name: str, *, is_gift: bool = False) -> str:
        await wf.step(pack, "first")
        await wf.sleep(DAY_S)
        if is_gift:
            await wf.step(pack, "paper")
        await wf.step(pack, "third")
        return f"new {name}"

    logs = MemoryLogs()
    old_workflow = old_send(old_code)
    run = changed((old_code, old_workflow), (new_code, send), "ann", after=1, logs=logs)
    assert await run == "new ann"
    assert await packed(logs) == [b"first", b"third"]

    other_code = bokiflow.Flow("post")

    def other_send() -> bokiflow.Startable[str]:
        @other_code.workflow
        async def send(wf: bokiflow.Workflow, name: str) -> str:
            await wf.step(pack, "x", name="check")
            return name

        return send

    with pytest.raises(RunParkedError, match=r"^Run 'tested' does not match .*'step check'"):
        await changed((old_code, old_workflow), (other_code, other_send()), "ann", after=1)
    with pytest.raises(bokiflow.FlowSettingsError, match="the same names"):
        await changed((old_code, old_workflow), (flow, deliver), "ann", after=1)
    with pytest.raises(bokiflow.FlowSettingsError, match="before 9 operations"):
        await changed((old_code, old_workflow), (new_code, send), "ann", after=9)


async def test_a_failed_run_a_missing_signal_and_a_crash_that_never_came_are_errors() -> None:
    before = dict(vars(flow))
    with pytest.raises(bokiflow.RunFailedError, match="KeyError"):
        await replayed(flow, broken)
    with pytest.raises(bokiflow.FlowSettingsError, match="does it wait for a signal"):
        await replayed(flow, wait)
    with pytest.raises(bokiflow.FlowSettingsError, match="before 9 operations"):
        await crashed(flow, deliver, "ann", after=9, fakes={greet: "hi"})
    with pytest.raises(bokiflow.FlowSettingsError, match="1 or more"):
        await crashed(flow, deliver, "ann", after=0)
    assert vars(flow) == before
