"""The transport over pyzmq (ARCHITECTURE 6; decision 0002).

A process has one PULL socket for all incoming frames, and one PUSH socket for each peer *process*.
The event loop watches the file descriptors of the sockets. A zmq descriptor is *edge-triggered*: it
becomes readable when the socket's state changes, but does not stay readable while the socket has
frames. Any send or receive may consume that signal. So the transport receives until the socket has
no more frames. After a send that would block, it reads the socket's state again before it waits for
the descriptor. `node_process` creates the transport.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

import structlog
import zmq

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId
from indilog.base.loopback import is_loopback
from indilog.config import Config
from indilog.runtime.transport.transport import (
    QUEUE_FULL,
    TOO_OLD,
    OnFrames,
    TransportCounts,
    check_peers,
)

FRAMES_PER_ITERATION_MAX: Final = 512
"""Largest number of frames received before the event loop runs other tasks."""
SEND_HIGH_WATER_FRAMES: Final = 128
"""Frames that zmq holds for one peer. Further frames wait in the queue of `_ZmqPeer`."""
RECEIVE_HIGH_WATER_FRAMES: Final = 128
RECONNECT_MS: Final = 50
RECONNECT_MS_MAX: Final = 500
HEARTBEAT_MS: Final = 2_000
"""Interval of zmq's heartbeats in milliseconds. If a peer is silent for three intervals, its host
may be down, and zmq reconnects.
"""

_log = structlog.get_logger(__name__)


class _ZmqPeer:
    """The sending side towards one process."""

    __slots__ = ("address", "queue", "queued_bytes", "socket", "waiting_since", "watched")

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self.socket = socket
        self.address = address
        self.queue: deque[bytes] = deque()
        self.queued_bytes = 0
        self.waiting_since = 0.0
        """When the peer last took a frame; valid while `queue` has frames."""
        self.watched = False
        """Whether the loop watches the socket; only while `queue` has frames."""


class ZmqTransport:
    """A `Transport` over pyzmq sockets, driven by the event loop (never by `zmq.asyncio`).

    zmq accepts no frame for a peer that is not connected (`ZMQ_IMMEDIATE`). Such frames wait here,
    at most `send_queue_s_max` seconds and `send_queue_bytes_max` bytes. So a restarted peer is not
    flooded with outdated frames.

    Args:
        address: address at which this process receives, e.g. `ipc:///run/x/storage-0`,
            `tcp://10.0.0.7:7401`.
        addresses: address at which each node of the cluster receives. Nodes at `address` are in
            this process, so the shell delivers their messages itself.
        loop: the running event loop; all methods are called on it.

    Raises:
        ConfigError: the address cannot be bound, or an address is not on loopback, because this
            transport does not encrypt (docs/decisions/0044).
    """

    def __init__(
        self,
        address: str,
        addresses: Mapping[NodeId, str],
        loop: asyncio.AbstractEventLoop,
        config: Config,
    ) -> None:
        _check_are_local({address, *addresses.values()})
        self.counts = TransportCounts()
        self._loop = loop
        self._frame_bytes_max = config.cluster.message_bytes_max
        self._queue_bytes_max = config.node.messages.send_queue_bytes_max
        self._queue_s_max = config.node.messages.send_queue_s_max
        self._context = zmq.Context()
        self._on_frames: OnFrames | None = None
        self._address = address
        self._pull = self._bound(address)
        self._processes: dict[str, _ZmqPeer] = {}
        self._peers: dict[NodeId, _ZmqPeer] = {}
        self.add_peers(addresses)

    def start(self, on_frames: OnFrames) -> None:
        """See `Transport.start`."""
        assert self._on_frames is None, "a transport is started once"
        self._on_frames = on_frames
        self._loop.add_reader(self._pull.fileno(), self._receive)
        self._loop.call_soon(self._receive)

    def add_peers(self, addresses: Mapping[NodeId, str]) -> None:
        """See `GrowingTransport.add_peers`."""
        new = {
            node: to
            for node, to in addresses.items()
            if to != self._address
            and ((known := self._peers.get(node)) is None or known.address != to)
        }
        if not new or self._context.closed:
            return
        check_peers(len(self._peers.keys() | new.keys()))
        _check_are_local(new.values())
        for to in dict.fromkeys(new.values()):
            if to not in self._processes:
                self._processes[to] = self._connect(to)
        self._peers |= {node: self._processes[to] for node, to in new.items()}
        for to in self._processes.keys() - {peer.address for peer in self._peers.values()}:
            gone = self._processes.pop(to)  # its nodes have moved
            self._watch(gone, wanted=False)
            gone.queue.clear()
            gone.socket.close(linger=0)

    def send(self, receiver: NodeId, frame: bytes) -> None:
        """See `Transport.send`."""
        peer = self._peers.get(receiver)
        if peer is None or len(frame) > self._frame_bytes_max:
            known, limit = peer is not None, self._frame_bytes_max
            self.counts.refuse(receiver, frame, known=known, limit=limit)
        elif not self._context.closed and (peer.queue or not self._try_send(peer, frame)):
            self._enqueue(peer, frame)

    def flush(self) -> None:
        """See `Transport.flush`."""
        for peer in self._processes.values():
            if peer.queue:
                self._drain(peer)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._context.closed:
            return
        if self._on_frames is not None:
            self._loop.remove_reader(self._pull.fileno())
        for peer in self._processes.values():
            self._watch(peer, wanted=False)
            peer.queue.clear()
        self._context.destroy(linger=0)

    # --- receiving

    def _receive(self) -> None:
        """Deliver received frames until zmq has no more, or schedule a further call."""
        if self._context.closed:
            return
        assert self._on_frames is not None
        if frames := self._receive_available():
            self.counts.frames_received += len(frames)
            self.counts.bytes_received += sum(map(len, frames))
            self._on_frames(frames)

    def _receive_available(self) -> list[bytes]:
        """Return all received frames, up to the limit of one call.

        At low load there is usually one frame. Reading the socket's state is then cheaper than a
        second receive that fails (1.4 µs against 3.2 µs).
        """
        frames: list[bytes] = []
        receive, took = self._pull.recv, frames.append
        try:
            took(receive(zmq.NOBLOCK))
            if self._events(self._pull) & zmq.POLLIN:
                for _ in range(FRAMES_PER_ITERATION_MAX - 1):
                    took(receive(zmq.NOBLOCK))
                self._loop.call_soon(self._receive)  # no edge will signal the remaining frames
        except zmq.Again:
            pass
        return frames

    # --- sending

    def _try_send(self, peer: _ZmqPeer, frame: bytes) -> bool:
        """Pass `frame` to zmq. False: zmq does not take the frame now."""
        try:
            peer.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.counts.frames_sent += 1
        self.counts.bytes_sent += len(frame)
        return True

    def _enqueue(self, peer: _ZmqPeer, frame: bytes) -> None:
        """Queue `frame` for `peer` after the frames in the queue, within the queue's bounds."""
        self._drop_old(peer)
        if not peer.queue:
            peer.waiting_since = self._loop.time()
        if peer.queued_bytes + len(frame) > self._queue_bytes_max:
            self.counts.dropped[QUEUE_FULL] += 1
            return
        peer.queue.append(frame)
        peer.queued_bytes += len(frame)
        self._drain(peer)

    def _drop_old(self, peer: _ZmqPeer) -> None:
        """Drop the queued frames of `peer` if it took no frame for `send_queue_s_max`."""
        if peer.queue and self._loop.time() - peer.waiting_since > self._queue_s_max:
            self.counts.dropped[TOO_OLD] += len(peer.queue)
            _log.info("peer takes nothing", address=peer.address, dropped=len(peer.queue))
            peer.queue.clear()
            peer.queued_bytes = 0

    def _drain(self, peer: _ZmqPeer) -> None:
        """Send the queued frames of `peer`. If frames are left, watch the socket.

        The socket's state is read after every refused frame. Reading makes zmq process pending
        events, such as a new connection or a reader that caught up; a send does this only every few
        milliseconds. The descriptor may have signalled these events already, and would not signal
        them again.
        """
        if self._context.closed:
            return
        self._drop_old(peer)
        while peer.queue:
            if self._try_send(peer, peer.queue[0]):
                peer.queued_bytes -= len(peer.queue.popleft())
                peer.waiting_since = self._loop.time()
            elif not self._events(peer.socket) & zmq.POLLOUT:
                break
        self._watch(peer, wanted=bool(peer.queue))

    def _watch(self, peer: _ZmqPeer, *, wanted: bool) -> None:
        if wanted and not peer.watched:
            self._loop.add_reader(peer.socket.fileno(), self._drain, peer)
        elif peer.watched and not wanted:
            self._loop.remove_reader(peer.socket.fileno())
        peer.watched = wanted

    # --- sockets

    @staticmethod
    def _events(socket: zmq.Socket[bytes]) -> int:
        return int(socket.getsockopt(zmq.EVENTS))

    def _bound(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_FRAMES)
        socket.setsockopt(zmq.MAXMSGSIZE, self._frame_bytes_max)
        self._common(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"Cannot receive at {address}: {error}.") from error
        return socket

    def _connect(self, address: str) -> _ZmqPeer:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_FRAMES)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        self._common(socket)
        socket.connect(address)
        return _ZmqPeer(socket, address)

    def _common(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)


def _check_are_local(addresses: Iterable[str]) -> None:
    for address in addresses:
        parts = urlsplit(address)
        if parts.scheme == "tcp" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"Messages to or from {address} would not be encrypted; set transport to "
                '"stream", which encrypts, or use a loopback address.'
            )
