"""A run continues with the code of the deployment that began it, while that code is kept."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.runs import Run
from indilog.sdk.runs import RunDetails, RunInfo
from indilog.testing import cluster
from indilog.testing.embedded_cluster import Cluster
from indilog_compute.workers import applications
from indilog_compute.workers.loader import PACKAGE

pytestmark = pytest.mark.asyncio

ORDER = """
import bokiflow, indilog

app = indilog.App("shop")
flow = bokiflow.Flow(app, lease=LEASE_S, passive_after=PASSIVE_S, partitions=4)

async def name(text: str) -> str:
    return f"{text} by VERSION"

@flow.workflow(DECORATED)
async def order(wf: bokiflow.Workflow, item: str) -> list[str]:
    wf.vars["code"] = "VERSION"
    done = [await wf.step(name, "begun", name="begun VERSION")]
    done.append(await wf.signal("go", timeout=600))
    CHANGE
    done.append(await wf.step(name, "ended"))
    return done

@flow.workflow
async def counted(wf: bokiflow.Workflow, rounds: int) -> str:
    await wf.signal("go", timeout=600)
    if rounds == 0:
        return "VERSION"
    wf.continue_as_new(rounds - 1)

@flow.workflow
async def parent(wf: bokiflow.Workflow) -> str:
    await wf.signal("go", timeout=600)
    return await wf.run(child)

@flow.workflow
async def child(wf: bokiflow.Workflow) -> str:
    return "VERSION"

@flow.query
def code(view: bokiflow.RunView) -> str:
    return f"{view.vars['code']}, asked by VERSION"

@app.function
async def version() -> str:
    return "VERSION"
