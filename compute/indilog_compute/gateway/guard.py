"""Checks each HTTP and WebSocket request before routing (docs/decisions/0026).

A request must meet four rules, in this order. `Guard` refuses it with the status of the first rule
that it breaks; otherwise it passes the request to the gateway.

1. The header `Host` is a literal loopback address, `localhost` or a configured name (status 421).
   This stops DNS rebinding: a page whose name was rebound to 127.0.0.1 still sends that name.
2. A page of another origin sends only GET and HEAD, and opens no WebSocket (status 403). A request
   comes from a page of our own origin, or from a program, if `Sec-Fetch-Site` is absent, `none` or
   `same-origin`, and `Origin` is absent or ours.
3. The request carries the token or the cookie of a session (status 401). If it carries a cookie,
   rule 2 forbids GET and HEAD from other origins too. Health checks, sign-in and public functions
   need neither token nor cookie.
4. The `Content-Type` of the body is JSON, or on some routes Python source or bytes (status 415). A
   browser sends a body of these types to another origin only with CORS, which the gateway never
   grants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from indilog.base.loopback import is_loopback
from indilog_compute.gateway.counters import GatewayCounters
from indilog_compute.gateway.credentials import Credentials
from indilog_compute.gateway.invoke import PREFIX
from indilog_compute.gateway.login import LOGIN_PAGE, LOGIN_PATH, SESSION_PATH, cookie_name
from indilog_compute.gateway.page import HTML, page_headers
from indilog_compute.gateway.problems import MEDIA_TYPE, problem, problem_text

OPEN_PATHS: Final = ("/livez", "/healthz", "/readyz", LOGIN_PATH)
"""Paths that need no token, because they reveal nothing about stored or deployed data."""
_SAFE: Final = ("GET", "HEAD")
_OWN_SITE: Final = (b"none", b"same-origin")
_HOST: Final = re.compile(rb"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_HOSTS_KEPT_MAX: Final = 64
_LOOKED_AT: Final = frozenset(
    {
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"authorization",
        b"cookie",
        b"content-type",
        b"content-length",
        b"transfer-encoding",
    }
)
_JSON: Final = b"application/json"
_OCTETS: Final = b"application/octet-stream"
_PYTHON: Final = b"text/x-python"
_BODIES: Final[Mapping[str, tuple[bytes, ...]]] = {
    "apps": (_JSON, _PYTHON, _OCTETS),
    "logs": (_JSON, _OCTETS),
}
"""Allowed content types besides JSON, by the first part of the path."""

_WHERE: Final = (
    "`indilog token` prints it; it is in the file `token` of the platform's data directory."
)
_NO_TOKEN: Final = (
    f"This needs the platform's token as `Authorization: Bearer TOKEN`. {_WHERE} `indilog open` "
    "gives a browser a session."
)
_WRONG_TOKEN: Final = f"The request has another token than this platform's. {_WHERE}"


class Refusal(NamedTuple):
    """Status and reason of a refused request."""

    status: HTTPStatus
    sentence: str


class Guard:
    """ASGI application that applies the four rules before the gateway.

    Args:
        app: the gateway.
        names: allowed host names besides loopback addresses and `localhost`; in lower case.
        credentials: authenticates callers; None: rule 3 is off.
        is_public: returns whether the function `app.function` may be called without a token.
        counters: count refused requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Iterable[str] = (),
        credentials: Credentials | None,
        is_public: Callable[[str], bool],
        counters: GatewayCounters,
    ) -> None:
        self._app = app
        self._names = frozenset(name.encode() for name in names)
        self._credentials = credentials
        self._is_public = is_public
        self._counters = counters
        self._hosts: set[bytes] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the gateway, or refuse it."""
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            self._counters.requests_refused += 1
            await _refuse(scope, send, refusal)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _LOOKED_AT:
                if name in headers:
                    sentence = f"The header {name.decode()} is sent twice; send it once."
                    return Refusal(HTTPStatus.BAD_REQUEST, sentence)
                headers[name] = value
        host = headers.get(b"host", b"").lower()
        if host not in self._hosts and not self._is_known(host):
            return _misdirected(host)
        is_own = self._is_own_origin(scope, host, headers)
        if not is_own and scope.get("method") not in _SAFE:  # a WebSocket's scope has no method
            return _foreign(headers)
        if self._credentials is not None:
            refusal = self._unauthorized(scope, headers, self._credentials, is_own=is_own)
            if refusal is not None:
                return refusal
        return _unfit_body(scope, headers)

    def _is_known(self, host: bytes) -> bool:
        """Rule 1. Accepted values are remembered, so the common case is one lookup."""
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found.group(1)
        if name not in self._names and not is_loopback(name.decode().strip("[]")):
            return False
        if len(self._hosts) < _HOSTS_KEPT_MAX:
            self._hosts.add(host)
        return True

    def _is_own_origin(self, scope: Scope, host: bytes, headers: Mapping[bytes, bytes]) -> bool:
        """Rule 2: return whether the request comes from our own origin, or from a program."""
        if headers.get(b"sec-fetch-site", b"none") not in _OWN_SITE:
            return False
        origin = headers.get(b"origin")
        if origin is None:
            return True
        scheme, _, named = origin.lower().partition(b"://")
        if named != host:
            return False
        is_tls = scope["scheme"] in ("https", "wss")
        # If the host is a configured name, a proxy may terminate TLS. Then `Origin` has https, and
        # our scheme is http.
        behind_proxy = scheme == b"https" and host.partition(b":")[0] in self._names
        return scheme == (b"https" if is_tls else b"http") or behind_proxy

    def _unauthorized(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        credentials: Credentials,
        *,
        is_own: bool,
    ) -> Refusal | None:
        """Rule 3: return the refusal of an unauthenticated request; None: the request may pass."""
        authorization = headers.get(b"authorization")
        if authorization is not None and credentials.is_token(authorization):
            return None
        if self._is_open(scope):
            return None
        session = cookie_in(headers.get(b"cookie", b""), cookie_name(scope).encode())
        if session is not None and credentials.is_session(session):
            return None if is_own else _foreign(headers)
        sentence = _WRONG_TOKEN if authorization else _NO_TOKEN
        return Refusal(HTTPStatus.UNAUTHORIZED, sentence)

    def _is_open(self, scope: Scope) -> bool:
        """Whether a request needs no token."""
        path, method = scope["path"], scope.get("method")
        if path in OPEN_PATHS:
            return method in _SAFE
        if method != "POST":
            return False
        if path == SESSION_PATH:
            return True  # the request carries a sign-in code
        if not path.startswith(PREFIX):
            return False
        app, _, function = path[len(PREFIX) :].partition("/")
        return self._is_public(f"{app}.{function}")


def cookie_in(cookies: bytes, name: bytes) -> bytes | None:
    """Return the value of a cookie in the header `Cookie`; None if it is absent."""
    for cookie in cookies.split(b";"):
        given, _, value = cookie.strip().partition(b"=")
        if given == name:
            return value
    return None


def _unfit_body(scope: Scope, headers: Mapping[bytes, bytes]) -> Refusal | None:
    """Rule 4: return the refusal of a body's type. A request without a body and without a
    `Content-Type` passes.
    """
    given = headers.get(b"content-type")
    if given is None:
        length = headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in headers:
            return None
        said = "none"
    else:
        kind = given.partition(b";")[0].strip().lower()
        if kind == _JSON or kind in _BODIES.get(_first_part(scope["path"]), ()):
            return None
        said = kind.decode("latin-1")[:100] or "none"
    return Refusal(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"The body's Content-Type is {said}; send application/json (`curl --json`), Python source "
        "to /apps as text/x-python, or a record's bytes as application/octet-stream.",
    )


def _first_part(path: str) -> str:
    return path.removeprefix("/").partition("/")[0]


def _misdirected(host: bytes) -> Refusal:
    name = host.decode("latin-1")[:100]
    return Refusal(
        HTTPStatus.MISDIRECTED_REQUEST,
        f"The host name {name!r} is not allowed; use a loopback address or localhost, or add the "
        "name to the setting host_names.",
    )


def _foreign(headers: Mapping[bytes, bytes]) -> Refusal:
    origin = headers.get(b"origin", b"of another site").decode("latin-1")[:100]
    return Refusal(
        HTTPStatus.FORBIDDEN,
        f"A page {origin} sent this request, and only the platform's own pages may; programs omit "
        "Origin and Sec-Fetch-Site.",
    )


async def _refuse(scope: Scope, send: Send, refusal: Refusal) -> None:
    """Answer with the refusal. A WebSocket is not opened."""
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    if kind not in ("http.response", *scope.get("extensions", ())):
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
        return
    body = problem_text(problem(refusal.status, refusal.sentence))
    headers = [(b"content-type", MEDIA_TYPE.encode())]
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b'Bearer realm="IndiLog"'))
        if _wants_page(scope):
            body = LOGIN_PAGE.encode()
            headers = [HTML, *page_headers(LOGIN_PAGE)]
    headers.append((b"content-length", b"%d" % len(body)))
    start: dict[str, Any] = {"status": int(refusal.status), "headers": headers}
    await send({"type": f"{kind}.start", **start})
    if scope.get("method") == "HEAD":
        body = b""
    await send({"type": f"{kind}.body", "body": body})


def _wants_page(scope: Scope) -> bool:
    """Whether the client is a browser that shows the answer as a page."""
    return scope.get("method") == "GET" and any(
        name == b"accept" and b"text/html" in value for name, value in scope["headers"]
    )
