"""A link: one end of a stream between a compute node and a worker or client, with numbered calls in
both directions (docs/decisions/0003).

All messages sent in one iteration of the event loop leave in one write. The end that asks (the
asker) numbers its questions. Answers carry that number and arrive in any order. The asker passes a
callback with each question. Unless the asker abandons the question, the callback is called exactly
once: with the answer, or with a `Failed` of kind `LinkLostError` if the stream ends first. Bytes
that are not messages close the link.

`Link` has no socket. `SocketLink` connects it to an asyncio stream transport, for workers. The
gateway and `indilog.connect` connect it to a WebSocket, and `link_pair` to another link in memory.
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
from indilog.link.frames import ClientFrame, Frame, FrameReader, write_frame
from indilog.link.link_messages import (
    Answer,
    Cancel,
    Greeting,
    InvocationFound,
    LinkLostError,
    LinkMessage,
    Question,
    RecordsFound,
    Returned,
    failed,
)

QUEUE_BYTES_MAX: Final = 64 * MIB
"""Largest number of bytes queued for a peer that does not read. Beyond this limit, new questions
are refused, and large answers are replaced by failures.
"""

SOCKET_MESSAGE_BYTES: Final = 128 * KIB
"""Largest number of bytes in one WebSocket message. It is below every `message_bytes_max`, because
the other end closes the socket after a larger message. One write of a link is split into several
messages.
"""

OnAnswer: TypeAlias = Callable[[Answer], None]
Serve: TypeAlias = "Callable[[Link, int, Question | Greeting], None]"

_LOST: Final = failed(LinkLostError("The connection was lost before the answer came."))


class Link:
    """One end of a link.

    Args:
        serve: answers the questions of the other end.
        message_bytes_max: largest message in bytes.
        on_lost: called once when the link is lost.
        is_of_client: whether the other end is a client, which sends only `ClientQuestion`s.

    Attributes:
        frames_received: number of messages received.
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
        """Set the largest size of a message in both directions, in bytes. The compute node
        announces it in its `Welcome`.
        """
        self._message_bytes_max = self._reader.message_bytes_max = message_bytes_max

    @property
    def is_lost(self) -> bool:
        """Whether the stream has ended."""
        return self._lost

    @property
    def held_bytes(self) -> int:
        """Number of bytes of the buffered incomplete message."""
        return self._reader.held_bytes

    @property
    def calls_open(self) -> int:
        """Number of questions without an answer."""
        return len(self._open)

    # --- asking

    def post(self, question: Question, on_answer: OnAnswer) -> int:
        """Send a question and return its number. `on_answer` is called once, with the answer.

        Raises:
            LinkLostError: the link is closed; the question was not sent.
            OverloadedError: too many bytes wait for the peer; the question was not sent.
            TooLargeError: the question is larger than a message may be; it was not sent.
        """
        if self._lost:
            raise LinkLostError("The connection is closed.")
        if self._waiting_bytes() > QUEUE_BYTES_MAX:
            raise OverloadedError("The other end does not read its messages; try again later.")
        call = self._next_call
        self._send(call, question)
        self._next_call = call + 1
        self._open[call] = on_answer
        return call

    async def ask(self, question: Question) -> Answer:
        """Ask, and return the answer. If the caller is cancelled, cancel the question at the other
        end.

        Raises:
            LinkLostError, OverloadedError, TooLargeError: as for `post`; nothing was sent.
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
        """Stop waiting for a question's answer, and cancel it at the other end."""
        if self._open.pop(call, None) is not None:
            self.cancel(call)

    def cancel(self, call: int) -> None:
        """Ask the other end to stop working on the question `call`. Its answer is still awaited."""
        if not self._lost:
            self._send(call, Cancel())

    # --- answering

    def answer(self, call: int, answer: Answer) -> None:
        """Answer the question `call` of the other end.

        An answer that exceeds the largest message is replaced by a `Failed`. Records and results
        are also replaced if too many bytes wait for the peer. A `Failed` in place of a function's
        result says that the function ran.
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
        """Send a message that has no answer."""
        if not self._lost:
            self._send(0, message)

    # --- the stream below

    def connected(
        self,
        write: Callable[[bytearray], None],
        close: Callable[[], None],
        queued_bytes: Callable[[], int],
    ) -> None:
        """Connect the link to a stream. `write` sends bytes and never blocks, `close` closes the
        stream, and `queued_bytes` returns the number of written bytes that are not sent yet.
        """
        self._write, self._close, self._queued_bytes = write, close, queued_bytes
        if self._out:
            self._flush()

    def received(self, data: bytes) -> None:
        """Process received bytes: serve the questions in them, and deliver the answers."""
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
        """Close the stream after all written bytes are sent; all open questions fail now."""
        if self._out and self._write is not None and not self._lost:
            self._flush()
        if self._close is not None:
            self._close()
        self.lost()

    def lost(self) -> None:
        """Fail all open questions, because the stream has ended. Further calls do nothing."""
        if self._lost:
            return
        self._lost = True
        waiting, self._open = self._open, {}
        self._out.clear()
        if self._on_lost is not None:  # first, so that a retry uses another link
            self._on_lost(self)
        for on_answer in waiting.values():
            on_answer(_LOST)

    # --- internal

    def _dispatch(self, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, Answer):
            on_answer = self._open.pop(frame.call, None)
            if on_answer is not None:  # None: the question was abandoned
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
        size = write_frame(out, call, message)
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
    """Return the answer, or a failure in place of an answer with records or a result."""
    match answer:
        case RecordsFound() | InvocationFound(outcome=Returned()):
            return failed(OverloadedError("The caller does not read its answers."))
        case Returned(position=position):
            return failed(
                CallOutcomeUnknownError(
                    "The function ran, but its result was dropped: the caller does not read its "
                    "answers."
                ),
                position,
            )
        case _:
            return answer


def socket_messages(data: bytearray) -> Iterator[bytes]:
    """Split written bytes into WebSocket messages. The reader joins the frames again."""
    view = memoryview(data)
    for start in range(0, len(view), SOCKET_MESSAGE_BYTES):
        yield bytes(view[start : start + SOCKET_MESSAGE_BYTES])


class SocketLink(asyncio.Protocol):
    """A link on a stream transport of the event loop."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the link."""
        stream = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass
        self.link.connected(stream.write, stream.close, stream.get_write_buffer_size)

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the link."""
        self.link.received(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """End the link."""
        self.link.lost()
