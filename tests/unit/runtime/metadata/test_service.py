"""The metadata store over a socket: deadlines, lost servers, resent requests, malformed bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Self

import msgspec
import pytest

from indilog.base.errors import (
    ConfigError,
    DataDirectoryError,
    OverloadedError,
    QuorumUnavailableError,
)
from indilog.config import node_config
from indilog.runtime.metadata import links
from indilog.runtime.metadata.client import MetadataClient
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.metadata.messages import CompareAndSet, Decided, Get, Reply, Request
from indilog.runtime.metadata.service import MetadataServer
from indilog.runtime.metadata.store import Versioned, Written
from indilog.runtime.transport.stream_incoming import LENGTH
from indilog.runtime.transport.transport import QUEUE_FULL

CONFIG = node_config(metadata_timeout_s=60.0, resend_s=0.05)
pytestmark = pytest.mark.asyncio


def address_in(directory: Path) -> str:
    return f"unix://{directory}/m"


async def test_a_request_sent_before_the_server_starts_is_answered(tmp_path: Path) -> None:
    async with MetadataClient(address_in(tmp_path), CONFIG) as client:
        early = asyncio.create_task(client.next_sequence("epoch"))
        await asyncio.sleep(0)
        with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
            server = MetadataServer(store, address_in(tmp_path), CONFIG)
            assert await early == 1
            await server.close()


async def test_without_a_server_a_request_fails_as_retryable(tmp_path: Path) -> None:
    hasty = node_config(metadata_timeout_s=0.02)
    async with MetadataClient(address_in(tmp_path), hasty) as client:
        with pytest.raises(QuorumUnavailableError, match=r"did not answer for 0\.02 s"):
            await client.get("view")


async def test_a_client_and_its_watch_survive_a_server_restart(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    async with MetadataClient(address, CONFIG) as client:
        with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
            server = MetadataServer(store, address, CONFIG)
            assert await client.compare_and_set("view", b"one", expected_version=0) == Written(1)
            watch = asyncio.create_task(client.watch("view", after=1))
            await client.get("view")
            await server.close()
        with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
            server = MetadataServer(store, address, CONFIG)
            assert await client.compare_and_set("view", b"two", expected_version=1) == Written(2)
            assert await watch == Versioned(b"two", 2)
            await server.close()


async def test_a_watch_is_renewed_after_the_server_reported_no_change_in_time(
    tmp_path: Path,
) -> None:
    quick = node_config(metadata_timeout_s=0.1)
    address = address_in(tmp_path)
    with EmbeddedMetadataStore(tmp_path / "metadata", quick) as store:
        server = MetadataServer(store, address, quick)
        async with MetadataClient(address, quick) as client:
            asked: list[int] = []
            real = store.watch

            async def watched(key: str, *, after: int) -> Versioned | None:
                asked.append(after)
                if len(asked) == 3:
                    await store.compare_and_set(key, b"one", expected_version=0)
                return await real(key, after=after)

            store.watch = watched  # type: ignore[method-assign]
            assert await client.watch("view", after=0) == Versioned(b"one", 1)
            assert len(asked) >= 3
        await server.close()


class Mute:
    """A server that answers nothing; `frames` has what each connection sent."""

    def __init__(self) -> None:
        self.frames: list[list[bytes]] = []
        self.asked_again = asyncio.Event()
        self.lost = asyncio.Event()

    async def on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read the frames of a connection; the first connection is closed after one frame."""
        self.frames.append(frames := [])
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                frames.append(await reader.readexactly(size))
                if len(self.frames) == 1:
                    break
                self.asked_again.set()
        writer.close()
        if len(self.frames) > 1:
            self.lost.set()


async def test_an_unanswered_request_is_sent_once_over_each_connection(tmp_path: Path) -> None:
    """A message is lost only with its connection, so a watch costs nothing while it waits."""
    hasty = node_config(metadata_timeout_s=60.0, resend_s=0.01)
    mute = Mute()
    server = await asyncio.start_unix_server(mute.on_connection, tmp_path / "m")
    async with server:
        async with MetadataClient(address_in(tmp_path), hasty) as client:
            asking = asyncio.create_task(client.get("view"))
            await mute.asked_again.wait()
            await asyncio.sleep(0.5)  # many times `resend_s`
            asking.cancel()
            await asyncio.wait([asking])
        await mute.lost.wait()
    [first], [second] = mute.frames
    assert first == second


