"""The HTTP routes of the catalog of logs."""

from __future__ import annotations

from typing import cast
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from indilog.base.log_kinds import LogInfo, LogKind
from indilog.link.byte_budget import ByteBudget
from indilog_compute.gateway.clients import SHARE
from indilog_compute.log_kinds import LogKinds
from indilog_compute.log_kinds.routes import catalog_router

pytestmark = pytest.mark.asyncio


class NotedSwitches:
    """Notes what is switched."""

    async def switch(self, name: str, kind: str, *, stripes: int | None) -> LogInfo:
        return LogInfo(name, cast("LogKind", kind), 0.0, stripes or 0)


@pytest.mark.parametrize("name", ["orders", "shop/orders", "50 %/ü"])
async def test_a_log_of_any_name_is_switched(name: str) -> None:
    app = FastAPI()
    app.include_router(catalog_router(cast("LogKinds", NotedSwitches())))

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, SHARE: ByteBudget(10**6).share()}, receive, send)

    transport = httpx.ASGITransport(counted)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        path = f"/logs/{quote(name, safe='')}/switch"
        answer = await client.post(path, json={"kind": "owned"})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["log"], answer.json()["kind"]) == (name, "owned")
