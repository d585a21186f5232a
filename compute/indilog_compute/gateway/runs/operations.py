"""Runs operations of applications for the gateway's routes. An operation runs in the same way as if
a client had sent a request. `RunRoutes`, `EventStream` and `wait_for_result` call `OperationCalls`.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, Final, NamedTuple, NoReturn

import msgspec
from fastapi import Response

from indilog_compute.gateway.clients import SHARE
from indilog_compute.gateway.heads import POSITION_HEADER
from indilog_compute.gateway.invoke import OPERATIONS_PREFIX, InvokeEndpoint
from indilog_compute.gateway.resources import GatewayResources

_FAILED_FROM: Final = 400


class OperationAnswer(NamedTuple):
    """The answer to `POST /operations/{app}/{operation}`.

    Attributes:
        headers: the headers by name; the names are in lower case.
        body: JSON text: the result, or a problem.
    """

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_failure(self) -> bool:
        """Whether the body is a problem."""
        return self.status >= _FAILED_FROM

    @property
    def position(self) -> int:
        """The position of the session after the operation; 0: the answer has no position."""
        return int(self.headers.get(POSITION_HEADER.decode(), "0"))

    @property
    def detail(self) -> str:
        """The sentence of a problem."""
        return str(msgspec.json.decode(self.body)["detail"])

    def response(self) -> Response:
        """Return this answer as the answer to a request."""
        headers = {name: value for name, value in self.headers.items() if name != "content-length"}
        return Response(self.body, status_code=self.status, headers=headers)


class OperationCalls:
    """Runs operations through the gateway's endpoint for calls. So an operation may run on this
    node or on another node.

    Args:
        invoke: the endpoint.
        resources: has the byte budget that counts the arguments.
    """

    def __init__(self, invoke: InvokeEndpoint, resources: GatewayResources) -> None:
        self._invoke = invoke
        self._resources = resources

    async def run(
        self, app: str, operation: str, arguments: bytes, *, position: int = 0
    ) -> OperationAnswer:
        """Run an operation and return its answer. If the caller is cancelled, the operation is
        cancelled too.

        Args:
            app: name of the application.
            operation: name of the operation.
            arguments: a JSON object.
            position: position of the caller's session.
        """
        path = f"{OPERATIONS_PREFIX}{app}/{operation}"
        share = self._resources.budget.share()
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(POSITION_HEADER, b"%d" % position)] if position else [],
            SHARE: share,
        }
        answer = _Answer(arguments)
        try:
            await self._invoke(scope, answer.receive, answer.send)
        finally:
            share.free()
        return answer.whole()


class _Answer:
    """The client of one request inside this process: sends the body and collects the answer."""

    def __init__(self, body: bytes) -> None:
        self._given: bytes | None = body
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts = bytearray()

    async def receive(self) -> MutableMapping[str, Any]:
        """Return the body of the request, once; this client never disconnects."""
        if (body := self._given) is None:
            await _never()
        self._given = None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self._parts += message.get("body", b"")

    def whole(self) -> OperationAnswer:
        """Return the answer, which is complete."""
        assert self._status, "the endpoint answers every request of a client that stays"
        return OperationAnswer(self._status, self._headers, bytes(self._parts))


async def _never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")
