"""Nodes join and leave a cluster of processes under constant load: no acknowledged record is lost,
and tagged reads see every one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

import indilog
from indilog.base.errors import AppendOutcomeUnknownError, IndilogError
from indilog.base.ids import NodeId
from indilog.base.log import Log
from indilog.config import Config
from indilog.runtime.cluster.held_process import HeldProcess
from indilog.runtime.cluster.supervisor import processes_config, supervised
from tests.cluster.test_supervisor import SUPERVISOR
from tests.support.clients import http_client
from tests.support.repeated import repeated

pytestmark = pytest.mark.cluster

DEADLINE_S = 250.0
TAG = "kept"
NEW = NodeId("engine-1")


def settings(directory: Path) -> dict[str, dict[str, object]]:
    """No caches, so that reads by tag ask the index tier, and records come from storage nodes."""
    node = {
        "data_dir": str(directory), "port": 0, "workers": 1, "segment_bytes": 5 * 1024 * 1024,
        "record_cache_bytes_max": 0, "suffix_cuts_max": 1, "popularity_entries_max": 0,
        "tag_cache_seqnums_max": 0, "tag_cache_seqnums_per_tag_max": 0,
        "restart_s_min": 0.05, "restart_s_max": 0.5, "hang_s": 600.0,
    }  # fmt: skip
    return {"cluster": {"index_shards": 1}, "node": node}


def config_in(directory: Path) -> Config:
    return processes_config(overrides=settings(directory))


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; the caller sets the deadline."""
    while True:
        if holds():
            return
        await asyncio.sleep(0.005)


class Load:
    """Appends and reads without end; collects what was acknowledged itself."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, bytes] = {}
        self.checked = 0
        """Reads that were compared with what was acknowledged before them."""
        self._attempts = 0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the appends and reads."""
        self._stopping.set()

    async def append(self, log: Log, name: str) -> bool:
        """Append one record; False: an error that may be retried left it out."""
        self._attempts += 1
        data = f"{name}-{self._attempts}".encode()
        try:
            self.acknowledged[await log.append(data, tags=[TAG])] = data
        except AppendOutcomeUnknownError:
            await asyncio.sleep(0.02)
        except IndilogError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(0.02)
        else:
            return True
        return False

    async def check(self, log: Log, newest: int | None = None) -> None:
        """Read by tag, and compare with the newest acknowledged records, or with all."""
        expected = sorted(self.acknowledged.items())[-newest if newest else 0 :]
        if not expected:
            return
        found: dict[int, bytes] = {}
        bound = expected[0][0]
        while page := await log.read_range(tag=TAG, bound=bound, limit=200):
            found |= {record.seqnum: record.data for record in page}
            bound = page[-1].seqnum + 1
        lost = [seqnum for seqnum, data in expected if found.get(seqnum) != data]
        assert not lost, f"{len(lost)} of {len(expected)} records are not found: {lost[:10]}"
        self.checked += 1

    @asynccontextmanager
    async def running(self, log: Log) -> AsyncIterator[None]:
        """Append and read while the block runs; fails if either failed."""

        async def appends(caller: int) -> None:
            while not self._stopping.is_set():
                await self.append(log, f"load-{caller}")

        async def reads() -> None:
            while not self._stopping.is_set():
                await self.check(log, newest=50)
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as tasks:
            for caller in range(4):
                tasks.create_task(appends(caller))
            tasks.create_task(reads())
            yield
            self.stop()

    async def more(self, count: int = 30) -> None:
        """Wait until so many further records are acknowledged."""
        wanted = len(self.acknowledged) + count
        await until(lambda: len(self.acknowledged) >= wanted)


async def wait_for_members(url: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the cluster has the wanted nodes, as its gateway shows."""
    async with http_client(url) as http:
        while True:
            state: dict[str, Any] = (await http.get("/cluster/members")).json()
            if state["reached"] and holds(state["installed"]):
                return state
            await asyncio.sleep(0.05)


async def command(*arguments: str) -> str:
    """Run a command of `indilog cluster`; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "indilog", "cluster", *arguments, stdout=subprocess.PIPE
    )
    try:
        printed, _ = await process.communicate()
    finally:
        if process.returncode is None:  # the test ran out of time: the command would wait longer
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed
    return printed.decode()


def test_nodes_join_and_leave_under_load_and_the_next_start_has_them(tmp_path: Path) -> None:
    load = Load()

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            url = supervisor.url
            async with indilog.connect(url) as client:
                log = client.log("scaled")
                async with load.running(log):
                    await load.more()
                    printed = await command(
                        "scale", "--compute-nodes", "2", "--storage-nodes", "3",
                        "--index-shards", "2", "--url", url,
                    )  # fmt: skip
                    assert "storage-0, storage-1, storage-2" in printed
                    await load.more()
                    other_url = await supervisor.processes[NEW].ready()
                    async with indilog.connect(other_url) as other:
                        other_log = other.log("scaled")
                        for _ in range(40):
                            await load.append(other_log, "new")
                        await load.check(other_log, newest=300)
                    await command("drain", "storage-0", "--url", url)
                    await until(lambda: "storage-0" not in supervisor.processes)
                    await load.more()
                    await command("drain", NEW, "--url", url)
                    await until(lambda: NEW not in supervisor.processes)
                    assert not (supervisor.run_directory / f"{NEW}.port").exists()
                    await load.more()
                await load.check(log)
                with pytest.raises((httpx.HTTPError, OSError)):
                    await asyncio.to_thread(httpx.get, other_url, timeout=60)

    async def next_start() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            assert supervisor.view is not None
            assert supervisor.view.storage_nodes == ("storage-1", "storage-2")
            assert supervisor.view.engines == ("engine-0",)
            assert supervisor.view.index_nodes == ("index-0-0", "index-1-0")
            assert set(supervisor.processes) == set(supervisor.view.nodes)
            async with indilog.connect(supervisor.url) as client:
                log = client.log("scaled")
                await load.check(log)
                await load.append(log, "after")
                await load.check(log)

    uvloop.run(story())
    assert any(data.startswith(b"new-") for data in load.acknowledged.values())
    assert load.checked > 10
    uvloop.run(next_start())


