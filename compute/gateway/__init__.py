"""The gateway: the platform over HTTP (API.md, "HTTP"). FastAPI on uvicorn, in the compute node's
process.

`app` puts it together; `invoke` is the hot path, a plain ASGI callable; `apps`, `records` and
`operation` are the other routes; `client_link` is the WebSocket of `indilog.connect`; `problems`
says errors; `openapi` and `page` describe it; `server` runs it.
"""

from compute.gateway.app import create_gateway
from compute.gateway.server import GatewayServer

__all__ = ["GatewayServer", "create_gateway"]
