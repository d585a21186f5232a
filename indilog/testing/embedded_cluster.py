"""A whole platform inside a test: `async with cluster() as client`.

All roles of all tiers run in this process, on a temporary directory that is removed at the end.
Segments are small, so that a start takes milliseconds. All other code is the same as in production.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from indilog.client import Client
from indilog.client import open as open_client
from indilog.config import MIB, ClusterConfig, Config, node_config


@asynccontextmanager
async def cluster(config: Config | None = None) -> AsyncIterator[Client]:
    """Run a platform for one test.

    The default of `durability` is `"memory"`, because a test's data is not needed after the test.
    """
    config = config or Config(
        cluster=ClusterConfig(durability="memory"), node=node_config(segment_bytes=8 * MIB)
    )
    with tempfile.TemporaryDirectory(prefix="indilog-test-") as directory:
        async with open_client(directory, config) as client:
            yield client
