"""A stub of the platform: an app's functions over a log in memory, and the HTTP that the demos
need.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from indilog.apps.app import App, Context, Function
from indilog.base.log import Session
from indilog.testing import MemoryLogs
from tests.support.flow_executions import NothingHeld


class Functions(NothingHeld):
    """An app's functions, which can call each other."""

    def __init__(self, app: App, logs: MemoryLogs | None = None) -> None:
        self.app = app
        self.logs = logs or MemoryLogs()
        self.calls: list[str] = []
        self._ids = itertools.count()
        self.sent: list[asyncio.Task[bytes]] = []

    def context(self, session: Session | None = None) -> Context:
        """Return a context, and make it the task's (`indilog.apps.app.current_context`)."""
        context = Context(self.logs, self, session=session, invocation_id=str(next(self._ids)))
        context.begin()
        return context

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        known: Function = self.app.functions[function.removeprefix(f"{self.app.name}.")]
        self.calls.append(known.name)
        checked = known.signature.arguments(arguments)
        context = self.context(session)
        given = (context,) if known.signature.takes_context else ()
        return known.signature.result_text(await known.body(*given, **checked))

    async def send(
        self, function: str, arguments: bytes, session: Session, *, delay_s: float, key: str = ""
    ) -> str:
        self.sent.append(asyncio.ensure_future(self.call(function, arguments, session)))
        return "sent"


class Gateway:
    """Serves the HTTP that the demos need; `tamper` may change an answer."""

    def __init__(self, app: App) -> None:
        self.functions = Functions(app)
        self.logs = self.functions.logs
        self.url = ""
        self.serving: set[asyncio.Task[None]] = set()
        self.calls: list[str] = []
        self.tamper: Callable[[str, bytes], bytes | tuple[int, bytes]] = lambda _, result: result

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(asyncio.ensure_future(self.serve(reader, writer)))

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
            pass
        finally:
            writer.close()

    async def answer(self, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        url = urlsplit(target)
        if method == "post":
            return await self.invoke(url.path.rpartition("/")[2], body)
        if url.path.endswith("/tail"):
            return 200, json.dumps({"tail": self.logs.position}).encode()
        if url.path == "/status":
            part = {"hits": 3, "misses": 1}
            return 200, json.dumps({"engine": {"suffix": part, "answer_cache": part}}).encode()
        _, _, name, _ = url.path.split("/")
        return 200, await self.page(unquote(name), parse_qs(url.query))

    async def page(self, name: str, query: dict[str, list[str]]) -> bytes:
        bound, limit = int(query["bound"][0]), int(query["limit"][0])
        found = await self.logs.log(name).read_range(bound=bound, limit=min(limit, 7))
        records = [{"seqnum": one.seqnum, "data": one.data.decode()} for one in found]
        after = found[-1].seqnum + 1 if found else bound
        return json.dumps({"records": records, "next_bound": after}).encode()

    async def invoke(self, function: str, arguments: bytes) -> tuple[int, bytes]:
        self.calls.append(function)
        result: Any = await self.functions.call(function, arguments, Session())
        reply = self.tamper(function, result)
        return reply if isinstance(reply, tuple) else (200, reply)


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[Gateway]:
    gateway = Gateway(app)
    server = await asyncio.start_server(gateway.accept, "127.0.0.1", 0)
    gateway.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield gateway
    server.close()
    await server.wait_closed()
    await asyncio.gather(*gateway.serving)
