"""The parts of `indilog node`: which process a machine gets, who is a member, and the status."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId, ViewNumber
from indilog.config import Config
from indilog.kernel.view import View
from indilog.runtime.cluster.cluster_members import wanted_in
from indilog.runtime.cluster.cluster_state import RUN_KEY, VIEW_KEY, Setting, run_of
from indilog.runtime.cluster.machines.machine_members import (
    MachineMembers,
    Membership,
    install_without,
    remove_silent,
    want_joined,
    want_zone,
)
from indilog.runtime.cluster.machines.machine_process import ROLES, roles_named
from indilog.runtime.cluster.machines.registration import machine_start, registered
from indilog.runtime.cluster.machines.service_manager import READY, notify, watchdog_s
from indilog.runtime.cluster.machines.status_keys import StatusKeys
from indilog.runtime.cluster.metadata_opening import OpenedMetadata
from indilog.runtime.cluster.processes import Processes, processes_in
from indilog.runtime.cluster.status_files import BELIEVED_S
from indilog.runtime.cluster.supervisor import processes_config
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore

ALL = tuple(ROLES.values())
ENGINE = NodeId("engine-0")


class Machines:
    """Machines with a metadata file each, and the store that they share."""

    def __init__(self, directory: Path, files: ExitStack) -> None:
        self._directory = directory
        self._files = files
        self._opened: dict[int, EmbeddedMetadataStore] = {}
        self.store = files.enter_context(
            EmbeddedMetadataStore(directory / "store", self.config(0).node)
        )

    def config(self, number: int, zone: str = "", **cluster: object) -> Config:
        overrides = {
            "node": {
                "zone": zone,
                "data_dir": str(self._directory / str(number)),
                "node_host": "127.0.0.1",
                "node_port": 7000 + number,
            },
            "cluster": cluster,
        }
        return processes_config(overrides=overrides, shared=3)

    async def register(self, number: int, config: Config | None = None) -> str:
        config = config or self.config(number)
        if number not in self._opened:
            file = EmbeddedMetadataStore(self._directory / f"metadata-{number}", config.node)
            self._opened[number] = self._files.enter_context(file)
        metadata = OpenedMetadata(self.store, self._opened[number])
        return (await registered(metadata, config, ALL)).name

    async def install(self) -> View:
        """Store the view that the primary would install."""
        found, run = await self.store.get(VIEW_KEY), await run_of(self.store)
        assert found is not None
        assert run is not None
        assert run.members is not None
        before = (await wanted_in(self.store)).view
        view = msgspec.structs.replace(
            before,
            number=ViewNumber(before.number + 1),
            engines=run.members.engines,
            spares=tuple(n for n in run.members.storage_nodes if n not in before.storage_nodes),
            index_shards=run.members.index_shards,
            aggregators=run.members.aggregators,
            members_version=run.members.version,
        )
        value = msgspec.json.encode(view)
        await self.store.compare_and_set(VIEW_KEY, value, expected_version=found.version)
        return view


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as files:
        yield Machines(tmp_path, files)


@pytest.mark.asyncio
async def test_first_machines_share_the_first_layout_and_a_restart_finds_its_process(
    machines: Machines,
) -> None:
    names = await asyncio.gather(*(machines.register(number) for number in range(3)))
    assert sorted(names) == ["node-0", "node-1", "node-2"]
    assert [await machines.register(number) for number in range(3)] == names
    start = await machine_start(machines.store, machines.config(1))
    assert start.addresses.keys() == set(start.view.nodes)
    of_second = start.processes.nodes_of(names[1], start.view.nodes)
    assert {start.addresses[node] for node in of_second} == {"stream://127.0.0.1:7001"}


@pytest.mark.asyncio
async def test_a_later_machine_gets_a_new_process_with_its_roles(machines: Machines) -> None:
    for number in range(3):
        await machines.register(number)
    later = await asyncio.gather(machines.register(3), machines.register(4))
    assert sorted(later) == ["node-3", "node-4"]
    processes = await processes_in(machines.store)
    nodes = set(processes.all_of("node-3")) - index_nodes(processes, "node-3")
    assert nodes == {"sequencer-3", "storage-3", "engine-3", "aggregator-3"}
    assert len(index_nodes(processes, "node-3")) == 1
    assert index_nodes(processes, "node-3") != index_nodes(processes, "node-4")


def index_nodes(processes: Processes, process: str) -> set[NodeId]:
    return {node for node in processes.all_of(process) if node.startswith("index-")}


@pytest.mark.asyncio
async def test_a_machine_may_come_back_with_another_address(machines: Machines) -> None:
    for number in range(3):
        await machines.register(number)
    moved = machines.config(9)
    name = await machines.register(1, moved)
    run = await run_of(machines.store)
    assert run is not None
    at = {run.addresses[n] for n in (await processes_in(machines.store)).all_of(name)}
    assert at == {"stream://127.0.0.1:7009"}


async def change_settings(
    machines: Machines, change: Callable[[dict[str, Setting]], object]
) -> None:
    """Change the stored `[cluster]` settings, as if another release had created the cluster."""
    run, found = await run_of(machines.store), await machines.store.get(RUN_KEY)
    assert run is not None
    assert found is not None
    change(run.settings["cluster"])
    value = msgspec.json.encode(run)
    await machines.store.compare_and_set(RUN_KEY, value, expected_version=found.version)


@pytest.mark.asyncio
async def test_a_machine_has_defaults_for_settings_that_an_earlier_release_did_not_know(
    machines: Machines,
) -> None:
    await machines.register(0)
    await change_settings(machines, lambda known: known.pop("cut_interval_s", None))
    assert await machines.register(1) == "node-1"
    with pytest.raises(ConfigError, match=r"created with cut_interval_s = 0\.0"):
        await machines.register(2, machines.config(2, cut_interval_s=0.5))


@pytest.mark.asyncio
async def test_a_cluster_of_a_later_release_refuses_a_machine_that_lacks_a_setting(
    machines: Machines,
) -> None:
    await machines.register(0)
    await change_settings(machines, lambda known: known.update(later=1))
    with pytest.raises(ConfigError, match="setting later, which this release does not know"):
        await machines.register(1)


@pytest.mark.asyncio
async def test_other_settings_of_the_cluster_are_refused(machines: Machines) -> None:
    await machines.register(0)
    with pytest.raises(ConfigError, match="created with index_shards = 2"):
        await machines.register(1, machines.config(1, index_shards=5))


@pytest.mark.asyncio
async def test_a_machine_with_the_address_of_another_one_gets_no_process(
    machines: Machines,
) -> None:
    await machines.register(0)
    with pytest.raises(ConfigError, match="is the address of node-0 already"):
        await machines.register(1, machines.config(0))
    assert await machines.register(2) == "node-1"


@pytest.mark.asyncio
async def test_a_process_joins_and_leaves_by_its_own_part_of_the_members(
    machines: Machines,
) -> None:
    store = machines.store
    for number in range(5):
        await machines.register(number)
    processes = await processes_in(store)
    joining = [processes.all_of(name) for name in ("node-3", "node-4")]
    await asyncio.gather(*(want_joined(store, nodes) for nodes in joining))
    view = await machines.install()
    standbys = {NodeId("sequencer-3"), NodeId("sequencer-4")}
    assert {*joining[0], *joining[1]} - standbys <= set(view.nodes)
    assert not standbys & set(view.nodes)
    assert (await wanted_in(store)).members.nodes == view.members.nodes

    membership = Membership(store, joining[0])
    await membership.look()
    assert not membership.leaving.is_set()
    alive = StatusKeys(store, "node-3")
    await alive.write({node: {"records": 1} for node in joining[0]})
    await MachineMembers(store, machines.config(0), ENGINE).drain("node-3")
    await remove_silent(store, StatusKeys(store, "node-0"))
    await membership.look()
    assert membership.leaving.is_set()
    assert not membership.left.is_set()
    run = await run_of(store)
    assert run is not None
    assert run.members is not None
    assert set(joining[0]) - standbys <= set(run.members.nodes), "its gateway has not ended"
    await install_without(store, joining[0])
    view = await machines.install()
    assert not set(joining[0]) & set(view.members.nodes)
    await membership.look()
    assert membership.left.is_set()


@pytest.mark.asyncio
async def test_nodes_that_are_to_leave_are_removed_when_they_are_silent(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their process ended a moment before they were to leave, so they become silent later."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = machines.store
    for number in range(4):
        await machines.register(number)
    gone = (await processes_in(store)).all_of("node-3")
    await want_joined(store, gone)
    await machines.install()
    await StatusKeys(store, "node-3").write({node: {"records": 1} for node in gone})
    others = StatusKeys(store, "node-0")
    await others.look()
    now += BELIEVED_S + 1
    await remove_silent(store, others)
    assert set(gone) & set((await machines.install()).members.nodes), "they are not to leave"
    other = StatusKeys(store, "node-1")  # it has just been started
    await MachineMembers(store, machines.config(0), ENGINE).drain("node-3")
    await remove_silent(store, other)
    assert set(gone) & set((await machines.install()).members.nodes), "their status may be recent"
    now += BELIEVED_S + 1
    await remove_silent(store, other)
    assert not set(gone) & set((await machines.install()).members.nodes)


@pytest.mark.asyncio
async def test_changes_that_leave_something_without_a_node_are_refused(machines: Machines) -> None:
    for number in range(3):
        await machines.register(number)
    members = MachineMembers(machines.store, machines.config(0), ENGINE)
    with pytest.raises(ConfigError, match="sequencer"):
        await members.drain("node-1")
    with pytest.raises(ConfigError, match="has no node 'node-7'; it has node-0, node-1, node-2"):
        await members.drain("node-7")
    with pytest.raises(ConfigError, match="use `indilog cluster drain node-1`"):
        await members.drain("storage-1")
    with pytest.raises(ConfigError, match="run `indilog node` on another machine"):
        await members.scale({"nodes": 4})


@pytest.mark.asyncio
async def test_a_status_is_recent_while_its_key_changes(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one, other = StatusKeys(machines.store, "node-0"), StatusKeys(machines.store, "node-1")
    await one.write({ENGINE: {"records": 7}})
    await other.look()
    missing = NodeId("engine-9")
    assert other.read([ENGINE, missing]) == ({ENGINE: {"records": 7}}, [missing])
    now += 11
    await other.look()
    assert other.read([ENGINE]).silent == [ENGINE]
    await StatusKeys(machines.store, "node-0").write({ENGINE: {"records": 8}})  # it was restarted
    await other.look()
    assert other.read([ENGINE]).status == {ENGINE: {"records": 8}}
    await one.remove([ENGINE])
    await one.write({ENGINE: {"records": 9}})
    await one.remove([ENGINE])
    await other.look()
    assert other.read([ENGINE]).silent == [ENGINE]


def test_roles_have_names() -> None:
    assert roles_named("compute, storage,compute") == ("engine", "storage")
    with pytest.raises(ConfigError, match="no role 'cook'"):
        roles_named("storage,cook")
    with pytest.raises(ConfigError, match="at least one role"):
        roles_named(" ,")


def test_the_service_manager_gets_a_datagram(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        assert notify(READY, {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert manager.recv(100) == b"READY=1"
        assert not notify(READY, {})
        assert not notify(READY, {"NOTIFY_SOCKET": str(tmp_path / "missing")})


def test_the_watchdog_has_half_of_its_time() -> None:
    assert watchdog_s({"WATCHDOG_USEC": "10000000"}) == 5.0
    assert watchdog_s({"WATCHDOG_USEC": "10000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_s({}) is None


@pytest.mark.asyncio
async def test_the_first_machines_lay_out_the_shards_by_their_zones(machines: Machines) -> None:
    zones = ("east", "east", "west")
    configs = [machines.config(n, zone, replicas=2) for n, zone in enumerate(zones)]
    names = [await machines.register(n, config) for n, config in enumerate(configs)]
    starts = await asyncio.gather(*(machine_start(machines.store, config) for config in configs))
    assert starts[0].view == starts[1].view == starts[2].view
    view = starts[0].view
    assert view.number == 1
    by_process = dict(zip(names, zones, strict=True))
    assert view.zones == {node: by_process[starts[0].processes.of(node)] for node in view.nodes}
    for placed in view.shards.values():
        assert {view.zones[node] for node in placed.replicas} == {"east", "west"}


@pytest.mark.asyncio
async def test_a_restart_with_another_zone_changes_no_first_view(machines: Machines) -> None:
    configs = [machines.config(n, "east", replicas=2) for n in range(3)]
    for n, config in enumerate(configs):
        await machines.register(n, config)
    view = (await machine_start(machines.store, configs[0])).view
    other = machines.config(1, "west", replicas=2)
    name = await machines.register(1, other)
    assert (await machine_start(machines.store, other)).view == view
    nodes = (await processes_in(machines.store)).all_of(name)
    await want_zone(machines.store, nodes, "west")
    wanted, run = await wanted_in(machines.store), await run_of(machines.store)
    assert run is not None
    assert run.members is not None
    moved = {node: zone for node, zone in wanted.members.zones.items() if zone == "west"}
    assert set(moved) == set(nodes) & set(view.nodes)
    assert run.members.zones == wanted.members.zones
    assert (wanted.view, run.members.nodes) == (view, view.members.nodes)
    await want_zone(machines.store, nodes, "west")
    assert (await wanted_in(machines.store)).members_version == wanted.members_version


@pytest.mark.asyncio
async def test_a_machine_that_joins_brings_its_zone(machines: Machines) -> None:
    for number in range(3):
        await machines.register(number)
    await machine_start(machines.store, machines.config(0))
    await machines.register(3, machines.config(3, "west"))
    nodes = [NodeId("storage-3"), NodeId("engine-3")]
    await want_joined(machines.store, nodes, "west")
    members = (await wanted_in(machines.store)).members
    assert members.zones == dict.fromkeys(nodes, "west")
