"""Logs of several kinds in one platform: creation, routing, restarts, several compute nodes."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConfigError,
    DataLossError,
    InvalidTagError,
    NotReadyError,
    TrimmedError,
    WrongStateError,
)
from indilog.base.log import After, Entry, Log, Session
from indilog.client import Client
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at
from tests.contract.kinds import running_s3
from tests.contract.reading import all_of, data_of
from tests.support.link_pair import linked_logs
from tests.support.s3_server import credentials_set

pytestmark = pytest.mark.asyncio


def configured(directory: Path, *, engines: int = 1, **settings: object) -> Config:
    cluster = ClusterConfig(engines=engines)
    node = node_config(data_dir=directory, segment_bytes=8 * MIB, **settings)
    return Config(cluster=cluster, node=node)


def client_of(platform: Platform) -> Client:
    return Client(platform.logs, platform.logs.kinds)


async def test_a_created_log_has_its_kind_after_a_restart_too(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        info = await client.create_log("events", kind="object-store")
        assert (info.log, info.kind) == ("events", "object-store")
        assert abs(info.created_at - time.time()) < 600
        assert await client.create_log("events", kind="object-store") == info
        await client.create_log("orders")
        log = client.log("events")
        assert [await log.append(b"%d" % n, tags=["t"]) for n in range(3)] == [0, 1, 2]
        await client.log("orders").append(b"shared")
        assert await client.log("events").tail() == 3, "it has an order of its own"
    assert list((tmp_path / "objects").glob("events-*/cells/*/*"))
    async with indilog.open(tmp_path) as client:
        assert [(each.log, each.kind) for each in await client.logs()] == [
            ("events", "object-store"), ("orders", "shared"),
        ]  # fmt: skip
        assert data_of(await all_of(client.log("events"), "t")) == [b"0", b"1", b"2"]
        assert await client.log("events").append(b"3") == 3


async def test_a_log_that_no_call_created_is_shared(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        await client.log("plain").append(b"x")
        assert await client.logs() == []
        with pytest.raises(WrongStateError, match="has records already"):
            await client.create_log("plain", kind="object-store")
        await client.log("plain").trim(await client.log("plain").tail())
        with pytest.raises(WrongStateError, match="has records already"):
            await client.create_log("plain", kind="object-store")
        assert (await client.create_log("plain")).kind == "shared"


async def test_a_bad_creation_is_refused_in_a_sentence(tmp_path: Path) -> None:
    async with indilog.open(tmp_path, configured(tmp_path, object_logs_max=1)) as client:
        with pytest.raises(
            ValueError, match="one of shared, object-store, order-first, owned, not 'tape'"
        ):
            await client.create_log("a", kind="tape")  # type: ignore[arg-type]
        with pytest.raises(InvalidTagError):
            await client.create_log("$logs", kind="object-store")
        await client.create_log("a", kind="object-store")
        with pytest.raises(WrongStateError, match="is of kind object-store; switch it to shared"):
            await client.create_log("a")
        with pytest.raises(WrongStateError, match="raise object_logs_max"):
            await client.create_log("b", kind="object-store")
        assert [info.log for info in await client.logs()] == ["a"]
    with pytest.raises(ConfigError, match="object_place must be an absolute path"):
        node_config(object_place="here")


async def test_workers_and_clients_see_no_difference(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path)) as platform:
        await client_of(platform).create_log("events", kind="object-store")
        log = linked_logs(platform.logs).log("events", Session())
        seqnums = await log.append_batch([Entry(b"a", ["t"])], after=After("t"))
        assert seqnums == [0]
        assert data_of(await all_of(platform.logs.log("events"), "t")) == [b"a"]


async def test_names_of_any_text_have_folders(tmp_path: Path) -> None:
    names = ["a/b", "../up", "größe", "x" * 128, "a%2Fb", "."]
    async with indilog.open(tmp_path) as client:
        for name in names:
            await client.create_log(name, kind="object-store")
            await client.log(name).append(name.encode())
    async with indilog.open(tmp_path) as client:
        for name in names:
            assert data_of(await all_of(client.log(name))) == [name.encode()]
    found = [path for path in (tmp_path / "objects").iterdir() if path.is_dir()]
    assert len(found) == len(names)


async def test_every_compute_node_routes_a_log_when_it_is_created(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path, engines=3)) as platform:
        nodes = list(platform.engines.values())
        kinds = [node.kinds for node in nodes]
        for number in range(4):
            name, creator = f"log{number}", kinds[number % 3]
            assert creator is not None
            await creator.create(name, "object-store")
            seqnums = await asyncio.gather(*[node.log(name).append(b"x") for node in nodes])
            assert sorted(seqnums) == [0, 1, 2]
            assert await nodes[0].shared(name, Session()).read_next(fresh=True) is None
            for node in nodes:
                assert len(await node.log(name).read_range()) == 3


async def test_creations_at_once_make_one_log(tmp_path: Path) -> None:
    async with embedded(configured(tmp_path, engines=3)) as platform:
        kinds = [node.kinds for node in platform.engines.values()]
        creating = [each.create("one", "object-store") for each in kinds if each is not None]
        infos = await asyncio.gather(*creating)
        assert len(set(infos)) == 1
        assert len(infos) == 3


async def test_a_node_that_does_not_follow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indilog_compute.log_kinds.kinds._FOLLOW_S", 0.2)
    async with embedded(configured(tmp_path, engines=2)) as platform:
        first, second = platform.engines.values()
        assert first.kinds is not None
        assert second.kinds is not None
        for task in second.kinds._tasks:
            task.cancel()
        with pytest.raises(NotReadyError, match=f"{second.node} did not answer"):
            await first.kinds.create("events", "object-store")


async def trimmed(log: Log) -> int:
    """Return the floor of a log."""
    try:
        await log.read_next()
    except TrimmedError as error:
        return error.first_seqnum
    return 0


async def test_retention_policies_are_enforced(tmp_path: Path) -> None:
    async with indilog.open(tmp_path, configured(tmp_path, retention_interval_s=0.05)) as client:
        await client.create_log("events", kind="object-store")
        log = client.log("events")
        for n in range(20):
            await log.append(b"%d" % n * 50)
        await log.set_retention(size_bytes=400)
        async with asyncio.timeout(60):
            while not await trimmed(log):  # noqa: ASYNC110 - the platform trims
                await asyncio.sleep(0.01)
        assert await log.read_prev() is not None


async def test_logs_are_kept_in_a_bucket(tmp_path: Path) -> None:
    place = running_s3()
    with credentials_set():
        async with indilog.open(tmp_path, configured(tmp_path, object_place=place)) as client:
            await client.create_log("events", kind="object-store")
            await client.log("events").append(b"x", tags=["t"])
        assert not (tmp_path / "objects").exists()
        async with indilog.open(tmp_path) as client:  # the place is in the catalog
            assert data_of(await all_of(client.log("events"), "t")) == [b"x"]


async def test_a_released_log_is_deleted_from_a_bucket() -> None:
    place = f"{running_s3().partition('?')[0]}/released?{running_s3().partition('?')[2]}"
    with credentials_set():
        store = object_store_at(place, timeout_s=10.0)
        for folder in ("a", "ab"):
            cells = await ObjectCells.created(store, folder, stripes=2)
            for position in range(4):
                assert await cells.write(position, b"content")
            await cells.write_generation(0, b"generation")
            await cells.write_checkpoint(4, b"checkpoint")
        await (kept := await ObjectCells.opened(store, "ab")).release()
        assert [await kept.read(position) for position in range(5)] == [b""] * 4 + [None]
        assert (await kept.generations(), await kept.newest_checkpoint()) == ([], None)
        assert not await kept.write(2, b"other")
        for _ in range(2):  # it may be repeated
            await store.delete_folder("a")
        assert await store.get("a/LOG") is None
        assert await store.names("a/cells/0000") == []
        assert await store.get("ab/LOG") is not None


async def test_a_place_that_is_lost_while_the_log_is_open_takes_no_append(tmp_path: Path) -> None:
    place, away = tmp_path / "data/objects", tmp_path / "away"
    async with indilog.open(
        tmp_path / "data", configured(tmp_path / "data", append_timeout_s=1)
    ) as client:
        await client.create_log("events", kind="object-store")
        log = client.log("events")
        assert await log.append(b"0") == 0
        place.rename(away)
        place.mkdir()
        with pytest.raises((AppendOutcomeUnknownError, NotReadyError)):
            await log.append(b"1")
        assert not list(place.iterdir()), "nothing is written elsewhere"
        place.rmdir()
        away.rename(place)
        last = await log.append(b"2")
    async with indilog.open(tmp_path / "data") as client:
        found = data_of(await all_of(client.log("events")))
        assert found in ([b"0", b"1", b"2"], [b"0", b"2"])
        assert found[last] == b"2"


async def test_a_log_whose_place_is_absent_is_not_created_again(tmp_path: Path) -> None:
    place, away = tmp_path / "data/objects", tmp_path / "away"
    async with indilog.open(tmp_path / "data") as client:
        await client.create_log("unused", kind="object-store")
        await client.create_log("events", kind="object-store")
        assert await client.log("events").append(b"0") == 0
    place.rename(away)
    async with indilog.open(tmp_path / "data") as client:
        for name in ("events", "unused"):
            with pytest.raises(DataLossError, match=r"has no .*/LOG; see that its place is"):
                await client.log(name).append(b"1")
        await client.log("orders").append(b"shared")
        shutil.rmtree(place, ignore_errors=True)
        away.rename(place)
        assert await client.log("events").append(b"1") == 1, "it is mounted again"
        assert await client.log("unused").append(b"0") == 0
