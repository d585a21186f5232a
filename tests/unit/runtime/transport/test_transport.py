"""What every transport promises: order, bounds, peers that start late, stop, or read nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TypeAlias

import pytest

from indilog.base.errors import ConfigError
from indilog.base.ids import NodeId
from indilog.runtime.cluster.cluster_keys import make_authority, make_node_keys
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.runtime.transport.transport import (
    PEERS_MAX,
    QUEUE_FULL,
    TOO_LARGE,
    TOO_OLD,
    UNKNOWN_PEER,
)
from indilog.runtime.transport.zmq_transport import ZmqTransport
from tests.unit.runtime.network import CONFIG, A, B, C, Inbox, Network, limited, on_uvloop, until

AnyTransport: TypeAlias = StreamTransport | ZmqTransport
AnyNetwork: TypeAlias = Network[StreamTransport] | Network[ZmqTransport]


@pytest.fixture(params=["stream", "tls", "zmq"])
def network(request: pytest.FixtureRequest, tmp_path: Path) -> AnyNetwork:
    if request.param == "stream":
        return Network(StreamTransport, tmp_path)
    if request.param == "tls":
        make_authority(tmp_path)
        return Network(StreamTransport, tmp_path, make_node_keys(tmp_path, "node"))
    return Network(ZmqTransport, tmp_path)


@pytest.fixture(params=["stream", "zmq"])
def unencrypted(request: pytest.FixtureRequest, tmp_path: Path) -> AnyNetwork:
    """A network whose receivers take bytes before they are started, as far as buffers reach."""
    if request.param == "stream":
        return Network(StreamTransport, tmp_path)
    return Network(ZmqTransport, tmp_path)


def send(transport: AnyTransport, receiver: NodeId, *frames: bytes) -> None:
    """Send in one loop iteration."""
    for frame in frames:
        transport.send(receiver, frame)
    transport.flush()


@on_uvloop
async def test_frames_arrive_unchanged_and_in_order(network: AnyNetwork) -> None:
    sent = [bytes([i % 256]) * (i * 37 % 5000) for i in range(1000)]
    a = network.transport(A)
    _, inbox = network.receiving(B)
    send(a, B, *sent)
    assert await inbox.until(len(sent)) == sent
    assert a.counts.frames_sent == len(sent)
    assert a.counts.bytes_sent == sum(map(len, sent))


@on_uvloop
async def test_received_frames_are_counted(network: AnyNetwork) -> None:
    a = network.transport(A)
    b, inbox = network.receiving(B)
    send(a, B, b"one", b"three")
    await inbox.until(2)
    assert (b.counts.frames_received, b.counts.bytes_received) == (2, 8)


@on_uvloop
async def test_large_frames_arrive_between_small_ones(network: AnyNetwork) -> None:
    """Frame sizes from less than one read to many reads, split anywhere."""
    sizes = [1, 262_139, 0, 262_140, 5, 262_141, 700_000, 3, 5_000_000, 2, 131_072]
    sent = [bytes([i]) * size for i, size in enumerate(sizes * 2)]
    a = network.transport(A)
    _, inbox = network.receiving(B)
    send(a, B, *sent)
    assert await inbox.until(len(sent)) == sent


@on_uvloop
async def test_frames_travel_in_both_directions_at_the_same_time(network: AnyNetwork) -> None:
    (a, to_a), (b, to_b) = network.receiving(A), network.receiving(B)
    for i in range(300):
        send(a, B, b"to b %d" % i)
        send(b, A, b"to a %d" % i)
    assert await to_a.until(300) == [b"to a %d" % i for i in range(300)]
    assert await to_b.until(300) == [b"to b %d" % i for i in range(300)]


@on_uvloop
async def test_frames_are_received_only_after_the_start(unencrypted: AnyNetwork) -> None:
    a, b, inbox = unencrypted.transport(A), unencrypted.transport(B), Inbox()
    sent = [b"%d" % i for i in range(50)]
    send(a, B, *sent)
    await until(lambda: a.counts.frames_sent == len(sent))
    b.start(inbox.take)
    assert await inbox.until(len(sent)) == sent


@on_uvloop
async def test_nodes_of_one_process_share_its_address(network: AnyNetwork) -> None:
    a = network.transport(A)
    _, inbox = network.receiving(B)
    send(a, B, b"for b")
    send(a, C, b"for c")
    assert await inbox.until(2) == [b"for b", b"for c"]


@on_uvloop
async def test_frames_wait_for_a_peer_that_has_not_started(network: AnyNetwork) -> None:
    a = network.transport(A)
    for i in range(10):
        send(a, B, b"%d" % i)
    assert a.counts.frames_sent == 0
    _, inbox = network.receiving(B)
    assert await inbox.until(10) == [b"%d" % i for i in range(10)]


@on_uvloop
async def test_a_restarted_peer_is_reached_again(network: AnyNetwork) -> None:
    a = network.transport(A)
    first, inbox = network.receiving(B)
    send(a, B, b"first")
    await inbox.until(1)
    first.close()
    _, inbox = network.receiving(B)
    arrived = asyncio.create_task(inbox.until(1))
    while not arrived.done():  # frames sent before the peer's end is noticed are lost
        send(a, B, b"second")
        await asyncio.wait([arrived], timeout=0.05)
    assert set(inbox.frames) == {b"second"}


@on_uvloop
async def test_frames_for_a_slow_peer_wait_and_arrive_in_order(
    unencrypted: AnyNetwork,
) -> None:
    """More than fits into the kernel (and zmq): the sender is refused, and notified later."""
    a, b, inbox = unencrypted.transport(A), unencrypted.transport(B), Inbox()
    sent = [i.to_bytes(4, "big") * 2048 for i in range(3000)]
    send(a, B, *sent)
    await until(lambda: a.counts.frames_sent > 0)
    assert a.counts.frames_sent < len(sent)
    b.start(inbox.take)
    assert await inbox.until(len(sent)) == sent
    assert not a.counts.dropped


@on_uvloop
async def test_frames_above_the_queue_limit_of_a_peer_are_dropped_and_counted(
    network: AnyNetwork,
) -> None:
    config = limited(send_queue_bytes_max=1000)
    a = network.transport(A, config)
    send(a, B, *[bytes([i]) * 200 for i in range(7)])
    assert a.counts.dropped[QUEUE_FULL] == 2
    _, inbox = network.receiving(B)
    assert await inbox.until(5) == [bytes([i]) * 200 for i in range(5)]
    send(a, B, bytes([7]) * 1000)
    assert (await inbox.until(6))[5] == bytes([7]) * 1000


@on_uvloop
async def test_frames_that_wait_too_long_for_an_absent_peer_are_dropped(
    network: AnyNetwork,
) -> None:
    a = network.transport(A)
    send(a, B, *[b"old %d" % i for i in range(3)])
    (process,) = a._processes.values()
    process.waiting_since -= CONFIG.node.messages.send_queue_s_max + 1
    send(a, B, b"new")
    assert a.counts.dropped[TOO_OLD] == 3
    _, inbox = network.receiving(B)
    assert await inbox.until(1) == [b"new"]


@on_uvloop
async def test_a_peer_that_returns_late_does_not_receive_expired_frames(
    network: AnyNetwork,
) -> None:
    a = network.transport(A)
    send(a, B, b"old")
    (process,) = a._processes.values()
    process.waiting_since -= CONFIG.node.messages.send_queue_s_max + 1
    _, inbox = network.receiving(B)
    await until(lambda: a.counts.dropped[TOO_OLD] == 1)
    send(a, B, b"new")
    assert await inbox.until(1) == [b"new"]


@on_uvloop
async def test_a_frame_at_the_limit_arrives_and_a_larger_one_is_dropped(
    network: AnyNetwork,
) -> None:
    a = network.transport(A, limited(message_bytes_max=5000))
    _, inbox = network.receiving(B, limited(message_bytes_max=5000))
    send(a, B, b"x" * 5000, b"y" * 5001, b"z")
    assert await inbox.until(2) == [b"x" * 5000, b"z"]
    assert a.counts.dropped[TOO_LARGE] == 1


@on_uvloop
async def test_a_receiver_refuses_a_frame_over_its_own_limit(network: AnyNetwork) -> None:
    """The sender's limit is larger: the receiver closes that connection and keeps the others."""
    network.addresses[C] = network.new_address("other")
    a, other = network.transport(A), network.transport(C)
    _, inbox = network.receiving(B, limited(message_bytes_max=5000))
    send(a, B, b"y" * 5001)
    send(other, B, b"from the other")
    assert await inbox.until(1) == [b"from the other"]


