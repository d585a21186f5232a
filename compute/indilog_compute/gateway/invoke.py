"""`POST /functions/{app}/{function}` and `POST /operations/{app}/{operation}`: the hot path, a
plain ASGI callable inside the gateway.

This module uses no routing and no request object, because a FastAPI route takes three times as long
as a plain ASGI answer. It decodes nothing: the worker gets the body's bytes, and the caller gets
the worker's bytes. `FunctionHost` runs the calls. A call that would wait on this node is offered to
other compute nodes (`forwarding`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qs, quote

import msgspec

from indilog.base.errors import (
    CallOutcomeUnknownError,
    IndilogError,
    InvalidArgumentsError,
    NotReadyError,
    OverloadedError,
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
from indilog_compute.gateway.forwarding import (
    FORWARDED_HEADER,
    INVOCATION_HEADER,
    REFUSED_HEADER,
    ForwardedCall,
    Forwarder,
    Offers,
    PeerAnswer,
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
OPERATIONS_PREFIX: Final = "/operations/"
POSITION_HEADER: Final = b"indilog-position"
KEY_HEADER: Final = b"idempotency-key"
_JSON: Final[Header] = (b"content-type", b"application/json")
_PROBLEM: Final[Header] = (b"content-type", b"application/problem+json")
_QUERY: Final = ("async", "delay")
_RELAYED: Final = frozenset(
    {b"content-type", b"location", b"retry-after", POSITION_HEADER, INVOCATION_HEADER}
)
"""Headers that the caller gets from another compute node's answer."""
_TRUE: Final = ("1", "true", "yes")
_FALSE: Final = ("0", "false", "no")


class _Request(NamedTuple):
    """A request for a call, with its complete body.

    Attributes:
        position: the session's position; 0: the request has none.
        key: the idempotency key; empty: the request has none.
        is_recorded: whether the call is recorded, because it is asynchronous or has a key.
        was_forwarded: whether another compute node forwarded the call, so that this node must not
            forward it again.
        start: starts the function or operation on this node.
    """

    scope: Scope
    receive: Receive
    send: Send
    name: str
    arguments: bytes
    position: int
    key: str
    is_recorded: bool
    was_forwarded: bool
    start: Callable[..., Call]


