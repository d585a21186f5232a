"""etcd: one key for each record, `tag/number`. The client assigns the numbers, because etcd has no
number by which a range can select. A put appends. A range with a limit of 1 reads, in ascending
order for `read_next`. For `read_prev` the server sorts the whole range below the place.

Clients use etcd's JSON gateway over kept-alive HTTP connections, one for each caller, because the
pinned packages have no gRPC.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from bench.sides.side import Peer
from bench.support.http_caller import HttpCaller, connect
from bench.support.servers import HOST


class Etcd(Peer):
    """Plain HTTP; requests are formatted by hand, so that no JSON library is measured."""

    def __init__(self, client: int, callers: list[HttpCaller]) -> None:
        super().__init__(client)
        self._callers = callers
        self._numbers = count()
        self._value = b64encode(self.data)

    async def put(self, caller: int, tag: str) -> str:
        """Put."""
        key = f"{tag}/{next(self._numbers):012}"
        body = b'{"key":"%b","value":"%b"}' % (b64encode(key.encode()), self._value)
        await self._callers[caller].post("/v3/kv/put", body)
        return key

    async def first(self, caller: int, tag: str, place: Any) -> bytes | None:  # noqa: ANN401
        """Range from the place to the end of the tag, limit 1."""
        return await self._range(caller, place, f"{tag}0", b"")

    async def last(self, caller: int, tag: str, place: Any) -> bytes | None:  # noqa: ANN401
        """Range from the begin of the tag to the place, descending, limit 1."""
        order = b',"sort_order":"DESCEND","sort_target":"KEY"'
        return await self._range(caller, f"{tag}/", f"{place}\0", order)

    async def _range(self, caller: int, start: str, end: str, order: bytes) -> bytes | None:
        keys = (b64encode(start.encode()), b64encode(end.encode()))
        body = b'{"key":"%b","range_end":"%b","limit":1%b}' % (*keys, order)
        answer = await self._callers[caller].post("/v3/kv/range", body)
        return answer if b'"kvs"' in answer else None


@asynccontextmanager
async def etcd(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Connect every caller."""
    connections = await connect(HOST, address["port"], callers)
    try:
        yield Etcd(client, connections)
    finally:
        for connection in connections:
            connection.close()
