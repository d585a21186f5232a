"""The address at which the nodes of a run find the metadata store (ARCHITECTURE 11).

With the embedded store, it is the address at which the supervisor serves the store. With ZooKeeper,
it is the path of a file with the settings to connect to ZooKeeper. The supervisor passes the
address to the processes of nodes (`node_process`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from indilog.base.errors import ConfigError
from indilog.config import NodeConfig, config_from, node_config
from indilog.runtime.metadata.client import MetadataClient
from indilog.runtime.metadata.store import MetadataStore

_SCHEME: Final = "zookeeper:"
_ZOOKEEPER_SETTINGS: Final = (
    "metadata_value_bytes_max",
    "metadata_keys_max",
    "metadata_watchers_max",
    "metadata_timeout_s",
    "metadata_session_s",
    "zookeeper_hosts",
    "zookeeper_root",
    "zookeeper_auth",
    "zookeeper_user",
    "zookeeper_password_file",
    "zookeeper_tls",
    "zookeeper_tls_ca",
    "zookeeper_tls_cert",
    "zookeeper_tls_key",
)
"""Settings that a node needs to connect to ZooKeeper; none of them is secret."""


def published_address(config: NodeConfig, run: Path) -> str:
    """Write the settings to connect to ZooKeeper into the directory of a run; return the address
    for nodes.
    """
    settings = {name: getattr(config.metadata, name) for name in _ZOOKEEPER_SETTINGS}
    plain = {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in settings.items()
    }
    file = run / "metadata.json"
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(plain))
    new.replace(file)
    return f"{_SCHEME}{file}"


@asynccontextmanager
async def metadata_at(address: str, keys: Path | None = None) -> AsyncIterator[MetadataStore]:
    """Connect to the metadata store at an address that the supervisor passed to a node.

    Args:
        address: a socket of the supervisor, or a file with the settings for ZooKeeper.
        keys: directory with the keys of this node; needed for a TCP address.

    Raises:
        ConfigError: the address is invalid, the keys cannot be used, or ZooKeeper refuses this
            client.
        QuorumUnavailableError: no server of the ZooKeeper ensemble answers.
    """
    if not address.startswith(_SCHEME):
        async with MetadataClient(address, node_config(node_keys=keys)) as client:
            yield client
        return
    from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore

    async with await ZooKeeperMetadataStore.open(_config_at(address)) as store:
        yield store


def _config_at(address: str) -> NodeConfig:
    try:
        content = Path(address.removeprefix(_SCHEME)).read_bytes()
        settings: dict[str, Any] = msgspec.json.decode(content)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{address} is no address of a metadata store: {error}.") from error
    return config_from(overrides={"node": settings}).node
