"""The transport over pyzmq: order, bounds, peers that come late, go, or take nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import cast

import pytest
import uvloop
import zmq

from indilog.config import ClusterConfig, Config, NodeConfig
from indilog.errors import ConfigError
from indilog.ids import NodeId
from indilog.runtime import transport
from indilog.runtime.transport import (
    QUEUE_FULL,
    TOO_LARGE,
    TOO_OLD,
    UNKNOWN_PEER,
    ZmqTransport,
)

CONFIG = Config()
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def on_uvloop(
    test: Callable[..., Coroutine[object, object, None]],
) -> Callable[..., None]:
    """Run a test on the platform's event loop, and close its transports while that still runs."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        async def whole() -> None:
            try:
                async with asyncio.timeout(30):
                    await test(**fixtures)
            finally:
                if isinstance(network := fixtures.get("network"), Network):
                    network.close()

        uvloop.run(whole())

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go on until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - only zmq knows
        await asyncio.sleep(0)


class Inbox:
    """Collects frames, and lets a test wait for them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._came = asyncio.Event()

    def take(self, frames: list[bytes]) -> None:
        assert frames, "nothing is not handed over"
        self.frames += frames
        self._came.set()

    async def until(self, count: int) -> list[bytes]:
        while len(self.frames) < count:
            self._came.clear()
            await self._came.wait()
        return self.frames


class Network:
    """Transports of one test, closed at its end."""

    def __init__(self, directory: Path) -> None:
        self.addresses = {node: f"ipc://{directory}/{node}" for node in (A, B)}
        self.addresses[C] = self.addresses[B]
        self._open: list[ZmqTransport] = []

    def transport(self, node: NodeId, config: Config = CONFIG) -> ZmqTransport:
        made = ZmqTransport(
            self.addresses[node], self.addresses, asyncio.get_running_loop(), config
        )
        self._open.append(made)
        return made

    def receiving(self, node: NodeId, config: Config = CONFIG) -> tuple[ZmqTransport, Inbox]:
        transport, inbox = self.transport(node, config), Inbox()
        transport.start(inbox.take)
        return transport, inbox

    def close(self) -> None:
        for made in self._open:
            made.close()


@pytest.fixture
def network(tmp_path: Path) -> Network:
    return Network(tmp_path)


@on_uvloop
async def test_frames_arrive_unchanged_and_in_order(network: Network) -> None:
    sent = [bytes([i % 256]) * (i * 37 % 5000) for i in range(1000)]
    a = network.transport(A)
    _, inbox = network.receiving(B)
    for frame in sent:
        a.send(B, frame)
    assert await inbox.until(len(sent)) == sent
    assert a.counts.frames_sent == len(sent)
    assert a.counts.bytes_sent == sum(map(len, sent))


@on_uvloop
async def test_both_ways_at_once(network: Network) -> None:
    (a, to_a), (b, to_b) = network.receiving(A), network.receiving(B)
    for i in range(300):
        a.send(B, b"to b %d" % i)
        b.send(A, b"to a %d" % i)
    assert await to_a.until(300) == [b"to a %d" % i for i in range(300)]
    assert await to_b.until(300) == [b"to b %d" % i for i in range(300)]


@on_uvloop
async def test_a_turn_of_many_frames_is_handed_over_in_few_lists(network: Network) -> None:
    """The loop is blocked while 100 frames arrive: one list, not 100 calls."""
    a, b = network.transport(A), network.transport(B)
    calls: list[int] = []
    inbox = Inbox()

    def count(frames: list[bytes]) -> None:
        calls.append(len(frames))
        inbox.take(frames)

    a.send(B, b"connected?")
    await until(lambda: a.counts.frames_sent == 1)
    for _ in range(99):
        a.send(B, b"x")
    b._pull.poll(5000)
    b.start(count)
    await inbox.until(100)
    assert len(calls) < 50


@on_uvloop
async def test_what_is_left_after_a_turn_is_taken_in_small_turns(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames are there before the first turn: no edge ever tells of those that it leaves."""
    monkeypatch.setattr(transport, "FRAMES_PER_TURN_MAX", 4)
    a, b, inbox = network.transport(A), network.transport(B), Inbox()
    sent = [b"%d" % i for i in range(50)]
    for frame in sent:
        a.send(B, frame)
    await until(lambda: a.counts.frames_sent == len(sent))
    b._pull.poll(5000)
    b.start(inbox.take)
    assert await inbox.until(len(sent)) == sent


