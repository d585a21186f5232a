"""Clients that take more than their share: of time, of bytes, of connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import websockets

from indilog.config import KIB, MIB
from indilog_compute.gateway import protocol
from indilog_compute.gateway import server as gateway_server
from tests.unit.compute.gateway.raw_gateway import RawGateway, head, raw_gateway

pytestmark = pytest.mark.asyncio

_BUY = "/functions/shop/buy"
_JSON = "Content-Type: application/json"


@pytest.fixture(autouse=True)
def swept_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_SWEEP_S", 0.02)


@pytest.fixture
def check_an_hour_later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that checks the time limits of all connections as in an hour."""
    servers: list[set[Any]] = []

    class Sweep(protocol.TimeLimitSweep):
        def __init__(self, connections: set[Any]) -> None:
            super().__init__(connections)
            servers.append(connections)

    def check() -> None:
        now = asyncio.get_running_loop().time() + 3600.0
        for connection in [each for connections in servers for each in connections]:
            connection.check_time(now)

    monkeypatch.setattr(gateway_server, "TimeLimitSweep", Sweep)
    return check


async def exchange(gateway: RawGateway, *sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes on a connection, and return the answer that comes before its end."""
    async with gateway.connected() as (reader, writer):
        for part in sent:
            writer.write(part)
        return await answered(reader)


async def answered(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the headers and the body of the next answer."""
    async with asyncio.timeout(60):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value
            for name, _, value in (line.partition(": ") for line in lines[1:] if line)
        }
        body = await reader.readexactly(int(headers["content-length"]))
    return int(lines[0].split()[1]), headers, body


def reported(body: bytes, status: int) -> str:
    problem = json.loads(body)
    assert problem["status"] == status
    return str(problem["detail"])


# --- time


async def test_a_head_that_does_not_end_is_answered_and_closed(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path, headers_timeout_s=0.05) as gateway:
        status, headers, body = await exchange(gateway, head(_BUY)[:-4])
        assert (status, headers["connection"]) == (408, "close")
        assert "within 0.05 s" in reported(body, 408)
        assert gateway.figure("clients_too_slow") == 1


async def test_a_silent_connection_is_closed(tmp_path: Path) -> None:
    async with (
        raw_gateway(tmp_path, headers_timeout_s=0.05) as gateway,
        gateway.connected() as (reader, _),
    ):
        assert await asyncio.wait_for(reader.read(), 60) == b""


async def test_a_slowly_arriving_head_gets_no_more_time(tmp_path: Path) -> None:
    async with (
        raw_gateway(tmp_path, headers_timeout_s=0.2) as gateway,
        gateway.connected() as (reader, writer),
    ):
        answer = asyncio.ensure_future(answered(reader))
        writer.write(head(_BUY)[:-2])
        while not answer.done():
            writer.write(b"X-More: 1\r\n")
            await asyncio.sleep(0.01)
        assert (await answer)[0] == 408


async def test_a_body_that_does_not_end_is_not_executed(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path, body_timeout_s=0.05) as gateway:
        half = head(_BUY, _JSON, "Content-Length: 100") + b'{"n": 1'
        status, _, body = await exchange(gateway, half)
        assert status == 408
        assert "body" in reported(body, 408)
        assert gateway.host.begun == []


async def test_an_answer_that_the_client_does_not_read_is_abandoned(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path, answer_timeout_s=0.1) as gateway:
        for _ in range(20):
            await gateway.logs.log("orders").append(bytes(MIB))
        async with gateway.connected() as (_, writer):
            for _ in range(8):
                writer.write(head("/logs/orders/records", method="GET"))
            await gateway.until_figure("clients_too_slow", 1)
        await gateway.until_free()


async def test_a_long_read_is_not_a_slow_client(
    tmp_path: Path, check_an_hour_later: Callable[[], None]
) -> None:
    async with raw_gateway(tmp_path) as gateway:
        reading = asyncio.ensure_future(gateway.http.get("/logs/orders/records?wait=30"))
        async with asyncio.timeout(60):
            while not gateway.logs.waiting:  # noqa: ASYNC110 - it is not announced
                await asyncio.sleep(0.01)
        check_an_hour_later()
        await gateway.logs.log("orders").append(b"x")
        assert len((await reading).json()["records"]) == 1
        assert gateway.figure("clients_too_slow") == 0


# --- size


