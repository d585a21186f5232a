"""The wanted members and the installed view in the metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from indilog.base.errors import ConfigError, NotReadyError
from indilog.base.ids import NodeId, ViewNumber
from indilog.config import Config, node_config
from indilog.kernel.view import Members, View, view_of
from indilog.runtime.cluster.cluster_members import (
    ClusterMembers,
    publish_views,
    store_view,
    wanted_in,
)
from indilog.runtime.cluster.cluster_state import (
    MEMBERS_KEY,
    RUN_KEY,
    VIEW_KEY,
    change_run,
    decode_members,
    decode_run,
    decode_view,
    publish_run,
)
from indilog.runtime.cluster.following import followed, running
from indilog.runtime.cluster.processes import processes_in
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore

VIEW = view_of(sequencers=3, storage_nodes=2, replicas=2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedMetadataStore]:
    with EmbeddedMetadataStore(tmp_path / "metadata", node_config()) as opened:
        yield opened


def numbered(number: int) -> View:
    return msgspec.structs.replace(VIEW, number=ViewNumber(number))


async def stored_number(store: EmbeddedMetadataStore) -> int:
    found = await store.get(VIEW_KEY)
    return 0 if found is None else decode_view(found.value).number


@pytest.mark.asyncio
async def test_a_stored_view_is_replaced_only_by_a_newer_one(store: EmbeddedMetadataStore) -> None:
    assert await store_view(store, numbered(3))
    assert not await store_view(store, numbered(2))
    assert not await store_view(store, numbered(3))
    assert await stored_number(store) == 3
    assert await store_view(store, numbered(4))
    assert await stored_number(store) == 4


@pytest.mark.asyncio
async def test_views_are_stored_as_the_primary_installs_them(store: EmbeddedMetadataStore) -> None:
    installed: list[View | None] = [None]
    async with asyncio.timeout(60), running(publish_views(store, lambda: installed[-1])):
        for number in (1, 2):
            installed.append(numbered(number))
            found = await store.watch(VIEW_KEY, after=await stored_version(store))
            assert found is not None
            assert decode_view(found.value).number == number


async def stored_version(store: EmbeddedMetadataStore) -> int:
    found = await store.get(VIEW_KEY)
    return 0 if found is None else found.version


@pytest.mark.asyncio
async def test_without_a_wish_the_members_are_those_of_the_view(
    store: EmbeddedMetadataStore,
) -> None:
    with pytest.raises(NotReadyError):
        await wanted_in(store)
    await store_view(store, VIEW)
    wanted = await wanted_in(store)
    assert (wanted.members, wanted.members_version) == (VIEW.members, 0)


@pytest.mark.asyncio
async def test_changes_of_two_callers_at_once_are_both_kept(store: EmbeddedMetadataStore) -> None:
    await store_view(store, VIEW)
    members = ClusterMembers(store, Config(), NodeId("engine-0"))
    await asyncio.gather(
        members.scale({"storage_nodes": 3}),
        members.scale({"compute_nodes": 2}),
        members.scale({"index_shards": 3}),
    )
    found = (await wanted_in(store)).members
    assert (len(found.storage_nodes), len(found.engines), len(found.index_shards)) == (3, 2, 3)
    assert found.version == 3
    state = await members.state()
    assert (state["view"], state["reached"]) == (1, False)


@pytest.mark.asyncio
async def test_a_refused_change_writes_nothing(store: EmbeddedMetadataStore) -> None:
    await store_view(store, VIEW)
    members = ClusterMembers(store, Config(), NodeId("engine-0"))
    for counts in ({"storage_nodes": 1}, {"storage": 3}, {"storage_nodes": "many"}):
        with pytest.raises(ConfigError):
            await members.scale(counts)
    with pytest.raises(ConfigError):
        await members.drain("engine-0")
    assert await store.get(MEMBERS_KEY) is None
    await members.scale({"storage_nodes": 2})
    assert await store.get(MEMBERS_KEY) is None, "it has so many"


@pytest.mark.asyncio
async def test_a_node_learns_addresses_and_members_that_a_running_run_gets(
    store: EmbeddedMetadataStore,
) -> None:
    addresses = {NodeId("storage-0"): "unix:///run/x/storage-0"}
    await publish_run(store, Config(), addresses, Path("/run/x"))
    seen: list[tuple[int, Members | None]] = []
    came = asyncio.Event()

    def note(value: bytes) -> None:
        run = decode_run(value)
        assert run is not None
        seen.append((len(run.addresses), run.members))
        came.set()

    async with asyncio.timeout(60), followed(store, RUN_KEY, lambda found: note(found.value)):
        more = addresses | {NodeId("storage-1"): "unix:///run/x/storage-1"}
        for change in ({"addresses": more}, {"members": VIEW.members}):
            await came.wait()
            came.clear()
            await change_run(store, lambda run, c=change: msgspec.structs.replace(run, **c))  # type: ignore[misc]
        await came.wait()
    assert seen == [(1, None), (2, None), (2, VIEW.members)]


def test_members_of_another_release_are_one_sentence() -> None:
    with pytest.raises(Exception, match="not understood"):
        decode_members(b"[1]")


@pytest.mark.asyncio
async def test_a_finalization_is_wanted_until_the_view_has_it(
    store: EmbeddedMetadataStore,
) -> None:
    await store_view(store, VIEW)
    members = ClusterMembers(store, Config(), NodeId("engine-0"))
    state = await members.finalize(0, 10)
    assert (state["reached"], state["missing"]) == (False, ["Shard 0 is not finalized yet."])
    before = (await wanted_in(store)).members
    await members.finalize(0, 10)
    assert (await wanted_in(store)).members == before
    await members.finalize(0, 0)
    wanted = (await wanted_in(store)).members
    assert (wanted.finalized, wanted.version) == ({0: 0}, before.version + 1)
    shards = {
        shard: msgspec.structs.replace(placed, finalized=True)
        for shard, placed in VIEW.shards.items()
    }
    await store_view(store, msgspec.structs.replace(numbered(2), shards=shards))
    assert (await members.state())["reached"]
    await members.finalize(0, 5)
    assert (await wanted_in(store)).members == wanted, "it is finalized already"
    with pytest.raises(ConfigError, match="no shard 4; it has 0"):
        await members.finalize(4, 0)


@pytest.mark.asyncio
async def test_giving_up_a_process_is_noted_before_other_members_are_wanted(
    store: EmbeddedMetadataStore,
) -> None:
    await store_view(store, VIEW)
    members = ClusterMembers(store, Config(), NodeId("engine-0"))
    await members.replace("storage-0")
    assert (await processes_in(store)).gone == ("storage-0",)
    wanted = (await wanted_in(store)).members
    assert wanted.storage_nodes == ("storage-1", "storage-2")
    await members.replace("storage-0")
    assert (await wanted_in(store)).members == wanted, "a repetition changes nothing"
