"""Assembles the gateway: its routes, error handlers and OpenAPI description (API.md, "HTTP").

`indilog.runtime.cluster.assembly` calls `create_gateway`, and runs the result behind `guard_port`
and `guard_unix_socket`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from indilog.base.errors import (
    IndilogError,
    InvalidArgumentsError,
    NotReadyError,
    OutcomeUnknownError,
)
from indilog.base.ids import MetalogPosition
from indilog.base.log import LogSource
from indilog.config import Config, NodeConfig
from indilog_compute.gateway.apps import apps_router
from indilog_compute.gateway.client_link import client_router
from indilog_compute.gateway.clients import SHARE, ClientLeftError
from indilog_compute.gateway.counters import GatewayCollector, GatewayCounters
from indilog_compute.gateway.credentials import Credentials
from indilog_compute.gateway.forwarding import Forwarder, Peers
from indilog_compute.gateway.guard import Guard
from indilog_compute.gateway.heads import Heads
from indilog_compute.gateway.invoke import OPERATIONS_PREFIX, PREFIX, InvokeEndpoint
from indilog_compute.gateway.login import login_router
from indilog_compute.gateway.openapi import describe
from indilog_compute.gateway.operation import (
    HostCollector,
    MembershipService,
    OneProcess,
    members_router,
    operation_router,
    snapshots_router,
)
from indilog_compute.gateway.page import PAGE, page_headers
from indilog_compute.gateway.page_text import RecordLimits
from indilog_compute.gateway.problems import (
    MEDIA_TYPE,
    Problem,
    problem,
    problem_of,
    problem_of_stop,
    problem_text,
)
from indilog_compute.gateway.readiness import AppendProbe
from indilog_compute.gateway.records import records_router
from indilog_compute.gateway.requests import faults_in, sentence_of
from indilog_compute.gateway.resources import GatewayResources
from indilog_compute.gateway.runs import OperationCalls, runs_router
from indilog_compute.log_kinds import LogKinds
from indilog_compute.log_kinds.routes import catalog_router
from indilog_compute.workers.host import FunctionHost

_CLIENT_LEFT: Final = 499
"""Status for a request whose client has disconnected; never sent."""


class GatewayApp(FastAPI):
    """The platform's HTTP interface. For speed, calls of functions and operations bypass FastAPI.

    Attributes:
        resources: limits and counters, shared with the servers that run this application.
        forwarder: runs calls on other compute nodes; None: calls run on this node only.
    """

    def __init__(
        self, host: FunctionHost, invoke: InvokeEndpoint, resources: GatewayResources, heads: Heads
    ) -> None:
        super().__init__(
            title="IndiLog",
            description="Stateful serverless functions on a shared log.",
            docs_url=None,  # FastAPI's page loads scripts from a CDN
            redoc_url=None,
        )
        self._host = host
        self._invoke = invoke
        self._heads = heads
        self.resources = resources
        self.forwarder: Forwarder | None = None
        self._described_at = -1
        self._base: dict[str, Any] | None = None
        self._streams: set[asyncio.Task[Any]] = set()
        """Tasks that have begun to send an answer. A task that sends a stream lasts long."""

    def end_streams(self) -> None:
        """End all streams, and close idle connections to other compute nodes, because the platform
        stops.
        """
        if self.forwarder is not None:
            self.forwarder.close()
        for task in self._streams:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        The server cancels this call when the platform stops; the client then gets a 503.
        """
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        share = scope[SHARE] = self.resources.budget.share()
        try:
            await self._heads.check(scope)
        except asyncio.CancelledError:
            await _answer(problem_of_stop(_error_of_stop("GET")))(scope, receive, send)
            return
        except IndilogError as error:
            await _answer(problem_of(error))(scope, receive, send)
            return
        try:
            if scope["path"].startswith((PREFIX, OPERATIONS_PREFIX)):
                await self._invoke(scope, receive, send)
            else:
                await self._route(scope, receive, send)
        finally:
            share.free()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by a FastAPI route. If the request is cancelled before its answer begins, the
        answer is a 503. If the request is cancelled later, the answer is a stream, whose body is
        ended.
        """
        begun = False
        task = asyncio.current_task()
        assert task is not None, "a server runs each request in a task"

        async def send_noted(message: Message) -> None:
            nonlocal begun
            begun = True
            self._streams.add(task)
            await self.resources.send(scope, send, message)

        try:
            await super().__call__(scope, receive, send_noted)
        except asyncio.CancelledError:
            if begun:  # a stream of records: end its body
                await send({"type": "http.response.body"})
            else:
                details = problem_of_stop(_error_of_stop(scope["method"]))
                await _answer(details)(scope, receive, send)
        except Exception:
            if not begun:
                raise
            # The handler of `Exception` has answered and logged the error. Starlette then raises
            # the error again.
        finally:
            self._streams.discard(task)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description, including the functions that are deployed now."""
        if self._base is None:
            self._base = super().openapi()
        if self._described_at != self._host.change_count:
            self.openapi_schema = describe(self._base, self._host.apps())
            self._described_at = self._host.change_count
        assert self.openapi_schema is not None, "the branch above sets it if it was unset"
        return self.openapi_schema


