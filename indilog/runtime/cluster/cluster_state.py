"""The state that the processes of a cluster share through the metadata store, before their log runs
(ARCHITECTURE 11).

The first process is the supervisor, or one of the first machines. It publishes the first view. For
each run, it also publishes the record of the run: the configuration and the addresses of the nodes.
A starting node reads the view and the record, and takes an epoch greater than all earlier epochs.
When nodes are added to a running cluster, their addresses are added to the record. When the roles
of the new nodes run, the record also gets the new members, so that the primary installs the next
view. The other modules of this package read and change these keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from indilog.base.errors import ConfigError, DataDirectoryError, NotReadyError
from indilog.base.ids import Epoch, NodeId
from indilog.config import Config, config_from
from indilog.config.node import flat_settings
from indilog.kernel.view import Members, View
from indilog.runtime.cluster.processes import (
    PROCESSES_KEY,
    Processes,
    decode_processes,
    processes_in,
)
from indilog.runtime.metadata.embedded import values_in
from indilog.runtime.metadata.store import MetadataStore, Written
from indilog.runtime.metadata.stored_values import decode_stored

VIEW_KEY = "view"
"""The newest installed view."""
MEMBERS_KEY = "members"
"""The wanted nodes of the cluster (`Members`), if an operator has changed them."""
CONFIGURED_KEY = "configured"
"""The nodes that the configuration named at the last start (`Members`)."""
EPOCH_KEY = "epoch"
ARRANGEMENT_KEY = "arrangement"
PLATFORM_KEY = "platform"
"""The id of the platform, which the first start chooses; only with ZooKeeper."""
RUN_KEY = "run"

Arrangement: TypeAlias = Literal["embedded", "processes", "machines"]
"""`embedded`: all nodes share one process and one journal. `processes`: several processes
(`Processes`) run on one machine, with a supervisor. `machines`: each process runs on a machine of
its own.
"""


Setting: TypeAlias = str | int | float | bool | None
"""The value of a setting, in the form that `config_from` takes; None: the setting is left out."""


class RunSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one run, valid while one of its processes runs.

    Attributes:
        addresses: address at which each node receives, e.g. `unix:///tmp/indilog-x/storage-0`.
        directory: directory with the sockets; removed at the end of the run.
        settings: the configuration, in the form that `config_from` takes.
        members: the members for the primary to install. They are set when their processes have been
            started; None: the nodes of the view.
        zones: the zones of nodes on several machines; each machine publishes its own zone.
        first_zones: the zones by which the first view was laid out; None: some of the first
            machines have not started yet.
    """

    addresses: dict[NodeId, str]
    directory: str
    settings: dict[str, dict[str, Setting]]
    members: Members | None = None
    zones: dict[NodeId, str] = {}
    first_zones: dict[NodeId, str] | None = {}


class NodeStart(NamedTuple):
    """All that a node needs to start."""

    config: Config
    view: View
    addresses: dict[NodeId, str]
    epoch: Epoch
    directory: Path
    """The run's directory, for sockets and published status."""
    processes: Processes


async def claim_arrangement(store: MetadataStore, arrangement: Arrangement) -> None:
    """Fix the arrangement of the data directory at its first start, permanently.

    Raises:
        ConfigError: the directory has another arrangement, so this start would not find its
            journals.
    """
    wanted = arrangement.encode()
    await store.compare_and_set(ARRANGEMENT_KEY, wanted, expected_version=0)
    found = await store.get(ARRANGEMENT_KEY)
    assert found is not None, "this start or an earlier one has set it"
    if found.value != wanted:
        raise ConfigError(
            f"The data directory was made by a cluster that runs {_described(found.value)}; "
            f"this start runs {_described(wanted)}. Start it like before, or use another directory."
        )


class Layout(NamedTuple):
    """The nodes of a data directory, and where their journals are."""

    view: View
    """The newest view."""
    arrangement: Arrangement
    processes: Processes

    def journals(self, nodes: Iterable[NodeId]) -> dict[str, tuple[NodeId, ...]]:
        """Return the names of the folders with the journals of `nodes`, and the nodes of each."""
        if self.arrangement == "embedded":
            return {"journal": tuple(nodes)}
        return self.processes.running(nodes)


def layout_in(directory: Path) -> Layout:
    """Return the layout of a data directory, without taking a lock.

    Raises:
        DataDirectoryError: there is no data directory, or its metadata file cannot be read.
    """
    values = values_in(directory / "metadata")
    if VIEW_KEY not in values or ARRANGEMENT_KEY not in values:
        raise DataDirectoryError(
            f"{directory} is not the data directory of a platform that has run: it has no metadata "
            "file "
            "with a view."
        )
    processes = values.get(PROCESSES_KEY)
    return Layout(
        decode_view(values[VIEW_KEY]),
        _decode_arrangement(values[ARRANGEMENT_KEY]),
        Processes() if processes is None else decode_processes(processes),
    )