"""


def code(
    version: str, *, decorated: str = "", passive_s: float | None = None, change: str = ""
) -> Any:  # noqa: ANN401
    """Return the sources of a version, whose first step has another name in each version.

    With `passive_s`, the lease is short, because what a run waits for is shown after half of it.
    """
    lease_s, passive_s = (60.0, 10.0) if passive_s is None else (8.0, passive_s)
    text = ORDER.replace("VERSION", version).replace("DECORATED", decorated)
    text = text.replace("CHANGE", change or "pass")
    return {"shop.py": text.replace("PASSIVE_S", str(passive_s)).replace("LEASE_S", str(lease_s))}


def config(**functions: int) -> Config:
    node = node_config(segment_bytes=8 * MIB, **functions)
    return Config(cluster=ClusterConfig(durability="memory"), node=node)


async def begun(
    c: Cluster,
    id: str,  # noqa: A002 - as in the API
    workflow: str = "order",
    **arguments: object,
) -> Run:
    """Start a run, and wait until it waits for its signal."""
    run = await c.start_run("shop", workflow, arguments, id=id)
    found = await shown(run, lambda found: bool(found.waits))
    assert found.run.state == "running"
    return run


async def shown(run: Run, holds: Callable[[RunDetails], bool]) -> RunDetails:
    """Return what is shown of a run once a condition holds."""
    async with asyncio.timeout(30):
        while not holds(found := await run.show()):  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.02)
    return found


def loaded() -> int:
    """Return how many deployments of the application are loaded in this process."""
    return len([name for name in list(sys.modules) if re.fullmatch(rf"{PACKAGE}\d+\.shop", name)])


async def infos(c: Cluster) -> list[RunInfo]:
    return [run.info for run in await c.runs("shop") if run.info is not None]


def is_parked(found: RunDetails) -> bool:
    return found.run.state == "parked"


async def ended(run: Run) -> Any:  # noqa: ANN401
    await run.signal("go", "go")
    found = await run.result(wait=30)
    assert found.state == "done", found
    return found.result


async def test_a_run_continues_with_the_code_that_began_it_and_new_runs_with_the_newest() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        await c.deploy(code("two"))
        new = await begun(c, "new", item="tea")
        assert [(await run.show()).run.version for run in (old, new)] == [1, 2]
        assert await ended(old) == ["begun by one", "go", "ended by one"]
        assert await ended(new) == ["begun by two", "go", "ended by two"]
        assert await c.call("shop.version") == "two"
        for version, run in ((1, old), (2, new)):
            for state in (None, "done"):
                listed = await c.runs("shop", version=version, state=state)
                assert [one.id for one in listed] == [run.id]
        assert (await old.show()).moved is None


async def test_a_query_is_answered_by_the_code_of_the_run() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        await c.deploy(code("two"))
        assert await old.query("code") == "one, asked by one"


async def test_a_run_that_is_not_in_memory_keeps_its_code() -> None:
    async with cluster() as c:
        await c.deploy(code("one", passive_s=0.0))
        old = await begun(c, "old", item="tea")
        async with asyncio.timeout(30):
            while not [run for run in await infos(c) if run.waits]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await c.deploy(code("two", passive_s=0.0))
        assert await ended(old) == ["begun by one", "go", "ended by one"]


async def test_a_run_whose_code_is_not_kept_moves_to_the_newest() -> None:
    """It shows that, and when; the code that does not match its steps parks it, as ever."""
    async with cluster(config(versions_kept_max=1)) as c:
        await c.deploy(code("one"))
        fits, differs = await begun(c, "fits", "parent"), await begun(c, "differs", item="tea")
        for version in ("two", "three"):
            await c.deploy(code(version))
        assert await ended(fits) == "three"
        found = await fits.show()
        assert (found.run.version, found.moved is not None) == (3, True)
        found = await shown(differs, is_parked)
        assert "was decided as 'step begun one'" in str(found.run.problem)
        assert found.run.version == 3


async def test_a_parked_run_continues_with_the_newest_code() -> None:
    """Also if its own code is kept: the run waits for other code."""
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        await c.deploy(code("two", decorated="pinned=False"))
        await shown(old, is_parked)
        await c.deploy(code("one"))  # the same sources as before: the run's own code
        assert await ended(old) == ["begun by one", "go", "ended by one"]


PATCH = """if wf.patched("mail"):
        done.append(await wf.step(name, "mailed"))"""


@pytest.mark.parametrize("decorated", ["", "pinned=False"])
async def test_runs_reach_changed_code_that_is_patched(decorated: str) -> None:
    """Code that calls `wf.patched` is made for runs of earlier code."""
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        new = code("one", decorated=decorated, change=PATCH)
        await c.deploy({"shop.py": new["shop.py"].replace('return "one"', 'return "two"')})
        assert await ended(old) == ["begun by one", "go", "mailed by one", "ended by one"]
        found = await old.show()
        assert (found.run.version, found.moved is not None) == (2, True)


async def test_patched_code_may_be_pinned() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        await c.deploy(code("one", decorated="pinned=True", change=PATCH))
        assert await ended(old) == ["begun by one", "go", "ended by one"]


async def test_a_round_begins_with_the_newest_code() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", "counted", rounds=1)
        await c.deploy(code("two"))
        await old.signal("go")
        assert (await shown(old, lambda found: found.round == 2)).run.version == 2
        assert await ended(old) == "two"


async def test_a_child_has_the_code_of_its_parent() -> None:
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", "parent")
        await c.deploy(code("two"))
        assert await ended(old) == "one"
        assert [run.version for run in await infos(c)] == [1, 1]


async def test_a_deployment_of_the_same_sources_is_the_same_code() -> None:
    """It takes no place of another one."""
    async with cluster(config(versions_kept_max=1)) as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        for _ in range(3):
            await c.deploy(code("two"))
        assert await ended(old) == ["begun by one", "go", "ended by one"]


async def test_code_that_no_open_run_needs_takes_no_place_of_other_code() -> None:
    async with cluster(config(versions_kept_max=2)) as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        for version in ("two", "three", "four", "five"):
            await c.deploy(code(version))
        assert await ended(old) == ["begun by one", "go", "ended by one"]


async def test_an_undeployed_application_gives_its_code_up() -> None:
    """Another owner may deploy that name next."""
    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", "parent")
        await c.deploy(code("two"))
        assert loaded() == 2
        await c.undeploy("shop")
        async with asyncio.timeout(30):
            while loaded():  # noqa: ASYNC110 - not announced
                await asyncio.sleep(0.05)
        await c.deploy(code("three"))
        assert await ended(old) == "three"


async def test_code_is_unloaded_when_no_open_run_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "_GIVE_UP_S", 0.05)

    async with cluster() as c:
        await c.deploy(code("one"))
        old = await begun(c, "old", item="tea")
        await c.deploy(code("two"))
        new = await begun(c, "new", item="tea")
        await asyncio.sleep(0.5)  # a time in which it would be unloaded
        assert loaded() == 2
        assert await ended(old) == ["begun by one", "go", "ended by one"]
        async with asyncio.timeout(30):
            while loaded() > 1:  # noqa: ASYNC110 - not announced
                await asyncio.sleep(0.05)
        assert await ended(new) == ["begun by two", "go", "ended by two"]
