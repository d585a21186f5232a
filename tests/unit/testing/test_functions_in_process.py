"""`indilog.testing.cluster` deploys applications and runs their functions in the test's process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest

import bokiflow
import indilog
from indilog import FunctionFailedError, InvalidArgumentsError, UnknownFunctionError
from indilog.testing import cluster

pytestmark = pytest.mark.asyncio

app = indilog.App("shop")
flow = bokiflow.Flow(app)
seen: list[object] = []


def price(item: str) -> int:
    """Return a price; a test replaces it."""
    return len(item)


@app.function
async def buy(ctx: indilog.Context, item: str, count: int = 1) -> int:
    await ctx.log("sales").append(item.encode(), tags=[item])
    seen.append((asyncio.get_running_loop(), threading.get_ident()))
    return price(item) * count


@app.function
async def sales(ctx: indilog.Context, item: str) -> int:
    return len(await ctx.log("sales").read_range(tag=item))


@app.function
def buy_all(ctx: indilog.Context, items: list[str]) -> int:
    """A sync function, which runs in a thread and calls another one."""
    return sum(ctx.wait(ctx.map(buy, [{"item": item} for item in items])))


@app.function
async def fail(ctx: indilog.Context) -> None:
    raise KeyError("no such thing")


@app.function
async def linger(ctx: indilog.Context) -> None:
    await asyncio.sleep(3600)


@app.service
async def watch(ctx: indilog.Context) -> None:
    async for record in ctx.log("watched").subscribe():
        await ctx.log("seen").append(record.data)


@flow.workflow
async def order(wf: bokiflow.Workflow, item: str) -> int:
    await wf.call(buy, item=item)
    return await wf.call(buy, item=item, count=await wf.step(count_of, item))


async def count_of(ctx: indilog.Context, item: str) -> int:
    return int(await ctx.call(sales, item=item))


async def test_an_app_object_is_deployed_and_called_on_the_tests_own_loop() -> None:
    async with cluster() as c:
        info = await c.deploy(app)
        assert (info.name, info.version) == ("shop", 1)
        seen.clear()
        assert await c.call("shop.buy", item="tea") == 3
        assert await c.call(buy, item="tea", count=2) == 6
        assert seen == [(asyncio.get_running_loop(), threading.get_ident())] * 2
        assert len(await c.log("sales").read_range(tag="tea")) == 2


async def test_a_function_uses_what_the_test_puts_in_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as c:
        await c.deploy(app)
        monkeypatch.setattr(sys.modules[__name__], "price", lambda _: 40)
        assert await c.call(buy, item="tea") == 40


async def test_errors_are_those_of_a_client() -> None:
    async with cluster() as c:
        await c.deploy(app)
        with pytest.raises(FunctionFailedError, match=r"^shop.fail failed: KeyError: 'no such"):
            await c.call(fail)
        with pytest.raises(InvalidArgumentsError, match="field 'item' is missing"):
            await c.call(buy)
        with pytest.raises(UnknownFunctionError, match="has no function 'bye'"):
            await c.call("shop.bye")


async def test_a_sync_function_runs_in_a_thread_and_calls_others() -> None:
    async with cluster() as c:
        await c.deploy(app)
        assert await c.call(buy_all, items=["a", "bb", "ccc"]) == 6


async def test_recorded_calls_run_once_and_later() -> None:
    async with cluster() as c:
        await c.deploy(app)
        for _ in range(2):
            assert await c.call(buy, idempotency_key="k", item="tea") == 3
        assert await c.call(sales, item="tea") == 1
        id_ = await c.send(buy, delay=0.01, item="milk")
        status = await c.invocation(id_, wait=30)
        assert status is not None
        assert status.result() == 4


async def test_services_run_while_the_app_is_deployed() -> None:
    async with cluster() as c:
        await c.deploy(app)
        await c.log("watched").append(b"x")
        record = await c.log("seen").read_next(wait=30)
        assert record is not None
        await c.undeploy("shop")
        await c.log("watched").append(b"y")
        with pytest.raises(UnknownFunctionError):
            await c.call(buy, item="tea")
        assert len(await c.log("seen").read_range()) == 1


@pytest.mark.parametrize("run", ["first", "second"])
async def test_one_app_object_serves_test_after_test_with_its_workflows(run: str) -> None:
    async with cluster() as c:
        await c.deploy(app)
        handle = await order.start("tea", id="order-1")
        assert await handle.result(timeout=30) == 3, run
        assert await (await order.start("tea", id="order-1")).result(timeout=30) == 3
        assert await c.call(sales, item="tea") == 2


async def test_runs_are_listed_and_shown_as_by_a_client() -> None:
    async with cluster() as c:
        await c.deploy(app)
        await (await order.start("tea", id="order-1")).result(timeout=30)
        (run,) = await c.runs("shop")
        assert run.id == "order-1"
        details = await run.show()
        assert details.run.state == "done"
        with pytest.raises(indilog.IndilogError, match="order-2"):
            await c.run("shop", "order-2").show()
        assert [each.info for each in await c.runs()] == [run.info]


async def test_a_flow_begins_anew_in_each_cluster() -> None:
    for _ in range(2):
        async with cluster() as c:
            await c.deploy(app)
            assert not await flow.runs()
            await (await order.start("tea", id="same")).result(timeout=30)
            assert [run.id for run in await flow.runs()] == ["same"]


APP_WITH_HELPER = """
import indilog

