"""The demo against a small stand-in for the gateway: the functions over a log in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pydantic_core
import pytest
import pytest_asyncio

from bokistore import ConflictError, Store
from functions.social import app as social
from functions.social.check import Replay, faults_of_objects, faults_of_posts, replayed
from functions.social.demo import demonstrated, figures
from functions.social.graph import synthetic_graph
from functions.social.http_connection import HttpConnection
from functions.social.load import LoadError, Run, Tally, load_graph, run_load
from indilog.app import Context
from indilog.log import Session
from indilog.testing import MemoryLogs

pytestmark = pytest.mark.asyncio

GRAPH = synthetic_graph(people=40, friends_each=3, seed=1)


class Gateway:
    """Speaks as much HTTP as the demo needs; `tamper` may change an answer."""

    def __init__(self) -> None:
        self.logs = MemoryLogs()
        self.url = ""
        self.calls: list[str] = []
        self.tamper: Callable[[str, Any], Any] = lambda _, result: result

    async def call(self, function: str, arguments: bytes, session: Session) -> bytes:
        raise AssertionError(function)

    async def send(
        self, function: str, arguments: bytes, session: Session, *, delay_s: float
    ) -> str:
        raise AssertionError(function)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].split("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                method, target, *_ = head.split()
                status, answer = await self.answer(method, target, body)
                writer.write(
                    b"HTTP/1.1 %d Told\r\nContent-Length: %d\r\nIndilog-Position: %d\r\n\r\n%s"
                    % (status, len(answer), self.logs.position, answer)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        url = urlsplit(target)
        if method == "post":
            return await self.invoke(url.path.rpartition("/")[2], json.loads(body))
        if url.path == "/logs/social/tail":
            return 200, json.dumps({"tail": self.logs.position}).encode()
        if url.path == "/status":
            part = {"hits": 3, "misses": 1}
            return 200, json.dumps({"engine": {"suffix": part, "answer_cache": part}}).encode()
        query = parse_qs(url.query)
        bound, limit = int(query["bound"][0]), int(query["limit"][0])
        found = await self.logs.log("social").read_range(bound=bound, limit=min(limit, 7))
        records = [{"seqnum": one.seqnum, "data": one.data.decode()} for one in found]
        after = found[-1].seqnum + 1 if found else bound
        return 200, json.dumps({"records": records, "next_bound": after}).encode()

    async def invoke(self, function: str, arguments: dict[str, Any]) -> tuple[int, bytes]:
        self.calls.append(function)
        body: Callable[..., Awaitable[Any]] = getattr(social, function)
        result = self.tamper(function, await body(Context(self.logs, self), **arguments))
        if isinstance(result, tuple):
            return result
        return 200, pydantic_core.to_json(result)


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield gateway
    server.close()
    await server.wait_closed()


async def test_the_demo_runs_checks_and_shows_a_table(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await demonstrated(gateway.url, GRAPH, 0.3, clients=4, seed=1) == []
    shown = " ".join(capsys.readouterr().out.split())
    assert all(function in shown for function in ("login", "profile", "timeline", "post"))
    assert "none lost, none doubled" in shown
    assert {"load", "login", "profile", "timeline", "post", "objects"} == set(gateway.calls)


async def test_loading_a_graph_again_finds_everybody_there(gateway: Gateway) -> None:
    told: list[int] = []
    assert await load_graph(gateway.url, GRAPH, told.append) == 40
    assert sum(told) == 40
    assert await load_graph(gateway.url, GRAPH, told.append) == 0


async def test_every_client_keeps_the_session(gateway: Gateway) -> None:
    await load_graph(gateway.url, GRAPH, lambda _: None)
    connection = HttpConnection(gateway.url)
    answer = await connection.post("/functions/social/profile", b'{"user":"1"}')
    connection.close()
    assert (answer.status, answer.position) == (200, gateway.logs.position)


async def test_a_connection_that_was_closed_is_made_again(gateway: Gateway) -> None:
    await load_graph(gateway.url, GRAPH, lambda _: None)
    connection = HttpConnection(gateway.url)
    for _ in range(2):
        answer = await connection.post("/functions/social/profile", b'{"user":"1"}')
        assert answer.status == 200
        connection.close()


async def test_a_refusal_that_can_pass_is_tried_again(gateway: Gateway) -> None:
    refused = (503, b'{"detail":"Not ready.","retryable":true}')
    gateway.tamper = lambda _, result: refused if len(gateway.calls) < 3 else result
    assert await load_graph(gateway.url, {"1": ["2"], "2": ["1"]}, lambda _: None) == 0
    assert len(gateway.calls) == 3


async def test_a_refusal_for_good_ends_the_load_with_its_sentence(gateway: Gateway) -> None:
    gateway.tamper = lambda *_: (404, b'{"detail":"There is no app social."}')
    with pytest.raises(LoadError, match="load failed: There is no app social"):
        await load_graph(gateway.url, GRAPH, lambda _: None)
    with pytest.raises(LoadError, match="20 times in a row: There is no app social"):
        await run_load(gateway.url, list(GRAPH), clients=1, seconds=60, seed=1)


async def test_a_platform_that_is_not_there_is_told(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(LoadError, match="Is the platform up"):
        await load_graph(url, GRAPH, lambda _: None)
    with pytest.raises(LoadError, match="does not answer"):
        await figures(url)
    with pytest.raises(LoadError, match="cannot be read over HTTP"):
        await replayed(url, lambda *_: None)


async def test_an_object_that_differs_from_the_log_is_found(gateway: Gateway) -> None:
    await load_graph(gateway.url, GRAPH, lambda _: None)
    replay = await replayed(gateway.url, lambda *_: None)
    assert await faults_of_objects(gateway.url, replay) == []
    replay.objects["user:3"]["posts"] = 1
    (fault,) = await faults_of_objects(gateway.url, replay)
    assert fault.startswith("user:3 is ")


async def test_the_checks_replay_leaves_out_what_was_in_conflict(gateway: Gateway) -> None:
    await load_graph(gateway.url, {"1": ["2"], "2": ["1"]}, lambda _: None)
    store = Store(gateway.logs.log("social"))
    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction() as txn:
            (await txn.get("user:1")).increment("posts")
            await store.increment("user:1", "posts", 10)
    replay = await replayed(gateway.url, lambda *_: None)
    assert replay.objects["user:1"]["posts"] == 10
    assert replay.conflicts == [gateway.logs.position - 1]


async def test_lost_changed_and_doubled_posts_are_found() -> None:
    run = Run(acknowledged={"1.1": "a", "1.2": "b", "1.3": "c"}, unknown={"d", "e"})
    replay = Replay(
        objects={
            "post:1.2": {"text": "x"},
            "post:1.3": {"text": "c"},
            "post:1.4": {"text": "c"},
            "post:1.5": {"text": "d"},
            "timeline": {"posts": []},
        }
    )
    assert faults_of_posts(run, replay) == [
        "Post 1.1 was acknowledged and is lost.",
        "Post 1.2 has the text 'x' instead of 'b'.",
        "The post 'c' was published 2 times.",
    ]


async def test_percentiles_are_of_the_answered_requests() -> None:
    tally = Tally()
    assert tally.percentile_s(99) == 0
    tally.latencies_s.extend(range(100, 0, -1))
    assert (tally.percentile_s(50), tally.percentile_s(99)) == (51, 100)
