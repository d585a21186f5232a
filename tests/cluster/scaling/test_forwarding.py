"""Compute nodes of a cluster of processes share their work: a gateway without a free slot lets
another node run the call.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from indilog.base.ids import NodeId
from indilog.config import Config
from indilog.runtime.cluster.supervisor import Supervisor, processes_config, supervised
from tests.cluster.scaling.test_scale import until
from tests.support.clients import http_client

pytestmark = pytest.mark.cluster

DEADLINE_S = 250.0
FIRST, SECOND = NodeId("engine-0"), NodeId("engine-1")
SETTINGS: dict[str, object] = {
    "port": 0, "workers": 1, "worker_calls_max": 1, "segment_bytes": 5 * 1024 * 1024,
    "restart_s_min": 0.05, "restart_s_max": 0.5, "invocation_lease_s": 3.0, "hang_s": 600.0,
}  # fmt: skip

SLOW = """
import asyncio, os
import indilog

app = indilog.App("slow")

@app.function
async def who(ctx: indilog.Context, s: float) -> int:
    await asyncio.sleep(s)
    return os.getppid()

@app.function(timeout_s=150)
async def begin_and_wait(ctx: indilog.Context, name: str) -> int:
    log = ctx.log("begun")
    await log.append(b"%d" % os.getppid(), tags=[name])
    if len(await log.read_range(tag=name)) == 1:
        await log.read_next("release " + name, wait=120)
    return os.getppid()

@app.function(timeout_s=150)
async def meet(ctx: indilog.Context, name: str, n: int) -> int:
    log = ctx.log("begun")
    await log.append(b"%d" % os.getppid(), tags=[f"{name} {n}"])
    await log.read_next(f"{name} {1 - n}", wait=120)
    return os.getppid()

async def where(ctx: indilog.Context) -> int:
    return os.getppid()

app.add_operation("node.where", where)
"""


async def deploy(supervisor: Supervisor) -> tuple[str, str]:
    """Deploy the functions; return the URLs of both gateways, when both know the application."""
    urls = [await supervisor.processes[node].ready() for node in (FIRST, SECOND)]
    async with http_client(urls[0]) as http:
        answer = await http.put("/apps/slow", json={"sources": {"slow.py": SLOW}})
        answer.raise_for_status()
    for url in urls:
        async with http_client(url) as http:
            while not (await http.get("/apps")).json()["apps"]:
                pass  # the deployment arrives through the log
    return urls[0], urls[1]


async def call(
    http: httpx.AsyncClient, function: str, key: str = "", **arguments: object
) -> httpx.Response:
    headers = {"idempotency-key": key} if key else {}
    return await http.post(f"/functions/slow/{function}", json=arguments, headers=headers)


async def wait_for_calls(http: httpx.AsyncClient, name: str, count: int = 1) -> list[str]:
    """Wait until a call has begun so many times; return the processes that began it."""
    while True:
        found = (await http.get("/logs/begun/records", params={"tag": name})).json()["records"]
        if len(found) >= count:
            return [record["data"] for record in found]


async def release(http: httpx.AsyncClient, name: str) -> None:
    """Let `begin_and_wait` return."""
    record = {"data": "", "tags": ["release " + name]}
    (await http.post("/logs/begun/records", json=record)).raise_for_status()


async def counters(url: str) -> dict[str, Any]:
    async with http_client(url) as http:
        counted: dict[str, Any] = (await http.get("/status")).json()["gateway"]
        return counted


def config(directory: Path, engines: int = 2) -> Config:
    node = {**SETTINGS, "data_dir": str(directory)}
    return processes_config(overrides={"cluster": {"engines": engines}, "node": node})


def test_concurrent_calls_at_one_gateway_run_on_both_nodes(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config(tmp_path)) as supervisor:
            first, second = await deploy(supervisor)
            async with http_client(first) as http:
                # Two calls that meet run at once, so not both in the only slot of a node.
                meetings = [("one", ""), ("two", ""), ("three", ""), ("four", "k")]
                for name, key in meetings:
                    answers = await asyncio.gather(
                        *[call(http, "meet", key=key and f"k{n}", name=name, n=n) for n in (0, 1)]
                    )
                    assert [answer.status_code for answer in answers] == [200] * 2
                    ran = {answer.json() for answer in answers}
                    assert len(ran) == 2, "each compute node has one worker, which has its parent"
                there = await counters(second)
                here = await counters(first)
                assert here["calls_forwarded"] == there["calls_taken"] == len(meetings)
                assert there["calls_forwarded"] == here["calls_taken"] == 0

    uvloop.run(story())


@pytest.mark.repeated("tests/unit/compute/gateway/forwarding/test_offers.py")
def test_an_operation_runs_where_there_is_room(tmp_path: Path) -> None:
    """The first node's only slot is in use."""

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config(tmp_path)) as supervisor:
            first, second = await deploy(supervisor)
            async with http_client(first) as http, http_client(second) as other:
                there = (await other.post("/operations/slow/node.where")).json()
                here = asyncio.create_task(call(http, "begin_and_wait", name="x"))
                await wait_for_calls(http, "x")
                answer = await http.post("/operations/slow/node.where")
                assert (answer.status_code, answer.json()) == (200, there), answer.text
                assert not here.done(), "the slot is still in use"
                await release(http, "x")
                assert (await here).json() != there
                assert (await counters(first))["calls_forwarded"] == 1

    uvloop.run(story())


