"""The gateway when the platform stops: the server cancels what still runs, and every caller
gets a clear error (ARCHITECTURE 11).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from indilog.base.log import Session
from indilog.config import Config, node_config
from indilog.testing import MemoryLog, MemoryLogs
from indilog_compute.gateway import create_gateway
from indilog_compute.gateway.app import GatewayApp
from indilog_compute.positions import Positions
from indilog_compute.workers.host import FunctionHost

pytestmark = pytest.mark.asyncio


class FakeCall:
    """A call of `shop.buy` that does not end; `worker` None: it has not begun."""

    name = "shop.buy"
    invocation = "i-1"

    def __init__(self, worker: object) -> None:
        self.worker = worker
        self.outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()


class FakeHost:
    """Runs one call."""

    generation = 0

    def __init__(self, call: FakeCall) -> None:
        self._call = call
        self.cancelled: list[FakeCall] = []
        self.positions = Positions(MemoryLogs())

    def call(self, *_: object, **__: object) -> FakeCall:
        return self._call

    def cancel(self, call: FakeCall) -> None:
        self.cancelled.append(call)


class Exchange:
    """One request to the application, as a server would make it."""

    def __init__(
        self,
        app: GatewayApp,
        method: str,
        target: str,
        *,
        body: bytes | None = b"",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        path, _, query = target.partition("?")
        scope = {
            "type": "http", "method": method, "path": path, "query_string": query.encode(),
            "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        self.sent: list[MutableMapping[str, Any]] = []
        self._body = body
        self._asked = 0
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        self._asked += 1
        if self._body is None or self._asked > 1:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self._body}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    async def cut_off(self) -> None:
        """Let the request run until it waits, then cancel it as a stopping server does."""
        for _ in range(50):
            await asyncio.sleep(0)
        assert not self.task.done()
        self.task.cancel()
        await self.task

    def problem(self) -> dict[str, Any]:
        """Return the answer, which must be a 503 in problem details with `Retry-After`."""
        start, body = self.sent
        headers = dict(start["headers"])
        assert start["status"] == 503
        assert headers[b"content-type"] == b"application/problem+json"
        assert headers[b"retry-after"] == b"1"
        reported: dict[str, Any] = json.loads(body["body"])
        assert reported["status"] == 503
        return reported


def gateway_of(host: object, directory: Path, logs: MemoryLogs | None = None) -> GatewayApp:
    config = Config(node=node_config(data_dir=directory, workers=0))
    return create_gateway(host, logs or MemoryLogs(config.cluster), dict, config)  # type: ignore[arg-type]


@pytest.fixture
def gateway(tmp_path: Path) -> Callable[[], GatewayApp]:
    def made() -> GatewayApp:
        config = Config(node=node_config(data_dir=tmp_path, workers=0))
        logs = MemoryLogs(config.cluster)
        return gateway_of(FunctionHost(config, logs), tmp_path, logs)

    return made


async def test_a_running_call_is_stopped_and_may_have_had_effects(tmp_path: Path) -> None:
    call = FakeCall(worker=object())
    host = FakeHost(call)
    exchange = Exchange(gateway_of(host, tmp_path), "POST", "/functions/shop/buy", body=b"{}")
    await exchange.cut_off()
    reported = exchange.problem()
    assert (reported["title"], reported["retryable"]) == ("CallOutcomeUnknownError", False)
    assert "shop.buy" in reported["detail"]
    assert host.cancelled == [call]


@pytest.mark.parametrize("body", [b"{}", None], ids=["waits for a worker", "is being uploaded"])
async def test_a_call_that_has_not_begun_is_answered_as_retryable(
    tmp_path: Path, body: bytes | None
) -> None:
    host = FakeHost(FakeCall(worker=None))
    exchange = Exchange(gateway_of(host, tmp_path), "POST", "/functions/shop/buy", body=body)
    await exchange.cut_off()
    reported = exchange.problem()
    assert (reported["title"], reported["retryable"]) == ("NotReadyError", True)


@pytest.mark.parametrize(
    ("key", "title", "retryable"),
    [(None, "CallOutcomeUnknownError", False), (b"k", "NotReadyError", True)],
)
async def test_an_asynchronous_call_that_is_being_recorded_may_run(
    tmp_path: Path, key: bytes | None, title: str, retryable: bool
) -> None:
    """A call with a key may be repeated nevertheless, because it runs once."""

    class Recording(FakeHost):
        async def send(self, *_: object, **__: object) -> str:
            await asyncio.Event().wait()
            return "never"

    app = gateway_of(Recording(FakeCall(None)), tmp_path)
    headers = [(b"idempotency-key", key)] if key else []
    exchange = Exchange(app, "POST", "/functions/shop/buy?async=1", body=b"{}", headers=headers)
    await exchange.cut_off()
    reported = exchange.problem()
    assert (reported["title"], reported["retryable"]) == (title, retryable)


async def test_a_waiting_read_is_answered_as_retryable(gateway: Callable[[], GatewayApp]) -> None:
    exchange = Exchange(gateway(), "GET", "/logs/orders/records?wait=60")
    await exchange.cut_off()
    assert exchange.problem()["retryable"] is True


async def test_an_append_under_way_is_not_answered_as_retryable(tmp_path: Path) -> None:
    class NeverAcknowledges(MemoryLogs):
        def log(self, name: str, session: Session | None = None) -> MemoryLog:
            log = super().log(name, session)
            log.append = lambda *_, **__: asyncio.Event().wait()  # type: ignore[method-assign]
            return log

    logs = NeverAcknowledges(Config().cluster)
    app = gateway_of(FakeHost(FakeCall(None)), tmp_path, logs)
    exchange = Exchange(app, "POST", "/logs/orders/records", body=b'{"data": "x"}')
    await exchange.cut_off()
    reported = exchange.problem()
    assert (reported["title"], reported["retryable"]) == ("OutcomeUnknownError", False)


async def test_streams_end_at_once_and_waiting_requests_continue(
    gateway: Callable[[], GatewayApp],
) -> None:
    app = gateway()
    exchange = Exchange(app, "GET", "/logs/orders/stream")
    waiting = Exchange(app, "GET", "/logs/orders/records?wait=60")
    async with asyncio.timeout(30):
        while not exchange.sent:  # noqa: ASYNC110 - a thread checks the query first
            await asyncio.sleep(0)
    app.end_streams()
    await asyncio.wait_for(exchange.task, 60)
    assert not waiting.task.done()
    await waiting.cut_off()
    assert [message["type"] for message in exchange.sent] == [
        "http.response.start", "http.response.body",
    ]  # fmt: skip
    assert not exchange.sent[-1].get("more_body")
