"""The owner of a log of kind `owned` is killed with its storage node, while it appends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import uvloop

import indilog
from indilog.base.errors import IndilogError
from indilog.base.log import Log
from indilog.runtime.cluster.supervisor import supervised
from tests.cluster.scaling.test_scale import DEADLINE_S, until
from tests.cluster.scaling.test_shared_processes import NODES, config_in

pytestmark = pytest.mark.cluster

CALLERS = 16


class Appends:
    """Appends of callers to one log; collects which were acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[tuple[int, bytes]] = []
        self.unknown: set[bytes] = set()

    async def run(self, log: Log, name: str) -> None:
        """Append with several callers until cancelled."""

        async def call(caller: int) -> None:
            number = 0
            while True:
                data = f"{name}-{caller}-{number}".encode()
                number += 1
                try:
                    self.acknowledged.append((await log.append(data, tags=["t"]), data))
                except IndilogError:
                    self.unknown.add(data)
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(call(caller) for caller in range(CALLERS)))

    async def more(self, count: int) -> None:
        wanted = len(self.acknowledged) + count
        await until(lambda: len(self.acknowledged) >= wanted)


async def all_data(log: Log) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    bound = 0
    while page := await log.read_range("t", bound, limit=500, fresh=True):
        found |= {record.seqnum: record.data for record in page}
        bound = page[-1].seqnum + 1
    return found


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.repeated)])
def test_a_killed_owner_loses_nothing_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    appends = Appends()

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            async with indilog.connect(supervisor.url) as client:
                await client.create_log("events", kind="owned")
            for kill in range(kills):
                lost, following = NODES[2 - kill % 2], NODES[1 + kill % 2]
                process, next_process = (supervisor.processes[n] for n in (lost, following))
                async with (
                    indilog.connect(await process.ready()) as owner,
                    indilog.connect(await next_process.ready()) as other,
                ):
                    work = asyncio.create_task(appends.run(owner.log("events"), f"of-{kill}"))
                    await appends.more(200)
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGKILL)
                    acknowledged = list(appends.acknowledged)
                    log = other.log("events")
                    assert await log.append(f"after-{kill}".encode(), tags=["t"]) > max(
                        seqnum for seqnum, _ in acknowledged
                    )
                    found = await all_data(log)
                    assert not [pair for pair in acknowledged if found.get(pair[0]) != pair[1]]
                    work.cancel()
                    await asyncio.gather(work, return_exceptions=True)
                await process.ready(restarts=1)
            async with indilog.connect(await supervisor.processes[NODES[0]].ready()) as client:
                found = await all_data(client.log("events"))
        seqnums = Counter(seqnum for seqnum, _ in appends.acknowledged)
        assert not [seqnum for seqnum, count in seqnums.items() if count > 1]
        assert not [pair for pair in appends.acknowledged if found.get(pair[0]) != pair[1]]
        assert sorted(found) == list(range(len(found)))
        assert max(Counter(found.values()).values()) == 1, "no record is there twice"

    uvloop.run(story())
