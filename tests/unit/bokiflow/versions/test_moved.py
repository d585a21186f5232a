"""A run is moved to the code of another deployment, if that continues its history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import bokiflow
from bokiflow import RunEndedError, RunNotMovedError, State, Workflow
from bokiflow.runs.records import (
    CodeVersion,
    MoveAsked,
    RunTaken,
    encode,
    partition_of,
    partition_tag,
    run_record,
    run_tag,
)
from indilog import App, InvalidArgumentsError, NotFoundError, WrongStateError
from indilog.client import Client
from indilog.sdk import DeployedVersion
from indilog.testing import MemoryLogs, cluster
from tests.support.flow_executions import FLOW_LOG
from tests.unit.bokiflow.processes import ShopProcess
from tests.unit.bokiflow.versions.test_pinned import begun, code, config, ended, is_parked, shown

pytestmark = pytest.mark.asyncio


async def test_a_run_moves_to_the_newest_code_and_says_so() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", "parent")
        await c.deploy(code("two"))
        assert await old.move() == 2
        found = await shown(old, lambda found: found.moved is not None)
        assert found.run.version == 2
        assert await old.move() == 2
        assert await ended(old) == "two"
        with pytest.raises(WrongStateError, match="Run 'old' has ended; it is not moved"):
            await old.move()


async def test_a_run_that_is_not_in_memory_moves() -> None:
    async with cluster() as c:
        await c.deploy(code("one", passive_s=0.0))
        old = await begun(c, "old", "parent")
        async with asyncio.timeout(30):
            while not [r for r in await c.runs("shop") if r.info and r.info.waits]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await c.deploy(code("two", passive_s=0.0))
        assert await old.move() == 2
        assert (await shown(old, lambda found: found.moved is not None)).run.version == 2
        assert await ended(old) == "two"


async def test_a_run_moves_to_a_deployment_between() -> None:
    async with cluster(config(versions_kept_max=3)) as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", "parent")
        for version in ("two", "three"):
            await c.deploy(code(version))
        assert await old.move(2) == 2
        await shown(old, lambda found: found.run.version == 2)
        assert await ended(old) == "two"


async def test_code_that_does_not_continue_a_run_is_refused_with_a_sentence() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        await c.deploy(code("two"))
        sentence = "Run 'old' was not moved to deployment 2: .* was decided as 'step begun one'"
        with pytest.raises(WrongStateError, match=sentence):
            await old.move()
        assert await ended(old) == ["begun by one", "go", "ended by one"]
        assert (await old.show()).run.version == 1


async def test_mistakes_are_one_sentence() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", "parent")
        text = code("two")["shop.py"]
        decorated = "@flow.workflow\nasync def parent"
        await c.deploy({"shop.py": text.replace(decorated, "async def parent")})
        with pytest.raises(InvalidArgumentsError, match="deployment 2 has no workflow 'parent'"):
            await old.move()
        with pytest.raises(InvalidArgumentsError, match=r"deployment 9 is not kept; .* is: 1, 2"):
            await old.move(9)
        with pytest.raises(NotFoundError, match="has no run 'x'"):
            await c.run("shop", "x").move()
        with pytest.raises(InvalidArgumentsError, match="is running or parked"):
            await c.move_runs("shop", state="done")
        with pytest.raises(InvalidArgumentsError, match="field 'page'"):
            await c.move_runs("shop", page="?")


async def test_a_run_is_not_moved_where_it_would_not_stay() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        await c.deploy(code("two", decorated="pinned=False"))
        new = await begun(c, "new", item="tea")
        with pytest.raises(InvalidArgumentsError, match="continue with the newest code"):
            await new.move(1)


async def test_a_parked_run_moves_to_code_that_continues_it() -> None:
    async with cluster(config(versions_kept_max=3)) as c:
        await c.deploy(code("one"))
        old, keeps_one = await begun(c, "old", item="tea"), await begun(c, "other", "parent")
        await c.deploy(code("two", decorated="pinned=False"))
        await shown(old, is_parked)
        await c.deploy(code("three"))
        assert await old.move(1) == 1
        await shown(old, lambda found: found.run.state == "running")
        assert await ended(old) == ["begun by one", "go", "ended by one"]
        assert await ended(keeps_one) == "one"


async def test_all_runs_of_a_list_move_but_those_that_cannot() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        fit = [await begun(c, f"fits-{n}", "parent") for n in range(3)]
        await begun(c, "differs", item="tea")
        await begun(c, "counted", "counted", rounds=0)
        await c.deploy(code("two"))
        new = await begun(c, "new", "parent")
        found = await c.move_runs("shop", workflow="parent", limit=2)
        assert (found.version, found.moved, found.refused) == (2, ("fits-2",), ())
        found = await c.move_runs("shop", from_version=1)
        assert (found.version, found.next) == (2, None)
        assert {"counted", "fits-0", "fits-1"} <= set(found.moved)
        assert [(one.id, one.workflow) for one in found.refused] == [("differs", "order")]
        assert "was not moved to deployment 2" in found.refused[0].reason
        for run in [*fit, new]:
            await shown(run, lambda found: found.run.version == 2)
            assert await ended(run) == "two"


class Deployments:
    """A process that has loaded two deployments; the body of a step waits for `goes_on`."""

    def __init__(self, logs: MemoryLogs) -> None:
        self.goes_on = asyncio.Event()
        self.bodies = list[str]()
        self.flows = [self._flow(logs, name) for name in ("one", "two")]
        apps = [flow._app for flow in self.flows]
        loaded = {str(n) * 16: app for n, app in enumerate(apps, 1) if isinstance(app, App)}
        self.app = loaded["2" * 16]
        for number, (digest, app) in enumerate(loaded.items(), 1):
            app.deployed = DeployedVersion(number, digest, loaded["2" * 16], loaded)

    def _flow(self, logs: MemoryLogs, name: str) -> bokiflow.Flow:
        flow = bokiflow.Flow(App("shop"), lease=0.5, partitions=2)
        flow.attach(logs)

        @flow.workflow
        async def order(wf: Workflow) -> list[str]:
            async def body() -> str:
                self.bodies.append(name)
                await self.goes_on.wait()
                return name

            done = [await wf.step(body, name="first"), await wf.step(body, name=f"then {name}")]
            await wf.signal("go")
            return [*done, await wf.step(body, name="last")]

        return flow


async def started(there: Deployments) -> bokiflow.Handle[list[str]]:
    """Start a run with deployment 1, and wait until the body of its first step runs."""
    first = there.flows[0]
    handle: bokiflow.Handle[list[str]] = await first.start("order", {}, id="a")
    async with asyncio.timeout(10):
        while not there.bodies:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return handle


async def asked_to_move(there: Deployments, handle: bokiflow.Handle[list[str]]) -> None:
    """Ask for the move of a run whose body runs, and wait until its owner has read that."""
    assert await handle.move() == 2
    async with asyncio.timeout(10):
        while not there.flows[1].runner.running["a"].is_passive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.leaping
async def test_a_body_ends_before_the_run_moves(logs: MemoryLogs) -> None:
    there = Deployments(logs)
    handle = await started(there)
    await asked_to_move(there, handle)
    assert there.bodies == ["one"]
    shown_to = await Client(logs).run(there.app, "a").show()
    assert (shown_to.run.version, shown_to.moves_to) == (1, 2)
    there.goes_on.set()
    await handle.signal("go")
    assert await handle.result(10) == ["one", "two", "two"]
    assert there.bodies == ["one", "two", "two"], "no body ran twice"
    assert (await handle.status()).version == 2


@pytest.mark.leaping
async def test_a_history_that_went_on_is_checked_again(logs: MemoryLogs) -> None:
    """Between the first check and the move, the run may decide steps that the code has not."""
    there = Deployments(logs)
    handle = await started(there)
    there.goes_on.set()
    async with asyncio.timeout(10):
        while (await handle.status()).steps < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(RunNotMovedError, match="step 2 was decided as 'step then one'"):
        await handle.move()
    asked = encode(MoveAsked(CodeVersion(2, "2" * 16)))
    tags = (run_tag("a"), partition_tag(partition_of("a", 2)), "flow-in")
    await logs.log(FLOW_LOG).append(asked, tags=tags)
    async with asyncio.timeout(10):
        while (await handle.status()).epoch < 3:  # noqa: ASYNC110 - its owner answers by then
            await asyncio.sleep(0.01)
    await handle.signal("go")
    assert await handle.result(10) == ["one", "one", "one"]
    status = await handle.status()
    assert (status.state, status.version) == (State.DONE, 1)
    with pytest.raises(RunEndedError):
        await handle.move()


@pytest.mark.leaping
async def test_the_history_says_when_and_where_to_a_run_moved(logs: MemoryLogs) -> None:
    there = Deployments(logs)
    handle = await started(there)
    await asked_to_move(there, handle)
    there.goes_on.set()
    await handle.signal("go")
    await handle.result(10)

    def said() -> Iterator[object]:
        for record in records:
            match run_record(record.data):
                case MoveAsked(code):
                    yield "asked", code.version
                case RunTaken(code=code) if code is not None:
                    yield "moved", code.version

    records = await logs.log(FLOW_LOG).read_range(run_tag("a"), 0)
    assert list(said()) == [("asked", 2), ("moved", 2)]


@pytest.mark.leaping
async def test_another_process_moves_a_run_of_a_crashed_one(logs: MemoryLogs) -> None:
    there, other = Deployments(logs), Deployments(logs)
    handle = await started(there)
    await handle.move()
    process = ShopProcess.__new__(ShopProcess)
    process.logs, process.flow = logs, there.flows[1]
    process.kill()
    driver = asyncio.create_task(other.flows[1].drive(logs))
    other.goes_on.set()
    handle = other.flows[1].handle("order", "a")
    await handle.signal("go")
    assert await handle.result(20) == ["two", "two", "two"]
    driver.cancel()
    await asyncio.gather(driver, return_exceptions=True)


@pytest.mark.leaping
async def test_runs_of_a_program_have_one_code(logs: MemoryLogs, flow: bokiflow.Flow) -> None:
    @flow.workflow
    async def order(wf: Workflow) -> None:
        await wf.signal("go")

    handle = await order.start(id="a")
    with pytest.raises(bokiflow.FlowSettingsError, match="is not deployed"):
        await handle.move()
