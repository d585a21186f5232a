"""A gateway on a real socket, and clients that write bytes to it as no library would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from indilog.config import ClusterConfig, Config, node_config
from indilog.link.link_messages import Returned
from indilog.testing import MemoryLogs
from indilog_compute.gateway import GatewayServer, create_gateway
from indilog_compute.gateway.resources import GatewayResources
from indilog_compute.workers.host import FunctionHost


class RecordedCall:
    """A call of `shop.buy` as the host under test keeps it; `worker` None: it waits."""

    name = "shop.buy"
    invocation = "i-1"

    def __init__(self, worker: object) -> None:
        self.worker = worker
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class RecordingHost(FunctionHost):
    """Records the calls that reach it, and runs none.

    Attributes:
        begun: arguments of each call, in order of arrival.
        dropped: calls that were cancelled.
        worker: what new calls run on; None: they wait.
        called: set when a call has arrived.
    """

    def __init__(self, config: Config, logs: MemoryLogs) -> None:
        super().__init__(config, logs)
        self.begun: list[bytes] = []
        self.calls: list[RecordedCall] = []
        self.dropped: list[object] = []
        self.worker: object | None = object()
        self.called = asyncio.Event()

    def call(self, name: str, arguments: bytes, **_: Any) -> Any:  # noqa: ANN401
        """Record a plain call."""
        self._record(arguments)
        call = RecordedCall(self.worker)
        self.calls.append(call)
        return call

    def cancel(self, call: Any) -> None:  # noqa: ANN401
        """Record that a call was dropped."""
        self.dropped.append(call)

    async def call_once(self, name: str, arguments: bytes, **_: Any) -> Any:  # noqa: ANN401
        """Record a call with a key."""
        self._record(arguments)
        return "i-2", Returned(0, b"1")

    async def send(self, name: str, arguments: bytes, **_: Any) -> str:  # noqa: ANN401
        """Record an asynchronous call."""
        self._record(arguments)
        return "i-3"

    def _record(self, arguments: bytes) -> None:
        self.begun.append(arguments)
        self.called.set()


class WatchedLogs(MemoryLogs):
    """Logs in memory that count the reads of users' logs that wait.

    Attributes:
        waiting: reads that wait for a record now.
    """

    waiting = 0

    async def appended(self, stream: bytes) -> None:
        """Count one more while it waits."""
        is_of_user = not stream.startswith(b"$")
        self.waiting += is_of_user
        try:
            await super().appended(stream)
        finally:
            self.waiting -= is_of_user


class RawGateway:
    """A gateway that listens, the host and logs behind it, its figures and an HTTP client."""

    def __init__(
        self,
        host: RecordingHost,
        logs: WatchedLogs,
        server: GatewayServer,
        http: httpx.AsyncClient,
        resources: GatewayResources,
    ) -> None:
        self.host = host
        self.logs = logs
        self.server = server
        self.http = http
        self._resources = resources

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection; it is closed when the block is left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def cut(self, sent: bytes) -> None:
        """Send bytes on a connection of their own, and close it."""
        async with self.connected() as (_, writer):
            writer.write(sent)
            await writer.drain()

    def figure(self, name: str) -> int:
        """Return one of the gateway's counts. A request for it would have the same limits."""
        return self._resources.status()[name]

    async def until_figure(self, name: str, value: int) -> None:
        """Wait until a count has reached `value`."""
        async with asyncio.timeout(60):
            while self.figure(name) < value:  # noqa: ASYNC110 - the count is not announced
                await asyncio.sleep(0.01)

    async def until_free(self) -> None:
        """Wait until the byte budget is unused."""
        async with asyncio.timeout(60):
            while self.figure("bytes"):  # noqa: ASYNC110 - the count is not announced
                await asyncio.sleep(0.01)


def head(target: str, *headers: str, method: str = "POST") -> bytes:
    """Return a request's head."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


@asynccontextmanager
async def raw_gateway(
    directory: Path,
    *,
    cluster: dict[str, Any] | None = None,
    on_config: Callable[[Config], None] = lambda _: None,
    **node: Any,  # noqa: ANN401
) -> AsyncIterator[RawGateway]:
    """Run a gateway over logs in memory; `node` and `cluster` are its settings."""
    config = Config(
        cluster=ClusterConfig(**(cluster or {})),
        node=node_config(**{"data_dir": directory, "workers": 0, **node}),
    )
    on_config(config)
    logs = WatchedLogs(config.cluster)
    host = RecordingHost(config, logs)
    app = create_gateway(host, logs, lambda: {"ready": True}, config)
    server = GatewayServer(app, "127.0.0.1", 0, resources=app.resources)
    await host.start()
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            yield RawGateway(host, logs, server, http, app.resources)
    finally:
        await server.stop()
        await host.stop()