@pytest.mark.repeated("tests/unit/compute/gateway/forwarding/test_offers.py")
def test_calls_at_a_killed_node_are_repeated_only_if_they_have_a_key(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config(tmp_path)) as supervisor:
            first, _ = await deploy(supervisor)
            # a call with a key is not offered again, so the node must not be known as unreachable
            for restarts, key in ((1, "k"), (2, "")):
                async with http_client(first) as http:
                    name = f"killed{key}"
                    here = asyncio.create_task(call(http, "begin_and_wait", name=f"x{key}"))
                    await wait_for_calls(http, f"x{key}")
                    there = asyncio.create_task(call(http, "begin_and_wait", key=key, name=name))
                    await wait_for_calls(http, name)
                    pid = supervisor.processes[SECOND].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    await release(http, f"x{key}")
                    answer = await there
                    if key:
                        assert answer.status_code == 200, answer.text
                        assert len(await wait_for_calls(http, name, 2)) == 2
                    else:
                        assert answer.status_code == 504, answer.text
                        assert answer.json()["title"] == "CallOutcomeUnknownError"
                        assert "engine-1" in answer.json()["detail"]
                        assert not answer.json()["retryable"]
                        assert len(await wait_for_calls(http, name)) == 1
                    assert (await here).status_code == 200
                    await supervisor.processes[SECOND].ready(restarts=restarts)

    uvloop.run(story())


@pytest.mark.repeated("tests/unit/compute/gateway/forwarding/test_offers.py")
def test_no_call_fails_while_a_node_that_takes_calls_leaves(tmp_path: Path) -> None:
    async def story() -> None:
        only_one = config(tmp_path, engines=1)
        async with asyncio.timeout(DEADLINE_S), supervised(only_one) as supervisor:
            url = await supervisor.processes[FIRST].ready()
            async with http_client(url) as http:
                (await http.put("/cluster/members", json={"compute_nodes": 2})).raise_for_status()
                await until(lambda: SECOND in supervisor.processes)
                await deploy(supervisor)
                answers: list[httpx.Response] = []
                is_gone = False

                async def caller() -> None:
                    while not is_gone:
                        answers.append(await call(http, "who", s=0.02))

                async with asyncio.TaskGroup() as callers:
                    for _ in range(4):
                        callers.create_task(caller())
                    while (await counters(url))["calls_forwarded"] < 10:
                        pass
                    (await http.delete(f"/cluster/members/{SECOND}")).raise_for_status()
                    await until(lambda: SECOND not in supervisor.processes)
                    before = len(answers)
                    await until(lambda: len(answers) >= before + 20)
                    is_gone = True
                failed = [answer.text for answer in answers if answer.status_code != 200]
                assert not failed
                assert len({answer.json() for answer in answers[-10:]}) == 1

    uvloop.run(story())
