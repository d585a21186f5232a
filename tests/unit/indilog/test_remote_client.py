"""`indilog.connect` without a connection: before the first one, and after a lost one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve

import indilog
from indilog import remote_client
from indilog.base.errors import CallOutcomeUnknownError, ClientClosedError, NotReadyError
from indilog.link.access import check_url
from indilog.link.frames import write_frame
from indilog.link.link_messages import (
    LINK_VERSION,
    Answer,
    InvocationFound,
    LinkLostError,
    Question,
    Returned,
    Welcome,
    failed,
)
from indilog.remote_client import RemoteClient
from tests.support.link_pair import LIMITS


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "url", ["", "banana", "localhost:8080", "http://", "ftp://here", "http://here:x", "http://[", 3]
)
async def test_a_malformed_url_is_refused_before_any_connection(url: str) -> None:
    with pytest.raises(ValueError, match=r"A platform's URL has the form http://"):
        async with indilog.connect(url):
            pass


@pytest.mark.parametrize("url", ["http://here:8080", "https://[::1]/", "http://here/below"])
def test_a_trailing_slash_of_a_url_is_removed(url: str) -> None:
    assert check_url(url) == url.rstrip("/")


@pytest.mark.asyncio
async def test_a_connection_lost_during_a_deployment_raises_an_error_that_says_to_repeat_it() -> (
    None
):
    class CutOff(RemoteClient):
        async def ask(self, question: Question) -> Answer:
            return failed(LinkLostError("The connection closed."))

    client = CutOff("http://here:8080")
    with pytest.raises(CallOutcomeUnknownError, match=r"lost while deploying; deploy again"):
        await client.deploy({"demo.py": ""})
    with pytest.raises(CallOutcomeUnknownError, match=r"lost while undeploying; undeploy again"):
        await client.undeploy("demo")


class Platform:
    """A gateway that accepts WebSockets, and greets a client when the test permits it."""

    def __init__(self) -> None:
        self.may_welcome = asyncio.Event()
        self.came = asyncio.Event()
        self.version = LINK_VERSION
        self.open: set[ServerConnection] = set()
        self.url = ""

    async def serve(self, socket: ServerConnection) -> None:
        self.open.add(socket)
        self.came.set()
        try:
            waiting = asyncio.ensure_future(self.may_welcome.wait())
            closing = asyncio.ensure_future(socket.wait_closed())
            await asyncio.wait([waiting, closing], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not closing.done():
                welcome = bytearray()
                write_frame(welcome, 0, Welcome(self.version, LIMITS))
                await socket.send(bytes(welcome))
            await closing
        finally:
            self.open.discard(socket)

    async def until_closed(self) -> None:
        async with asyncio.timeout(60):
            while self.open:  # noqa: ASYNC110 - not announced
                await asyncio.sleep(0.001)


@asynccontextmanager
async def listening() -> AsyncIterator[Platform]:
    platform = Platform()
    async with serve(platform.serve, "127.0.0.1", 0) as server:
        platform.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield platform


def tasks() -> int:
    return sum("_Connection" in repr(task) for task in asyncio.all_tasks())


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["silent", "cancelled", "another version"])
async def test_a_connection_without_a_greeting_leaves_no_task_or_socket(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(remote_client, "_CONNECT_S", 0.2 if how == "silent" else 60.0)
    async with listening() as platform:
        client = RemoteClient(platform.url, token="t")
        opening = asyncio.ensure_future(client.open())
        coming = asyncio.ensure_future(platform.came.wait())
        # A busy machine may take longer than 0.2 s to connect.
        await asyncio.wait([coming, opening], return_when=asyncio.FIRST_COMPLETED)
        coming.cancel()
        if how == "cancelled":
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        else:
            if how == "another version":
                platform.version = LINK_VERSION + 1
                platform.may_welcome.set()
            with pytest.raises(NotReadyError):
                await opening
        await platform.until_closed()
        assert tasks() == 0


@pytest.mark.asyncio
async def test_a_client_closed_while_connecting_stays_closed() -> None:
    """Otherwise an append that was reconnecting would be written after `close`."""
    async with listening() as platform:
        client = RemoteClient(platform.url, token="t")
        platform.may_welcome.set()
        await client.open()
        platform.may_welcome.clear()
        platform.came.clear()
        client.drop()
        appending = asyncio.ensure_future(client.log("orders").append(b"x"))
        async with asyncio.timeout(60):
            await platform.came.wait()
        await client.close()
        platform.may_welcome.set()
        with pytest.raises(ClientClosedError):
            await appending
        await platform.until_closed()
        assert tasks() == 0


@pytest.mark.asyncio
async def test_reads_after_an_outcome_see_what_the_invocation_wrote() -> None:
    class ReturningStatus(RemoteClient):
        async def ask(self, question: Question) -> Answer:
            return InvocationFound("i", "app.f", "done", Returned(7, b"1"))

    client = ReturningStatus("http://here:8080")
    assert await client.invocation("i") is not None
    assert client.session.position == 7
