"""Logs of kind owned in one platform: creation, restarts, compute nodes, lost storage nodes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import ConditionFailedError, WrongStateError
from indilog.base.ids import NodeId
from indilog.base.log import After, Entry, Log, Session
from indilog.config import Config
from indilog.kernel.cell_layout import CellLayout
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog.wire.cell_messages import CellKeysWanted, CellSection
from indilog_cells.opening import has_ended, node_of
from indilog_cells.owned_cells import OwnedCells
from indilog_compute.local_log import LocalLogs
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


async def test_compute_nodes_append_through_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[str] = []
    monkeypatch.setattr(OwnedCells, "give_up_on", lambda _, owner: given_up.append(owner))
    async with embedded(three(tmp_path, engines=3)) as platform:
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
        assert not given_up


async def test_callers_on_two_nodes_in_turn_claim_a_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[str] = []
    begin_epoch = OwnedCells._begin_epoch

    async def counted(self: OwnedCells, layout: CellLayout) -> None:
        claims.append(layout.owner)
        await begin_epoch(self, layout)

    monkeypatch.setattr(OwnedCells, "_begin_epoch", counted)
    async with embedded(three(tmp_path, engines=2)) as platform:
        one, _ = kinds_of(platform)
        await one.create("events", "owned")
        first, second = logs_of(platform)
        for number in range(0, 60, 3):
            assert await first.append(b"a", tags=["t"]) == number
            assert await second.append(b"b", tags=["t"]) == number + 1
            (placed,) = await second.append_batch(
                [Entry(b"c", ["t"])], after=After("t", number + 1)
            )
            assert placed == number + 2
        with pytest.raises(ConditionFailedError) as failed:
            await second.append_batch([Entry(b"d", ["t"])], after=After("t", 58))
        assert failed.value.last_seqnum == 59
        await second.trim(30)
        assert data_of(await first.read_range("t", 30)) == [b"a", b"b", b"c"] * 10
        assert await second.now() >= 0.0
        owner = layout_of(one, "events").owner
        assert node_of(owner) == one.node
        assert len(claims) == 1


@pytest.mark.repeated("tests/cells/test_owned.py")
async def test_an_owner_that_does_not_answer_loses_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner of an earlier release leaves out the messages."""

    async def serve_nothing(*_: object) -> None:
        return None

    monkeypatch.setattr(LocalLogs, "_serve_appends", serve_nothing)
    async with embedded(three(tmp_path, engines=2)) as platform:
        one, two = kinds_of(platform)
        await one.create("events", "owned")
        first, second = logs_of(platform)
        assert await first.append(b"0", tags=["t"]) == 0
        appended = [second.append(b"x", tags=["t"]) for _ in range(10)]
        assert sorted(await asyncio.gather(*appended)) == list(range(1, 11))
        assert node_of(layout_of(two, "events").owner) == two.node
        assert await first.append(b"11", tags=["t"]) == 11
        assert [r.seqnum for r in await all_of(second, "t")] == list(range(12))


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
    async with embedded(three(tmp_path, engines=2)) as platform:
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
        listed = (await kinds.requests.ask_cells(replica.node, wanted)).listed
        assert [key.position for key in listed] == list(range(31))
        assert data_of(await all_of(log, "t")) == [b"%d" % n for n in range(31)]


class Nodes:
    """The compute nodes of a view."""

    node = NodeId("engine-0")

    def compute_nodes(self) -> list[NodeId]:
        return [NodeId("engine-0"), NodeId("engine-1")]


async def test_the_owner_of_an_ended_process_is_not_asked() -> None:
    assert has_ended("", Nodes()), "no owner"
    assert has_ended("engine-0/x", Nodes()), "an earlier process of this node"
    assert has_ended("engine-7/x", Nodes()), "a node that left"
    assert not has_ended("engine-1/x", Nodes())
