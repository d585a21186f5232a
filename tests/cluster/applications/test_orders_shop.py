"""The shop's page on a running platform: it places orders, and relays the events of one order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from functions.orders import shop
from functions.orders.outside import services
from functions.orders.sales import Settings
from tests.cluster.function_platform import Platform, running

SOURCES = Path(shop.__file__).parent
TEA = {"id": "o", "customer": "ann", "lines": {"tea": 1}, "card": "card", "city": "Bonn"}
pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]


@asynccontextmanager
async def the_shop(directory: Path) -> AsyncIterator[tuple[Platform, httpx.AsyncClient]]:
    """Run a platform with the app, its services, and the shop's web application."""
    sources = {path.name: path.read_text() for path in SOURCES.glob("*.py")}
    with services(failing=0.0) as outside:
        async with running(directory, workers=1) as platform:
            assert (await platform.http.put("/apps/orders", json={"sources": sources})).is_success
            goods = {item: {"price": cents, "pieces": 9} for item, cents in shop.GOODS.items()}
            await platform.call("orders.load", goods=goods, settings=Settings(outside.url).__dict__)
            web = shop.shop(platform.url)
            async with (
                web.router.lifespan_context(web),
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(web), base_url="http://127.0.0.1:8090"
                ) as page,
            ):
                yield platform, page


async def events(
    platform: Platform, order: str, after: int | None = None
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """Yield seqnum and content of the events that the shop relays."""
    seqnum = -1
    text = b""
    async for part in shop.relayed_events(platform.http, order, after):
        *lines, text = (text + part).split(b"\n")
        for line in lines:
            if line.startswith(b"id: "):
                seqnum = int(line.removeprefix(b"id: "))
            if line.startswith(b"data: "):
                record = json.loads(line.removeprefix(b"data: "))
                yield seqnum, json.loads(record["data"])


async def test_the_page_shows_the_statuses_of_one_order_live_and_continues_after_a_break(
    tmp_path: Path,
) -> None:
    async with the_shop(tmp_path) as (platform, page):
        for order in ("other", "o"):
            placed = await page.post("/orders", json=TEA | {"id": order})
            assert (placed.status_code, placed.json()) == (200, order)
        seen = []
        async for seqnum, event in events(platform, "o"):
            assert event["order"] == "o"
            seen.append((seqnum, event["status"]))
            if event["status"] == "paid":
                break
        assert [status for _, status in seen] == ["accepted", "charged", "paid"]
        async for place in events(platform, "o", after=seen[0][0]):
            assert (place[0], place[1]["status"]) == seen[1]
            break


@pytest.mark.repeated("tests/unit/functions/test_orders.py")
async def test_the_page_decides_and_cancels(tmp_path: Path) -> None:
    async with the_shop(tmp_path) as (platform, page):
        for does, end in (("approve", "paid"), ("decline", "rejected"), ("cancel", "cancelled")):
            await page.post("/orders", json=TEA | {"id": does, "lines": {"samovar": 1}})
            assert (await page.post(f"/orders/{does}/{does}")).json() is True
            sale = (await platform.call("orders.outcome", order=does)).json()
            assert sale["status"] == end


async def test_the_page_is_served_to_this_machine_only_and_refuses_what_is_unknown(
    tmp_path: Path,
) -> None:
    async with the_shop(tmp_path) as (_, page):
        served = await page.get("/")
        assert served.text == (SOURCES / "page.html").read_text()
        assert "connect-src 'self'" in served.headers["content-security-policy"]
        assert "//" not in served.text.replace("// ", ""), "it loads nothing from elsewhere"
        assert (await page.get("/goods")).json() == shop.GOODS
        for method, path, headers, status in (
            ("GET", "/", {"host": "elsewhere.example"}, 400),
            ("POST", "/orders/o/pay", {}, 422),
            ("POST", "/orders/a%20b/cancel", {}, 422),
            ("POST", "/orders", {"content-type": "text/plain"}, 422),
            ("GET", "/orders/o/events", {"last-event-id": "x"}, 422),
        ):
            answer = await page.request(
                method,
                path,
                headers=headers,
                content=json.dumps(TEA) if path == "/orders" else None,
            )
            assert answer.status_code == status, path
        unknown = await page.post("/orders/unknown/cancel")
        assert unknown.status_code == 500
        assert "There is no order 'unknown'" in unknown.json()["detail"]
