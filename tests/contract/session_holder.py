"""A process that holds an ephemeral key, for tests that kill or pause it.

It prints a line when it holds the key. Then it answers each input line with whether it still holds
the key, and with the result of a write through its session.
"""

from __future__ import annotations

import asyncio
import sys

from indilog.base.telemetry import configure_logging
from indilog.config import NodeConfig, node_config
from indilog.runtime.metadata.client import MetadataClient
from indilog.runtime.metadata.store import SessionExpiredError, Written
from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore


async def store_at(address: str) -> MetadataClient | ZooKeeperMetadataStore:
    """Return a client of the store at an address of `tests.support.metadata_places`."""
    if address.startswith("unix:"):
        return MetadataClient(address, NodeConfig())
    hosts, _, root = address.partition("/")
    config = node_config(zookeeper_hosts=hosts, zookeeper_root=root)
    return await ZooKeeperMetadataStore.open(config)


async def main(address: str, key: str, ttl_s: float) -> None:
    """Hold `key` until the standard input ends."""
    async with await store_at(address) as store:
        session = await store.session(ttl_s)
        outcome = await session.create(key, b"held")
        assert isinstance(outcome, Written)
        sys.stdout.write(f"holds {outcome.version}\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                session.check()
                believes = "believes"
            except SessionExpiredError:
                believes = "knows"
            try:
                await session.compare_and_set("d/fenced", b"x", expected_version=0)
                wrote = "wrote"
            except SessionExpiredError:
                wrote = "refused"
            sys.stdout.write(f"{believes} {wrote}\n")
            sys.stdout.flush()
        await session.close()


if __name__ == "__main__":
    configure_logging()
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
