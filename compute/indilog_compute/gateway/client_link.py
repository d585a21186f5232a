"""`/client`: the WebSocket that `indilog.connect` opens. Its binary messages carry the byte stream
of a link (docs/decisions/0003). A frame of the link may span several messages, and a message may
contain several frames. `FunctionHost.client_server` answers the questions of the link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from indilog.base.errors import OverloadedError
from indilog.link.byte_budget import UNCHARGED_BYTES, ByteBudget, ByteShare
from indilog.link.link import Link, Serve, socket_messages, unless_large
from indilog.link.link_messages import (
    LINK_VERSION,
    Answer,
    CallFunction,
    Cancel,
    DeployApp,
    Greeting,
    InvocationFound,
    LogAppend,
    LogAppendBatch,
    LogSetAux,
    Question,
    RecordsFound,
    Returned,
    SendFunction,
    Welcome,
)
from indilog_compute.gateway.resources import GatewayResources
from indilog_compute.workers.host import FunctionHost

_PART_BYTES: Final = 16 * 1024


class ClientLink(Link):
    """The link of one client. The bytes of its unanswered questions count in the gateway's byte
    budget.

    Every question is answered, even a cancelled one, so all counted bytes are returned to the
    budget. If a client reuses the call number of an unanswered question, the link closes, because
    the bytes of the two questions could not be distinguished.

    Args:
        serve: answers one question.
        budget: the gateway's byte budget.
        message_bytes_max: largest message, in bytes.
        on_lost: called when the link is lost.
    """

    __slots__ = ("_budget", "_partial", "_questions", "_sizes")

    def __init__(
        self,
        serve: Serve,
        budget: ByteBudget,
        *,
        message_bytes_max: int,
        on_lost: Callable[[Link], None],
    ) -> None:
        def counted(link: Link, call: int, message: Question | Greeting) -> None:
            if call in self._sizes and not isinstance(message, Cancel):
                structlog.get_logger().warning("link closed: call number in use", call=call)
                self.close()
                return
            if (size := payload_bytes(message)) > UNCHARGED_BYTES:
                self._questions.take(size)
                self._sizes[call] = size
            serve(link, call, message)

        super().__init__(
            counted, message_bytes_max=message_bytes_max, on_lost=on_lost, is_of_client=True
        )
        self._budget = budget
        self._partial = budget.share()
        self._questions = budget.share()
        self._sizes: dict[int, int] = {}

    def received(self, data: bytes) -> None:
        """Process received bytes. If they end with an incomplete message for which the budget has
        no room, close the link.
        """
        super().received(data)
        self._partial.free()
        try:
            self._partial.take_up_to(self.held_bytes)
        except OverloadedError:
            self.close()

    def answer(self, call: int, answer: Answer) -> None:
        """Send an answer; if it is large and the budget is used up, send an error instead."""
        self._questions.release(self._sizes.pop(call, 0))
        if self._budget.is_used_up and answer_bytes(answer) > UNCHARGED_BYTES:
            self._budget.refused += 1
            answer = unless_large(answer)
        super().answer(call, answer)

    def lost(self) -> None:
        """Return all bytes to the budget after the stream has ended."""
        super().lost()
        self._sizes.clear()
        self._questions.free()
        self._partial.free()


def payload_bytes(message: Question | Greeting) -> int:
    """Return the bytes of the data in a question, without its small fields."""
    match message:
        case LogAppend():
            return len(message.data)
        case LogAppendBatch():
            return sum(map(len, message.data))
        case CallFunction() | SendFunction():
            return len(message.arguments)
        case LogSetAux():
            return len(message.aux)
        case DeployApp():
            return sum(map(len, message.sources.values()))
        case _:
            return 0


def answer_bytes(answer: Answer) -> int:
    """Return the bytes of the data in an answer, without its small fields."""
    match answer:
        case RecordsFound():
            return sum(len(record.data) + len(record.aux or b"") for record in answer.records)
        case Returned(result=result) | InvocationFound(outcome=Returned(result=result)):
            return len(result)
        case _:
            return 0


class WebSocketWriter:
    """Sends the bytes that a link writes. Bytes that are written during a send are sent together
    afterwards.

    Args:
        socket: the client's WebSocket.
        share: counts the queued bytes in the gateway's budget.
    """

    def __init__(self, socket: WebSocket, share: ByteShare) -> None:
        self._socket = socket
        self._share = share
        self._queue = bytearray()
        self._written = asyncio.Event()
        self._closed = False

    def write(self, data: bytearray) -> None:
        """Queue bytes; never blocks."""
        self._queue += data
        self._share.note(len(data))
        self._written.set()

    def close(self) -> None:
        """Let `run` send the queued bytes and then close the WebSocket."""
        self._closed = True
        self._written.set()

    def queued_bytes(self) -> int:
        """Bytes that are queued."""
        return len(self._queue)

    async def run(self) -> None:
        """Send queued bytes until `close` is called; then close the WebSocket."""
        while not (self._closed and not self._queue):
            await self._written.wait()
            self._written.clear()
            while self._queue:
                data, self._queue = self._queue, bytearray()
                for part in socket_messages(data):
                    await self._socket.send_bytes(part)
                    self._share.release(len(part))
        await self._socket.close()


async def take_in(link: Link, data: bytes) -> None:
    """Pass received bytes to the link in parts of 16 KiB; other tasks run between two parts."""
    link.received(data[:_PART_BYTES])
    for start in range(_PART_BYTES, len(data), _PART_BYTES):
        await asyncio.sleep(0)
        if link.is_lost:
            return
        link.received(data[start : start + _PART_BYTES])


def client_router(host: FunctionHost, resources: GatewayResources) -> APIRouter:
    """Return the route `/client`."""
    router = APIRouter()

    @router.websocket("/client")
    async def client(socket: WebSocket) -> None:
        """Serve one client until it disconnects."""
        await socket.accept()
        server = host.client_server()
        link = ClientLink(
            server.serve,
            resources.budget,
            message_bytes_max=host.limits.message_bytes_max,
            on_lost=lambda _: server.close(),
        )
        share = resources.budget.share()
        writer = WebSocketWriter(socket, share)
        link.connected(writer.write, writer.close, writer.queued_bytes)
        link.tell(Welcome(LINK_VERSION, host.limits))
        sending = asyncio.ensure_future(writer.run())
        try:
            while not link.is_lost:
                await take_in(link, await socket.receive_bytes())
        except WebSocketDisconnect:
            pass
        finally:
            link.lost()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            share.free()

    return router
