"""Heads of requests that no route may see: text that is not UTF-8, positions from nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from indilog.base.errors import TrimmedError
from tests.support.repeated import repeated
from tests.unit.compute.gateway.raw_gateway import RawGateway, raw_gateway

pytestmark = pytest.mark.asyncio

_ROUTES = (
    ("GET", "/logs/orders/records"),
    ("GET", "/logs/orders/records/0"),
    ("GET", "/logs/orders/tail"),
    ("GET", "/logs/orders/stream"),
    ("POST", "/logs/orders/records"),
    ("POST", "/functions/shop/buy"),
)


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RawGateway]:
    async with raw_gateway(tmp_path) as made:
        await made.logs.log("orders").append(b"x")
        yield made


@pytest.mark.parametrize(("method", "path"), _ROUTES)
@pytest.mark.parametrize(
    "position", ["2", "x", *map(repeated, ("-1", "1" + "0" * 23, "999999999999999999"))]
)
async def test_a_position_beyond_the_log_is_refused_at_once_on_every_route(
    gateway: RawGateway, method: str, path: str, position: str
) -> None:
    headers = {"Indilog-Position": position}
    async with asyncio.timeout(60):
        answer = await gateway.http.request(method, path, headers=headers, json={"data": "y"})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Indilog-Position"
    assert answer.json()["retryable"] is False
    assert gateway.host.begun == []
    assert gateway.logs.position == 1


async def test_a_position_that_another_node_has_reached_is_accepted(gateway: RawGateway) -> None:
    for _ in range(3):
        await gateway.logs.log("orders").append(b"x")
        position = str(gateway.logs.position)
        answer = await gateway.http.get("/logs/orders/tail", headers={"Indilog-Position": position})
        assert answer.is_success


@pytest.mark.parametrize(
    "target",
    ["/logs/%FE/tail", "/logs/%FF/tail", "/logs/orders/records?tag=%FF", "/functions/%C3/buy"],
)
async def test_text_that_is_not_utf_8_is_refused(gateway: RawGateway, target: str) -> None:
    """Each such byte would become the same character: different names, one log."""
    answer = await gateway.http.get(target)
    assert answer.status_code == 422
    assert "is not UTF-8" in answer.json()["detail"]


@pytest.mark.parametrize("last", ["-5", "x", "1.5", "9" * 30])
async def test_a_malformed_last_event_id_is_refused(gateway: RawGateway, last: str) -> None:
    answer = await gateway.http.get("/logs/orders/stream", headers={"Last-Event-ID": last})
    assert answer.status_code == 422


@pytest.mark.parametrize("query", ["bound=0", ""])
async def test_a_stream_from_below_the_floor_is_an_error_before_it_begins(
    gateway: RawGateway, query: str
) -> None:
    log = gateway.logs.log("orders")
    await log.append(b"y")
    await log.trim(2)
    headers = {} if query else {"Last-Event-ID": "0"}
    answer = await gateway.http.get(f"/logs/orders/stream?{query}", headers=headers)
    assert (answer.status_code, answer.json()["next_seqnum"]) == (410, 2)
    assert answer.json()["title"] == TrimmedError.__name__


@pytest.mark.parametrize("age_s", [1e-9, 0.5, 0, -1])
async def test_a_retention_below_the_least_is_refused(gateway: RawGateway, age_s: float) -> None:
    answer = await gateway.http.put("/logs/orders/retention", json={"age_s": age_s})
    assert answer.is_client_error
    assert (await gateway.http.get("/logs/orders/retention")).json()["age_s"] is None
