"""`indilog cluster replace`: a process that is gone permanently is given up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest
import uvloop

import indilog
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.cluster.supervisor import supervised
from tests.cluster.scaling.test_scale import Load, command, until
from tests.cluster.scaling.test_shared_processes import config_in

pytestmark = pytest.mark.cluster

DEADLINE_S = 250.0


@pytest.mark.repeated("tests/unit/runtime/cluster/test_processes.py")
def test_a_process_that_cannot_start_any_more_is_replaced_under_load(tmp_path: Path) -> None:
    """Its directory is unusable, so each start of it fails; it had one of three sequencers."""
    load, data = Load(), tmp_path / "data"

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(data)) as supervisor:
            url = supervisor.url
            async with indilog.connect(url) as client:
                log = client.log("scaled")
                async with load.running(log):
                    await load.more()
                    lost = supervisor.processes["node-2"]
                    assert lost.pid is not None
                    os.kill(lost.pid, signal.SIGKILL)
                    shutil.rmtree(data / "node-2")
                    (data / "node-2").write_text("no directory")
                    await until(lambda: lost.restarts >= 2)
                    printed = await command("replace", "node-2", "--url", url)
                    assert "sequencer-0, sequencer-1, sequencer-3" in printed
                    await until(lambda: "node-2" not in supervisor.processes)
                    await load.more()
                await load.check(log)

    async def next_start() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(data)) as supervisor:
            assert "node-2" not in supervisor.processes
            async with indilog.connect(supervisor.url) as client:
                await load.check(client.log("scaled"))
                await load.append(client.log("scaled"), "again")

    uvloop.run(story())
    assert layout_in(data).processes.gone == ("node-2",)
    uvloop.run(next_start())
