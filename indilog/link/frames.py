"""Frames the messages of a link in a byte stream: each message follows its length
(docs/decisions/0003).

The codec does no I/O: it takes bytes in pieces of any size, and returns frames. Bytes that are not
a frame raise `MalformedFrameError`; the link (`indilog.link.link`) then closes the stream.
"""

from __future__ import annotations

from typing import Final

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.link.link_messages import ClientQuestion, LinkMessage


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message on a link, with the number of its question. On the wire, a frame follows its
    length, a big-endian u32.
    """

    call: int
    message: LinkMessage


class ClientFrame(Frame, frozen=True, array_like=True):
    """A frame from a client, which may send only `ClientQuestion`s."""

    message: ClientQuestion


LENGTH_BYTES: Final = 4
_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final = {kind: msgspec.msgpack.Decoder(kind) for kind in (Frame, ClientFrame)}


def write_frame(buffer: bytearray, call: int, message: LinkMessage) -> int:
    """Append a frame to `buffer` and return its size in bytes."""
    start = len(buffer)
    buffer += b"\0\0\0\0"
    _encoder.encode_into(Frame(call, message), buffer, -1)
    size = len(buffer) - start
    buffer[start : start + LENGTH_BYTES] = (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return size


class FrameReader:
    """Cuts a stream of bytes into frames.

    It buffers at most one incomplete frame, so `message_bytes_max` bounds its memory. That limit
    may be changed between two calls. `kind` defines the allowed messages.
    """

    __slots__ = ("_decoder", "_rest", "message_bytes_max")

    def __init__(self, message_bytes_max: int, kind: type[Frame] = Frame) -> None:
        self.message_bytes_max = message_bytes_max
        self._decoder = _decoders[kind]
        self._rest = bytearray()

    @property
    def held_bytes(self) -> int:
        """Number of bytes of the buffered incomplete frame."""
        return len(self._rest)

    def frames(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes.

        Raises:
            MalformedFrameError: the bytes are not a frame, or the frame exceeds
                `message_bytes_max`.
        """
        if self._rest:
            self._rest += data
            data = bytes(self._rest) if self._complete() else b""
        found: list[Frame] = []
        offset, end = 0, len(data)
        view = memoryview(data)
        while end - offset >= LENGTH_BYTES:
            start = offset + LENGTH_BYTES
            stop = start + self._size(view[offset:start])
            if stop > end:
                break
            found.append(self._decode(view[start:stop]))
            offset = stop
        if data:
            self._rest = bytearray(view[offset:])
        return found

    def _complete(self) -> bool:
        """Tell whether the first buffered frame is complete."""
        if len(self._rest) < LENGTH_BYTES:
            return False
        return len(self._rest) >= LENGTH_BYTES + self._size(self._rest[:LENGTH_BYTES])

    def _size(self, length: memoryview | bytearray) -> int:
        size = int.from_bytes(length, "big")
        if size > self.message_bytes_max:
            raise MalformedFrameError(
                f"a message of {size:,} bytes; the limit is {self.message_bytes_max:,}"
            )
        return size

    def _decode(self, frame: memoryview) -> Frame:
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrameError(f"not a message of a link: {error}") from error