class RefusesOnce:
    """Stands for a zmq socket that refuses a send, and on being asked finds that it may."""

    def __init__(self) -> None:
        self.asked = 0
        self.sent: list[bytes] = []

    def send(self, frame: bytes, flags: int) -> None:
        if not self.asked:
            raise zmq.Again
        self.sent.append(frame)

    def getsockopt(self, option: int) -> int:
        self.asked += 1
        return int(zmq.POLLOUT)

    def fileno(self) -> int:
        raise AssertionError("nobody waits for a descriptor that has told already")


@on_uvloop
async def test_after_a_refusal_the_socket_is_asked_before_anybody_waits(network: Network) -> None:
    a = network.transport(A)
    (process,) = a._processes.values()
    stub, real = RefusesOnce(), process.socket
    process.socket = cast("zmq.Socket[bytes]", stub)
    a.send(B, b"x")
    process.socket = real
    assert stub.sent == [b"x"]
    assert not process.queue


@on_uvloop
async def test_nodes_of_one_process_share_its_address(network: Network) -> None:
    a = network.transport(A)
    _, inbox = network.receiving(B)
    a.send(B, b"for b")
    a.send(C, b"for c")
    assert await inbox.until(2) == [b"for b", b"for c"]


@on_uvloop
async def test_frames_for_a_peer_that_is_not_there_yet_wait_for_it(network: Network) -> None:
    a = network.transport(A)
    for i in range(10):
        a.send(B, b"%d" % i)
    assert a.counts.frames_sent == 0
    _, inbox = network.receiving(B)
    assert await inbox.until(10) == [b"%d" % i for i in range(10)]


@on_uvloop
async def test_a_peer_that_comes_back_is_reached_again(network: Network) -> None:
    a = network.transport(A)
    first, inbox = network.receiving(B)
    a.send(B, b"first")
    await inbox.until(1)
    first.close()
    _, inbox = network.receiving(B)
    arrived = asyncio.create_task(inbox.until(1))
    while not arrived.done():  # what leaves before zmq sees that the peer went is lost
        a.send(B, b"second")
        await asyncio.wait([arrived], timeout=0.05)
    assert set(inbox.frames) == {b"second"}


@on_uvloop
async def test_what_a_slow_peer_does_not_take_waits_and_arrives_in_order(network: Network) -> None:
    """More than fits into zmq and the kernel: the sender is refused, then told by the descriptor.

    Between the two it must notice each time that the reader caught up (edge triggered).
    """
    a, b, inbox = network.transport(A), network.transport(B), Inbox()
    sent = [i.to_bytes(4, "big") * 2048 for i in range(3000)]
    for frame in sent:
        a.send(B, frame)
    assert a.counts.frames_sent < len(sent)
    b.start(inbox.take)
    assert await inbox.until(len(sent)) == sent
    assert not a.counts.dropped


@on_uvloop
async def test_flush_passes_on_what_waits(network: Network) -> None:
    a = network.transport(A)
    a.flush()
    a.send(B, b"x")
    b = network.transport(B)
    while a.counts.frames_sent == 0:
        a.flush()
        await asyncio.sleep(0)
    assert b._pull.recv() == b"x"


@on_uvloop
async def test_beyond_the_queue_of_a_peer_frames_are_dropped_and_counted(network: Network) -> None:
    config = Config(node=NodeConfig(send_queue_bytes_max=1000))
    a = network.transport(A, config)
    for i in range(7):
        a.send(B, bytes([i]) * 200)
    assert a.counts.dropped[QUEUE_FULL] == 2
    _, inbox = network.receiving(B)
    assert await inbox.until(5) == [bytes([i]) * 200 for i in range(5)]
    a.send(B, bytes([7]) * 1000)
    assert (await inbox.until(6))[5] == bytes([7]) * 1000


