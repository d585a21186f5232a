"""Replicas are placed in different zones, and `indilog cluster shards` says where they are not."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import uvloop

import indilog
from indilog.config import Config
from indilog.runtime.cluster.supervisor import processes_config, supervised
from tests.cluster.scaling.test_scale import Load, command, settings

pytestmark = pytest.mark.cluster

DEADLINE_S = 250.0
"""Four processes start, and copy shards, while other tests run."""


def config_in(directory: Path, zone: str) -> Config:
    overrides = settings(directory)
    overrides["node"] |= {"zone": zone}
    overrides["cluster"] = {"replicas": 2, "ack_quorum": 0}
    return processes_config(overrides=overrides, shared=3)


async def shards(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await command("shards", "--json", "--url", url))
    return found


@pytest.mark.repeated("tests/unit/ordering")
def test_shards_are_spread_over_zones_and_rebalanced_where_the_audit_says(
    tmp_path: Path,
) -> None:
    load = Load()

    async def first() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config_in(tmp_path, "east,east,west")) as supervisor,
            indilog.connect(supervisor.url) as client,
        ):
            await load.append(client.log("scaled"), "first")
            found = await shards(supervisor.url)
            assert [{*shard["zones"]} for shard in found] == [{"east", "west"}] * 3
            assert "are in" not in await command("shards", "--url", supervisor.url)

    async def then() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config_in(tmp_path, "a,b")) as supervisor,
            indilog.connect(supervisor.url) as client,
        ):
            while not any(shard["shares_zone"] for shard in await shards(supervisor.url)):
                await load.append(client.log("scaled"), "until the primary installs the zones")
            printed = await command("shards", "--url", supervisor.url)
            assert "are in zone a (2), and there are storage nodes in other zones." in printed
            await command("scale", "--nodes", "4", "--url", supervisor.url)
            printed = await command("nodes", "--url", supervisor.url)
            [row] = [line for line in printed.splitlines() if line.startswith("storage-3 ")]
            assert row.split()[-1] == "b", "the fourth process has the second zone"
            log = client.log("scaled")
            async with load.running(log):
                await load.more()
                printed = await command("rebalance", "--url", supervisor.url)
                assert "spread evenly" in printed
                await load.more()
            found = await shards(supervisor.url)
            assert [{*shard["zones"]} for shard in found] == [{"a", "b"}] * len(found)
            copies = Counter(node for shard in found for node in shard["counting"])
            for zone in ((0, 2), (1, 3)):
                counts = [copies[f"storage-{number}"] for number in zone]
                assert max(counts) - min(counts) <= 1, "evenly, as far as zones permit"
            assert not any(shard["further"] for shard in found)
            await load.check(log)

    uvloop.run(first())
    uvloop.run(then())
