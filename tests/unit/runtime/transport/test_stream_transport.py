"""The transport over streams: one write per loop iteration, connections (the rest is in
`test_transport`).
"""

from __future__ import annotations

import asyncio
import math
import socket
from pathlib import Path

import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId
from indilog.config import Config
from indilog.runtime.transport import stream_transport
from indilog.runtime.transport.stream_address import StreamAddress
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.runtime.transport.transport import MALFORMED, QUEUE_FULL, TOO_OLD
from tests.unit.runtime.network import CONFIG, A, B, C, Inbox, Network, limited, on_uvloop, until

Streams = Network[StreamTransport]


@pytest.fixture
def network(tmp_path: Path) -> Streams:
    return Network(StreamTransport, tmp_path)


async def connected(network: Streams, config: Config = CONFIG) -> tuple[StreamTransport, Inbox]:
    """Yield `a` with a connection to `b`, and the inbox of `b`."""
    a = network.transport(A, config)
    _, inbox = network.receiving(B)
    a.send(B, b"connected?")
    await inbox.until(1)
    return a, inbox


def stuck(network: Streams) -> tuple[StreamTransport, socket.socket]:
    """Yield `a`, and a socket at `b` that accepts a connection and then reads nothing."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(network.addresses[B].removeprefix("unix://"))
    listener.listen()
    return network.transport(A), listener


@on_uvloop
async def test_all_frames_of_a_loop_iteration_leave_in_one_write(network: Streams) -> None:
    a, inbox = await connected(network)
    lists = inbox.lists
    for i in range(100):
        a.send(B if i % 2 else C, b"%d" % i)
    assert a.counts.frames_sent == 1
    a.flush()
    assert a.counts.frames_sent == 101
    assert (await inbox.until(101))[1:] == [b"%d" % i for i in range(100)]
    assert inbox.lists == lists + 1


@on_uvloop
async def test_a_loop_iteration_with_many_frames_writes_before_its_end(network: Streams) -> None:
    """A queue over the limit loses no frame while the peer reads."""
    a, inbox = await connected(network, limited(send_queue_bytes_max=1000))
    for i in range(100):
        a.send(B, bytes([i]) * 400)
    a.flush()
    assert not a.counts.dropped
    await inbox.until(101)


@on_uvloop
async def test_peers_are_written_in_the_order_of_their_first_frames(network: Streams) -> None:
    nodes = [NodeId(f"n{i}") for i in range(4)]
    network.addresses |= {node: network.addresses[A] + node for node in nodes}
    a = network.transport(A)
    inboxes = [network.receiving(node)[1] for node in nodes]
    for node in nodes:
        a.send(node, b"connected?")
    for inbox in inboxes:
        await inbox.until(1)
    a.flush()
    for i in (2, 0, 3, 1, 0):
        a.send(nodes[i], b"x")
    order = [process._to.name.rpartition("n")[2] for process in a._spoken_to]
    assert order == ["2", "0", "3", "1"]
    a.flush()
    assert not a._spoken_to


@on_uvloop
async def test_no_connection_is_made_to_a_peer_without_frames(network: Streams) -> None:
    network.addresses[C] = network.addresses[B] + "-other"
    network.receiving(C)
    a, _ = await connected(network)
    quiet = a._peers[C]
    assert quiet._attempt is None
    assert quiet._connection is None
    assert a._peers[B]._connection is not None


@on_uvloop
async def test_a_peer_that_reads_nothing_holds_one_write_and_the_queue(network: Streams) -> None:
    a, listener = stuck(network)
    with listener:
        for _ in range(200):
            a.send(B, b"x" * 1_000_000)
            a.flush()
            await asyncio.sleep(0)
        (process,) = a._processes.values()
        assert not process.writable
        assert process._untaken() <= stream_transport.WRITE_BYTES + 4
        assert process.queued_bytes <= CONFIG.node.messages.send_queue_bytes_max
        assert a.counts.dropped[QUEUE_FULL] > 100


@on_uvloop
async def test_frames_that_wait_too_long_for_a_stuck_peer_are_dropped(network: Streams) -> None:
    a, listener = stuck(network)
    with listener:
        for _ in range(10):
            a.send(B, b"x" * 1_000_000)
        a.flush()
        (process,) = a._processes.values()
        await until(lambda: process._connection is not None and not process.writable)
        waiting = len(process.queue)
        assert waiting > 0
        process.waiting_since -= CONFIG.node.messages.send_queue_s_max + 1
        a.send(B, b"new")
        assert a.counts.dropped[TOO_OLD] == waiting
        assert list(process.queue) == [b"new"]


@on_uvloop
async def test_a_peer_that_reads_a_large_frame_slowly_is_not_treated_as_stuck(
    network: Streams,
) -> None:
    a, listener = stuck(network)
    with listener:
        a.send(B, b"x" * 8_000_000)
        a.send(B, b"after it")
        (process,) = a._processes.values()
        await until(lambda: process._connection is not None and not process.writable)
        peer, _ = listener.accept()
        with peer:
            before = process._untaken()
            while process._untaken() == before:
                peer.recv(100_000)
                await asyncio.sleep(0)
            process.waiting_since -= CONFIG.node.messages.send_queue_s_max + 1
            a.send(B, b"more")
            assert not a.counts.dropped
            assert list(process.queue) == [b"after it", b"more"]


@on_uvloop
async def test_a_peer_that_writes_to_a_one_way_connection_is_disconnected(network: Streams) -> None:
    a, listener = stuck(network)
    with listener:
        a.send(B, b"x")
        await until(lambda: a.counts.frames_sent == 1)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"what?")
            await until(lambda: a.counts.dropped[MALFORMED] == 1)
            (process,) = a._processes.values()
            await until(lambda: process._connection is None)
            assert peer.recv(100) == b"\1\0\0\0x"


@on_uvloop
async def test_reconnects_to_a_peer_that_closes_at_once_back_off(network: Streams) -> None:
    a, listener = stuck(network)
    (process,) = a._processes.values()
    with listener:
        listener.settimeout(0)
        seen = [process._backoff_s]
        while process._backoff_s < stream_transport.RECONNECT_S_MAX:
            a.send(B, b"x")
            a.flush()
            if process._connection is not None:
                process._connected_at = math.inf  # it does not last, however slow this is
                listener.accept()[0].close()
                await until(lambda: process._connection is None)
                seen.append(process._backoff_s)
            process._next_at = 0.0
            await asyncio.sleep(0)
    assert seen == sorted(seen)
    assert len(seen) >= 4


@on_uvloop
async def test_connection_attempts_end_when_the_waiting_frames_expire(network: Streams) -> None:
    a = network.transport(A)
    a.send(B, b"x")
    (process,) = a._processes.values()
    process.waiting_since -= CONFIG.node.messages.send_queue_s_max + 1
    await until(lambda: process._attempt is None)
    assert a.counts.dropped[TOO_OLD] == 1
    _, inbox = network.receiving(B)
    a.send(B, b"y")
    assert await inbox.until(1) == [b"y"]


@on_uvloop
async def test_frames_sent_after_a_peer_closed_wait_for_a_reconnect(network: Streams) -> None:
    """The end of the peer is known before the loop reports the lost connection."""
    a, listener = stuck(network)
    (process,) = a._processes.values()
    with listener:
        a.send(B, b"x")
        await until(lambda: a.counts.frames_sent == 1)
        listener.accept()[0].close()
        await until(lambda: not process.writable)
        a.send(B, b"y")
        a.flush()
        assert list(process.queue) == [b"y"]


class LateConnection:
    """A stub of a connection that is made at the moment in which it is no longer needed."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


