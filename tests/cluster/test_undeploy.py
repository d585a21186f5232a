"""Undeploying end to end: on every compute node, over a restart, with calls in flight."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

import indilog
from indilog.base.errors import AppNameTakenError, UnknownFunctionError
from tests.cluster.function_platform import Platform, running, running_two, until
from tests.support.moved_time import moved_time
from tests.support.repeated import repeated

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

SOURCE = """
import asyncio
import indilog

app = indilog.App("demo")

@app.schedule("0 0 1 1 *")
@app.function
async def count(ctx: indilog.Context) -> int:
    log = ctx.log("counts")
    await log.append(b"1")
    return len(await log.read_range())

@app.function
async def wait_for_release(ctx: indilog.Context) -> str:
    await ctx.log("gate").append(b"here", tags=["here"])
    await ctx.log("gate").read_next("release", wait=60)
    return "released"

@app.service
async def serve(ctx: indilog.Context) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.shield(ctx.log("gate").append(b"", tags=["service ended"]))
"""
WORKFLOW = """
import indilog
from bokiflow import Flow, Workflow

app = indilog.App("demo")
flow = Flow(app, lease=1.0)

async def stall(ctx: indilog.Context) -> str:
    await ctx.log("gate").append(b"", tags=["here"])
    await ctx.log("gate").read_next("release", wait=600)
    return "stalled"

@flow.workflow
async def tour(wf: Workflow) -> str:
    return await wf.step(stall)

@app.function
async def begin(ctx: indilog.Context) -> str:
    return (await tour.start(id="tour")).id

@app.function
async def end(ctx: indilog.Context) -> str:
    return await tour.handle("tour").result(30)
"""
SENTENCE = re.compile(r"App demo was undeployed at 20\d\d-\S+\+00:00; deploy it again\.")


def refusal(answer: httpx.Response) -> tuple[int, bool]:
    return answer.status_code, bool(SENTENCE.fullmatch(answer.json()["detail"]))


def is_gone(platform: Platform) -> bool:
    return not platform.host.apps()


async def outcome(platform: Platform, invocation: str) -> dict[str, Any]:
    reported: dict[str, Any] = (
        await platform.http.get(f"/invocations/{invocation}", params={"wait": 60})
    ).json()
    return reported


async def test_an_undeployed_app_is_gone_on_every_node_and_its_running_calls_end(
    tmp_path: Path,
) -> None:
    async with running_two(tmp_path) as (first, second), indilog.connect(first.url) as client:
        await first.deploy("demo", SOURCE)
        answer = await second.http.delete("/apps/demo")
        assert answer.status_code == 200, "a node that may not have followed the deployment"
        await first.deploy("demo", SOURCE)
        await until(lambda: not is_gone(second))
        assert (await second.call("demo.count")).json() == 1
        runs = asyncio.ensure_future(first.call("demo.wait_for_release"))
        assert await client.log("gate").read_next("here", wait=100) is not None
        answer = await second.http.delete("/apps/demo")
        assert (answer.status_code, answer.json()) == (
            200,
            {"name": "demo", "version": 2, "invocations_open": 0},
        )
        assert is_gone(second)
        await until(lambda: is_gone(first))
        for platform in (first, second):
            assert refusal(await platform.call("demo.count")) == (404, True)
            assert refusal(await platform.http.get("/apps/demo")) == (404, True)
            assert refusal(await platform.http.delete("/apps/demo")) == (404, False)
            status = platform.host.status()
            assert (status["apps"], status["schedules"], status["services"]) == ({}, [], {})
        ended = 0
        for _ in range(2):
            record = await client.log("gate").read_next("service ended", ended, wait=100)
            assert record is not None
            ended = record.seqnum + 1
        await client.log("gate").append(b"", tags=["release"])
        assert (await runs).json() == "released"
        await until(lambda: not any(w.deployments for w in first.host._pool.workers))


@pytest.mark.repeated("tests/unit/compute/workers/test_applications.py")
async def test_a_client_undeploys_as_the_owner_who_deployed(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as platform, indilog.connect(platform.url) as client:
        await client.deploy({"demo.py": SOURCE}, owner="ann")
        assert await client.call("demo.count") == 1
        with pytest.raises(AppNameTakenError, match="was deployed by ann; undeploy it as that"):
            await client.undeploy("demo")
        gone = await client.undeploy("demo", owner="ann")
        assert (gone.name, gone.version, gone.owner) == ("demo", 1, "ann")
        assert [f.name for f in gone.functions] == ["count", "wait_for_release"]
        with pytest.raises(UnknownFunctionError, match=SENTENCE):
            await client.call("demo.count")
        with pytest.raises(UnknownFunctionError, match="was already undeployed at 20"):
            await client.undeploy("demo", owner="ann")
        again = await client.deploy({"demo.py": SOURCE}, owner="eve")
        assert (again.version, again.owner) == (2, "eve")
        assert await client.call("demo.count") == 2


async def change(here: Platform, there: Platform, source: str | None, version: int) -> None:
    """Deploy `demo` here, or undeploy it (None), and wait until the other node has followed."""
    if source is None:
        assert (await here.http.delete("/apps/demo")).status_code == 200
    else:
        assert (await here.deploy("demo", source)).json()["version"] == version
    left = [] if source is None else [version]
    await until(lambda: [info.version for info in there.host.apps()] == left)


@pytest.mark.repeated("tests/unit/compute/workers/test_host.py")
@pytest.mark.parametrize("has_read", [repeated(True), False])
async def test_the_outcome_of_a_key_is_returned_after_any_later_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_read: bool
) -> None:
    """On a node that has read the other node's records, and on one that has not."""
    path, keyed = "/functions/demo/count", {"idempotency-key": "k"}
    source = SOURCE.replace("@app.schedule", "# @app.schedule")
    changes = (
        (source.replace("indilog.Context) -> int", "indilog.Context, n: int) -> int"), 422),
        (source.replace("def count(", "def other("), 404),
        (None, 404),
    )
    async with running_two(tmp_path) as (first, second), indilog.connect(second.url) as client:
        if not has_read:
            monkeypatch.setattr(second.host._invocations, "known", lambda *_: None)
        await first.deploy("demo", source)
        once = await first.http.post(path, headers=keyed)
        assert (once.status_code, once.json()) == (200, 1)
        for version, (changed, refused) in enumerate(changes, start=2):
            await change(first, second, changed, version)
            for platform in (first, second):
                again = await platform.http.post(path, headers=keyed)
                assert (again.status_code, again.json()) == (200, 1)
                assert again.headers["indilog-invocation"] == once.headers["indilog-invocation"]
                later = await platform.http.post(f"{path}?async=1", headers=keyed)
                assert later.json() == {"invocation": once.headers["indilog-invocation"]}
                new = await platform.http.post(path, headers={"idempotency-key": "new"})
                assert new.status_code == refused
                others = await platform.http.post(path, headers=keyed, json={"m": 1})
                assert others.status_code == 422
            assert await client.call("demo.count", idempotency_key="k") == 1


