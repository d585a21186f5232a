"""Runs keep the code that began them over deployments, restarts and kill -9 of real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import indilog
from indilog.remote_client import RemoteClient
from indilog.runs import Run
from indilog.sdk.runs import RunDetails
from tests.cluster.function_platform import Platform, running_two, until
from tests.cluster.platform_process import platform
from tests.support.repeated import repeated

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]
APP = """
import bokiflow, indilog
from steps import name

app = indilog.App("shop")
flow = bokiflow.Flow(app, lease=1.0)

@flow.workflow
async def order(wf: bokiflow.Workflow) -> list[str]:
    done = [await wf.step(name, "begun")]
    done.append(await wf.signal("go", timeout=600))
    done.append(await wf.step(name, "ended"))
    return done

@app.function
async def version() -> str:
    return name("asked")
"""
STEPS = """
def name(text: str) -> str:
    return f"{text} by VERSION"

name.__name__ = "name VERSION"
"""


def code(version: str) -> dict[str, str]:
    """Return the sources of a version: its modules have the names of those of other versions."""
    return {"shop.py": APP, "steps.py": STEPS.replace("VERSION", version)}


async def begun(client: RemoteClient, id: str) -> Run:  # noqa: A002
    run = await client.start_run("shop", "order", id=id)
    await shown(run, lambda found: bool(found.steps))
    return run


async def shown(run: Run, holds: Callable[[RunDetails], bool]) -> RunDetails:
    async with asyncio.timeout(200):
        while not holds(found := await run.show()):  # noqa: ASYNC110 - not announced
            await asyncio.sleep(0.05)
    return found


async def ended(client: RemoteClient, id: str) -> object:  # noqa: A002
    run = client.run("shop", id)
    await run.signal("go", "go")
    found = await run.result(wait=60)
    return found.result if found.state == "done" else found


@pytest.mark.repeated("tests/unit/bokiflow/versions/test_pinned.py")
@pytest.mark.parametrize(
    "options", [pytest.param((), id="embedded"), repeated(("--processes",), "processes")]
)
async def test_a_run_ends_with_the_code_that_began_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with platform(tmp_path, *options) as up:
        async with indilog.connect(up.url) as client:
            await client.deploy(code("one"))
            for id_ in ("first", "second", "third"):
                await begun(client, id_)
            await client.deploy(code("two"))
            await begun(client, "new")
            assert await ended(client, "first") == ["begun by one", "go", "ended by one"]
        up.kill_everything()
    with platform(tmp_path, *options) as up:
        async with indilog.connect(up.url) as client:
            assert await ended(client, "second") == ["begun by one", "go", "ended by one"]
            await client.deploy(code("three"))
            assert await ended(client, "new") == ["begun by two", "go", "ended by two"]
            assert await client.call("shop.version") == "asked by three"
        up.interrupted()
    with platform(tmp_path, *options) as up:
        async with indilog.connect(up.url) as client:
            assert await ended(client, "third") == ["begun by one", "go", "ended by one"]
            ends = [(run.id, run.info and run.info.version) for run in await client.runs("shop")]
            assert ends == [("new", 2), ("third", 1), ("second", 1), ("first", 1)]


@pytest.mark.repeated("tests/unit/bokiflow/versions/test_pinned.py")
async def test_each_compute_node_keeps_the_code_of_runs(tmp_path: Path) -> None:
    """A run moves to the executor of any node, with its code."""
    text = APP.replace("from steps import name\n", STEPS)

    async def outcome(node: Platform, run: str) -> object:
        await node.http.post(f"/runs/shop/{run}/signal", json={"name": "go", "value": "go"})
        return (await node.http.get(f"/runs/shop/{run}/result?wait=60")).json()["result"]

    async with running_two(tmp_path) as (first, second):
        assert (await first.deploy("shop", text.replace("VERSION", "one"))).status_code == 200
        await until(lambda: second.host.status()["apps"] == {"shop": 1})
        runs = [f"run-{number}" for number in range(8)]
        for number, run in enumerate(runs):
            node = (first, second)[number % 2]
            body = {"workflow": "order", "arguments": {}, "id": run}
            assert (await node.http.post("/runs/shop", json=body)).status_code < 300
            async with asyncio.timeout(200):
                while not (await first.http.get(f"/runs/shop/{run}")).json()["steps"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert (await second.deploy("shop", text.replace("VERSION", "two"))).status_code == 200
        await until(lambda: first.host.status()["apps"] == {"shop": 2})
        outcomes = await asyncio.gather(*(outcome(first, run) for run in runs))
        assert outcomes == [["begun by one", "go", "ended by one"]] * len(runs)


@pytest.mark.repeated("tests/unit/bokiflow/versions/test_pinned.py")
async def test_a_run_waits_while_its_code_does_not_load_in_a_worker(tmp_path: Path) -> None:
    """The newest code would park it; the run continues once its own code loads again."""
    broken = tmp_path / "broken"
    fails = f"""
import pathlib
if pathlib.Path({str(broken)!r}).exists():
    raise RuntimeError("a file is missing here")
"""
    one = code("one")
    with platform(tmp_path / "data") as up:
        async with indilog.connect(up.url) as client:
            await client.deploy({**one, "steps.py": one["steps.py"] + fails})
            await begun(client, "old")
            await client.deploy(code("two"))
        up.interrupted()
    broken.touch()
    with platform(tmp_path / "data") as up:
        async with indilog.connect(up.url) as client:
            old = client.run("shop", "old")
            await old.signal("go", "go")
            found = await shown(old, lambda found: any(w.what == "its code" for w in found.waits))
            assert (found.run.version, found.run.state, found.moved) == (1, "running", None)
            error = str(found.waits[0].error)
            assert error.startswith("The code of deployment 1 is not loaded: App shop does not ")
            assert "a file is missing here" in error
            broken.unlink()
            result = await old.result(wait=90)
            assert result.result == ["begun by one", "go", "ended by one"]
            assert (await old.show()).moved is None
