"""`POST /functions/{app}/{function}`: the hot path, a plain ASGI callable inside the gateway.

No routing, no request object, no decoding: the body goes to the worker as it came, the result goes
back as the worker wrote it. (A FastAPI route costs three times a bare ASGI answer.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

import msgspec

from compute.gateway.problems import Problem, problem, problem_of, problem_of_stop, problem_text
from compute.workers.call import Call
from compute.workers.host import FunctionHost
from indilog.calls import Failed, error_from
from indilog.errors import CallOutcomeUnknownError, IndilogError, NotReadyError, TooLargeError

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

PREFIX: Final = "/functions/"
POSITION_HEADER: Final = b"indilog-position"
INVOCATION_HEADER: Final = b"indilog-invocation"
_JSON: Final[Header] = (b"content-type", b"application/json")
_PROBLEM: Final[Header] = (b"content-type", b"application/problem+json")
_TRUE: Final = ("1", "true", "yes")


class InvokeEndpoint:
    """Answers everything below `/functions/`."""

    def __init__(self, host: FunctionHost, *, body_bytes_max: int) -> None:
        self._host = host
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the function that the path names, and answer with its result.

        Being cancelled means that the platform stops: the caller is told that, and whether the
        function had begun.
        """
        try:
            await self._invoke(scope, receive, send)
        except (IndilogError, ValueError) as error:
            await _send_problem(send, problem_of(error))
        except asyncio.CancelledError:  # before there was a call
            await _send_problem(send, problem_of_stop(_nothing_done("the call")))

    async def _invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        app, _, function = path[len(PREFIX) :].partition("/")
        if scope["method"] != "POST":
            told = problem(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"Functions are called with POST, not {scope['method']}.",
            )
            await _send_problem(send, told, ((b"allow", b"POST"),))
            return
        arguments = await _body(receive, self._body_bytes_max)
        name = f"{app}.{function}"
        if scope["query_string"] and _is_async(query := _query(scope)):
            await self._send_async(send, name, arguments, query)
            return
        call = self._host.call(name, arguments, position=_position(scope))
        try:
            outcome = await call.outcome
        except asyncio.CancelledError:
            await _send_problem(send, self._cut_off(call))
            return
        headers = (
            (INVOCATION_HEADER, call.invocation.encode()),
            (POSITION_HEADER, b"%d" % outcome.position),
        )
        if isinstance(outcome, Failed):
            await _send_problem(send, problem_of(error_from(outcome)), headers)
        else:
            await _send(send, HTTPStatus.OK, (_JSON, *headers), outcome.result)

    def _cut_off(self, call: Call) -> Problem:
        """Stop `call`, and return what its caller is told."""
        began = call.worker is not None
        self._host.cancel(call)
        if not began:
            return problem_of_stop(_nothing_done(call.name))
        return problem_of_stop(
            CallOutcomeUnknownError(
                f"The platform stopped while {call.name} ran; it may have had effects."
            )
        )

    async def _send_async(
        self, send: Send, name: str, arguments: bytes, query: dict[str, str]
    ) -> None:
        delay_s = float(query.get("delay", "0"))
        if not 0 <= delay_s < float("inf"):
            raise ValueError(f"delay is a number of seconds, 0 or more, not {query['delay']}.")
        invocation = self._host.send(name, arguments, delay_s=delay_s)
        body = msgspec.json.encode({"invocation": invocation})
        location = (b"location", f"/invocations/{invocation}".encode())
        await _send(send, HTTPStatus.ACCEPTED, (_JSON, location), body)


def _nothing_done(what: str) -> NotReadyError:
    return NotReadyError(f"The platform stopped before {what} began; repeat it when it is back.")


async def _body(receive: Receive, bytes_max: int) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    while message.get("more_body"):
        if len(body) > bytes_max:
            break
        message = await receive()
        body += message.get("body", b"")
    if len(body) > bytes_max:
        raise TooLargeError("The request's size in bytes", size=len(body), limit=bytes_max)
    return body


def _query(scope: Scope) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}


def _is_async(query: dict[str, str]) -> bool:
    return query.get("async", "").lower() in _TRUE


def _position(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == POSITION_HEADER:
            return _position_in(value)
    return 0


def _position_in(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise ValueError(f"Indilog-Position is a metalog position, not {value.decode('latin-1')}.")
    return int(value)


async def _send_problem(send: Send, told: Problem, headers: tuple[Header, ...] = ()) -> None:
    more: tuple[Header, ...] = (_PROBLEM, *headers)
    if told.status == HTTPStatus.SERVICE_UNAVAILABLE:
        more += ((b"retry-after", b"1"),)
    await _send(send, told.status, more, problem_text(told))


async def _send(send: Send, status: int, headers: tuple[Header, ...], body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send(
        {"type": "http.response.start", "status": int(status), "headers": [length, *headers]}
    )
    await send({"type": "http.response.body", "body": body})
