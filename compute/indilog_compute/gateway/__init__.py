"""The gateway: the platform's HTTP interface (API.md, "HTTP").

The gateway is a FastAPI application on uvicorn, in the process of a compute node. It calls
`FunctionHost` for functions and invocations, and `LogSource` for logs.

`app` assembles the gateway. `guard` checks each request before all routes, with `credentials` and
`login`. `invoke` answers calls of functions, the hot path, as a plain ASGI callable; `forwarding`
runs calls on other compute nodes. `apps`, `records`, `runs` and `operation` have the other routes.
`client_link` is the WebSocket of `indilog.connect`, and `rpc` the gRPC interface. `problems` turns
errors into answers. `openapi` and `page` describe the interface. `server` runs the gateway on a
port and on a `unix_socket`.
"""

from indilog_compute.gateway.app import create_gateway, guard_port, guard_unix_socket
from indilog_compute.gateway.forwarding import PeerPort, Peers
from indilog_compute.gateway.server import GatewayServer, tls_of
from indilog_compute.gateway.unix_socket import socket_in

__all__ = [
    "GatewayServer",
    "PeerPort",
    "Peers",
    "create_gateway",
    "guard_port",
    "guard_unix_socket",
    "socket_in",
    "tls_of",
]