@on_uvloop
async def test_what_waits_for_a_peer_that_is_away_for_long_is_dropped(network: Network) -> None:
    a = network.transport(A)
    for i in range(3):
        a.send(B, b"old %d" % i)
    (process,) = a._processes.values()
    process.waiting_since -= CONFIG.node.send_queue_s_max + 1
    a.send(B, b"new")
    assert a.counts.dropped[TOO_OLD] == 3
    _, inbox = network.receiving(B)
    assert await inbox.until(1) == [b"new"]


@on_uvloop
async def test_a_peer_that_comes_back_late_is_not_met_by_a_flood(network: Network) -> None:
    a = network.transport(A)
    a.send(B, b"old")
    (process,) = a._processes.values()
    process.waiting_since -= CONFIG.node.send_queue_s_max + 1
    _, inbox = network.receiving(B)
    await until(lambda: a.counts.dropped[TOO_OLD] == 1)
    a.send(B, b"new")
    assert await inbox.until(1) == [b"new"]


def limited(message_bytes_max: int) -> Config:
    """Give a configuration with a small limit that its cross-checks would not allow."""
    cluster = ClusterConfig()
    object.__setattr__(cluster, "message_bytes_max", message_bytes_max)
    return dataclasses.replace(CONFIG, cluster=cluster)


@on_uvloop
async def test_a_frame_at_the_limit_arrives_and_a_larger_one_is_dropped(network: Network) -> None:
    a = network.transport(A, limited(5000))
    _, inbox = network.receiving(B, limited(5000))
    a.send(B, b"x" * 5000)
    a.send(B, b"y" * 5001)
    a.send(B, b"z")
    assert await inbox.until(2) == [b"x" * 5000, b"z"]
    assert a.counts.dropped[TOO_LARGE] == 1


@on_uvloop
async def test_a_receiver_refuses_a_frame_over_its_own_limit(network: Network) -> None:
    """The sender's limit is larger; the receiver cuts the connection, others do not notice."""
    a = network.transport(A)
    _, inbox = network.receiving(B, limited(5000))
    with zmq.Context() as context, context.socket(zmq.PUSH) as other:
        other.linger = 0
        other.connect(network.addresses[B])
        a.send(B, b"y" * 5001)
        other.send(b"from the other")
        assert await inbox.until(1) == [b"from the other"]


@on_uvloop
async def test_a_frame_for_nobody_is_dropped_and_counted(network: Network) -> None:
    a = network.transport(A)
    a.send(NodeId("nobody"), b"x")
    assert a.counts.dropped[UNKNOWN_PEER] == 1


@on_uvloop
async def test_bytes_that_are_not_zmq_harm_nobody(network: Network, unused_tcp_port: int) -> None:
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    network.addresses[B] = network.addresses[C] = address
    _, inbox = network.receiving(B)
    with socket.create_connection(("127.0.0.1", unused_tcp_port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        a = network.transport(A)
        a.send(B, b"x")
        assert await inbox.until(1) == [b"x"]


@on_uvloop
async def test_an_address_in_use_is_told_in_a_sentence(unused_tcp_port: int) -> None:
    address = f"tcp://127.0.0.1:{unused_tcp_port}"
    addresses: Mapping[NodeId, str] = {A: address}
    loop = asyncio.get_running_loop()
    first = ZmqTransport(address, addresses, loop, CONFIG)
    with pytest.raises(ConfigError, match=f"Cannot receive at {address}: .*in use"):
        ZmqTransport(address, addresses, loop, CONFIG)
    first.close()
    ZmqTransport(address, addresses, loop, CONFIG).close()


@on_uvloop
async def test_closing_loses_what_waits_and_may_be_repeated(network: Network) -> None:
    a, _ = network.receiving(A)
    a.send(B, b"x")
    a.close()
    a.close()
    a.flush()


@on_uvloop
async def test_a_receiver_may_close_while_it_is_given_frames(network: Network) -> None:
    a, b = network.transport(A), network.transport(B)
    closed = asyncio.Event()

    def close(frames: list[bytes]) -> None:
        b.close()
        closed.set()

    b.start(close)
    for _ in range(2000):
        a.send(B, b"x")
    await closed.wait()
