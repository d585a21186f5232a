"""Machines of a cluster have zones, and their shards are finalized and rebalanced."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvloop

import indilog
from tests.cluster.machine import Machine, machine
from tests.cluster.scaling.test_scale import Load, command
from tests.support.zookeeper_server import ZooKeeperServer

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]

DEADLINE_S = 300.0
CLUSTER = """
[cluster]
shared_processes = 3
storage_nodes = 3
replicas = 2
ack_quorum = 0
"""
ZONES = ("east", "east", "west")


@pytest.mark.repeated("tests/unit/ordering")
def test_machines_have_zones_and_their_shards_are_finalized_and_rebalanced(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    load = Load()

    async def story(url: str) -> None:
        async with asyncio.timeout(DEADLINE_S), indilog.connect(url) as client:
            log = client.log("scaled")
            shards = json.loads(await command("shards", "--json", "--url", url))
            assert [{*shard["zones"]} for shard in shards] == [{"east", "west"}] * 3
            async with load.running(log):
                await load.more()
                printed = await command("finalize", "0", "--url", url)
                assert "Shard 0 is finalized." in printed
                assert "spread evenly" in await command("rebalance", "--url", url)
                await load.more()
            assert load._attempts == len(load.acknowledged), "no append failed"
            await load.check(log)

    with ExitStack() as stack:
        machines: list[Machine] = []
        for number, zone in enumerate(ZONES):
            one = machine(tmp_path, number, zookeeper, {"zone": zone})
            one.config.write_text(CLUSTER)
            stack.callback(one.kill)
            one.start()
            machines.append(one)
        for one in machines:
            one.wait_ready()
        uvloop.run(story(machines[0].url))