@on_uvloop
async def test_a_frame_for_an_unknown_node_is_dropped_and_counted(network: AnyNetwork) -> None:
    a = network.transport(A)
    send(a, NodeId("unknown"), b"x")
    assert a.counts.dropped[UNKNOWN_PEER] == 1


@on_uvloop
async def test_malformed_bytes_do_not_affect_other_connections(
    network: AnyNetwork,
) -> None:
    place = network.at_port()
    _, inbox = network.receiving(B)
    with socket.create_connection(place) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        a = network.transport(A)
        send(a, B, b"x")
        assert await inbox.until(1) == [b"x"]


@on_uvloop
async def test_an_address_in_use_is_refused_in_one_sentence(network: AnyNetwork) -> None:
    network.at_port()
    first, _ = network.receiving(B)
    with pytest.raises(ConfigError, match=f"Cannot receive at {network.addresses[B]}: .*in use"):
        network.transport(B)
    first.close()
    network.transport(B)


@on_uvloop
async def test_a_frame_sent_after_the_transport_closed_is_dropped_silently(
    network: AnyNetwork,
) -> None:
    a, _ = network.receiving(A)
    send(a, B, b"x")
    a.close()
    a.close()
    send(a, B, b"z")
    a.flush()
    _, inbox = network.receiving(B)
    b = network.transport(A)
    send(b, B, b"y")
    assert await inbox.until(1) == [b"y"]


