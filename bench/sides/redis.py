"""Redis Streams: one stream for each tag. XADD appends, XRANGE ... COUNT 1 is `read_next`,
XREVRANGE ... COUNT 1 is `read_prev`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import redis.asyncio as redis
from glide import GlideClient, GlideClientConfiguration, IdBound, MaxId, MinId, NodeAddress

from bench.sides.side import Peer
from bench.support.servers import HOST


class RedisPy(Peer):
    """redis-py's asyncio client with its parser in C (hiredis); `connections` has one per
    caller.
    """

    def __init__(self, client: int, connections: list[redis.Redis]) -> None:
        super().__init__(client)
        self._connections = connections

    def put(self, caller: int, tag: str) -> Awaitable[Any]:
        """XADD."""
        return self._connections[caller].xadd(tag, {"d": self.data})

    def first(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """XRANGE ... COUNT 1."""
        return self._connections[caller].xrange(tag, place, "+", 1)

    def last(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """XREVRANGE ... COUNT 1."""
        return self._connections[caller].xrevrange(tag, place, "-", 1)


class Glide(Peer):
    """valkey-glide: a client in Rust, all callers over one connection."""

    def __init__(self, client: int, connection: GlideClient) -> None:
        super().__init__(client)
        self._connection = connection

    def put(self, caller: int, tag: str) -> Awaitable[Any]:
        """XADD."""
        return self._connection.xadd(tag, [("d", self.data)])

    def first(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """XRANGE ... COUNT 1."""
        return self._connection.xrange(tag, IdBound(place), MaxId(), 1)

    def last(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """XREVRANGE ... COUNT 1."""
        return self._connection.xrevrange(tag, IdBound(place), MinId(), 1)


@asynccontextmanager
async def redis_py(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Open redis-py as in its documentation: one client with a pool of connections."""
    async with redis.Redis(host=HOST, port=address["port"], max_connections=callers) as one:
        yield RedisPy(client, [one] * callers)


@asynccontextmanager
async def redis_py_tuned(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Open redis-py with the fastest settings found: a Unix socket, one connection per caller."""
    connections = [
        redis.Redis(unix_socket_path=address["path"], single_connection_client=True)
        for _ in range(callers)
    ]
    async with AsyncExitStack() as stack:
        for connection in connections:
            await stack.enter_async_context(connection)
        yield RedisPy(client, connections)


@asynccontextmanager
async def glide(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Connect once."""
    node = NodeAddress(HOST, address["port"])
    connection = await GlideClient.create(GlideClientConfiguration([node], request_timeout=10_000))
    try:
        yield Glide(client, connection)
    finally:
        await connection.close()