async def test_an_invocation_that_had_not_begun_fails_unless_it_is_deployed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds after a restart: the log has the state, and version numbers continue."""
    monkeypatch.setattr("indilog_compute.invocations.runs._PAUSE_S_MAX", 0.1)
    moved = moved_time(monkeypatch)
    path = "/functions/demo/count?async=1"
    async with running(tmp_path, workers=1) as platform:
        await platform.deploy("demo", SOURCE)
        assert (await platform.call("demo.count")).json() == 1
        soon = (await platform.http.post(f"{path}&delay=1800")).json()["invocation"]
        later = (await platform.http.post(f"{path}&delay=3600")).json()["invocation"]
        assert (await platform.http.delete("/apps/demo")).status_code == 200
        moved.passed_s = 2000.0
        await platform.deploy("other", SOURCE)  # any change makes the executor check its time
        reported = await outcome(platform, soon)
        assert (reported["state"], reported["problem"]["title"]) == (
            "failed",
            "UnknownFunctionError",
        )
        assert SENTENCE.fullmatch(reported["problem"]["detail"])
    async with running(tmp_path, workers=1) as again:
        assert refusal(await again.call("demo.count")) == (404, True)
        deployed = await again.deploy("demo", SOURCE)
        assert (deployed.status_code, deployed.json()["version"]) == (200, 2)
        assert (await again.call("demo.count")).json() == 2
        moved.passed_s = 3700.0
        now = (await again.http.post(path)).json()["invocation"]
        assert [(await outcome(again, i))["state"] for i in (now, later)] == ["done", "done"]
        assert (await again.call("demo.count")).json() == 5
        headers = {"indilog-owner": "eve"}
        refused = await again.http.delete("/apps/demo", headers=headers)
        assert (refused.status_code, refused.json()["title"]) == (409, "AppNameTakenError")


async def test_a_workflow_of_an_undeployed_app_continues_when_the_app_is_deployed_again(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, workers=1) as platform, indilog.connect(platform.url) as client:
        gate = client.log("gate")
        await platform.deploy("demo", WORKFLOW)
        assert (await platform.call("demo.begin")).json() == "tour"
        stalls = await gate.read_next("here", wait=100)
        assert stalls is not None
        await platform.http.delete("/apps/demo")
        await until(lambda: not any(w.deployments for w in platform.host._pool.workers))
        await platform.deploy("demo", WORKFLOW)
        assert await gate.read_next("here", stalls.seqnum + 1, wait=100), "the step has run again"
        await gate.append(b"", tags=["release"])
        assert (await platform.call("demo.end")).json() == "stalled"
