"""NATS JetStream: one stream, one subject for each tag. A publish waits for the stream's ack. A
direct get by subject, from a sequence number on, is `read_next`. JetStream cannot read backwards
from a place, so there is no `read_prev`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from bench.sides.side import Peer
from bench.support.servers import HOST

STREAM: Final = "BENCH"
_TIMEOUT_S: Final = 30.0


class JetStream(Peer):
    """nats-py: all callers over one connection."""

    lacks = frozenset({"read_prev"})

    def __init__(self, client: int, context: JetStreamContext) -> None:
        super().__init__(client)
        self._context = context

    async def put(self, caller: int, tag: str) -> int:
        """Publish, and wait for the ack."""
        return (await self._context.publish(f"bench.{tag}", self.data)).seq

    def first(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """Direct get, `next_by_subj`."""
        return self._context.get_msg(STREAM, place, f"bench.{tag}", direct=True, next=True)

    def last(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """Unsupported: JetStream has no such read."""
        raise NotImplementedError


@asynccontextmanager
async def jetstream(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Connect once; create the stream, if it does not exist."""
    connection = await nats.connect(f"nats://{HOST}:{address['port']}")
    try:
        context = connection.jetstream(timeout=_TIMEOUT_S)
        await context.add_stream(StreamConfig(name=STREAM, subjects=["bench.>"], allow_direct=True))
        yield JetStream(client, context)
    finally:
        await connection.close()
