"""A compute node for tests: a Unix socket whose answers a test decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from indilog.base.ids import NodeId
from indilog_compute.gateway.counters import GatewayCounters
from indilog_compute.gateway.forwarding import ForwardedCall, Forwarder, Peers


class Exchange:
    """One offered call, as the peer sees it."""

    def __init__(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.head = head
        self._reader = reader
        self._writer = writer

    async def take(self) -> bytes:
        """Take the call; return its body."""
        self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b""
        while size := int((await self._reader.readuntil(b"\r\n")).strip(), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        assert await self._reader.readexactly(2) == b"\r\n"
        return body

    async def until_ended(self) -> None:
        """Wait until the other side has closed the connection."""
        with suppress(ConnectionError):
            assert await self._reader.read() == b""

    def answer(self, status: int = 200, body: bytes = b"1", **headers: str) -> None:
        """Answer; `headers` are given with underscores."""
        lines = {"content-length": str(len(body))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer.write(f"HTTP/1.1 {status} \r\n{text}\r\n".encode() + body)

    def send(self, data: bytes) -> None:
        """Send any bytes."""
        self._writer.write(data)

    def cut(self) -> None:
        """End the connection as the death of the process does."""
        self._writer.transport.abort()


Behaviour: TypeAlias = Callable[[Exchange], Awaitable[None]]


class FakePeer:
    """Serves every offered call by `behaviour`.

    Attributes:
        heads: heads of the offered calls.
        bodies: bodies of the calls that `take_and_answer` took.
        connections: connections that were opened.
        asked: set when a call was offered.
    """

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or self.take_and_answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()

    async def take_and_answer(self, exchange: Exchange) -> None:
        """Take a call, and answer it."""
        self.bodies.append(await exchange.take())
        exchange.answer(indilog_load="0/1")

    async def refuse(self, exchange: Exchange) -> None:
        """Refuse a call, because no slot is free."""
        exchange.answer(503, indilog_load="1/1")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                self.asked.set()
                await self.behaviour(Exchange(head, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class Cluster:
    """Fake peers, and a forwarder that knows them."""

    def __init__(
        self, directory: Path, *, calls_max: int = 8, answer_bytes_max: int = 1000
    ) -> None:
        self.nodes = [NodeId("engine-0")]
        self._directory = directory
        self.peers = Peers(self.nodes[0], lambda: self.nodes, self.socket_of)
        self.counters = GatewayCounters()
        self.forwarder = Forwarder(
            self.peers,
            calls_max=calls_max,
            answer_bytes_max=answer_bytes_max,
            counters=self.counters,
        )

    def socket_of(self, node: NodeId) -> Path:
        """Return the path of a peer's socket."""
        return self._directory / node / "s"

    @asynccontextmanager
    async def joined(self, peer: FakePeer) -> AsyncIterator[NodeId]:
        """Let a peer serve while the block runs."""
        node = NodeId(f"engine-{len(self.nodes)}")
        socket = self.socket_of(node)
        socket.parent.mkdir(parents=True)
        # a short alias, because a socket's address has at most 107 bytes
        here = socket.parent.parent / f"{node}.short"
        server = await asyncio.start_unix_server(peer.serve, here)
        socket.symlink_to(here)
        self.nodes.append(node)
        try:
            yield node
        finally:
            server.close()
            self.forwarder.close()


def forwarded(
    body: bytes = b"{}", *, key: str = "", answer_s: float | None = 60.0, name: str = "shop.buy"
) -> ForwardedCall:
    """Return a call that may be forwarded."""
    headers = f"idempotency-key: {key}\r\n".encode() if key else b""
    target = f"/functions/{name.replace('.', '/')}".encode()
    return ForwardedCall(
        name, target, body, headers=headers, key=key, deployed_at=7, answer_s=answer_s
    )