async def test_further_requests_than_may_wait_are_refused_at_once(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    narrow = node_config(metadata_watchers_max=1)
    with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
        server = MetadataServer(store, address, narrow)
        async with MetadataClient(address, CONFIG) as client:
            watch = asyncio.create_task(client.watch("view", after=0))
            await asyncio.sleep(0)  # the watch is sent first
            with pytest.raises(OverloadedError, match="1 requests"):
                await client.get("view")
            await store.compare_and_set("view", b"one", expected_version=0)
            assert await watch == Versioned(b"one", 1)
        await server.close()


async def test_a_client_that_does_not_read_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an answer could be lost without its connection."""
    monkeypatch.setattr(links, "_UNSENT_BYTES_MAX", 100)
    address = address_in(tmp_path)
    with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
        await store.compare_and_set("view", bytes(200), expected_version=0)
        server = MetadataServer(store, address, CONFIG)
        with Raw(address) as client:
            client.send(msgspec.msgpack.encode(Get(1, "view")))
            with pytest.raises(ConnectionError):
                await client.received()
        assert server.counts.dropped[QUEUE_FULL] == 1
        await server.close()


async def test_a_failure_of_the_store_reaches_the_client(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    store = EmbeddedMetadataStore(tmp_path / "metadata", CONFIG)
    server = MetadataServer(store, address, CONFIG)
    store.close()
    async with MetadataClient(address, CONFIG) as client:
        with pytest.raises(DataDirectoryError, match="takes no more writes"):
            await client.next_sequence("epoch")
    await server.close()


class Raw:
    """A client that sends any bytes."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address.removeprefix("unix://"))
        self._socket.settimeout(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, message: bytes) -> None:
        self._socket.sendall(LENGTH.pack(len(message)) + message)

    async def received(self) -> Reply:
        """Read one reply in a thread, so that the server on this loop can send it."""
        frame = await asyncio.to_thread(self._frame)
        reply: Reply = msgspec.msgpack.decode(frame, type=Reply)
        return reply

    def _frame(self) -> bytes:
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            if not (part := self._socket.recv(size - len(got))):
                raise ConnectionError("the server has closed the connection")
            got += part
        return got


async def test_a_resent_write_is_executed_once_and_answered_twice(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    request: Request = CompareAndSet(7, "view", b"one", 0, "client-7")
    with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
        server = MetadataServer(store, address, CONFIG)
        with Raw(address) as client:
            for _ in range(2):
                client.send(msgspec.msgpack.encode(request))
                assert await client.received() == Decided(7, written=True, version=1)
        assert await store.get("view") == Versioned(b"one", 1)
        await server.close()


async def test_malformed_requests_are_counted_and_later_requests_are_answered(
    tmp_path: Path,
) -> None:
    address = address_in(tmp_path)
    rubbish = [
        b"",
        b"\xff\xff",
        msgspec.msgpack.encode(["Get", "not a number", "view"]),
        msgspec.msgpack.encode(["Unknown", 1]),
    ]
    with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
        server = MetadataServer(store, address, CONFIG)
        request: Request = CompareAndSet(1, "view", b"one", 0, "w")
        with Raw(address) as client:
            for message in rubbish:
                client.send(message)
            client.send(msgspec.msgpack.encode(request))
            assert await client.received() == Decided(1, written=True, version=1)
        assert server.ignored == len(rubbish)
        await server.close()


async def test_an_address_that_cannot_be_bound_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with (
        EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store,
        pytest.raises(ConfigError, match="Cannot receive at unix:///nowhere"),
    ):
        MetadataServer(store, "unix:///nowhere/at/all/m", CONFIG)
    with pytest.raises(ConfigError, match=r"The address of a stream must be .* not post://card"):
        MetadataClient("post://card", CONFIG)


async def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    with EmbeddedMetadataStore(tmp_path / "metadata", CONFIG) as store:
        server = MetadataServer(store, address_in(tmp_path), CONFIG)
        client = MetadataClient(address_in(tmp_path), CONFIG)
        client.close()
        client.close()
        await server.close()
        await server.close()
