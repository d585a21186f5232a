"""The node that switches a log is killed with its storage node, while other nodes append."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import uvloop

import indilog
from indilog.base.errors import IndilogError
from indilog.base.log_kinds import OBJECT_STORE, ORDER_FIRST, OWNED, SHARED, LogKind
from indilog.remote_client import RemoteClient
from indilog.runtime.cluster.supervisor import supervised
from tests.cluster.faults.test_killed_owner import Appends, all_data
from tests.cluster.scaling.test_scale import DEADLINE_S
from tests.cluster.scaling.test_shared_processes import NODES, config_in

pytestmark = pytest.mark.cluster

SWITCH_S = 0.5
"""About as long as a switch takes under load: the node is killed at some time in it."""


@pytest.mark.repeated("tests/cells/test_switched_logs.py")
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param((OWNED, ORDER_FIRST), id="shared to owned to order-first"),
        pytest.param(
            (ORDER_FIRST, OWNED, SHARED, ORDER_FIRST, OBJECT_STORE, OWNED),
            id="six switches",
            marks=pytest.mark.repeated,
        ),
    ],
)
@pytest.mark.timeout(900)
def test_a_killed_switch_loses_nothing_that_was_acknowledged(
    tmp_path: Path, kinds: tuple[LogKind, ...]
) -> None:
    appends = Appends()
    moments = random.Random(1)

    async def story() -> None:
        async with supervised(config_in(tmp_path)) as supervisor:
            before: LogKind = SHARED
            found: dict[int, bytes] = {}
            async with indilog.connect(supervisor.url) as client:
                await client.create_log("events")
            for number, kind in enumerate(kinds):
                switching = supervisor.processes[NODES[2 - number % 2]]
                appending = supervisor.processes[NODES[1 + number % 2]]
                async with (
                    asyncio.timeout(DEADLINE_S),
                    indilog.connect(await switching.ready()) as switcher,
                    indilog.connect(await appending.ready()) as other,
                ):
                    work = asyncio.create_task(appends.run(other.log("events"), f"at-{number}"))
                    await appends.more(100)
                    switch = asyncio.create_task(switched(switcher, kind))
                    await asyncio.sleep(moments.uniform(0.0, SWITCH_S))
                    assert switching.pid is not None
                    os.kill(switching.pid, signal.SIGKILL)
                    await appends.more(100)
                    (info,) = await other.logs()
                    assert info.kind in (before, kind)
                    work.cancel()
                    await asyncio.gather(work, switch, return_exceptions=True)
                    await switching.ready(restarts=number // 2 + 1)
                    assert (await other.switch_log("events", kind)).kind == kind
                    before = kind
                    last = await other.log("events").append(b"after-%d" % number, tags=["t"])
                    found = await all_data(other.log("events"))
                    assert max(found) == last
                    assert not [p for p in appends.acknowledged if found.get(p[0]) != p[1]]
            assert max(Counter(found.values()).values()) == 1, "no record is there twice"
        seqnums = Counter(seqnum for seqnum, _ in appends.acknowledged)
        assert max(seqnums.values()) == 1

    uvloop.run(story())


async def switched(client: RemoteClient, kind: LogKind) -> None:
    """Switch the log; the node may be killed meanwhile."""
    try:
        await client.switch_log("events", kind)
    except IndilogError:
        return
