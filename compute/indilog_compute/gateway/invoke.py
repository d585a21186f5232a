"""`POST /functions/{app}/{function}`: the hot path, a plain ASGI callable inside the gateway.

It has no routing and no request object, because a FastAPI route takes three times as long as a bare
ASGI answer. It decodes nothing: the worker gets the body's bytes, and the caller gets the worker's
bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

import msgspec

from indilog.base.errors import (
    CallOutcomeUnknownError,
    IndilogError,
    InvalidArgumentsError,
    NotReadyError,
)
from indilog.link.link_messages import Failed, Returned, error_from
from indilog_compute.gateway.clients import (
    ClientLeftError,
    Receive,
    Scope,
    cancel_if_left,
    read_body,
    wait_until_left,
)
from indilog_compute.gateway.problems import (
    Problem,
    problem,
    problem_of,
    problem_of_stop,
    problem_text,
)
from indilog_compute.gateway.resources import LARGE_BYTES, GatewayResources
from indilog_compute.workers.call import Call
from indilog_compute.workers.host import FunctionHost

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header: TypeAlias = tuple[bytes, bytes]

PREFIX: Final = "/functions/"
POSITION_HEADER: Final = b"indilog-position"
INVOCATION_HEADER: Final = b"indilog-invocation"
KEY_HEADER: Final = b"idempotency-key"
_JSON: Final[Header] = (b"content-type", b"application/json")
_PROBLEM: Final[Header] = (b"content-type", b"application/problem+json")
_QUERY: Final = ("async", "delay")
_TRUE: Final = ("1", "true", "yes")
_FALSE: Final = ("0", "false", "no")


class InvokeEndpoint:
    """Answers all requests below `/functions/`."""

    def __init__(
        self, host: FunctionHost, resources: GatewayResources, *, body_bytes_max: int
    ) -> None:
        self._host = host
        self._resources = resources
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the function that the path names, and answer with its result.

        The server cancels this call when the platform stops. The answer then says whether the
        function had begun.
        """
        try:
            await self._invoke(scope, receive, send)
        except (IndilogError, ValueError) as error:
            await _send_problem(send, problem_of(error))
        except ClientLeftError:
            self._resources.counters.clients_left += 1
        except asyncio.CancelledError:  # the call has not begun
            await _send_problem(send, problem_of_stop(_nothing_done("the call")))

    async def _invoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        app, _, function = path[len(PREFIX) :].partition("/")
        if scope["method"] != "POST":
            details = problem(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"Functions are called with POST, not {scope['method']}.",
            )
            await _send_problem(send, details, ((b"allow", b"POST"),))
            return
        what = "The size of the call's arguments in bytes"
        arguments = await read_body(scope, receive, self._body_bytes_max, what=what)
        name = f"{app}.{function}"
        if scope["query_string"] and (delay_s := _start_later_s(name, scope)) is not None:
            await self._send_async(send, scope, name, arguments, delay_s)
            return
        position, key = _headers(scope)
        if key:
            once = self._host.call_once(name, arguments, key=key, position=position)
            await self._send_once(scope, receive, send, name, once)
            return
        call = self._host.call(name, arguments, position=position)
        try:
            if call.worker is None and not call.outcome.done():
                await self._wait_for_worker(receive, call)
            outcome = await asyncio.shield(call.outcome)
        except asyncio.CancelledError:
            await _send_problem(send, self._cut_off(call))
            return
        await self._send_outcome(scope, send, call.invocation, outcome)

    async def _wait_for_worker(self, receive: Receive, call: Call) -> None:
        """Wait for the end of `call`. If the client disconnects before a worker takes the call,
        cancel the call.

        Raises:
            ClientLeftError: the client disconnected; a call that a worker has taken continues.
        """
        leaving = asyncio.ensure_future(wait_until_left(receive))
        ends: set[asyncio.Future[Any]] = {leaving, call.outcome}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not call.outcome.done():
                if call.worker is None:
                    self._host.cancel(call)
                raise ClientLeftError
        finally:
            leaving.cancel()

    async def _send_once(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        name: str,
        once: Coroutine[Any, Any, tuple[str, Returned | Failed]],
    ) -> None:
        try:
            invocation, outcome = await cancel_if_left(receive, once)
        except asyncio.CancelledError:
            details = problem_of_stop(
                NotReadyError(
                    f"The platform stopped before {name} ended; repeat it with the same key."
                )
            )
            await _send_problem(send, details)
            return
        await self._send_outcome(scope, send, invocation, outcome)

    def _cut_off(self, call: Call) -> Problem:
        """Cancel `call`, and return the problem for its caller."""
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
        self, send: Send, scope: Scope, name: str, arguments: bytes, delay_s: float
    ) -> None:
        position, key = _headers(scope)
        try:
            invocation = await self._host.send(
                name, arguments, position=position, delay_s=delay_s, key=key
            )
        except asyncio.CancelledError:
            await _send_problem(send, problem_of_stop(_perhaps_recorded(name, key)))
            return
        body = msgspec.json.encode({"invocation": invocation})
        location = (b"location", f"/invocations/{invocation}".encode())
        await _send(send, HTTPStatus.ACCEPTED, (_JSON, location), body)

    async def _send_outcome(
        self, scope: Scope, send: Send, invocation: str, outcome: Returned | Failed
    ) -> None:
        headers = (
            (INVOCATION_HEADER, invocation.encode()),
            (POSITION_HEADER, b"%d" % outcome.position),
        )
        if isinstance(outcome, Failed):
            await _send_problem(send, problem_of(error_from(outcome)), headers)
            return
        if len(outcome.result) > LARGE_BYTES:
            send = partial(self._resources.send, scope, send)
        await _send(send, HTTPStatus.OK, (_JSON, *headers), outcome.result)


