"""IndiLog as a side of comparisons, in four ways. It is embedded in the client process, or used
over the network (`indilog.connect`). Or the client process is a compute node of a cluster, or one
of three processes with all roles.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import indilog
from bench.sides.side import Peer
from bench.support import platforms
from indilog.base.ids import NodeId
from indilog.base.log import Log


class IndiLog(Peer):
    """The log; all callers share a session."""

    def __init__(self, client: int, log: Log) -> None:
        super().__init__(client)
        self._log = log

    def put(self, caller: int, tag: str) -> Awaitable[Any]:
        """`Log.append`."""
        return self._log.append(self.data, tags=(tag,))

    def first(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """`Log.read_next`."""
        return self._log.read_next(tag, place)

    def last(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """`Log.read_prev`."""
        return self._log.read_prev(tag, place)


@asynccontextmanager
async def embedded(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Run all tiers in this process."""
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        async with platforms.running(platforms.configured(path)) as running:
            yield IndiLog(client, running.log)


@asynccontextmanager
async def compute_node(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Be a compute node of the cluster at `address`."""
    node = NodeId(f"engine-{client}")
    async with platforms.joined_as(node, address["metadata"]) as log:
        yield IndiLog(client, log)


@asynccontextmanager
async def one_of_three(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Be a process of the cluster at `address`, with a node of each kind. Client 0 is the last
    process, whose sequencer is not the primary. Client 1 is the process before it.
    """
    async with platforms.joined_as(f"node-{2 - client}", address["metadata"]) as log:
        yield IndiLog(client, log)


@asynccontextmanager
async def connected(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Connect to the gateway at `address`."""
    async with indilog.connect(address["url"]) as remote:
        yield IndiLog(client, remote.log("bench"))
