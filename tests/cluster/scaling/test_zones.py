"""Replicas are placed in different zones, and `indilog cluster shards` says where they are not."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import uvloop

import indilog
from indilog.config import Config
from indilog.runtime.cluster.supervisor import processes_config, supervised
from tests.cluster.scaling.test_scale import DEADLINE_S, Load, command, settings

pytestmark = pytest.mark.cluster


def config_in(directory: Path, zone: str) -> Config:
    overrides = settings(directory)
    overrides["node"] |= {"zone": zone}
    overrides["cluster"] = {"replicas": 2, "ack_quorum": 0}
    return processes_config(overrides=overrides, shared=4)


async def shards(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await command("shards", "--json", "--url", url))
    return found


def test_shards_are_spread_over_zones_and_an_audit_names_those_that_are_not(
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
            assert [{*shard["zones"]} for shard in found] == [{"east", "west"}] * 4
            assert "are in" not in await command("shards", "--url", supervisor.url)
            await command("scale", "--nodes", "5", "--url", supervisor.url)
            printed = await command("nodes", "--url", supervisor.url)
            [row] = [line for line in printed.splitlines() if line.startswith("storage-4 ")]
            assert row.endswith("east"), "node-4 has the second of the three zones"

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
            await load.check(client.log("scaled"))

    uvloop.run(first())
    uvloop.run(then())