def _perhaps_recorded(name: str, key: str) -> IndilogError:
    if key:
        return NotReadyError(
            f"The platform stopped while it recorded {name}; repeat it with the same key."
        )
    return CallOutcomeUnknownError(
        f"The platform stopped while it recorded a call of {name}; the call may or may not run."
    )


def _nothing_done(what: str) -> NotReadyError:
    return NotReadyError(f"The platform stopped before {what} began; repeat it when it is back.")


def _start_later_s(name: str, scope: Scope) -> float | None:
    """Return the delay of an asynchronous call in seconds; None for a synchronous call.

    Raises:
        InvalidArgumentsError: a field of the query is unknown or malformed; names the field.
    """
    values = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    query = {field: given[-1] for field, given in values.items()}
    for field in query:
        if field not in _QUERY:
            raise _misfit(name, field, "is not known; the fields are async and delay")
    wanted = query.get("async", "0").lower()
    if wanted not in _TRUE + _FALSE:
        raise _misfit(name, "async", f"is 1 or 0, not {wanted!r}")
    if wanted in _FALSE:
        if "delay" in query:
            raise _misfit(name, "delay", "needs async=1")
        return None
    try:
        return float(query.get("delay", "0"))
    except ValueError:
        raise _misfit(name, "delay", f"is a number of seconds, not {query['delay']!r}") from None


def _misfit(name: str, field: str, problem: str) -> InvalidArgumentsError:
    sentence = f"{name} was not run: the query's field '{field}' {problem}."
    return InvalidArgumentsError(sentence, [{"field": field, "problem": problem}])


def _headers(scope: Scope) -> tuple[int, str]:
    """Return the session's position and the idempotency key; 0 and empty if absent."""
    position, key = 0, ""
    for name, value in scope["headers"]:
        if name == POSITION_HEADER:
            position = int(value)  # `Heads` has checked that it is a number
        elif name == KEY_HEADER:
            key = value.decode("latin-1").strip()
            if not key:
                raise ValueError("Idempotency-Key is empty; leave it out, or give a key.")
    return position, key


async def _send_problem(send: Send, details: Problem, headers: tuple[Header, ...] = ()) -> None:
    more: tuple[Header, ...] = (_PROBLEM, *headers)
    if details.status == HTTPStatus.SERVICE_UNAVAILABLE:
        more += ((b"retry-after", b"1"),)
    await _send(send, details.status, more, problem_text(details))


async def _send(send: Send, status: int, headers: tuple[Header, ...], body: bytes) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send(
        {"type": "http.response.start", "status": int(status), "headers": [length, *headers]}
    )
    await send({"type": "http.response.body", "body": body})
