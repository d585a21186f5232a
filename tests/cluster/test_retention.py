"""Retention on a whole platform: policies set by all interfaces, enforced also after a restart."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.log import Log, Session
from indilog.config import MIB, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded, status_of

pytestmark = [pytest.mark.asyncio, pytest.mark.cluster]


def config_in(directory: Path) -> Config:
    node = node_config(data_dir=directory, segment_bytes=8 * MIB, retention_interval_s=0.02)
    return Config(node=node)


async def trimmed_to(log: Log, kept: int) -> int:
    """Return the floor when the log holds no more than `kept` records."""
    async with asyncio.timeout(100):
        floor = 0
        while True:
            try:
                found = await log.read_range(bound=floor)
                if len(found) <= kept:
                    return floor
                await log.read_next(bound=found[-1].seqnum + 1, wait=0.02)
            except TrimmedError as error:
                floor = error.first_seqnum


def retention_in(platform: Platform) -> dict[str, object]:
    figures = status_of(platform.shell, platform.logs)["engine"]["retention"]
    assert isinstance(figures, dict)
    return figures


async def test_policies_are_enforced_and_again_after_a_restart(tmp_path: Path) -> None:
    async with embedded(config_in(tmp_path)) as platform:
        log = platform.logs.log("orders", Session())
        aged = platform.logs.log("aged", Session())
        await aged.append(b"old")
        for _ in range(20):
            await log.append(b"x" * 1_000)
        assert retention_in(platform)["logs"] == 0
        await log.set_retention(size_bytes=5_100)
        floor = await trimmed_to(log, 5)
        await aged.set_retention(age_s=1)
        await trimmed_to(aged, 0)
        async with asyncio.timeout(100):
            while retention_in(platform)["last_trim_log"] != "aged":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert retention_in(platform)["logs"] == 2
    async with embedded(config_in(tmp_path)) as platform:
        log = platform.logs.log("orders", Session())
        for _ in range(3):
            await log.append(b"y" * 1_000)
        assert await trimmed_to(log, 5) > floor
        assert [r.data[:1] for r in await log.read_range(bound=await trimmed_to(log, 5))] == [
            *[b"x"] * 2,
            *[b"y"] * 3,
        ]


async def test_two_compute_nodes_of_a_view_enforce_once(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    cluster = dataclasses.replace(config.cluster, engines=2)
    async with embedded(dataclasses.replace(config, cluster=cluster)) as platform:
        serving = [logs.retention is not None for logs in platform.engines.values()]
        assert serving == [True, False]
        second = platform.engines[platform.view.engines[1]].log("orders", Session())
        for _ in range(20):
            await second.append(b"x" * 1_000)
        await second.set_retention(size_bytes=5_100)
        await trimmed_to(second, 5)