class InvokeEndpoint:
    """Answers all requests below `/functions/` and `/operations/`.

    Args:
        host: runs the functions.
        resources: limits and counters.
        body_bytes_max: largest body of a request.
        forwarder: runs calls on other compute nodes; None: calls run on this node only.
    """

    def __init__(
        self,
        host: FunctionHost,
        resources: GatewayResources,
        *,
        body_bytes_max: int,
        forwarder: Forwarder | None = None,
    ) -> None:
        self._host = host
        self._resources = resources
        self._body_bytes_max = body_bytes_max
        self._forwarder = forwarder
        self._offers = Offers(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the function or operation that the path names, and answer with its result.

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
        is_operation = path.startswith(OPERATIONS_PREFIX)
        prefix = OPERATIONS_PREFIX if is_operation else PREFIX
        app, _, function = path[len(prefix) :].partition("/")
        if scope["method"] != "POST":
            details = problem(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"Functions and operations are called with POST, not {scope['method']}.",
            )
            await _send_problem(send, details, ((b"allow", b"POST"),))
            return
        name = f"{app}.{function}"
        position, key, forwarded = _headers(scope)
        what = "The size of the call's arguments in bytes"
        is_recorded = bool(key) or bool(scope["query_string"])
        if is_operation and is_recorded:
            raise ValueError(
                f"{name} was not run: an operation takes neither a query nor an Idempotency-Key."
            )
        start = self._host.operate if is_operation else self._host.call
        if forwarded is None:
            arguments = await read_body(scope, receive, self._body_bytes_max, what=what)
            if self._forwarder is None and not is_recorded:
                call = start(name, arguments, position=position)
                await self._finish(scope, receive, send, call)
                return
        else:
            send = self._offers.with_load(send)
            try:
                self._offers.check(name, forwarded, is_recorded=is_recorded)
            except OverloadedError as error:
                await _send_problem(send, problem_of(error))
                return
            with self._offers.reserved():  # the other node sends the body now
                arguments = await read_body(scope, receive, self._body_bytes_max, what=what)
            self._resources.counters.calls_taken += 1
        was_forwarded = forwarded is not None
        request = _Request(
            scope, receive, send, name, arguments, position, key, is_recorded, was_forwarded, start
        )
        if scope["query_string"] and (delay_s := _start_later_s(name, scope)) is not None:
            await self._send_async(request, delay_s)
        elif key:
            await self._call_once(request)
        else:
            await self._call(request)

    async def _call(self, request: _Request) -> None:
        """Run a plain call, here or on another compute node."""
        try:
            call = request.start(request.name, request.arguments, position=request.position)
        except NotReadyError as error:
            if request.was_forwarded:
                await _refuse(request, error)
            elif not isinstance(error, OverloadedError) or not await self._ran_elsewhere(request):
                raise
            return
        if request.was_forwarded and call.worker is None and self._host.withdraw(call):
            await _refuse(request, OverloadedError(f"{request.name} got no slot on this node."))
            return
        is_waiting = call.worker is None and not call.outcome.done()
        if is_waiting and (elsewhere := self._elsewhere(request)) is not None:
            try:
                answer = await self._wait_or_forward(request.receive, call, elsewhere)
            except asyncio.CancelledError:
                details = self._cut_off(call, may_run=elsewhere.may_have_run)
                await _send_problem(request.send, details)
                return
            if answer is not None:
                await self._relay(request, answer)
                return
            if elsewhere.is_taken:  # the other node took the call and did not begin it
                call = request.start(request.name, request.arguments, position=request.position)
        await self._finish(request.scope, request.receive, request.send, call)

    async def _finish(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        """Answer with the outcome of a call that runs or waits here."""
        try:
            if call.worker is None and not call.outcome.done():
                await self._wait_for_worker(receive, call)
            outcome = await asyncio.shield(call.outcome)
        except asyncio.CancelledError:
            await _send_problem(send, self._cut_off(call))
            return
        await self._send_outcome(scope, send, call.invocation, outcome)

    async def _wait_for_worker(self, receive: Receive, call: Call) -> None:
        """Wait until `call` has an outcome. If the client disconnects before a worker has taken the
        call, cancel the call.

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

    async def _wait_or_forward(
        self, receive: Receive, call: Call, elsewhere: ForwardedCall
    ) -> PeerAnswer | None:
        """Wait until another node has run `call`, and return its answer. Return None if the call
        has begun or ended here first. If the client disconnects before the call begins anywhere,
        cancel the call.

        Raises:
            ClientLeftError: the client disconnected; a call that has begun continues.
            CallOutcomeUnknownError: another node took the call and was lost.
        """
        assert self._forwarder is not None, "`elsewhere` needs one"
        leaving = asyncio.ensure_future(wait_until_left(receive))
        forwarding = asyncio.ensure_future(
            self._forwarder.forward_waiting(
                elsewhere,
                is_waiting=lambda: call.worker is None and not call.outcome.done(),
                withdraw=lambda: self._host.withdraw(call),
            )
        )
        ends: set[asyncio.Future[Any]] = {leaving, forwarding, call.outcome}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                return forwarding.result()
            if call.outcome.done():
                return None
            if call.worker is None and not elsewhere.is_taken:
                self._host.cancel(call)
            raise ClientLeftError
        finally:
            leaving.cancel()
            forwarding.cancel()

    async def _call_once(self, request: _Request) -> None:
        """Run a call with a key, here or on another compute node."""
        once = self._run_once(request)
        try:
            answer = await cancel_if_left(request.receive, once)
        except asyncio.CancelledError:
            details = problem_of_stop(
                NotReadyError(
                    f"The platform stopped before {request.name} ended; repeat it with the same "
                    "key."
                )
            )
            await _send_problem(request.send, details)
            return
        if isinstance(answer, PeerAnswer):
            await self._relay(request, answer)
        else:
            await self._send_outcome(request.scope, request.send, *answer)

    async def _run_once(self, request: _Request) -> PeerAnswer | tuple[str, Returned | Failed]:
        if (
            self._forwarder is not None
            and (elsewhere := self._recorded_elsewhere(request)) is not None
            and (answer := await self._forwarder.forward(elsewhere)) is not None
        ):
            return answer
        return await self._host.call_once(
            request.name, request.arguments, key=request.key, position=request.position
        )

    # --- calls that another compute node runs

    def _elsewhere(self, request: _Request) -> ForwardedCall | None:
        """Return the call as a `ForwardedCall`; None: the call may not be forwarded."""
        if self._forwarder is None or request.was_forwarded:
            return None
        deployed_at = self._host.deployed_at(request.name)
        if deployed_at is None:
            return None
        scope = request.scope
        target = scope.get("raw_path") or quote(scope["path"]).encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = b"".join(
            b"%b: %b\r\n" % (name, value)
            for name, value in scope["headers"]
            if name in (POSITION_HEADER, KEY_HEADER)
        )
        return ForwardedCall(
            request.name,
            target,
            request.arguments,
            headers=headers,
            key=request.key,
            deployed_at=deployed_at,
            answer_s=None if request.is_recorded else self._host.longest_s(request.name),
        )

    def _recorded_elsewhere(self, request: _Request) -> ForwardedCall | None:
        """Return a recorded call as a `ForwardedCall`. None: the call begins here, because a slot
        is free, its key is known, or it may not be forwarded.
        """
        name, key = request.name, request.key
        if key and self._host.has_key(name, request.arguments, key):
            return None
        if self._offers.has_room(name, is_recorded=True):
            return None
        return self._elsewhere(request)

    async def _ran_elsewhere(self, request: _Request) -> bool:
        """Offer a call to other nodes, because this node refuses it. Return whether the caller has
        an answer.
        """
        elsewhere = self._elsewhere(request)
        if self._forwarder is None or elsewhere is None:
            return False
        try:
            answer = await cancel_if_left(request.receive, self._forwarder.forward(elsewhere))
        except asyncio.CancelledError:
            if not elsewhere.may_have_run:
                raise
            await _send_problem(request.send, problem_of_stop(_cut_while_running(request.name)))
            return True
        if answer is not None:
            await self._relay(request, answer)
        return answer is not None

    async def _relay(self, request: _Request, answer: PeerAnswer) -> None:
        """Send the answer of another compute node to the caller."""
        headers = tuple(header for header in answer.headers if header[0] in _RELAYED)
        send = request.send
        if len(answer.body) > LARGE_BYTES:
            send = partial(self._resources.send, request.scope, send)
        await _send(send, answer.status, headers, answer.body)

    # --- answers

    def _cut_off(self, call: Call, *, may_run: bool = False) -> Problem:
        """Cancel `call`, and return the problem for its caller; `may_run` is whether another
        compute node may run the call.
        """
        began = call.worker is not None or may_run
        self._host.cancel(call)
        error = _cut_while_running(call.name) if began else _nothing_done(call.name)
        return problem_of_stop(error)

    async def _send_async(self, request: _Request, delay_s: float) -> None:
        name, key = request.name, request.key
        elsewhere = self._recorded_elsewhere(request) if self._forwarder and not delay_s else None
        try:
            if self._forwarder is not None and elsewhere is not None:
                answer = await self._forwarder.forward(elsewhere)
                if answer is not None:
                    await self._relay(request, answer)
                    return
            invocation = await self._host.send(
                name, request.arguments, position=request.position, delay_s=delay_s, key=key
            )
        except asyncio.CancelledError:
            await _send_problem(request.send, problem_of_stop(_perhaps_recorded(name, key)))
            return
        body = msgspec.json.encode({"invocation": invocation})
        location = (b"location", f"/invocations/{invocation}".encode())
        await _send(request.send, HTTPStatus.ACCEPTED, (_JSON, location), body)

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


async def _refuse(request: _Request, error: NotReadyError) -> None:
    """Tell the forwarding node that this node took the call, but did not begin it."""
    await _send_problem(request.send, problem_of(error), ((REFUSED_HEADER, b"1"),))


def _perhaps_recorded(name: str, key: str) -> IndilogError:
    if key:
        return NotReadyError(
            f"The platform stopped while it recorded {name}; repeat it with the same key."
        )
    return CallOutcomeUnknownError(
        f"The platform stopped while it recorded a call of {name}; the call may or may not run."
    )


def _cut_while_running(name: str) -> IndilogError:
    return CallOutcomeUnknownError(
        f"The platform stopped while {name} ran; it may have had effects."
    )


def _nothing_done(what: str) -> NotReadyError:
    return NotReadyError(f"The platform stopped before {what} began; repeat it when it is back.")


def _start_later_s(name: str, scope: Scope) -> float | None:
    """Return the delay of an asynchronous call in seconds; None: the call is synchronous.

    Raises:
        InvalidArgumentsError: a field of the query is unknown or malformed; the error names it.
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


def _headers(scope: Scope) -> tuple[int, str, bytes | None]:
    """Return the session's position (0: absent), the idempotency key (empty: absent), and the value
    of `FORWARDED_HEADER` (None: absent).
    """
    position, key, forwarded = 0, "", None
    for name, value in scope["headers"]:
        if name == POSITION_HEADER:
            position = int(value)  # `Heads` has checked that it is a number
        elif name == KEY_HEADER:
            key = value.decode("latin-1").strip()
            if not key:
                raise ValueError("Idempotency-Key is empty; leave it out, or give a key.")
        elif name == FORWARDED_HEADER:
            forwarded = value
    return position, key, forwarded


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
