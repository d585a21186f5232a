"""The metadata stores of tests: in this process, served to other processes, or in ZooKeeper.

Each place provides any number of clients of one store, and can restart the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Self

import pytest

from indilog.config import NodeConfig, node_config
from indilog.runtime.metadata.client import MetadataClient
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.service import MetadataServer
from indilog.runtime.metadata.store import MetadataStore
from tests.support.zookeeper_server import ZooKeeperServer, hosts_of


class Place(ABC):
    """One store, and clients of it; `address` is for clients in other processes."""

    def __init__(self, directory: Path, config: NodeConfig) -> None:
        self.directory = directory
        self.config = config
        self.clients = AsyncExitStack()

    @property
    def address(self) -> str:
        return f"unix://{self.directory}/m"

    async def __aenter__(self) -> Self:
        await self.back()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.clients.aclose()
        await self.away()

    async def restart(self) -> MetadataStore:
        """Close all clients, stop and start the store, and open a client."""
        await self.clients.aclose()
        await self.away()
        await self.back()
        return await self.client()

    @abstractmethod
    async def client(self, config: NodeConfig | None = None) -> MetadataStore:
        """Return a client of the store, another one at each call if it can be."""

    @abstractmethod
    async def away(self) -> None:
        """Make the store unreachable."""

    @abstractmethod
    async def back(self) -> None:
        """Make the store reachable again."""


class EmbeddedPlace(Place):
    """The file in this process."""

    _store: EmbeddedMetadataStore

    async def client(self, config: NodeConfig | None = None) -> MetadataStore:
        return self._store

    async def away(self) -> None:
        self._store.close()

    async def back(self) -> None:
        self._store = EmbeddedMetadataStore(self.directory / "metadata", self.config)


class ServedPlace(Place):
    """The same file, served over a socket."""

    async def client(self, config: NodeConfig | None = None) -> MetadataStore:
        return await self.clients.enter_async_context(
            MetadataClient(self.address, config or self.config)
        )

    async def away(self) -> None:
        await self._server.close()
        self._store.close()

    async def back(self) -> None:
        self._store = EmbeddedMetadataStore(self.directory / "metadata", self.config)
        self._server = MetadataServer(self._store, self.address, self.config)


class ZooKeeperPlace(Place):
    """A part of a ZooKeeper that all tests of this process share, or of an ensemble."""

    def __init__(
        self, directory: Path, config: NodeConfig, servers: Sequence[ZooKeeperServer]
    ) -> None:
        super().__init__(directory, config)
        self.servers = servers

    @property
    def address(self) -> str:
        return f"{hosts_of(self.servers)}/{self._root}"

    @property
    def _root(self) -> str:
        return f"{self.directory.parent.name}-{self.directory.name}"

    def configured(self, config: NodeConfig | None = None) -> NodeConfig:
        """Return a configuration for clients of this place."""
        return node_config(
            config or self.config, zookeeper_hosts=hosts_of(self.servers), zookeeper_root=self._root
        )

    async def client(self, config: NodeConfig | None = None) -> MetadataStore:
        from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore

        return await self.clients.enter_async_context(
            await ZooKeeperMetadataStore.open(self.configured(config))
        )

    async def __aexit__(self, *_: object) -> None:
        await self.clients.aclose()

    async def away(self) -> None:
        for server in self.servers:
            server.kill()

    async def back(self) -> None:
        for server in self.servers:
            if not server.mode():
                server.start()
        for server in self.servers:
            server.wait_ready()


def place_of(request: pytest.FixtureRequest, directory: Path, config: NodeConfig) -> Place:
    """Return the place that a test is parametrised with."""
    kind = request.param
    if kind is ZooKeeperPlace:
        return ZooKeeperPlace(directory, config, [request.getfixturevalue("zookeeper")])
    place = kind(directory, config)
    assert isinstance(place, Place)
    return place


EMBEDDED: Final = pytest.param(EmbeddedPlace, id="embedded")
SERVED: Final = pytest.param(ServedPlace, id="served")
ZOOKEEPER: Final = pytest.param(ZooKeeperPlace, id="zookeeper", marks=pytest.mark.zookeeper)