_LARGE_HEADS = {
    "one header": head("/livez", "X: " + "x" * 70 * KIB, method="GET"),
    "many headers": head("/livez", *["X: 1"] * 12_000, method="GET"),
    "a header without end": head("/livez", "X: " + "x" * 70 * KIB, method="GET")[:-4],
    "a long path": head("/" + "x" * 70 * KIB, method="GET"),
    "trailers": head(_BUY, _JSON, "Transfer-Encoding: chunked")
    + b"2\r\n{}\r\n0\r\nX: "
    + b"x" * 300 * KIB,
}


@pytest.mark.parametrize("sent", _LARGE_HEADS.values(), ids=_LARGE_HEADS)
async def test_a_large_head_is_refused(tmp_path: Path, sent: bytes) -> None:
    async with raw_gateway(tmp_path) as gateway:
        status, _, body = await exchange(gateway, sent)
        assert status == 431
        assert reported(body, 431) == "The head of a request may have at most 65,536 bytes."
        assert gateway.host.begun == []


async def test_bytes_that_are_no_http_are_answered_in_a_sentence(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path) as gateway:
        status, _, body = await exchange(gateway, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert reported(body, status) == "This is not an HTTP request."
        assert gateway.figure("requests_malformed") == 1


async def test_pipelined_requests_behind_a_waiting_one_are_limited(tmp_path: Path) -> None:
    async with (
        raw_gateway(tmp_path) as gateway,
        gateway.connected() as (reader, writer),
    ):
        writer.write(head("/logs/orders/records?wait=300", method="GET"))
        writer.write(head("/livez", method="GET") * 1_000)
        status, _, body = await answered(reader)
        assert "At most 16 requests" in reported(body, status)
        async with asyncio.timeout(60):
            while gateway.logs.waiting:  # noqa: ASYNC110 - it is not announced
                await asyncio.sleep(0.01)


# --- all together


async def test_connections_beyond_the_limit_are_refused_as_retryable(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path, connections_max=2) as gateway:
        async with gateway.connected(), gateway.connected():
            status, headers, body = await exchange(gateway, head(_BUY, "Content-Length: 0"))
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert "Too many connections" in reported(body, 503)
            assert gateway.host.begun == []
        await gateway.until_figure("connections_refused", 1)
        assert (await gateway.http.get("/livez")).status_code == 200


async def test_connections_far_beyond_the_limit_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: their time is not over."""
    monkeypatch.setattr(protocol, "_REFUSAL_TIMEOUT_S", 600.0)
    async with raw_gateway(tmp_path, connections_max=2) as gateway:
        opened = [
            await asyncio.open_connection("127.0.0.1", gateway.server.port) for _ in range(200)
        ]
        try:
            ends = [asyncio.ensure_future(reader.read()) for reader, _ in opened]
            await asyncio.wait(ends[-100:], timeout=60)
            assert all(end.done() for end in ends[-100:])
            assert sum(not end.done() for end in ends) <= 2 + 64
        finally:
            for _, writer in opened:
                writer.close()
            await asyncio.gather(*ends, return_exceptions=True)


async def test_request_bodies_share_one_byte_budget(tmp_path: Path) -> None:
    """Small requests are served nevertheless; large ones again when the first has left."""
    async with raw_gateway(tmp_path, gateway_bytes_max=200 * KIB) as gateway:
        async with gateway.connected() as (_, writer):
            writer.write(head(_BUY, _JSON, f"Content-Length: {MIB}") + b" " * 150 * KIB)
            await gateway.until_figure("bytes", 150 * KIB)
            refused = await gateway.http.post(_BUY, content=b" " * 100 * KIB)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["retryable"] is True
            assert gateway.host.begun == []
            assert (await gateway.http.post(f"{_BUY}?async=1", content=b"{}")).is_success
        await gateway.until_figure("clients_left", 1)
        answer = await gateway.http.post(f"{_BUY}?async=1", content=b" " * 100 * KIB)
        assert answer.is_success
        await gateway.until_free()


async def test_pages_and_streams_count_against_the_byte_budget(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path, gateway_bytes_max=200 * KIB) as gateway:
        for _ in range(3):
            await gateway.logs.log("orders").append(b"x" * 100 * KIB)
        for direction in ("next", "prev"):
            answer = await gateway.http.get(f"/logs/orders/records?direction={direction}")
            assert (answer.status_code, answer.json()["retryable"]) == (503, True)
        assert (await gateway.http.get("/logs/orders/records?limit=1")).is_success
        assert (await gateway.http.get("/logs/orders/stream")).content == b""
        await gateway.until_free()


@pytest.mark.parametrize("direction", ["next", "prev"])
async def test_a_page_is_limited_in_bytes_and_names_where_it_continues(
    tmp_path: Path, direction: str
) -> None:
    """Bytes of text: a zero byte takes six."""
    async with raw_gateway(tmp_path) as gateway:
        for _ in range(12):
            await gateway.logs.log("orders").append(bytes(500 * KIB))
        seen: list[int] = []
        query: dict[str, Any] = {"direction": direction, "limit": 10_000}
        more = True
        while more:
            page = await gateway.http.get("/logs/orders/records", params=query)
            assert len(page.content) < 8 * MIB
            found = page.json()
            seen += [record["seqnum"] for record in found["records"]]
            more = found["more"]
            query["bound"] = found["next_bound"]
        assert sorted(seen) == list(range(12))
        assert seen == sorted(seen, reverse=direction == "prev")


# --- links


async def test_incomplete_websocket_messages_share_the_byte_budget(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path, gateway_bytes_max=300 * KIB) as gateway:
        url = f"ws://127.0.0.1:{gateway.server.port}/client"
        async with websockets.connect(url) as first, websockets.connect(url) as second:
            for client in (first, second):
                await client.recv()
            # The frame of a link says that it has 8 MiB, and comes in part.
            await first.send((8 * MIB).to_bytes(4, "big") + bytes(100 * KIB))
            await first.send(bytes(100 * KIB))
            await gateway.until_figure("bytes", 200 * KIB)
            await second.send((8 * MIB).to_bytes(4, "big") + bytes(120 * KIB))
            await asyncio.wait_for(second.wait_closed(), 60)
        await gateway.until_free()


async def test_an_idle_link_has_no_time_limit(
    tmp_path: Path, check_an_hour_later: Callable[[], None]
) -> None:
    async with raw_gateway(tmp_path) as gateway:
        url = f"ws://127.0.0.1:{gateway.server.port}/client"
        async with websockets.connect(url) as client:
            await client.recv()
            for _ in range(2):  # after the upgrade, and after a ping
                check_an_hour_later()
                await asyncio.wait_for(await client.ping(), 60)
        assert gateway.figure("clients_too_slow") == 0


_PING = b"\x89\x80" + bytes(4)
_MESSAGE = b"\x82\x84" + bytes(4) + (8).to_bytes(4, "big")
"""Both are masked with zeros. The message is the first part of a frame of a link."""


@pytest.mark.parametrize("before", [b"", _PING, _MESSAGE], ids=["alone", "ping", "message"])
async def test_an_incomplete_websocket_message_is_abandoned(tmp_path: Path, before: bytes) -> None:
    async with raw_gateway(tmp_path, body_timeout_s=0.1) as gateway:
        url = f"ws://127.0.0.1:{gateway.server.port}/client"
        async with websockets.connect(url) as client:
            await client.recv()
            client.transport.write(before + b"\x82\xfe\xff\xff\x00\x00\x00\x00" + bytes(1_000))
            await asyncio.wait_for(client.wait_closed(), 60)
        assert gateway.figure("clients_too_slow") == 1


async def test_a_large_websocket_message_is_refused(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path) as gateway:
        url = f"ws://127.0.0.1:{gateway.server.port}/client"
        async with websockets.connect(url) as client:
            await client.send(bytes(MIB))
            await asyncio.wait_for(client.wait_closed(), 60)
            assert client.close_code == 1009


# --- batches


_LARGE_BATCHES = {
    "too many records": (b'{"records":[' + b",".join([b"{}"] * 300_000) + b"]}", 413),
    "wrong records": (b'{"records":[' + b",".join([b'{"dat":1}'] * 9_000) + b"]}", 422),
    "wrong tags": (b'{"data":"x","tags":[' + b",".join([b"{}"] * 500_000) + b"]}", 422),
    "unknown fields": (b"{" + b",".join(b'"k%d":1' % n for n in range(200_000)) + b"}", 422),
}


@pytest.mark.parametrize(("body", "status"), _LARGE_BATCHES.values(), ids=_LARGE_BATCHES)
async def test_a_large_batch_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes, status: int
) -> None:
    """Seconds were spent on collecting what is wrong with each of them."""

    def collects_all(*_: object, **__: object) -> None:
        pytest.fail("all faults of a large body are collected")

    monkeypatch.setattr("indilog_compute.gateway.requests.parse_json", collects_all)
    monkeypatch.setattr("indilog_compute.gateway.values.RecordBody.entry", collects_all)
    async with raw_gateway(tmp_path) as gateway:
        answer = await gateway.http.post("/logs/orders/records", content=body)
        assert answer.status_code == status
        assert "\n" not in answer.json()["detail"]
        assert gateway.logs.position == 0
