"""Logs of kind owned in one platform: creation, restarts, compute nodes, lost storage nodes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import WrongStateError
from indilog.base.ids import NodeId
from indilog.base.log import After, Entry, Log, Session
from indilog.config import Config
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.wire.cell_messages import CellKeysWanted, CellSection
from indilog_cells.opening import Tenure
from tests.cells.test_order_first import configured, kinds_of, layout_of
from tests.contract.reading import all_of, data_of
from tests.support.link_pair import linked_logs

pytestmark = pytest.mark.asyncio


def three(directory: Path, *, engines: int = 1, **settings: object) -> Config:
    config = configured(directory, engines=engines, nodes=3, **settings)
    return Config(cluster=dataclasses.replace(config.cluster, replicas=3), node=config.node)


def logs_of(platform: Platform) -> list[Log]:
    return [linked_logs(each).log("events", Session()) for each in platform.engines.values()]


async def test_a_log_is_there_after_a_restart(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        info = await client.create_log("events", kind="owned")
        assert (info.log, info.kind) == ("events", "owned")
        log = client.log("events")
        assert [await log.append(b"%d" % n, tags=["t"]) for n in range(5)] == [0, 1, 2, 3, 4]
        await log.trim(2)
    async with indilog.open(tmp_path) as client:
        log = client.log("events")
        assert data_of(await log.read_range("t", 2)) == [b"2", b"3", b"4"]
        assert await log.append(b"5", tags=["t"]) == 5
        assert data_of(await log.read_range("t", 2)) == [b"2", b"3", b"4", b"5"]
        assert await client.create_log("events", kind="owned") == info


async def test_the_number_of_logs_is_limited(tmp_path: Path) -> None:
    async with indilog.open(tmp_path, configured(tmp_path, owned_logs_max=1)) as client:
        await client.create_log("a", kind="owned")
        with pytest.raises(WrongStateError, match="raise owned_logs_max"):
            await client.create_log("b", kind="owned")
        with pytest.raises(WrongStateError, match="raise owned_logs_max"):
            await client.switch_log("c", "owned")


async def test_compute_nodes_claim_a_log_from_each_other(tmp_path: Path) -> None:
    config = three(tmp_path, engines=3, owner_keeps_s=0.2)
    async with embedded(config) as platform:
        await kinds_of(platform)[1].create("events", "owned")
        logs = logs_of(platform)
        appended = [log.append(b"x", tags=["t"]) for log in logs for _ in range(20)]
        assert sorted(await asyncio.gather(*appended)) == list(range(60))
        for log in logs:
            assert [r.seqnum for r in await all_of(log, "t")] == list(range(60))
        (first,) = await logs[0].append_batch([Entry(b"y", ["u"])], after=After("u"))
        assert first == 60
        layout = layout_of(kinds_of(platform)[0], "events")
        assert (len(layout.complete), layout.lacking) == (3, 1)


async def test_an_idle_log_shows_its_last_record_to_all_nodes(tmp_path: Path) -> None:
    async with embedded(three(tmp_path, engines=2)) as platform:
        await kinds_of(platform)[0].create("events", "owned")
        first, second = logs_of(platform)
        for number in range(10):
            assert await first.append(b"%d" % number, tags=["t"]) == number
            assert await second.tail() == number + 1
            found = await second.read_prev("t")
            assert found is not None
            assert found.data == b"%d" % number


async def test_a_log_is_switched_to_other_kinds(tmp_path: Path) -> None:
    async with embedded(three(tmp_path, engines=2, owner_keeps_s=0.2)) as platform:
        one, two = kinds_of(platform)
        await one.create("events", "owned")
        log, other = logs_of(platform)
        for number in range(5):
            await log.append(b"%d" % number, tags=["t"])
        for kind in ("object-store", "shared"):
            await two.switch("events", kind)
            await asyncio.gather(log.append(kind.encode(), tags=["t"]), log.tail())
        assert data_of(await all_of(other, "t")) == [
            *(b"%d" % n for n in range(5)), b"object-store", b"shared",
        ]  # fmt: skip


async def test_a_disk_that_lost_its_cells_is_filled_again(tmp_path: Path) -> None:
    config = three(tmp_path)
    async with embedded(config) as platform:
        await kinds_of(platform)[0].create("events", "owned")
        log = platform.logs.log("events")
        for n in range(30):
            await log.append(b"%d" % n, tags=["t"])
    for file in (tmp_path / "journal" / "cells").glob("storage-1.*"):
        file.unlink()
    async with embedded(config) as platform:
        (kinds,) = kinds_of(platform)
        log = platform.logs.log("events")
        await log.append(b"30", tags=["t"])
        async with asyncio.timeout(60):
            while len((layout := layout_of(kinds, "events")).complete) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert layout.lacking == 1
        (replica,) = (each for each in layout.complete if each.node == "storage-1")
        wanted = CellKeysWanted(0, replica.space, layout.epoch, CellSection.RECORDS)
        listed = (await kinds.ask_cells(replica.node, wanted)).listed
        assert [key.position for key in listed] == list(range(31))
        assert data_of(await all_of(log, "t")) == [b"%d" % n for n in range(31)]


class Nodes:
    """The compute nodes that a `Tenure` asks for."""

    node = NodeId("engine-0")

    def compute_nodes(self) -> list[NodeId]:
        return [NodeId("engine-0"), NodeId("engine-1")]


async def test_a_running_owner_keeps_its_log_for_a_while() -> None:
    clock = [10.0]
    tenure = Tenure(Nodes(), 2.0, clock=lambda: clock[0])
    assert tenure.may_claim(""), "no owner"
    assert tenure.may_claim("engine-0/x"), "an ended process of this node"
    assert tenure.may_claim("engine-7/x"), "a node that left"
    assert not tenure.may_claim("engine-1/x")
    clock[0] = 11.9
    assert not tenure.may_claim("engine-1/x")
    clock[0] = 12.0
    assert tenure.may_claim("engine-1/x")
    assert not tenure.may_claim("engine-1/y"), "another owner begins its time"
    assert Tenure(Nodes(), 2.0, clock=lambda: 0.0).may_claim("engine-1/x"), "it may be old"