@pytest.mark.repeated("tests/simulation/test_simulation.py")
def test_a_compute_node_killed_while_it_joins_is_started_again_and_joins(tmp_path: Path) -> None:
    async def story() -> None:
        load = Load()
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            url = supervisor.url
            async with (
                indilog.connect(url) as client,
                load.running(client.log("scaled")),
                http_client(url) as http,
            ):
                (await http.put("/cluster/members", json={"compute_nodes": 2})).raise_for_status()
                await until(lambda: NEW in supervisor.processes)
                new = supervisor.processes[NEW]
                await until(lambda: new.pid is not None)
                assert new.pid is not None
                os.kill(new.pid, signal.SIGKILL)
                other_url = await new.ready(restarts=1)
                await wait_for_members(url, lambda installed: NEW in installed["compute_nodes"])
                async with indilog.connect(other_url) as other:
                    while not await load.append(other.log("scaled"), "new"):
                        pass
                await load.more()

    uvloop.run(story())


SLOW = """
import asyncio
import indilog

app = indilog.App("slow")

@app.function(timeout_s=200)
async def append_later(ctx: indilog.Context) -> int:
    await ctx.log("calls").append(b"begun")
    assert await ctx.log("leaving").read_next(wait=150)
    await asyncio.sleep(1.0)
    return await ctx.log("calls").append(b"done")
"""


@pytest.mark.repeated("tests/unit/runtime/cluster/test_membership.py")
def test_a_call_at_a_compute_node_that_leaves_finishes_and_appends(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given["node"] |= {"stop_timeout_s": DEADLINE_S}  # a call that has not ended then is ended
    config = processes_config(overrides=given)

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config) as supervisor:
            url = supervisor.url
            async with http_client(url) as http:
                await http.put("/cluster/members", json={"compute_nodes": 2})
                await until(lambda: NEW in supervisor.processes)
                other_url = await supervisor.processes[NEW].ready()
                deployed = await http.put("/apps/slow", json={"sources": {"slow.py": SLOW}})
                deployed.raise_for_status()
                async with http_client(other_url) as other:
                    path = "/functions/slow/append_later"
                    while not (await other.get("/apps")).json()["apps"]:
                        pass  # the deployment arrives through the log
                    call = asyncio.create_task(other.post(path, json={}))
                    begun: list[object] = []
                    while not begun:
                        assert not call.done(), call.result().text
                        begun = (await http.get("/logs/calls/records")).json()["records"]
                    (await http.delete(f"/cluster/members/{NEW}")).raise_for_status()
                    record = {"data": "", "tags": []}
                    (await http.post("/logs/leaving/records", json=record)).raise_for_status()
                    answer = await call
                assert answer.status_code == 200, answer.text
                found = (await http.get("/logs/calls/records")).json()["records"]
                assert [record["data"] for record in found] == ["begun", "done"]
                await wait_for_members(url, lambda installed: NEW not in installed["compute_nodes"])
                await until(lambda: NEW not in supervisor.processes)

    uvloop.run(story())


@pytest.mark.repeated("tests/cluster/test_supervisor.py")
@pytest.mark.parametrize("after_s", [repeated(0.0), 0.15])
def test_a_supervisor_killed_while_the_cluster_grows_is_replaced_and_continues(
    tmp_path: Path, after_s: float
) -> None:
    given = json.dumps(settings(tmp_path))

    async def story() -> None:
        load = Load()
        async with asyncio.timeout(DEADLINE_S):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SUPERVISOR, given, stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            while not (line := await process.stdout.readline()).startswith(b"[["):
                assert line, "the supervisor ended"
            _, url = json.loads(line)
            async with (
                AsyncExitStack() as next_supervisor,  # which stops the cluster after the load ended
                indilog.connect(url) as client,
                http_client(url) as http,
                load.running(log := client.log("scaled")),
            ):
                await load.more()
                counts = {"compute_nodes": 2, "storage_nodes": 3, "index_shards": 2}
                (await http.put("/cluster/members", json=counts)).raise_for_status()
                await asyncio.sleep(after_s)
                # asyncio's `wait` ends with the output, which processes of nodes keep open.
                killed = HeldProcess(process.pid, os.pidfd_open(process.pid))
                killed.kill()
                await killed.wait()
                await load.more()
                supervisor = await next_supervisor.enter_async_context(
                    supervised(config_in(tmp_path))
                )
                assert supervisor.url == url, "the gateway was adopted"
                await wait_for_members(url, lambda installed: NEW in installed["compute_nodes"])
                async with indilog.connect(await supervisor.processes[NEW].ready()) as other:
                    while not await load.append(other.log("scaled"), "new"):
                        pass
                await load.more()
                await load.check(log)

    uvloop.run(story())
