"""Runs the gRPC server of a compute node.

gRPC itself listens only on a Unix socket, in a folder that only this user can enter. This module
accepts the connections of clients within the limits of the gateway, decrypts their bytes, and
passes the bytes to the Unix socket. gRPC has no limit on connections. Without the limit here, idle
clients could use up the open files that the journal needs. `indilog.runtime.cluster.assembly` runs
`GrpcServer`, which serves `LogService` and `InvokeService`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from indilog.base.errors import ConfigError
from indilog.base.log import LogSource
from indilog.config import Config
from indilog_compute.gateway.resources import GatewayResources
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb
from indilog_compute.gateway.rpc.invoke_service import NAME as INVOKE
from indilog_compute.gateway.rpc.invoke_service import InvokeService
from indilog_compute.gateway.rpc.log_service import NAME as LOG
from indilog_compute.gateway.rpc.log_service import LogService
from indilog_compute.workers.host import FunctionHost

_GRACE_S: Final = 3.0
"""Seconds that running requests have to end when the server stops."""
_CHUNK: Final = 64 * 1024
_IDLE_MS: Final = 300_000
"""Milliseconds without a request after which a connection is closed."""
_DESCRIPTORS: Final = 3
"""Open files of one connection: one for the client, and two for both ends of the connection to
gRPC's socket. Each open file counts as a connection of the gateway.
"""
_SHARE: Final = 2
"""gRPC may use at most the gateway's connections divided by this number."""
_OPEN: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Services that need no token, because they reveal nothing about stored or deployed data."""


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses requests without the platform's token. The comparison takes constant time."""

    def __init__(self, token: str) -> None:
        self._expected = b"bearer " + token.encode()
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            _refuse
        )

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a request, or a handler that refuses the request."""
        details = handler_call_details
        if details.method.startswith(_OPEN):
            return await continuation(details)
        given = b""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                given = value.encode() if isinstance(value, str) else value
        scheme, _, token = given.partition(b" ")
        if not hmac.compare_digest(scheme.lower() + b" " + token.strip(), self._expected):
            return self._refusal
        return await continuation(details)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "This needs the platform's token as metadata `authorization: Bearer TOKEN`: `indilog "
        "token` prints it.",
    )


class GrpcServer:
    """A listening gRPC server.

    Args:
        config: port, host and limits.
        logs: the logs.
        host: runs the functions.
        resources: limits and counters, shared with the HTTP server.
        token: authenticates callers; None: callers need no token.
        tls: TLS context for the connections of clients; None: no TLS.

    Attributes:
        port: the port on which the server listens; valid after `start` has returned.
    """

    def __init__(
        self,
        config: Config,
        logs: LogSource,
        host: FunctionHost,
        resources: GatewayResources,
        *,
        token: str | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        gateway = config.node.gateway
        self.port = gateway.grpc_port or 0
        self._host = gateway.host
        self._resources = resources
        self._tls = tls
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        message_bytes = config.cluster.message_bytes_max
        self._server = grpc.aio.server(
            interceptors=[] if token is None else [TokenCheck(token)],
            options=[
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", message_bytes),
                ("grpc.max_connection_idle_ms", _IDLE_MS),
                ("grpc.server_handshake_timeout_ms", int(1000 * gateway.headers_timeout_s)),
                ("grpc.max_metadata_size", gateway.headers_bytes_max),
            ],
            maximum_concurrent_rpcs=config.node.functions.calls_pending_max,
        )
        services = LogService(logs, host.positions, resources.budget), InvokeService(host)
        self._server.add_generic_rpc_handlers([service.handlers() for service in services])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (LOG, INVOKE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        assert {s.full_name for s in pb.DESCRIPTOR.services_by_name.values()} == {LOG, INVOKE}
        reflection.enable_server_reflection(names, self._server)
        self._folder = tempfile.TemporaryDirectory(prefix="indilog-grpc-")
        self._socket = Path(self._folder.name) / "grpc"
        self._listening: asyncio.Server | None = None
        self._pipes: set[asyncio.Task[None]] = set()
        self._open = 0

    async def start(self) -> None:
        """Start serving; after this returns, requests are answered.

        Raises:
            ConfigError: the port is in use or not allowed.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listening = await asyncio.start_server(
                self._on_connection, self._host, self.port, family=family, ssl=self._tls,
                limit=_CHUNK, start_serving=False,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"gRPC cannot listen on {self._host}, port {self.port}: {error.strerror}; choose "
                "another grpc_port."
            ) from error
        self.port = self._listening.sockets[0].getsockname()[1]
        self._server.add_insecure_port(f"unix:{self._socket}")
        await self._server.start()
        for name in ("", LOG, INVOKE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._listening.start_serving()

    async def stop(self) -> None:
        """Stop listening; running requests have a few seconds to end."""
        if self._listening is not None:
            self._listening.close()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_GRACE_S)
        for pipe in list(self._pipes):
            pipe.cancel()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        self._folder.cleanup()

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass the bytes of a connection to gRPC's socket and back, if the gateway has room for the
        connection; otherwise close it.
        """
        resources = self._resources
        own_max, room = resources.connections_max // _SHARE, resources.connections_max
        if self._open + _DESCRIPTORS > own_max or resources.connections + _DESCRIPTORS > room:
            resources.counters.requests_refused += 1
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None, "a stream's callback runs in a task"
        self._pipes.add(task)
        self._open += _DESCRIPTORS
        resources.connections += _DESCRIPTORS
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(
                str(self._socket), limit=_CHUNK
            )
            await _join((reader, inner_writer), (inner_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass  # the client left, or the server stops
        except Exception as error:  # noqa: BLE001 - the other connections go on
            structlog.get_logger().exception("gRPC connection failed", exc_info=error)
        finally:
            writer.transport.abort()
            self._open -= _DESCRIPTORS
            resources.connections -= _DESCRIPTORS
            self._pipes.discard(task)


async def _join(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Copy bytes from the reader to the writer of each way, until the first way ends."""
    copying = [asyncio.ensure_future(_copy(*way)) for way in ways]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)
        for _, writer in ways:
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