app = indilog.App("greet")


@app.function
async def hello(ctx: indilog.Context) -> str:
    from words import WORD

    return WORD
"""


async def test_folders_are_deployed_too_apart_from_each_other_and_leave_no_module(
    tmp_path: Path,
) -> None:
    before, finders = set(sys.modules), list(sys.meta_path)
    async with cluster() as one, cluster() as two:
        for c, word in ((one, "hello"), (two, "servus")):
            folder = tmp_path / word
            folder.mkdir()
            (folder / "app.py").write_text(APP_WITH_HELPER)
            (folder / "words.py").write_text(f"WORD = {word!r}\n")
            assert (await c.deploy(folder)).version == 1
            assert (await c.deploy(folder)).version == 2
        assert await two.call("greet.hello") == "servus"
        assert await one.call("greet.hello") == "hello"
    left = [name for name in set(sys.modules) - before if name.startswith("indilog_deployed")]
    assert left == []
    assert sys.meta_path == finders


async def test_an_app_that_cannot_be_deployed_is_refused_in_one_sentence() -> None:
    async with cluster() as c:
        with pytest.raises(indilog.DeployError, match="App empty has no functions"):
            await c.deploy(indilog.App("empty"))
        with pytest.raises(ValueError, match="under its own name"):
            await c.deploy(app, name="other")


async def test_the_end_of_a_cluster_ends_calls_services_and_runs() -> None:
    before = asyncio.all_tasks()
    async with cluster() as c:
        await c.deploy(app)
        calling = asyncio.ensure_future(c.call(linger))
        await order.start("tea")
        await c.send(buy, delay=3600, item="tea")
    with pytest.raises(indilog.IndilogError):
        await calling
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert left <= {calling}


async def test_a_function_that_blocks_the_loop_as_a_breakpoint_does_breaks_nothing() -> None:
    async with cluster() as c:
        await c.deploy(blocked)
        assert await c.call(block) == 1
        seqnum = await c.log("after").append(b"x")
        assert await c.log("after").read(seqnum) is not None


blocked = indilog.App("blocked")


@blocked.function
async def block(ctx: indilog.Context) -> int:
    before = await ctx.log("before").append(b"x")
    time.sleep(2.5)  # noqa: ASYNC251 - longer than worker_silent_s
    return 1 if await ctx.log("before").read(before) else 0
