"""The receiving side of a stream: cuts received bytes into frames (decision 0005).

A frame follows its length, a little-endian u32. `StreamTransport` creates an `Incoming` for each
accepted connection.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final, cast

import structlog

from indilog.runtime.transport.stream_address import tune
from indilog.runtime.transport.transport import (
    MALFORMED,
    TOO_MANY_CONNECTIONS,
    OnFrames,
    TransportCounts,
)

CONNECTIONS_MAX: Final = 1024
"""Largest number of incoming connections; each holds at most one incomplete frame."""
LENGTH: Final = struct.Struct("<I")

_LENGTH_BYTES: Final = LENGTH.size
_unpacked_from: Final = LENGTH.unpack_from
_log = structlog.get_logger(__name__)


class Incoming(asyncio.Protocol):
    """One connection that a peer has made.

    Usually one read brings complete frames, which are delivered at once. The beginning of an
    incomplete frame is kept, and is examined again only when the rest has arrived. So each byte is
    copied only a few times, even if it arrives in small pieces. Memory grows with the bytes that
    the peer has sent, not with the length that a frame claims.

    Args:
        all_connections: the open connections. This connection adds and removes itself.
        on_frames: called with the complete frames of each read, as one list.
        frame_bytes_max: a longer frame closes the connection.
        counts: the counters of the transport.
    """

    __slots__ = (
        "_all", "_connection", "_counts", "_frame_bytes_max", "_needed_bytes", "_on_frames",
        "_rest",
    )  # fmt: skip

    def __init__(
        self,
        all_connections: set[Incoming],
        on_frames: OnFrames,
        frame_bytes_max: int,
        counts: TransportCounts,
    ) -> None:
        self._all = all_connections
        self._on_frames = on_frames
        self._frame_bytes_max = frame_bytes_max
        self._counts = counts
        self._connection: asyncio.Transport | None = None
        self._rest = bytearray()
        """The received part of an incomplete frame, which begins with the frame's length."""
        self._needed_bytes = 0
        """Bytes that `_rest` must have before it is examined again; valid only if `_rest` is not
        empty.
        """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, unless there are too many."""
        self._connection = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        if len(self._all) >= CONNECTIONS_MAX:
            self._refuse(TOO_MANY_CONNECTIONS)
            return
        tune(transport)
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        """Deliver the frames that `data` completes."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed_bytes:
                return
            data = bytes(self._rest)
            self._rest = bytearray()
        frames: list[bytes] = []
        start, end, needed = 0, len(data), _LENGTH_BYTES
        while end - start >= _LENGTH_BYTES:
            (size,) = _unpacked_from(data, start)
            if size > self._frame_bytes_max:
                self._refuse(MALFORMED, size=size, limit=self._frame_bytes_max)
                return
            needed = _LENGTH_BYTES + size
            if start + needed > end:
                break
            frames.append(data[start + _LENGTH_BYTES : start + needed])
            start += needed
            needed = _LENGTH_BYTES
        if start < end:
            self._rest += data[start:]
            self._needed_bytes = needed
        if frames:
            self._counts.frames_received += len(frames)
            self._counts.bytes_received += sum(map(len, frames))
            self._on_frames(frames)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Remove the connection; an incomplete frame is lost."""
        self._all.discard(self)

    def close(self) -> None:
        """Stop at once."""
        if self._connection is not None:
            self._connection.abort()

    def _refuse(self, reason: str, **details: object) -> None:
        self._counts.dropped[reason] += 1
        _log.warning("connection closed", reason=reason, **details)
        self.close()