@on_uvloop
async def test_a_connection_made_after_the_transport_closed_is_closed(
    network: Streams,
) -> None:
    a = network.transport(A)
    (process,) = a._processes.values()
    a.close()
    late = LateConnection()
    process.connection_made(late)  # type: ignore[arg-type]
    assert late.aborted
    assert not process.writable


@on_uvloop
async def test_an_exception_in_one_connection_attempt_does_not_end_the_attempts(
    network: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    async def connect(
        to: object, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, tls: object
    ) -> None:
        tries.append(to)
        raise RuntimeError("the loop has a fault")

    monkeypatch.setattr(StreamAddress, "connect", connect)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    a = network.transport(A)
    a.send(B, b"x")
    await until(lambda: bool(tries))
    monkeypatch.undo()
    _, inbox = network.receiving(B)
    await asyncio.sleep(0)
    a.send(B, b"y")
    assert await inbox.until(2) == [b"x", b"y"]


@on_uvloop
async def test_a_connection_made_at_its_timeout_is_not_written_to(
    network: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop closes the connection then, without a notification."""
    tries: list[asyncio.Protocol] = []

    async def connect(
        to: object,
        loop: asyncio.AbstractEventLoop,
        protocol: stream_transport._StreamPeer,
        tls: object,
    ) -> None:
        tries.append(protocol)
        protocol.writable = True
        raise TimeoutError

    monkeypatch.setattr(StreamAddress, "connect", connect)
    a = network.transport(A)
    a.send(B, b"x")
    await until(lambda: bool(tries))
    a.flush()
    (process,) = a._processes.values()
    assert list(process.queue) == [b"x"]


@on_uvloop
async def test_an_address_of_another_transport_is_refused_in_one_sentence(network: Streams) -> None:
    network.addresses[B] = "tcp://127.0.0.1:7401"
    with pytest.raises(ConfigError, match=r"not tcp://127\.0\.0\.1:7401"):
        network.transport(A)
