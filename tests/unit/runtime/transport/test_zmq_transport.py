"""The transport over pyzmq: its edge-triggered descriptor (the rest is in `test_transport`)."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import zmq

from indilog.runtime.transport import zmq_transport
from indilog.runtime.transport.zmq_transport import ZmqTransport
from tests.unit.runtime.network import A, B, Inbox, Network, on_uvloop, until


@pytest.fixture
def network(tmp_path: Path) -> Network[ZmqTransport]:
    return Network(ZmqTransport, tmp_path)


@on_uvloop
async def test_many_frames_of_one_iteration_are_delivered_in_few_lists(
    network: Network[ZmqTransport],
) -> None:
    """The loop is blocked while 100 frames arrive: one list, not 100 calls."""
    a, b, inbox = network.transport(A), network.transport(B), Inbox()
    a.send(B, b"connected?")
    await until(lambda: a.counts.frames_sent == 1)
    for _ in range(99):
        a.send(B, b"x")
    b._pull.poll(5000)
    b.start(inbox.take)
    await inbox.until(100)
    assert inbox.lists < 50


@on_uvloop
async def test_frames_left_after_an_iteration_are_received_in_small_iterations(
    network: Network[ZmqTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All frames arrive before the first iteration: no later edge announces the remaining ones."""
    monkeypatch.setattr(zmq_transport, "FRAMES_PER_ITERATION_MAX", 4)
    a, b, inbox = network.transport(A), network.transport(B), Inbox()
    sent = [b"%d" % i for i in range(50)]
    for frame in sent:
        a.send(B, frame)
    await until(lambda: a.counts.frames_sent == len(sent))
    b._pull.poll(5000)
    b.start(inbox.take)
    assert await inbox.until(len(sent)) == sent


class RefusesOnce:
    """A stub of a zmq socket that refuses a send, and reports on the next query that it may."""

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
        raise AssertionError("no caller waits for a descriptor that is ready")


@on_uvloop
async def test_after_a_refused_send_the_socket_is_queried_before_any_wait(
    network: Network[ZmqTransport],
) -> None:
    a = network.transport(A)
    (process,) = a._processes.values()
    stub, real = RefusesOnce(), process.socket
    process.socket = cast("zmq.Socket[bytes]", stub)
    a.send(B, b"x")
    process.socket = real
    assert stub.sent == [b"x"]
    assert not process.queue


@on_uvloop
async def test_flush_sends_waiting_frames(network: Network[ZmqTransport]) -> None:
    a = network.transport(A)
    a.flush()
    a.send(B, b"x")
    b = network.transport(B)

    def sent() -> bool:
        a.flush()
        return a.counts.frames_sent == 1

    await until(sent)
    assert b._pull.recv() == b"x"
