"""The shop on this machine: a page that shows an order's status live, and the services outside.

`python -m functions.orders.shop` needs a running platform with the app deployed. The page talks to
this process only. This process holds the platform's token, and relays the events of one order; the
browser gets neither token nor cookie. Anyone who knows the id of an order can see its status. So
ids must not be guessable: the page chooses random ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Annotated, Any, Final

import httpx
import typer
import uvicorn
from fastapi import FastAPI, Header, Path
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from functions.orders.events import EVENTS_LOG
from functions.orders.outside import services
from functions.orders.sales import Order, Settings
from indilog import reach

PORT: Final = 8090
GOODS: Final = {"tea": 450, "teapot": 3_900, "samovar": 89_000}
"""Prices in cents. A samovar needs an approval."""
APPROVAL_S: Final = 60.0
_PIECES: Final = 100
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
}
_TIMEOUT_S: Final = 60.0
_Id = Annotated[str, Path(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


def shop(url: str) -> FastAPI:
    """Return the web application of the shop.

    Args:
        url: URL of the platform.
    """

    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(**reach(url).for_httpx, timeout=_TIMEOUT_S) as platform:
            app.state.platform = platform
            yield

    web = FastAPI(lifespan=connected, openapi_url=None)
    # A page of another site, whose host name leads here, must not act as this page.
    web.add_middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"])
    text = FilePath(__file__).with_name("page.html").read_text()

    async def call(function: str, arguments: dict[str, Any]) -> JSONResponse:
        platform: httpx.AsyncClient = web.state.platform
        answer = await platform.post(f"/functions/orders/{function}", json=arguments)
        return JSONResponse(answer.json(), answer.status_code)

    @web.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=_HEADERS)

    @web.get("/goods")
    async def goods() -> dict[str, int]:
        return GOODS

    @web.post("/orders")
    async def place(order: Order) -> JSONResponse:
        return await call("place", {"order": asdict(order)})

    @web.post("/orders/{order}/{does}")
    async def act(
        order: _Id, does: Annotated[str, Path(pattern="^(approve|decline|cancel)$")]
    ) -> JSONResponse:
        if does == "cancel":
            return await call("cancel", {"order": order})
        return await call("decide", {"order": order, "approve": does == "approve"})

    @web.get("/orders/{order}/events")
    async def events(
        order: _Id, last_event_id: Annotated[int | None, Header(ge=0)] = None
    ) -> StreamingResponse:
        return StreamingResponse(
            relayed_events(web.state.platform, order, last_event_id),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )

    return web


async def relayed_events(
    platform: httpx.AsyncClient, order: str, last_event_id: int | None
) -> AsyncIterator[bytes]:
    """Relay the server-sent events of one order; a browser that reconnects gets later events."""
    headers = {} if last_event_id is None else {"last-event-id": str(last_event_id)}
    stream = platform.stream(
        "GET",
        f"/logs/{EVENTS_LOG.replace('/', '%2F')}/stream",
        params={"tag": f"order:{order}"},
        headers=headers,
        timeout=httpx.Timeout(_TIMEOUT_S, read=None),  # the next event may be days away
    )
    async with stream as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            yield part


def load(url: str, settings: Settings) -> None:
    """Load the shop's goods and settings into the platform.

    Raises:
        httpx.HTTPError: the platform does not answer, or the app is not deployed.
    """
    goods = {item: {"price": price, "pieces": _PIECES} for item, price in GOODS.items()}
    with httpx.Client(**reach(url).for_httpx, timeout=_TIMEOUT_S) as platform:
        arguments = {"goods": goods, "settings": asdict(settings)}
        platform.post("/functions/orders/load", json=arguments).raise_for_status()


def main(
    url: Annotated[str, typer.Option(help="URL of the platform.")] = "http://127.0.0.1:8080",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page.")] = PORT,
    failing: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of the services' requests that fail.")
    ] = 0.2,
) -> None:
    """Run the shop until Ctrl-C."""
    with services(failing=failing) as outside:
        try:
            load(url, Settings(services=outside.url, approval_s=APPROVAL_S))
        except httpx.HTTPError:
            typer.echo(
                f"The app orders does not answer at {url}: start the platform (./start), and "
                "deploy the app (indilog deploy functions/orders).",
                err=True,
            )
            raise typer.Exit(2) from None
        typer.echo(f"The shop is on http://127.0.0.1:{port}; Ctrl-C stops it.")
        uvicorn.run(shop(url), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