@on_uvloop
async def test_a_receiver_may_close_while_frames_are_delivered(network: AnyNetwork) -> None:
    a, b = network.transport(A), network.transport(B)
    closed = asyncio.Event()

    def close(frames: list[bytes]) -> None:
        assert frames
        b.close()
        closed.set()

    b.start(close)
    send(a, B, *[b"x"] * 2000)
    await closed.wait()


@on_uvloop
async def test_peers_that_are_added_later_get_frames(network: AnyNetwork) -> None:
    a = network.transport(A)
    late = NodeId("late")
    send(a, late, b"too early")
    assert a.counts.dropped[UNKNOWN_PEER] == 1
    network.addresses[late] = network.new_address("late")
    a.add_peers(network.addresses)
    a.add_peers(network.addresses)
    send(a, late, b"before it receives")
    _, inbox = network.receiving(late)
    send(a, late, b"one", b"two")
    assert await inbox.until(3) == [b"before it receives", b"one", b"two"]
    assert a.counts.dropped[UNKNOWN_PEER] == 1


@on_uvloop
async def test_added_peers_keep_the_connections_of_the_known_ones(network: AnyNetwork) -> None:
    a = network.transport(A)
    _, inbox = network.receiving(B)
    send(a, B, b"first")
    await inbox.until(1)
    a.add_peers({B: network.addresses[B], NodeId("late"): network.addresses[B]})
    send(a, B, b"second")
    send(a, NodeId("late"), b"third")
    assert await inbox.until(3) == [b"first", b"second", b"third"]


@on_uvloop
async def test_a_node_that_moved_gets_frames_at_its_new_address(network: AnyNetwork) -> None:
    a = network.transport(A)
    before, inbox = network.receiving(B)
    send(a, B, b"first")
    await inbox.until(1)
    before.close()
    network.addresses[B] = network.new_address("elsewhere")
    _, inbox = network.receiving(B)
    a.add_peers(network.addresses)
    send(a, B, b"second")
    assert await inbox.until(1) == [b"second"]


@on_uvloop
async def test_peers_are_bounded(network: AnyNetwork) -> None:
    a = network.transport(A)
    many = {NodeId(f"n{i}"): network.addresses[B] for i in range(PEERS_MAX - 1)}
    with pytest.raises(ConfigError, match="at most 4,096 nodes, not 4,097"):
        a.add_peers(many)
    send(a, NodeId("n1"), b"x")
    assert a.counts.dropped[UNKNOWN_PEER] == 1, "none was added"
    many.popitem()
    a.add_peers(many)
    send(a, NodeId("n1"), b"x")
    assert a.counts.dropped[UNKNOWN_PEER] == 1