def has_copied_layout(directory: Path) -> bool:
    """Return whether the layout in a data directory is a copy of the original in ZooKeeper.

    Raises:
        DataDirectoryError: the metadata file cannot be read.
    """
    return PLATFORM_KEY in values_in(directory / "metadata")


_ARRANGEMENTS: Final[Mapping[Arrangement, str]] = {
    "embedded": "embedded (in one process)",
    "processes": "as separate processes",
    "machines": "on several machines",
}


def _decode_arrangement(value: bytes) -> Arrangement:
    for arrangement in _ARRANGEMENTS:
        if value == arrangement.encode():
            return arrangement
    raise DataDirectoryError(f"The arrangement of the nodes, {value!r}, is of another release.")


def _described(arrangement: bytes) -> str:
    return _ARRANGEMENTS[_decode_arrangement(arrangement)]


async def publish_run(
    store: MetadataStore,
    config: Config,
    addresses: dict[NodeId, str],
    directory: Path,
    members: Members | None = None,
) -> RunSettings | None:
    """Publish the settings of this run. Return the settings of the previous run; None: there was
    no previous run, or another release published its settings.
    """
    run = msgspec.json.encode(RunSettings(addresses, str(directory), settings_of(config), members))
    while True:
        before = await store.get(RUN_KEY)
        version = before.version if before else 0
        if isinstance(await store.compare_and_set(RUN_KEY, run, expected_version=version), Written):
            return decode_run(before.value) if before else None


async def change_run(
    store: MetadataStore, change: Callable[[RunSettings], RunSettings]
) -> RunSettings:
    """Replace the record of this run by the result of `change`, and return the new record."""
    while True:
        before = await store.get(RUN_KEY)
        assert before is not None, "the run was published"
        run = decode_run(before.value)
        assert run is not None, "this release published it"
        changed = change(run)
        if changed == run:
            return run
        value = msgspec.json.encode(changed)
        outcome = await store.compare_and_set(RUN_KEY, value, expected_version=before.version)
        if isinstance(outcome, Written):
            return changed


async def run_of(store: MetadataStore) -> RunSettings | None:
    """Return the settings of the last run. None: no settings are published, or another release
    published the settings in another form.
    """
    found = await store.get(RUN_KEY)
    return decode_run(found.value) if found is not None else None


def decode_run(value: bytes) -> RunSettings | None:
    """Return the settings of a run; None: another release published them, in another form."""
    try:
        return msgspec.json.decode(value, type=RunSettings)
    except msgspec.DecodeError:
        return None


def decode_members(value: bytes) -> Members:
    """Return the wanted members; see `decode_stored`."""
    return decode_stored(value, Members, "The record of the members")


def decode_view(value: bytes) -> View:
    """Return the installed view; see `decode_stored`."""
    return decode_stored(value, View, "The record of the view")


def settings_of(config: Config) -> dict[str, dict[str, Setting]]:
    """Return a configuration as plain values, in the form that `config_from` takes."""
    parts = {"cluster": config.cluster, "node": flat_settings(config.node)}
    settings: dict[str, dict[str, Setting]] = msgspec.to_builtins(parts, enc_hook=_spelled)
    return settings


def _spelled(value: object) -> str:
    assert isinstance(value, Path), "the configuration holds paths and plain values only"
    return str(value)


async def node_start(store: MetadataStore) -> NodeStart:
    """Return all that a node needs to start, with a new epoch.

    Raises:
        NotReadyError: the first process has not published the view or the run yet.
        ConfigError, DataDirectoryError: another release published the view or the run in an unknown
            form.
        QuorumUnavailableError: the store does not answer.
    """
    view, run = await store.get(VIEW_KEY), await store.get(RUN_KEY)
    if view is None or run is None:
        raise NotReadyError("The cluster's first process has not published its view yet.")
    if (published := decode_run(run.value)) is None:
        raise ConfigError("The cluster's first process is of another release; use the same one.")
    epoch = Epoch(await store.next_sequence(EPOCH_KEY))
    processes = await processes_in(store)
    return NodeStart(
        config=config_from(overrides=published.settings),
        view=decode_view(view.value),
        addresses=published.addresses,
        epoch=epoch,
        directory=Path(published.directory),
        processes=processes,
    )
