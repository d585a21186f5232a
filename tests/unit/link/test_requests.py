"""Requests to a gateway: what a client learns when a connection fails."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from indilog.base.errors import CallOutcomeUnknownError, NotReadyError
from indilog.base.log import Session
from indilog.link.access import Endpoint
from indilog.link.requests import GatewayRequests

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (httpx.ConnectError("refused"), NotReadyError),
        (httpx.ReadError("reset"), CallOutcomeUnknownError),
        # Raised by anyio when uvloop has closed the connection before the request was sent.
        (AttributeError("'NoneType' object has no attribute 'getpeername'"), NotReadyError),
    ],
)
async def test_an_outcome_is_unknown_only_if_the_request_was_sent(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    async def fail(*_args: Any, **_more: Any) -> httpx.Response:  # noqa: ANN401 - as httpx's own
        raise raised

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", fail)
    requests = GatewayRequests(lambda: Endpoint("http://127.0.0.1:9"), Session())
    with pytest.raises(expected):
        await requests.send("POST", "/apps")
