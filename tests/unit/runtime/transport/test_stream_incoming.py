"""The receiving side of a stream: chunks of any size, malformed lengths, too many connections."""

from __future__ import annotations

import socket
from typing import cast

import pytest

from indilog.runtime.transport import stream_incoming
from indilog.runtime.transport.stream_incoming import Incoming
from indilog.runtime.transport.transport import MALFORMED, TOO_MANY_CONNECTIONS, TransportCounts


class Connection:
    """A stub of the event loop's side of a connection."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return cast("socket.socket", self)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_UNIX


class Receiver:
    """Connections of one process, and the frames that they delivered."""

    def __init__(self, frame_bytes_max: int = 100) -> None:
        self.lists: list[list[bytes]] = []
        self.counts = TransportCounts()
        self.connections: set[Incoming] = set()
        self._frame_bytes_max = frame_bytes_max

    def connected(self) -> tuple[Incoming, Connection]:
        made = Incoming(self.connections, self.lists.append, self._frame_bytes_max, self.counts)
        connection = Connection()
        made.connection_made(connection)  # type: ignore[arg-type]
        return made, connection


def test_the_frames_of_one_read_are_delivered_as_one_list() -> None:
    receiver = Receiver()
    incoming, _ = receiver.connected()
    incoming.data_received(b"\3\0\0\0abc" + b"\0\0\0\0" + b"\1\0\0\0d")
    assert receiver.lists == [[b"abc", b"", b"d"]]


def test_a_frame_is_delivered_only_when_it_is_complete() -> None:
    receiver = Receiver()
    incoming, _ = receiver.connected()
    for byte in b"\3\0\0\0ab":
        incoming.data_received(bytes([byte]))
    assert not receiver.lists
    incoming.data_received(b"c\1\0")
    assert receiver.lists == [[b"abc"]]
    incoming.data_received(b"\0\0d")
    assert receiver.lists == [[b"abc"], [b"d"]]


def test_delivered_frames_are_counted() -> None:
    receiver = Receiver()
    incoming, _ = receiver.connected()
    incoming.data_received(b"\3\0\0\0abc\1\0\0\0d\7\0")
    assert (receiver.counts.frames_received, receiver.counts.bytes_received) == (2, 4)


def test_a_length_at_the_limit_is_accepted_and_one_above_closes_the_connection() -> None:
    receiver = Receiver(frame_bytes_max=5)
    incoming, connection = receiver.connected()
    incoming.data_received(b"\5\0\0\0aaaaa")
    assert receiver.lists == [[b"aaaaa"]]
    assert receiver.counts.dropped == {}
    incoming.data_received(b"\6\0\0\0")
    assert connection.aborted
    assert receiver.counts.dropped == {MALFORMED: 1}


def test_frames_before_a_malformed_length_in_a_read_are_lost_with_the_connection() -> None:
    receiver = Receiver(frame_bytes_max=5)
    incoming, connection = receiver.connected()
    incoming.data_received(b"\1\0\0\0aGET / HTTP/1.1")
    assert connection.aborted
    assert not receiver.lists


def test_no_memory_is_allocated_for_an_announced_length() -> None:
    receiver = Receiver(frame_bytes_max=1 << 30)
    incoming, _ = receiver.connected()
    incoming.data_received((1 << 30).to_bytes(4, "little") + b"x")
    assert len(incoming._rest) == 5


def test_connections_beyond_the_limit_are_closed_until_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_incoming, "CONNECTIONS_MAX", 2)
    receiver = Receiver()
    (first, a), (_, b), (third, c) = (receiver.connected() for _ in range(3))
    assert [a.aborted, b.aborted, c.aborted] == [False, False, True]
    assert receiver.counts.dropped == {TOO_MANY_CONNECTIONS: 1}
    third.connection_lost(None)
    first.connection_lost(None)
    _, d = receiver.connected()
    assert not d.aborted
