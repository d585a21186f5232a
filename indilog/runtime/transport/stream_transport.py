"""The transport over raw streams: Unix sockets and TCP (ARCHITECTURE 6; docs/decisions/0005).

A process has one listening socket, and one outgoing connection to each peer *process*. The
connection is opened for the first frame to the peer. Data flows in one direction on each
connection. The end of an outgoing connection shows that the peer died. On the wire, a frame follows
its length, a little-endian u32. All frames of an iteration leave in one write, at `flush`.

The limit of the event loop's write buffer is zero. So if the kernel does not take all bytes of a
write at once, the connection pauses until the kernel has taken the rest. Meanwhile frames wait in a
queue of this module. The queue is bounded in bytes and in time, and frames can still be dropped
from it.

`indilog.link.frames` has a different framing: it decodes link messages while it splits the stream.
Here frames stay bytes, and a large frame is received in place. `node_process` creates the
transport, which uses `StreamServer` and `Incoming`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from typing import Final, cast

import structlog

from indilog.base.ids import NodeId
from indilog.config import KIB, MIB, Config
from indilog.runtime.transport.peer_keys import keys_for
from indilog.runtime.transport.stream_address import StreamAddress, parse_stream_address, tune
from indilog.runtime.transport.stream_incoming import LENGTH, Incoming
from indilog.runtime.transport.stream_server import StreamServer
from indilog.runtime.transport.transport import (
    MALFORMED,
    QUEUE_FULL,
    REFUSED_PEER,
    TOO_OLD,
    OnFrames,
    TransportCounts,
    check_peers,
)

WRITE_BYTES: Final = 1 * MIB
"""Largest number of bytes in one write. Bytes of a write that the kernel has not taken yet can no
longer be dropped.
"""
JOINED_BYTES_MAX: Final = 32 * KIB
"""If the frames of one write have at most this many bytes together, they are copied into one
buffer. The copy is cheaper than a system call per frame.
"""
CONNECT_S_MAX: Final = 2.0
"""Seconds after which an attempt to connect fails."""
RECONNECT_S: Final = 0.05
"""Seconds until the first retry to connect; doubled with each retry."""
RECONNECT_S_MAX: Final = 0.5
"""The longest pause between retries, in seconds. After a connection that lasted longer, the pause
is `RECONNECT_S` again.
"""

_packed: Final = LENGTH.pack
_log = structlog.get_logger(__name__)


class StreamTransport:
    """A `Transport` over stream sockets, with asyncio protocols.

    The frames that wait for a peer are bounded (`send_queue_bytes_max`, `send_queue_s_max`). In
    addition the event loop may hold one write of `WRITE_BYTES` or one larger frame. This write is
    lost when the connection breaks.

    With keys (`node_keys`) TCP connections are encrypted, and both sides authenticate themselves.

    Args:
        address: where this process receives: `unix:///run/x/storage-0` or `stream://10.0.0.7:7401`.
        addresses: address at which each node of the cluster receives. Nodes at `address` are in
            this process, so the shell delivers their messages itself.
        loop: the running event loop; all methods are called on it.

    Raises:
        ConfigError: an address has another form; the address of this process cannot be bound; or an
            address is not on loopback, and there are no keys.
    """

    def __init__(
        self,
        address: str,
        addresses: Mapping[NodeId, str],
        loop: asyncio.AbstractEventLoop,
        config: Config,
    ) -> None:
        self.counts = TransportCounts()
        self._loop = loop
        self._frame_bytes_max = config.cluster.message_bytes_max
        self._incoming: set[Incoming] = set()
        self._server: StreamServer | None = None
        self._closed = False
        own = parse_stream_address(address)
        self._address = address
        self._config = config
        self._keys = keys_for(own, config.node)
        self._processes: dict[str, _StreamPeer] = {}
        self._peers: dict[NodeId, _StreamPeer] = {}
        self.add_peers(addresses)
        self._spoken_to: dict[_StreamPeer, None] = {}
        """Peers with frames since the last flush, in the order of their first frame. The order
        matters because roles send the most urgent messages first.
        """
        self._listener = own.listener()

    def start(self, on_frames: OnFrames) -> None:
        """See `Transport.start`."""
        assert self._server is None, "a transport is started once"

        def accepted() -> Incoming:
            return Incoming(self._incoming, on_frames, self._frame_bytes_max, self.counts)

        self._server = StreamServer(self._listener, accepted, self._loop, self._keys, self.counts)
        self._server.start()

    def add_peers(self, addresses: Mapping[NodeId, str]) -> None:
        """See `GrowingTransport.add_peers`."""
        new = {
            node: to
            for node, to in addresses.items()
            if to != self._address
            and ((known := self._peers.get(node)) is None or known.address != to)
        }
        if not new or self._closed:
            return
        check_peers(len(self._peers.keys() | new.keys()))
        processes = {
            to: _StreamPeer(to, self._loop, self._config, self.counts)
            for to in dict.fromkeys(new.values())
            if to not in self._processes
        }
        self._processes |= processes
        self._peers |= {node: self._processes[to] for node, to in new.items()}
        for to in self._processes.keys() - {peer.address for peer in self._peers.values()}:
            self._processes.pop(to).close()  # its nodes have moved

    def send(self, receiver: NodeId, frame: bytes) -> None:
        """See `Transport.send`."""
        peer = self._peers.get(receiver)
        if peer is None or len(frame) > self._frame_bytes_max:
            known, limit = peer is not None, self._frame_bytes_max
            self.counts.refuse(receiver, frame, known=known, limit=limit)
        elif not self._closed:
            peer.take(frame)
            self._spoken_to[peer] = None

    def flush(self) -> None:
        """See `Transport.flush`."""
        if self._spoken_to:
            for peer in self._spoken_to:
                peer.drain()
            self._spoken_to.clear()

    def close(self) -> None:
        """See `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for peer in self._processes.values():
            peer.close()
        for connection in self._incoming:
            connection.close()


# --- sending


class _StreamPeer(asyncio.Protocol):
    """The sending side towards one process: its connection, and the frames that wait for it.

    Attributes:
        address: where the process receives.
        queue: frames that wait, in order.
        writable: whether the connection takes more frames.
    """

    __slots__ = (
        "_attempt", "_backoff_s", "_closed", "_connected_at", "_connection", "_counts", "_keys",
        "_loop", "_next_at", "_paused", "_queue_bytes_max", "_queue_s_max", "_to",
        "_untaken_bytes", "_write_bytes", "address", "queue", "queued_bytes", "waiting_since",
        "writable",
    )  # fmt: skip

    def __init__(
        self,
        address: str,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        counts: TransportCounts,
    ) -> None:
        self.address = address
        self.queue: deque[bytes] = deque()
        self.queued_bytes = 0
        self.writable = False
        self._paused = False
        """Whether the event loop has paused writes."""
        self.waiting_since = 0.0
        """When the peer last took bytes; valid while `queue` holds frames."""
        self._untaken_bytes = 0
        """The bytes that the event loop held for the peer at `waiting_since`."""
        self._to: StreamAddress = parse_stream_address(address)
        self._keys = keys_for(self._to, config.node)
        self._loop = loop
        self._counts = counts
        self._queue_bytes_max = config.node.messages.send_queue_bytes_max
        self._queue_s_max = config.node.messages.send_queue_s_max
        self._write_bytes = min(WRITE_BYTES, self._queue_bytes_max)
        self._connection: asyncio.Transport | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._closed = False
        self._backoff_s = RECONNECT_S
        self._connected_at = 0.0
        self._next_at = 0.0
        """When the next attempt to connect is due."""

    # --- waiting frames

    def take(self, frame: bytes) -> None:
        """Queue `frame` for the next `drain`, within the bounds."""
        size = len(frame)
        if not self.writable:
            self._wait()
        elif self.queued_bytes + size > self._write_bytes:
            self.drain()
        if self.queued_bytes + size > self._queue_bytes_max:
            self._counts.dropped[QUEUE_FULL] += 1
            return
        self.queue.append(frame)
        self.queued_bytes += size

    def drain(self) -> None:
        """Write the queued frames, until the peer takes no more."""
        queue = self.queue
        while queue and self.writable:
            if len(queue) == 1 or self.queued_bytes <= self._write_bytes:
                frames, size = list(queue), self.queued_bytes
                queue.clear()
            else:
                frames, size = self._first_frames()
            self.queued_bytes -= size
            self._write(frames, size)

    def _first_frames(self) -> tuple[list[bytes], int]:
        """Remove the frames of the next write from the queue, at least one, and return them."""
        frames = [self.queue.popleft()]
        size = len(frames[0])
        while self.queue and size + len(self.queue[0]) <= self._write_bytes:
            frames.append(self.queue.popleft())
            size += len(frames[-1])
        return frames, size

    def _write(self, frames: list[bytes], size: int) -> None:
        assert self._connection is not None, "only a connection is writable"
        self._counts.frames_sent += len(frames)
        self._counts.bytes_sent += size
        pieces = [piece for frame in frames for piece in (_packed(len(frame)), frame)]
        if size <= JOINED_BYTES_MAX:
            self._connection.write(b"".join(pieces))
        else:
            self._connection.writelines(pieces)
        if self._connection.is_closing():
            self.writable = False  # the write failed; `connection_lost` follows

    def _wait(self) -> None:
        """Note that frames wait for a peer that is down or slow."""
        self._drop_old()
        if not self.queue:
            self._note_progress()
        if self._connection is None and self._attempt is None:
            self._attempt = self._loop.create_task(self._connect())

    def _drop_old(self) -> None:
        """Drop the queued frames if the peer took nothing for `send_queue_s_max`."""
        if not self.queue or self._loop.time() - self.waiting_since <= self._queue_s_max:
            return
        if self._untaken() < self._untaken_bytes:
            self._note_progress()
            return
        self._counts.dropped[TOO_OLD] += len(self.queue)
        _log.info("peer takes nothing", address=self._to.name, dropped=len(self.queue))
        self.queue.clear()
        self.queued_bytes = 0

    def _note_progress(self) -> None:
        self.waiting_since = self._loop.time()
        self._untaken_bytes = self._untaken()

    def _untaken(self) -> int:
        return self._connection.get_write_buffer_size() if self._connection else 0

    # --- the connection

    async def _connect(self) -> None:
        """Try to connect while frames wait for the peer. Frames that become too old are dropped."""
        try:
            while self.queue and self._connection is None:
                await asyncio.sleep(max(0.0, self._next_at - self._loop.time()))
                self._next_at = self._loop.time() + self._backoff_s
                self._backoff_s = min(2 * self._backoff_s, RECONNECT_S_MAX)
                await self._connect_once()
        finally:
            self._attempt = None

    async def _connect_once(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                tls = self._keys.client if self._keys is not None else None
                await self._to.connect(self._loop, self, tls)
        except ssl.SSLError as error:
            self._counts.dropped[REFUSED_PEER] += 1
            _log.warning("peer refused", peer=self._to.name, reason=str(error))
            self._forget()
            self._drop_old()
        except (OSError, TimeoutError):
            self._forget()  # a connection that was opened too late is not used
            self._drop_old()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the queued frames."""
        self._connection = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        if self._closed:
            self._abort()
            return
        # A TLS connection pauses if its buffer has at least `high` bytes. So with limit 0 it would
        # stay paused forever.
        self._connection.set_write_buffer_limits(high=0 if self._keys is None else 1)
        tune(self._connection)
        self._connected_at = self._loop.time()
        if not self._paused:  # TLS is paused until its handshake ends, and then resumes
            self.resume_writing()

    def pause_writing(self) -> None:
        """Queue further frames, because the connection takes no more bytes."""
        self._paused = True
        if self.writable:
            self.writable = False
            self._note_progress()

    def resume_writing(self) -> None:
        """Send the queued frames that are not too old."""
        self._paused = False
        self._drop_old()
        self.writable = True
        self.drain()

    def data_received(self, data: bytes) -> None:
        """Close the connection: a peer must not send on it."""
        self._counts.dropped[MALFORMED] += 1
        _log.warning("peer sends on a one-way connection", address=self._to.name, size=len(data))
        self._abort()

    def eof_received(self) -> None:
        """Stop writing, because the peer is gone. Later frames wait for the next connection."""
        self.writable = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Keep the queued frames. If frames are queued, reconnect."""
        self._forget()
        if self._closed:
            return
        if isinstance(exc, ssl.SSLError):
            _log.warning("refused by a peer", address=self._to.name, reason=str(exc))
        _log.debug("peer lost", address=self._to.name, reason=str(exc or "end of stream"))
        if self._loop.time() - self._connected_at > RECONNECT_S_MAX:
            self._backoff_s, self._next_at = RECONNECT_S, 0.0
        if self.queue:
            self._wait()

    def close(self) -> None:
        """Stop at once."""
        self._closed = True
        self.queue.clear()
        self.queued_bytes = 0
        if self._attempt is not None:
            self._attempt.cancel()
        self._abort()

    def _forget(self) -> None:
        self._connection = None
        self.writable = self._paused = False
        self._untaken_bytes = 0

    def _abort(self) -> None:
        self.writable = False
        if self._connection is not None:
            self._connection.abort()
