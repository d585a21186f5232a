"""Addresses of streams: their syntax, their current owner, and socket files of dead processes."""

from __future__ import annotations

import contextlib
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from indilog.base.errors import ConfigError
from indilog.runtime.transport.stream_address import parse_stream_address, tune


def test_a_unix_socket_address_holds_a_path() -> None:
    assert parse_stream_address("unix:///run/x/storage-0").path == "/run/x/storage-0"


@pytest.mark.parametrize(
    ("address", "host"),
    [("stream://10.0.0.7:7401", "10.0.0.7"), ("stream://[::1]:7401", "::1")],
)
def test_a_port_address_holds_a_host_and_a_number(address: str, host: str) -> None:
    found = parse_stream_address(address)
    assert (found.path, found.host, found.port) == ("", host, 7401)


@pytest.mark.parametrize(
    "address",
    [
        "", "storage-0", "unix://", "unix://run/x", "stream://:7401", "stream://host",
        "stream://host:0", "stream://host:65536", "stream://host:7401/x", "tcp://host:7401",
        "ipc:///run/x", "stream://" + "x" * 64 + ":7401",
    ],
)  # fmt: skip
def test_a_malformed_stream_address_is_refused_in_one_sentence(address: str) -> None:
    with pytest.raises(ConfigError, match="address of a stream must be unix:///PATH or stream://"):
        parse_stream_address(address)


def test_the_socket_file_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    address = parse_stream_address(f"unix://{tmp_path}/a")
    address.listener().close()
    assert Path(address.path).exists()
    with address.listener(), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(address.path)


def test_a_socket_file_with_a_listening_process_is_kept(tmp_path: Path) -> None:
    address = parse_stream_address(f"unix://{tmp_path}/a")
    with address.listener(), socket.socket(socket.AF_UNIX) as peer:
        with pytest.raises(ConfigError, match=r"Cannot receive at unix:///.*/a: .*in use"):
            address.listener()
        peer.connect(address.path)


def test_a_process_with_a_full_connection_backlog_is_not_treated_as_dead(tmp_path: Path) -> None:
    address = parse_stream_address(f"unix://{tmp_path}/a")
    with ExitStack() as stack:
        listener = stack.enter_context(address.listener())
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.settimeout(0)
                waiting.connect(address.path)
        with pytest.raises(ConfigError, match="in use"):
            address.listener()
        assert Path(address.path).is_socket()


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ConfigError, match="in use"):
        parse_stream_address(f"unix://{tmp_path}/a").listener()
    assert (tmp_path / "a").read_text() == "mine"


def test_a_path_that_is_too_long_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot receive at .*: AF_UNIX path too long"):
        parse_stream_address(f"unix://{tmp_path}/{'x' * 200}").listener()


class Connection:
    """A stub of the event loop's side of a connection."""

    def __init__(self, own: socket.socket) -> None:
        self._own = own

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self._own


def test_small_writes_to_a_port_leave_at_once_and_a_vanished_host_is_noticed() -> None:
    with socket.socket() as own:
        tune(Connection(own))  # type: ignore[arg-type]
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 6000
