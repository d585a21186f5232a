"""Logs of kind order-first in one platform: creation, restarts, compute nodes, lost disks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import NotReadyError, WrongStateError
from indilog.base.log import After, Entry, Session
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.kernel.cell_layout import CellLayout
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.wire.cell_messages import CellKey, CellOutcome, CellsSeal, CellsTrim, CellWrite
from indilog_compute.log_kinds import LogKinds
from tests.contract.reading import all_of, data_of
from tests.support.link_pair import linked_logs

pytestmark = pytest.mark.asyncio


def configured(directory: Path, *, engines: int = 1, nodes: int = 1, **settings: object) -> Config:
    cluster = ClusterConfig(engines=engines, storage_nodes=nodes, replicas=min(nodes, 2))
    node = node_config(data_dir=directory, segment_bytes=8 * MIB, **settings)
    return Config(cluster=cluster, node=node)


def kinds_of(platform: Platform) -> list[LogKinds]:
    return [logs.kinds for logs in platform.engines.values() if logs.kinds is not None]


def folder_of(kinds: LogKinds, name: str, segment: int = -1) -> str:
    """Return the folder of a segment of a log, by default of the last one."""
    return kinds._catalog.logs[name].segments[segment].folder


def layout_of(kinds: LogKinds, name: str) -> CellLayout:
    """Return the newest known layout of the last segment of a log."""
    return kinds.layout(folder_of(kinds, name))


async def test_a_log_is_there_after_a_restart(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        info = await client.create_log("events", kind="order-first")
        assert (info.log, info.kind) == ("events", "order-first")
        log = client.log("events")
        assert [await log.append(b"%d" % n, tags=["t"]) for n in range(5)] == [0, 1, 2, 3, 4]
        await log.trim(2)
    async with indilog.open(tmp_path) as client:
        log = client.log("events")
        assert await log.append(b"5", tags=["t"]) == 5
        assert data_of(await log.read_range("t", 2)) == [b"2", b"3", b"4", b"5"]
        assert await client.create_log("events", kind="order-first") == info


async def test_the_number_of_logs_is_limited(tmp_path: Path) -> None:
    async with indilog.open(tmp_path, configured(tmp_path, order_first_logs_max=1)) as client:
        await client.create_log("a", kind="order-first")
        with pytest.raises(WrongStateError, match="raise order_first_logs_max"):
            await client.create_log("b", kind="order-first")
        with pytest.raises(WrongStateError, match="is of kind order-first; switch it to"):
            await client.create_log("a", kind="object-store")


async def test_compute_nodes_append_to_one_order(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path, engines=3, nodes=3)) as platform:
        await kinds_of(platform)[1].create("events", "order-first")
        logs = [linked_logs(each).log("events", Session()) for each in platform.engines.values()]
        appended = [log.append(b"x", tags=["t"]) for log in logs for _ in range(20)]
        assert sorted(await asyncio.gather(*appended)) == list(range(60))
        for log in logs:
            assert [r.seqnum for r in await all_of(log, "t")] == list(range(60))
            newest = await log.read_prev("t")
            assert newest is not None
            assert newest.seqnum == 59
        (first,) = await logs[0].append_batch([Entry(b"y", ["u"])], after=After("u"))
        assert first == 60
        chains = layout_of(kinds_of(platform)[0], "events").chains
        assert [len(chain) for chain in chains] == [2, 2, 2]
        assert len({chain[0].node for chain in chains}) == 3, "each node is a head"


async def test_one_layout_follows_another(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path, engines=2, nodes=2)) as platform:
        one, two = kinds_of(platform)
        await one.create("events", "order-first")
        folder = folder_of(one, "events")
        before = one.layout(folder)
        after, other = before.filled(2), before.filled(3)
        changed = await asyncio.gather(
            one.change_layout(folder, before, after), two.change_layout(folder, before, other)
        )
        assert sorted(changed) == [False, True]
        await asyncio.gather(one.renew_layouts(), two.renew_layouts())
        newest = one.layout(folder)
        assert newest == two.layout(folder) == (after if changed[0] else other)
        assert await two.change_layout(folder, newest, before.filled(4))
        assert not await two.change_layout(folder, newest, before.filled(5))


async def test_a_disk_that_lost_its_cells_is_filled_again(tmp_path: Path) -> None:
    config = configured(tmp_path, nodes=3)
    async with embedded(config) as platform:
        (kinds,) = kinds_of(platform)
        await kinds.create("events", "order-first")
        log = platform.logs.log("events")
        for n in range(30):
            await log.append(b"%d" % n, tags=["t"])
    for file in (tmp_path / "journal" / "cells").glob("storage-1.*"):
        file.unlink()
    async with embedded(config) as platform:
        (kinds,) = kinds_of(platform)
        log = platform.logs.log("events")
        await log.append(b"30", tags=["t"])
        filled: dict[str, object] = {}
        async with asyncio.timeout(60):
            while (layout := layout_of(kinds, "events")).is_filling or layout.epoch < 3:
                filled |= kinds.status()["filling"]
                await asyncio.sleep(0.001)
        assert filled.keys() == {"events"}
        assert kinds.status()["filling"] == {}
        assert all(len(chain) == 2 for chain in layout.chains)
    for file in (tmp_path / "journal" / "cells").glob("storage-0.*"):
        file.unlink()
    async with embedded(config) as platform:
        found = data_of(await all_of(platform.logs.log("events"), "t"))
        assert found == [b"%d" % n for n in range(31)], "copies were restored before"


async def test_a_log_without_complete_copies_says_so(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path)) as platform:
        await kinds_of(platform)[0].create("events", "order-first")
        await platform.logs.log("events").append(b"x")
    for file in (tmp_path / "journal" / "cells").iterdir():
        file.unlink()
    config = configured(tmp_path, append_timeout_s=2.0, cell_replace_after_s=0.1)
    async with embedded(config) as platform:
        with pytest.raises(NotReadyError, match="storage-0 has lost the log"):
            await platform.logs.log("events").append(b"y")


async def test_questions_reach_the_cells_of_a_node(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path)) as platform:
        (node,) = platform.view.storage_nodes
        ask = platform.logs.ask_cells
        opened = await ask(node, CellsSeal(0, "s", 1, opens=True))
        assert opened.outcome is CellOutcome.DONE
        written = await ask(node, CellWrite(0, "s", 1, CellKey(0, 4), b"x"))
        assert written.outcome is CellOutcome.DONE
        assert (await ask(node, CellsTrim(0, "s", 1, 0, 2))).outcome is CellOutcome.DONE
        assert (await ask(node, CellsSeal(0, "s", 2))).end == 5
