"""A cluster of processes with a node of each kind. It outlives any one of three, grows and shrinks,
and its data directory can be read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

import indilog
from indilog.base.errors import ConfigError
from indilog.config import Config
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.cluster.supervisor import processes_config, supervised
from indilog_pipeline.journals import read_journals
from tests.cluster.scaling.test_scale import DEADLINE_S, Load, command, settings, until
from tests.support.repeated import repeated

pytestmark = pytest.mark.cluster

NODES = ("node-0", "node-1", "node-2")


def config_in(directory: Path, count: int = 3) -> Config:
    overrides = settings(directory)
    del overrides["cluster"]
    return processes_config(overrides=overrides, shared=count)


@pytest.mark.repeated("tests/unit/runtime/cluster/test_processes.py")
@pytest.mark.parametrize("losses", [("node-0",), repeated(tuple(reversed(NODES)), "each")])
def test_three_processes_outlive_the_loss_of_any_one(
    tmp_path: Path, losses: tuple[str, ...]
) -> None:
    load, data = Load(), tmp_path / "data"

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(data)) as supervisor:
            assert tuple(supervisor.processes) == NODES
            for lost in losses:
                process = supervisor.processes[lost]
                other = supervisor.processes["node-1" if lost == "node-0" else "node-0"]
                async with indilog.connect(await other.ready()) as client:
                    log = client.log("scaled")
                    await load.append(log, "before")
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGKILL)
                    acknowledged = len(load.acknowledged)
                    while len(load.acknowledged) < acknowledged + 20:
                        await load.append(log, f"without-{lost}")
                    await load.check(log)
                    await process.ready(restarts=1)
                    await load.append(log, "after")
                    async with indilog.connect(await process.ready()) as again:
                        await load.check(again.log("scaled"))

    uvloop.run(story())
    assert load.checked == 2 * len(losses)
    layout = layout_in(data)
    journals = layout.journals(layout.view.nodes)
    assert tuple(journals) == NODES
    assert [nodes[:2] for nodes in journals.values()] == [
        (f"sequencer-{n}", f"storage-{n}") for n in range(3)
    ]
    stored = read_journals(data)
    assert stored.committed.length > 0
    assert len(stored.nodes) == 3
    run("rebuild-index", data)
    run("rebuild-index", data, "--verify")
    with pytest.raises(ConfigError, match="3 shared processes, not with a process for each"):
        uvloop.run(_start(processes_config(overrides=settings(data))))


def run(*arguments: str | Path) -> str:
    """Run a command of `indilog`; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "indilog", *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.repeated("tests/cluster/faults/test_backup.py")
def test_a_backup_is_restored_into_shared_processes(tmp_path: Path) -> None:
    load = Load()
    data, new = tmp_path / "data", tmp_path / "new"

    async def story(directory: Path, name: str) -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config_in(directory)) as supervisor,
            indilog.connect(supervisor.url) as client,
        ):
            log = client.log("scaled")
            await load.check(log)
            for _ in range(30):
                await load.append(log, name)
            await load.check(log)

    uvloop.run(story(data, "old"))
    run("backup", data, tmp_path / "backup")
    printed = run("backup", "restore", tmp_path / "backup", new, "--nodes", "3")
    assert f"indilog up --nodes 3 --data {new}" in printed
    assert set(layout_in(new).processes.shared.values()) == set(NODES)
    uvloop.run(story(new, "new"))


async def _start(config: Config) -> None:
    async with supervised(config):
        pass


@pytest.mark.repeated("tests/cluster/scaling/test_scale.py")
def test_a_fourth_process_joins_and_leaves_under_load(tmp_path: Path) -> None:
    load = Load()

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            url = supervisor.url
            async with indilog.connect(url) as client:
                log = client.log("scaled")
                async with load.running(log):
                    await load.more()
                    printed = await command("scale", "--nodes", "4", "--url", url)
                    assert "storage-2, storage-3" in printed
                    assert "engine-2, engine-3" in printed
                    fourth = supervisor.processes["node-3"]
                    async with indilog.connect(await fourth.ready()) as other:
                        for _ in range(40):
                            await load.append(other.log("scaled"), "new")
                    await load.more()
                    await command("drain", "node-3", "--url", url)
                    await until(lambda: "node-3" not in supervisor.processes)
                    await load.more()
                await load.check(log)

    async def next_start() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            assert tuple(supervisor.processes) == NODES
            async with indilog.connect(supervisor.url) as client:
                await load.check(client.log("scaled"))
            await command("scale", "--nodes", "4", "--url", supervisor.url)
            assert tuple(supervisor.processes) == (*NODES, "node-4"), "a number is not used again"

    uvloop.run(story())
    assert any(data.startswith(b"new-") for data in load.acknowledged.values())
    uvloop.run(next_start())


@pytest.mark.repeated("tests/unit/runtime/cluster/test_processes.py")
def test_the_first_process_leaves_with_its_sequencer_under_load(tmp_path: Path) -> None:
    """`node-0` has the primary. The sequencer of `node-3` takes the place of its sequencer."""
    load = Load()

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            url = await supervisor.processes["node-1"].ready()
            async with indilog.connect(url) as client:
                log = client.log("scaled")
                async with load.running(log):
                    await load.more()
                    with pytest.raises(AssertionError, match="2 == 0"):
                        await command("drain", "node-0", "--url", url)
                    await command("scale", "--nodes", "4", "--url", url)
                    await load.more()
                    printed = await command("drain", "node-0", "--url", url)
                    assert "sequencer-1, sequencer-2, sequencer-3" in printed
                    await until(lambda: "node-0" not in supervisor.processes)
                    await load.more()
                    # Two of the three sequencers are a majority only if the new one counts.
                    process = supervisor.processes["node-1"]
                    other = await supervisor.processes["node-3"].ready()
                    async with indilog.connect(other) as remaining:
                        assert process.pid is not None
                        os.kill(process.pid, signal.SIGSTOP)
                        before = len(load.acknowledged)
                        while len(load.acknowledged) < before + 20:
                            await load.append(remaining.log("scaled"), "without-node-1")
                        os.kill(process.pid, signal.SIGCONT)
                    await load.more()
                await load.check(log)
        assert "sequencer-0" not in layout_in(tmp_path).view.sequencers

    async def next_start() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            assert "node-0" not in supervisor.processes
            async with indilog.connect(supervisor.url) as client:
                await load.check(client.log("scaled"))
                await load.append(client.log("scaled"), "again")

    uvloop.run(story())
    uvloop.run(next_start())
