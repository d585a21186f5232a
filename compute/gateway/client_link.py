"""`/client`: the WebSocket that `indilog.connect` opens; it carries the frames of a link
(docs/decisions/0003), in binary messages cut anyhow.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from compute.workers.host import FunctionHost
from indilog.calls import LINK_VERSION, Welcome
from indilog.link import Link, socket_messages

CLIENTS_MAX = 1024
"""Clients at once; a further one is turned away."""


class WebSocketWriter:
    """Sends what a link writes; what comes while a send is under way goes out with the next one."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._queue = bytearray()
        self._written = asyncio.Event()
        self._closed = False

    def write(self, data: bytearray) -> None:
        """Queue bytes; never blocks."""
        self._queue += data
        self._written.set()

    def close(self) -> None:
        """Send what is queued, then close."""
        self._closed = True
        self._written.set()

    def queued_bytes(self) -> int:
        """How much waits."""
        return len(self._queue)

    async def run(self) -> None:
        """Send until closed."""
        while not (self._closed and not self._queue):
            await self._written.wait()
            self._written.clear()
            while self._queue:
                data, self._queue = self._queue, bytearray()
                for part in socket_messages(data):
                    await self._socket.send_bytes(part)
        await self._socket.close()


def client_router(host: FunctionHost) -> APIRouter:
    """Return the route `/client`."""
    router = APIRouter()
    clients: set[Link] = set()

    @router.websocket("/client")
    async def client(socket: WebSocket) -> None:
        """Serve one client until it leaves."""
        if len(clients) >= CLIENTS_MAX:
            await socket.close(1013, "too many clients; try again later")
            return
        await socket.accept()
        server = host.client_server()
        link = Link(
            server.serve,
            message_bytes_max=host.limits.message_bytes_max,
            on_lost=lambda _: server.close(),
        )
        writer = WebSocketWriter(socket)
        link.connected(writer.write, writer.close, writer.queued_bytes)
        link.tell(Welcome(LINK_VERSION, host.limits))
        clients.add(link)
        sending = asyncio.ensure_future(writer.run())
        try:
            while not link.is_lost:
                link.received(await socket.receive_bytes())
        except WebSocketDisconnect:
            pass
        finally:
            clients.discard(link)
            link.lost()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    return router
