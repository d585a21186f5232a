"""A link: one end of a stream between a compute node and a worker or client, with numbered calls
both ways (docs/decisions/0003).

Theory of operation. What is sent within one turn of the event loop leaves in one write. Questions
are numbered by their asker, answers come back under the number in any order. The asker gives a
callback, which is called exactly once: with the answer, or with a `Failed` of kind `LinkLostError`
when the stream ends first. Bytes that are not messages close the link.

`Link` itself knows no socket: `SocketLink` puts it on an asyncio stream transport (the raw Protocol
of the event loop), the gateway and `connect` put it on a WebSocket.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - a link is part of the shell
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias, cast

import structlog

from indilog.base.errors import (
    CallOutcomeUnknownError,
    IndilogError,
    MalformedFrameError,
    OverloadedError,
    TooLargeError,
)
from indilog.config import KIB, MIB
from indilog.link.frames import ClientFrame, Frame, FrameReader, frame_written
from indilog.link.link_messages import (
    Answer,
    Cancel,
    Greeting,
    InvocationTold,
    LinkLostError,
    LinkMessage,
    Question,
    RecordsFound,
    Returned,
    failed,
)

QUEUE_BYTES_MAX: Final = 64 * MIB
"""Bytes that wait for a peer that does not read; beyond it questions and large answers are
refused."""

SOCKET_MESSAGE_BYTES: Final = 128 * KIB
"""Bytes in one message of a WebSocket; below every `message_bytes_max`, beyond which the other end
closes it. What a link writes in one turn may be many times as much.
"""

OnAnswer: TypeAlias = Callable[[Answer], None]
Serve: TypeAlias = "Callable[[Link, int, Question | Greeting], None]"

_LOST: Final = failed(LinkLostError("The connection was lost before the answer came."))


class Link:
    """One end of a link.

    Args:
        serve: answers the questions of the other end.
        message_bytes_max: of one message.
        on_lost: called when the link is gone.
        is_of_client: the other end is a client: it sends `ClientQuestion`s only.

    Attributes:
        frames_received: how many messages came in.
    """

    __slots__ = (
        "_close",
        "_lost",
        "_message_bytes_max",
        "_next_call",
        "_on_lost",
        "_open",
        "_out",
        "_queued_bytes",
        "_reader",
        "_serve",
        "_write",
        "frames_received",
    )

    def __init__(
        self,
        serve: Serve,
        *,
        message_bytes_max: int,
        on_lost: Callable[[Link], None] | None = None,
        is_of_client: bool = False,
    ) -> None:
        self._serve = serve
        self._on_lost = on_lost
        self._message_bytes_max = message_bytes_max
        self._reader = FrameReader(message_bytes_max, ClientFrame if is_of_client else Frame)
        self._open: dict[int, OnAnswer] = {}
        self._next_call = 1
        self._out = bytearray()
        self._lost = False
        self.frames_received = 0
        self._write: Callable[[bytearray], None] | None = None
        self._queued_bytes: Callable[[], int] = int
        self._close: Callable[[], None] | None = None

    def set_limit(self, message_bytes_max: int) -> None:
        """Messages of either end may be as large as this from now on, as the other end has said."""
        self._message_bytes_max = self._reader.message_bytes_max = message_bytes_max

    @property
    def is_lost(self) -> bool:
        """Whether the stream has ended."""
        return self._lost

    @property
    def held_bytes(self) -> int:
        """How many bytes of an incomplete message are held."""
        return self._reader.held_bytes

    @property
    def calls_open(self) -> int:
        """How many questions wait for their answer."""
        return len(self._open)

    # --- asking

    def post(self, question: Question, on_answer: OnAnswer) -> int:
        """Ask, and have `on_answer` called once with the answer; return the call's number.

        Raises:
            LinkLostError: the link is closed; the question was not sent.
            OverloadedError: too much waits for the peer; the question was not sent.
            TooLargeError: the question exceeds the limit of a message; it was not sent.
        """
        if self._lost:
            raise LinkLostError("The connection is closed.")
        if self._waiting_bytes() > QUEUE_BYTES_MAX:
            raise OverloadedError("The other end does not read what it is sent; try again later.")
        call = self._next_call
        self._send(call, question)
        self._next_call = call + 1
        self._open[call] = on_answer
        return call

    async def ask(self, question: Question) -> Answer:
        """Ask and wait for the answer; being cancelled cancels the question at the other end.

        Raises:
            LinkLostError, OverloadedError, TooLargeError: as `post`; nothing was sent.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def answered(answer: Answer) -> None:
            if not future.done():
                future.set_result(answer)

        call = self.post(question, answered)
        try:
            return await future
        except asyncio.CancelledError:
            self.abandon(call)
            raise

    def abandon(self, call: int) -> None:
        """Stop waiting for a question's answer and tell the other end so."""
        if self._open.pop(call, None) is not None:
            self.cancel(call)

    def cancel(self, call: int) -> None:
        """Ask the other end to stop working on `call`; its answer is still awaited."""
        if not self._lost:
            self._send(call, Cancel())

    # --- answering

    def answer(self, call: int, answer: Answer) -> None:
        """Answer the question `call` of the other end.

        An answer larger than a message may be, and records or a result beyond what may wait for the
        peer, are replaced by a `Failed` that says so: of a function that it ran.
        """
        if self._lost:
            return
        if self._waiting_bytes() > QUEUE_BYTES_MAX:
            answer = unless_large(answer)
        try:
            self._send(call, answer)
        except TooLargeError as error:
            self._send(call, failed(error))

    def tell(self, message: Greeting | Question) -> None:
        """Say something that has no answer."""
        if not self._lost:
            self._send(0, message)

    # --- the stream below

    def connected(
        self,
        write: Callable[[bytearray], None],
        close: Callable[[], None],
        queued_bytes: Callable[[], int],
    ) -> None:
        """Start: bytes go out by `write`, which never blocks; `queued_bytes` says what waits."""
        self._write, self._close, self._queued_bytes = write, close, queued_bytes
        if self._out:
            self._flush()

    def received(self, data: bytes) -> None:
        """Take in bytes from the stream; serve the questions and deliver the answers in them."""
        try:
            frames = self._reader.frames(data)
        except MalformedFrameError as error:
            structlog.get_logger().warning("link closed: malformed frame", reason=str(error))
            self.close()
            return
        self.frames_received += len(frames)
        for frame in frames:
            self._dispatch(frame)

    def close(self) -> None:
        """Close the stream after what was written; every open question fails now."""
        if self._out and self._write is not None and not self._lost:
            self._flush()
        if self._close is not None:
            self._close()
        self.lost()

    def lost(self) -> None:
        """The stream has ended: fail every open question, once."""
        if self._lost:
            return
        self._lost = True
        waiting, self._open = self._open, {}
        self._out.clear()
        if self._on_lost is not None:  # first: an asker that retries on a failure asks elsewhere
            self._on_lost(self)
        for on_answer in waiting.values():
            on_answer(_LOST)

    # --- inside

    def _dispatch(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Answer):
            on_answer = self._open.pop(frame.call, None)
            if on_answer is not None:  # none: it was abandoned meanwhile
                on_answer(message)
            return
        if self._lost:
            return
        try:
            self._serve(self, frame.call, message)
        except IndilogError as error:
            self.answer(frame.call, failed(error))

    def _send(self, call: int, message: LinkMessage) -> None:
        out = self._out
        start = len(out)
        size = frame_written(out, call, message)
        if size > self._message_bytes_max:
            del out[start:]
            raise TooLargeError(
                "The message's size in bytes", size=size, limit=self._message_bytes_max
            )
        if start == 0 and self._write is not None:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._out and not self._lost and self._write is not None:
            out, self._out = self._out, bytearray()
            self._write(out)

    def _waiting_bytes(self) -> int:
        return len(self._out) + self._queued_bytes()


def unless_large(answer: Answer) -> Answer:
    """Return what is as small as the failure in its place would be, or that."""
    match answer:
        case RecordsFound() | InvocationTold(outcome=Returned()):
            return failed(OverloadedError("You do not read the answers that you asked for."))
        case Returned(position=position):
            return failed(
                CallOutcomeUnknownError(
                    "The function ran, but its result was dropped: you do not read your answers."
                ),
                position,
            )
        case _:
            return answer


def socket_messages(data: bytearray) -> Iterator[bytes]:
    """Cut what a link has written into messages of a WebSocket; the reader puts frames together."""
    view = memoryview(data)
    for start in range(0, len(view), SOCKET_MESSAGE_BYTES):
        yield bytes(view[start : start + SOCKET_MESSAGE_BYTES])


class SocketLink(asyncio.Protocol):
    """A link on a stream transport of the event loop."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the link."""
        stream = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self.link.connected(stream.write, stream.close, stream.get_write_buffer_size)

    def data_received(self, data: bytes) -> None:
        """Hand over what came."""
        self.link.received(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """End the link."""
        self.link.lost()
