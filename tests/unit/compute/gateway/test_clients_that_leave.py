"""Clients that leave before their request is served: with half a body, or while it waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from tests.unit.compute.gateway.raw_gateway import RawGateway, head, raw_gateway

pytestmark = pytest.mark.asyncio

_BUY = "/functions/shop/buy"
_JSON = "Content-Type: application/json"
_HALF_BODIES = {
    "nothing of it": head(_BUY, _JSON, "Content-Length: 100"),
    "a part of its length": head(_BUY, _JSON, "Content-Length: 100") + b'{"n": 1}',
    "a chunk without an end": head(_BUY, _JSON, "Transfer-Encoding: chunked")
    + b'8\r\n{"n": 1}\r\n',
    "half a chunk": head(_BUY, _JSON, "Transfer-Encoding: chunked") + b'80\r\n{"n": 1}',
}


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RawGateway]:
    async with raw_gateway(tmp_path) as made:
        yield made


@pytest.mark.parametrize("sent", _HALF_BODIES.values(), ids=_HALF_BODIES)
async def test_a_call_with_an_incomplete_body_is_never_executed(
    gateway: RawGateway, sent: bytes
) -> None:
    with structlog.testing.capture_logs() as logged:
        await gateway.cut(sent)
        await gateway.until_figure("clients_left", 1)
    assert gateway.host.begun == []
    assert logged == []


@pytest.mark.parametrize("header", ["Idempotency-Key: k", "X-Other: 1"])
async def test_an_incomplete_body_is_never_recorded_and_takes_no_key(
    gateway: RawGateway, header: str
) -> None:
    target = _BUY if "Key" in header else f"{_BUY}?async=1"
    await gateway.cut(head(target, _JSON, header, "Content-Length: 100") + b"{}")
    await gateway.until_figure("clients_left", 1)
    assert gateway.host.begun == []
    name, _, value = header.partition(": ")
    answer = await gateway.http.post(target, json={"n": 1}, headers={name: value})
    assert answer.is_success
    assert gateway.host.begun == [b'{"n":1}']


@pytest.mark.parametrize("path", ["/logs/orders/records", "/logs/orders/trim", "/apps/shop"])
async def test_an_incomplete_body_has_no_effect_on_other_routes(
    gateway: RawGateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = "PUT" if path == "/apps/shop" else "POST"
    whole = b'{"data": "x"}'
    with structlog.testing.capture_logs() as logged, caplog.at_level(logging.WARNING):
        await gateway.cut(head(path, _JSON, "Content-Length: 50", method=method) + whole)
        await gateway.until_figure("clients_left", 1)
    assert gateway.logs.position == 0
    assert logged == []
    assert caplog.records == []


async def test_a_call_that_waits_is_dropped_when_its_client_leaves(gateway: RawGateway) -> None:
    gateway.host.worker = None
    async with gateway.connected() as (_, writer):
        writer.write(head(_BUY, _JSON, "Content-Length: 2") + b"{}")
        await asyncio.wait_for(gateway.host.called.wait(), 60)
    await gateway.until_figure("clients_left", 1)
    assert gateway.host.dropped == gateway.host.calls


async def test_a_call_that_has_begun_continues_when_its_client_leaves(gateway: RawGateway) -> None:
    gateway.host.worker = None
    async with gateway.connected() as (_, writer):
        writer.write(head(_BUY, _JSON, "Content-Length: 2") + b"{}")
        await asyncio.wait_for(gateway.host.called.wait(), 60)
        gateway.host.calls[0].worker = object()
    await gateway.until_figure("clients_left", 1)
    assert gateway.host.dropped == []


@pytest.mark.parametrize("path", ["/logs/orders/records?wait=300", "/logs/orders/stream"])
async def test_a_read_that_waits_ends_when_its_client_leaves(
    gateway: RawGateway, path: str
) -> None:
    async with gateway.connected() as (_, writer):
        writer.write(head(path, method="GET"))
        async with asyncio.timeout(60):
            while not gateway.logs.waiting:  # noqa: ASYNC110 - it is not announced
                await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        while gateway.logs.waiting:  # noqa: ASYNC110 - it is not announced
            await asyncio.sleep(0.01)
