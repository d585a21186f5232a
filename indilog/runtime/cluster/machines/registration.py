"""Decides which process of the cluster a machine runs, and publishes the addresses of all processes
(decision 0057).

The first machines get the processes `node-0`, `node-1` and so on of the first layout, in the order
of their start. A machine that starts later gets a new process. The key `claims/PROCESS` holds the
id of the data directory that has the process. So a restart finds its process again, even if it was
killed between two steps. An empty data directory has a new id, so a machine that lost its disk
joins as a new machine. `machine_process` calls `registered`, and then `machine_start`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from indilog.base.errors import ConfigError, NotReadyError
from indilog.base.ids import Epoch, NodeId
from indilog.config import Config
from indilog.kernel.view import FIRST_VIEW
from indilog.runtime.cluster.cluster_members import wanted_in
from indilog.runtime.cluster.cluster_state import (
    EPOCH_KEY,
    RUN_KEY,
    VIEW_KEY,
    NodeStart,
    RunSettings,
    Setting,
    change_run,
    claim_arrangement,
    decode_run,
    decode_view,
    run_of,
    settings_of,
)
from indilog.runtime.cluster.following import RETRY_S
from indilog.runtime.cluster.layout import view_in, wanted_view
from indilog.runtime.cluster.membership import Kind, check_can_change
from indilog.runtime.cluster.metadata_opening import OpenedMetadata
from indilog.runtime.cluster.processes import (
    PROCESSES_KEY,
    decode_processes,
    number_of_process,
    processes_in,
    with_new_process,
)
from indilog.runtime.metadata.store import MetadataStore

CLAIMS: Final = "claims/"
MACHINE_KEY: Final = "machine"
"""Key in the metadata file of a data directory: the id of the directory."""
_WAIT_LOGGED_S: Final = 10.0
_SCHEMES: Final[Mapping[str, str]] = {"stream": "stream", "zmq": "tcp"}
"""The schemes of TCP ports, by the setting `transport`."""

_log = structlog.get_logger(__name__)


class Registered(NamedTuple):
    """A process of the cluster, and its nodes."""

    name: str
    nodes: tuple[NodeId, ...]


async def registered(
    metadata: OpenedMetadata, config: Config, roles: Collection[Kind]
) -> Registered:
    """Return the process that this machine runs, and publish its address.

    Args:
        metadata: the metadata store, and the file of this machine's data directory.
        config: configuration of this machine.
        roles: the kinds of nodes of the process, if the process is new.

    Raises:
        ConfigError: the cluster has other settings, or its nodes do not run on several machines.
        NotReadyError: other machines change the cluster at the same time; try again.
        QuorumUnavailableError: the metadata store does not answer.
    """
    store = metadata.store
    await claim_arrangement(store, "machines")
    await _lay_out(store, config)
    machine, address = await _machine_id(metadata), _address_of(config)
    await _check_address(store, machine, address)
    name = await _claimed(store, machine)
    nodes = await _nodes_of(store, name, roles)
    zone = config.node.zone
    await change_run(store, lambda run: _with_address(run, nodes, address, zone))
    return Registered(name, nodes)


async def _lay_out(store: MetadataStore, config: Config) -> None:
    """Store the first layout and the settings of the cluster. If they are stored already, compare
    the settings.
    """
    settings = settings_of(config)["cluster"]
    while (found := await store.get(RUN_KEY)) is None:
        try:
            await view_in(store, config, "machines")
        except NotReadyError:  # another machine does the same
            await asyncio.sleep(RETRY_S)
            continue
        run = RunSettings({}, "", {"cluster": settings}, first_zones=None)
        await store.compare_and_set(RUN_KEY, msgspec.json.encode(run), expected_version=0)
    run_found = decode_run(found.value)
    if run_found is None:
        raise ConfigError("The cluster was created by another release; use the same one.")
    _check_settings(run_found.settings["cluster"], settings)


def _check_settings(known: Mapping[str, Setting], settings: Mapping[str, Setting]) -> None:
    """Refuse other `[cluster]` settings than those of the cluster.

    If an earlier release created the cluster, settings that were added since are not stored. They
    count as having their defaults.

    Raises:
        ConfigError: a setting differs, or only a later release knows it.
    """
    defaults = settings_of(Config())["cluster"]
    if unknown := sorted(known.keys() - defaults.keys()):
        raise ConfigError(
            f"The cluster has the setting {unknown[0]}, which this release does not know: use the "
            "release of the other machines."
        )
    for name, default in sorted(defaults.items()):
        of_cluster, here = known.get(name, default), settings.get(name, default)
        if of_cluster != here:
            raise ConfigError(
                f"The cluster was created with {name} = {of_cluster}, and this machine is "
                f"configured with {here}: give all machines the same [cluster] settings."
            )


async def _machine_id(metadata: OpenedMetadata) -> bytes:
    """Return the id of the data directory. The first call chooses the id."""
    if (known := await metadata.file.get(MACHINE_KEY)) is not None:
        return known.value
    chosen = os.urandom(16).hex().encode()
    await metadata.file.compare_and_set(MACHINE_KEY, chosen, expected_version=0)
    return chosen


async def _check_address(store: MetadataStore, machine: bytes, address: str) -> None:
    """Refuse an address that another process has. Called before this machine claims a process."""
    run, processes = await run_of(store), await processes_in(store)
    assert run is not None, "the cluster is laid out"
    name = await _claimed_before(store, machine)
    for node, at in run.addresses.items():
        if at == address and processes.of(node) != name:
            raise ConfigError(
                f"{address} is the address of {processes.of(node)} already: give each machine its "
                "own node_host, or each process of a machine its own node_port."
            )


async def _claimed_before(store: MetadataStore, machine: bytes) -> str | None:
    """Return the process that this machine has; None: it has none yet."""
    claims, _ = await store.list_keys(CLAIMS)
    found = (key for key, claim in claims.items() if claim.value == machine)
    return next((key.removeprefix(CLAIMS) for key in found), None)


async def _claimed(store: MetadataStore, machine: bytes) -> str:
    """Return the process of this machine: the process that it already has, a free process of the
    first layout, or a new process.
    """
    while (name := await _claimed_before(store, machine)) is None:
        claims, _ = await store.list_keys(CLAIMS)
        processes = await processes_in(store)
        claimed = {key.removeprefix(CLAIMS) for key in claims}
        free = {*processes.shared.values()} - claimed
        used = [processes.count - 1, *map(number_of_process, claimed)]
        name = min(free, key=number_of_process) if free else f"node-{max(used) + 1}"
        await store.compare_and_set(f"{CLAIMS}{name}", machine, expected_version=0)
    return name


async def _nodes_of(store: MetadataStore, name: str, roles: Collection[Kind]) -> tuple[NodeId, ...]:
    """Return the nodes of a process. A new process gets a node of each of `roles`."""
    while True:
        before = await store.get(PROCESSES_KEY)
        assert before is not None, "the first layout has processes"
        processes = decode_processes(before.value)
        if nodes := processes.all_of(name):
            return nodes
        wanted = await wanted_in(store)
        check_can_change(wanted.view)
        number = number_of_process(name)
        changed = with_new_process(processes, number, wanted.members, wanted.view, roles)
        value = msgspec.json.encode(changed)
        await store.compare_and_set(PROCESSES_KEY, value, expected_version=before.version)


def _address_of(config: Config) -> str:
    messages = config.node.messages
    host = f"[{messages.node_host}]" if ":" in messages.node_host else messages.node_host
    return f"{_SCHEMES[messages.transport]}://{host}:{messages.node_port}"


def _with_address(
    run: RunSettings, nodes: Collection[NodeId], address: str, zone: str
) -> RunSettings:
    addresses = run.addresses | dict.fromkeys(nodes, address)
    zones = {node: at for node, at in run.zones.items() if node not in nodes}
    zones |= dict.fromkeys(nodes, zone) if zone else {}
    return msgspec.structs.replace(run, addresses=addresses, zones=zones)


async def _place_by_zones(store: MetadataStore, config: Config) -> None:
    """Lay out the first view by the zones of the first machines. Called when all of them have
    started, before any role has run.

    Each of the first machines calls this. All use the zones that the first caller stored.
    """
    run = await change_run(store, _with_first_zones)
    while run.first_zones:
        found = await store.get(VIEW_KEY)
        assert found is not None, "it was laid out"
        view = decode_view(found.value)
        if view.number > FIRST_VIEW or view.zones == run.first_zones:
            return
        placed = msgspec.json.encode(wanted_view(config, run.first_zones))
        await store.compare_and_set(VIEW_KEY, placed, expected_version=found.version)


def _with_first_zones(run: RunSettings) -> RunSettings:
    if run.first_zones is not None:
        return run
    return msgspec.structs.replace(run, first_zones=run.zones)


async def machine_start(store: MetadataStore, config: Config) -> NodeStart:
    """Wait until all nodes of the view have an address. Return all that the process needs to start,
    with a new epoch.

    Raises:
        QuorumUnavailableError: the metadata store does not answer.
    """
    epoch = Epoch(await store.next_sequence(EPOCH_KEY))
    logged = -_WAIT_LOGGED_S
    clock = asyncio.get_running_loop().time
    while True:
        wanted, run = await wanted_in(store), await run_of(store)
        processes = await processes_in(store)
        assert run is not None, "`registered` has published it"
        missing = [node for node in wanted.view.nodes if node not in run.addresses]
        if not missing:
            await _place_by_zones(store, config)
            wanted = await wanted_in(store)
            break
        if clock() - logged >= _WAIT_LOGGED_S:
            logged = clock()
            _log.info("other machines are awaited", processes=[*processes.running(missing)])
        await asyncio.sleep(RETRY_S)
    return NodeStart(
        config=config,
        view=wanted.view,
        addresses=run.addresses,
        epoch=epoch,
        directory=config.node.data_dir,
        processes=processes,
    )