def create_gateway(
    host: FunctionHost,
    logs: LogSource,
    status: Callable[[], dict[str, Any]],
    config: Config,
    registry: CollectorRegistry | None = None,
    *,
    request_snapshots: Callable[[], MetalogPosition] | None = None,
    members: MembershipService | None = None,
    peers: Peers | None = None,
    kinds: LogKinds | None = None,
) -> GatewayApp:
    """Return the gateway's ASGI application.

    Args:
        host: runs the functions; already started.
        logs: the logs, for the routes below `/logs`.
        status: returns the content of `/status`. The fields `ready` and `read_only` decide the
            answer of `/readyz`.
        config: limits.
        registry: Prometheus registry to which the gateway adds its metrics; None: a new registry.
        request_snapshots: asks index nodes for snapshots; None: there is no route for this.
        members: changes the nodes of the cluster; None: the platform is one process.
        peers: the other compute nodes, which run calls for which this node has no room; None: there
            are no other compute nodes.
        kinds: creates and lists logs; None: there are no routes for this.
    """
    body_bytes_max = config.cluster.batch_bytes_max
    registry = registry or CollectorRegistry(auto_describe=False)
    registry.register(HostCollector(host))
    resources = GatewayResources(config.node)

    def gateway_status() -> dict[str, Any]:
        return {**status(), "gateway": resources.status()}

    registry.register(GatewayCollector(resources.status))
    forwarder = _forwarder(peers, config, resources.counters)
    invoke = InvokeEndpoint(host, resources, body_bytes_max=body_bytes_max, forwarder=forwarder)
    app = GatewayApp(host, invoke, resources, Heads(host.positions))
    app.forwarder = forwarder
    app.include_router(apps_router(host, body_bytes_max=body_bytes_max))
    # base64 makes a record a third longer
    limits = RecordLimits.of(config)
    app.include_router(records_router(logs, limits, body_bytes_max=body_bytes_max * 3 // 2))
    if kinds is not None:
        app.include_router(catalog_router(kinds))
    probe = AppendProbe(logs, timeout_s=config.node.gateway.ready_append_s)
    app.include_router(operation_router(host, gateway_status, registry, probe))
    if request_snapshots is not None:
        app.include_router(snapshots_router(request_snapshots))
    app.include_router(members_router(members or OneProcess()))
    app.include_router(client_router(host, resources))
    operations = OperationCalls(invoke, resources)
    answer_s = config.node.gateway.apps_answer_s
    app.include_router(
        runs_router(host, operations, logs, answer_s=answer_s, body_bytes_max=body_bytes_max)
    )
    _add_pages(app)
    _add_errors(app, resources.counters)
    return app


def _forwarder(peers: Peers | None, config: Config, counters: GatewayCounters) -> Forwarder | None:
    calls_max = config.node.gateway.calls_forwarded_max
    if peers is None or calls_max == 0:
        return None
    return Forwarder(
        peers,
        calls_max=calls_max,
        answer_bytes_max=max(
            config.node.functions.result_bytes_max, config.cluster.message_bytes_max
        ),
        counters=counters,
    )


def guard_port(gateway: GatewayApp, host: FunctionHost, node: NodeConfig, token: str) -> Guard:
    """Return the gateway behind the checks of `Guard`, with the sign-in pages for browsers.

    Args:
        gateway: the result of `create_gateway`.
        host: knows which functions are public.
        node: settings with the host names of the gateway and the limits of browser sessions.
        token: authenticates callers; ignored if `auth` is off.
    """
    credentials = Credentials(
        token,
        sessions_max=node.gateway.browser_sessions_max,
        session_s_max=node.gateway.browser_session_s_max,
        code_s=node.gateway.sign_in_code_s,
    )
    gateway.include_router(login_router(credentials))
    return Guard(
        gateway,
        names=_names(node),
        credentials=credentials if node.gateway.auth else None,
        is_public=host.is_public,
        counters=gateway.resources.counters,
    )


def guard_unix_socket(gateway: GatewayApp, host: FunctionHost, node: NodeConfig) -> Guard:
    """Return the gateway for the Unix socket. A request needs no token; `Guard` applies all other
    checks.
    """
    return Guard(
        gateway,
        names=_names(node),
        credentials=None,
        is_public=host.is_public,
        counters=gateway.resources.counters,
    )


def _names(node: NodeConfig) -> list[str]:
    """Return the host names of a gateway, spelled as in the header `Host`."""
    return [
        f"[{name}]" if ":" in name else name
        for name in (node.gateway.host.lower(), *node.gateway.names)
    ]


def _add_pages(app: GatewayApp) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = HTMLResponse(PAGE)
        page.raw_headers.extend(page_headers(PAGE))
        return page


def _error_of_stop(method: str) -> IndilogError:
    if method in ("GET", "HEAD"):
        return NotReadyError(
            "The platform stopped before it answered; repeat the request when it is back."
        )
    return OutcomeUnknownError(
        "The platform stopped before it answered; the request may have taken effect."
    )


def _add_errors(app: GatewayApp, counters: GatewayCounters) -> None:
    async def left(_request: Request, _error: Exception) -> Response:
        counters.clients_left += 1
        return Response(status_code=_CLIENT_LEFT)  # the connection is closed

    async def failed(_request: Request, error: Exception) -> Response:
        return _answer(problem_of(error))

    async def broken(_request: Request, error: Exception) -> Response:
        structlog.get_logger().exception("request failed", exc_info=error)
        sentence = "The platform failed on this request; its log says why."
        return _answer(problem(HTTPStatus.INTERNAL_SERVER_ERROR, sentence))

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        sentence = (
            "There is no such path; GET /docs lists all paths."
            if status == HTTPStatus.NOT_FOUND
            else f"{error.detail}; GET /docs says how to call it."
        )
        return _answer(problem(status, sentence), dict(error.headers or {}))

    async def misfit(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        # The first part of `loc` is query, path, header or body; callers do not need it.
        faults = faults_in([{**fault, "loc": fault["loc"][1:]} for fault in error.errors()])
        sentence = f"Nothing was done: {sentence_of(faults)}."
        return _answer(problem_of(InvalidArgumentsError(sentence, faults)))

    app.add_exception_handler(ClientLeftError, left)
    for kind in (IndilogError, ValueError, TypeError):
        app.add_exception_handler(kind, failed)
    app.add_exception_handler(RequestValidationError, misfit)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Exception, broken)


def _answer(details: Problem, headers: dict[str, str] | None = None) -> Response:
    more = dict(headers or {})
    if details.status == HTTPStatus.SERVICE_UNAVAILABLE:
        more["retry-after"] = "1"
    return Response(
        problem_text(details), status_code=details.status, media_type=MEDIA_TYPE, headers=more
    )
