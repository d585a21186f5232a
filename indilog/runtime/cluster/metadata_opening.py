"""Opens the metadata store that the configuration names, for a data directory (ARCHITECTURE 11).

Each data directory has a metadata file. With the embedded store this file is the store. With
ZooKeeper the file holds the id of this platform in ZooKeeper. From this id, a start detects that a
data directory and ZooKeeper's metadata belong to different platforms. The file also holds a copy of
the layout, for programs that read a data directory without its platform. `assembly`, the supervisor
and `machines.machine_process` open the store at their start.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, NoReturn

from indilog.base.errors import ConfigError, DataDirectoryError
from indilog.config import NodeConfig
from indilog.runtime.cluster.cluster_state import ARRANGEMENT_KEY, PLATFORM_KEY, VIEW_KEY
from indilog.runtime.cluster.data_directory import opened_metadata_file
from indilog.runtime.cluster.processes import PROCESSES_KEY
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.store import MetadataStore


class OpenedMetadata(NamedTuple):
    """The store of a platform, and the metadata file of its data directory."""

    store: MetadataStore
    file: EmbeddedMetadataStore
    """The metadata file. With the embedded store it is the same object as `store`."""

    async def copy_layout(self) -> None:
        """Copy the layout, which `layout_in` reads, into the file."""
        if self.store is self.file:
            return
        for key in (VIEW_KEY, ARRANGEMENT_KEY, PROCESSES_KEY):
            found, copy = await self.store.get(key), await self.file.get(key)
            if found is not None and (copy is None or copy.value != found.value):
                version = copy.version if copy is not None else 0
                await self.file.compare_and_set(key, found.value, expected_version=version)


@asynccontextmanager
async def opened_metadata(
    config: NodeConfig, *, joins: bool = False
) -> AsyncIterator[OpenedMetadata]:
    """Open the metadata store of the data directory, which no other process can open meanwhile.

    `joins`: a new data directory may join a platform whose nodes run on several machines.

    Raises:
        DataDirectoryError: as `opened_metadata_file`; or ZooKeeper has lost the metadata.
        ConfigError: the data directory belongs to another store, or ZooKeeper refuses this client.
        QuorumUnavailableError: no server of the ZooKeeper ensemble answers.
    """
    with opened_metadata_file(config) as file:
        if config.metadata.metadata_store == "embedded":
            if await file.get(PLATFORM_KEY) is not None:
                raise ConfigError(
                    f"The platform of {config.data_dir} keeps its metadata in ZooKeeper; start it "
                    'with metadata_store = "zookeeper", or choose another directory.'
                )
            yield OpenedMetadata(file, file)
            return
        from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore

        async with await ZooKeeperMetadataStore.open(config) as store:
            if joins:
                await _adopt_platform(store, file)
            await _check_belongs(store, file, config)
            yield OpenedMetadata(store, file)


async def _adopt_platform(store: MetadataStore, file: EmbeddedMetadataStore) -> None:
    """Give a new data directory the id of the platform in the store, if the nodes of that platform
    run on several machines. The first machine chooses the id.
    """
    if await file.get(PLATFORM_KEY) is not None or await file.get(VIEW_KEY) is not None:
        return
    await store.compare_and_set(ARRANGEMENT_KEY, b"machines", expected_version=0)
    arrangement = await store.get(ARRANGEMENT_KEY)
    if arrangement is None or arrangement.value != b"machines":
        return  # the store has the metadata of a platform of another arrangement
    chosen = os.urandom(8).hex().encode()
    await store.compare_and_set(PLATFORM_KEY, chosen, expected_version=0)
    if (there := await store.get(PLATFORM_KEY)) is not None:
        await file.compare_and_set(PLATFORM_KEY, there.value, expected_version=0)


async def _check_belongs(
    store: MetadataStore, file: EmbeddedMetadataStore, config: NodeConfig
) -> None:
    """Raise an error if the store has the metadata of another platform than the data directory, or
    has lost the metadata.
    """
    place = f"{config.metadata.zookeeper_root} in ZooKeeper"
    known, was_started = await file.get(PLATFORM_KEY), await file.get(VIEW_KEY) is not None
    if known is None and was_started:
        raise ConfigError(
            f"The platform of {config.data_dir} keeps its metadata in its directory; start it with "
            'metadata_store = "embedded", or choose another directory.'
        )
    there = await store.get(PLATFORM_KEY)
    if there is not None and (known is None or known.value != there.value):
        _refuse_other(place, config)
    if there is not None:
        return
    if was_started:
        raise DataDirectoryError(
            f"{place} has lost the metadata of the platform of {config.data_dir}; restore it, or "
            "choose another directory."
        )
    chosen = known.value if known is not None else os.urandom(8).hex().encode()
    if known is None:  # the file is first: a start accepts a file whose id the store lacks
        await file.compare_and_set(PLATFORM_KEY, chosen, expected_version=0)
    await store.compare_and_set(PLATFORM_KEY, chosen, expected_version=0)
    there = await store.get(PLATFORM_KEY)
    if there is None or there.value != chosen:
        _refuse_other(place, config)


def _refuse_other(place: str, config: NodeConfig) -> NoReturn:
    raise ConfigError(
        f"{place} holds the metadata of another platform than that of {config.data_dir}; set "
        "another zookeeper_root."
    )
