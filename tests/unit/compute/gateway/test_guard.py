"""Claims about the layer before all routes, as browsers and hostile programs would try it: what it
refuses never reaches a route.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from indilog_compute.gateway.counters import GatewayCounters
from indilog_compute.gateway.credentials import Credentials
from indilog_compute.gateway.guard import Guard

TOKEN = "t" * 43
JSON = {"content-type": "application/json"}
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]
UNSAFE = [method for method in METHODS if method not in ("GET", "HEAD")]
PATHS = [
    "/",
    "/apps",
    "/apps/x",
    "/logs/x/records",
    "/status",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/functions/a/closed",
    "/functions/a/absent",
    "/invocations/1",
    "/invocations/held",
    "/session/codes",
    "/nowhere",
    "/livez/",
    "//livez",
    "/livezz",
    "/functions/a/open/x",
]
NAMES = [
    "localhost",
    "LocalHost:8080",
    "127.0.0.1",
    "127.0.0.1:8080",
    "127.9.8.7:1",
    "[::1]",
    "[::1]:8080",
    "box.example",
    "BOX.example:443",
]
STRANGE_NAMES = [
    "",
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "localhost.",
    "127.1",
    "2130706433",
    "0x7f.1",
    "0.0.0.0",
    "192.168.0.1",
    "[::ffff:127.0.0.1]",
    "[::2]",
    "::1",
    "user@127.0.0.1",
    "127.0.0.1:8080:1",
    "127.0.0.1 ",
    "127.0.0.1,evil",
    "evil.example#127.0.0.1",
    "box.example.evil",
    "127.0.0.1:x",
]


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class GuardHarness:
    """A guard before an application that keeps which requests reached it."""

    def __init__(self, *, auth: bool = True, port: int = 8080) -> None:
        self.clock = Clock()
        self.credentials = Credentials(
            TOKEN, sessions_max=2, session_s_max=100, code_s=10, clock=self.clock
        )
        self.reached: list[str] = []
        self.counters = GatewayCounters()
        self.guard = Guard(
            self._app,
            names=["box.example"],
            credentials=self.credentials if auth else None,
            is_public={"a.open"}.__contains__,
            counters=self.counters,
        )
        self.port = port
        self.headers: dict[str, str] = {}
        self.body = b""

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def ask(
        self,
        method: str,
        path: str,
        *headers: tuple[str, str],
        host: str = "127.0.0.1:8080",
        scheme: str = "http",
        kind: str = "http",
    ) -> int:
        """Return the status of an answer; 200: it reached the application."""
        sent: list[Any] = []

        async def send(message: Any) -> None:  # noqa: ANN401
            sent.append(message)

        async def receive() -> Any:  # noqa: ANN401
            raise AssertionError("a refusal reads no body")

        given = [("host", host), *headers]
        scope: dict[str, Any] = {
            "type": kind,
            "scheme": scheme,
            "path": path,
            "server": ("127.0.0.1", self.port),
            "headers": [(name.encode(), value.encode()) for name, value in given],
        }
        if kind == "http":
            scope["method"] = method
        else:
            scope["extensions"] = {"websocket.http.response": {}}
        asyncio.run(self.guard(scope, receive, send))
        start, body = sent
        self.headers = {name.decode(): value.decode() for name, value in start["headers"]}
        self.body = body.get("body", b"")
        status: int = start["status"]
        return status


BEARER = ("authorization", f"Bearer {TOKEN}")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", PATHS)
def test_every_path_needs_the_token_whatever_the_method(method: str, path: str) -> None:
    harness = GuardHarness()
    assert harness.ask(method, path) == 401
    assert harness.headers["www-authenticate"].startswith("Bearer")
    assert (b"indilog token" in harness.body) is (method != "HEAD")
    assert (harness.reached, harness.counters.requests_refused) == ([], 1)
    assert harness.ask(method, path, BEARER) == 200
    assert harness.counters.requests_refused == 1


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz", "/login"])
def test_health_and_the_sign_in_page_need_no_token_and_are_read_only(path: str) -> None:
    harness = GuardHarness()
    assert [harness.ask(method, path) for method in ("GET", "HEAD")] == [200, 200]
    assert {harness.ask(method, path) for method in UNSAFE} == {401}


@pytest.mark.parametrize(
    "value",
    [
        "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}t", f"Basic {TOKEN}",
        TOKEN, f"Bearer{TOKEN}", f"Bearer {TOKEN.upper()}", f"Bearer {TOKEN},{TOKEN}",
    ],
)  # fmt: skip
def test_a_wrong_token_is_refused_like_a_missing_one(value: str) -> None:
    harness = GuardHarness()
    assert harness.ask("GET", "/apps", ("authorization", value)) == 401
    assert (b"another token than this platform's" in harness.body) is bool(value)
    assert b"indilog token" in harness.body
    assert harness.ask("GET", "/apps", ("authorization", f"bEARER  {TOKEN} ")) == 200


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_foreign_host_name_is_refused_before_any_other_check(kind: str) -> None:
    for name in STRANGE_NAMES:
        for method in METHODS if kind == "http" else [""]:
            harness = GuardHarness()
            assert harness.ask(method, "/livez", BEARER, host=name, kind=kind) == 421, name
            assert harness.reached == []
    for name in NAMES:
        assert GuardHarness().ask("GET", "/apps", BEARER, host=name, kind=kind) == 200, name


def test_a_request_without_a_host_name_is_refused() -> None:
    harness = GuardHarness()
    scope = {"type": "http", "scheme": "http", "path": "/livez", "method": "GET", "headers": []}
    sent: list[Any] = []

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    asyncio.run(harness.guard(scope, None, send))  # type: ignore[arg-type]
    assert (sent[0]["status"], harness.reached) == (421, [])


def test_known_host_names_are_remembered_up_to_a_limit() -> None:
    harness = GuardHarness()
    for port in range(1000):
        assert harness.ask("GET", "/livez", host=f"127.0.0.1:{port}") == 200
    assert len(harness.guard._hosts) <= 64


@pytest.mark.parametrize("name", ["host", "origin", "sec-fetch-site", "authorization",
                                  "content-type", "content-length", "cookie"])  # fmt: skip
def test_a_repeated_header_that_the_guard_checks_is_refused(name: str) -> None:
    given = (name, "127.0.0.1:8080")
    assert GuardHarness().ask("GET", "/livez", given, given) == 400


ORIGINS_OF_OTHERS = [
    "http://evil.example", "null", "", "http://127.0.0.1", "http://127.0.0.1:9999",
    "https://127.0.0.1:8080", "http://localhost:8080", "http://127.0.0.1:8080.evil.example",
    "http://127.0.0.1:8080/", "ws://127.0.0.1:8080", "127.0.0.1:8080", "file://",
    "http://evil.example http://127.0.0.1:8080",
]  # fmt: skip


@pytest.mark.parametrize("path", ["/apps", "/functions/a/open", "/session", "/logs/x/records"])
@pytest.mark.parametrize("auth", [True, False])
def test_a_page_of_another_origin_changes_nothing_even_with_the_token(
    path: str, *, auth: bool
) -> None:
    for method in UNSAFE:
        for origin in ORIGINS_OF_OTHERS:
            harness = GuardHarness(auth=auth)
            assert harness.ask(method, path, BEARER, ("origin", origin), *JSON.items()) == 403, (
                origin
            )
            assert harness.reached == []
        for site in ("cross-site", "same-site", "", "none,same-origin"):
            assert (
                GuardHarness(auth=auth).ask(method, path, BEARER, ("sec-fetch-site", site)) == 403
            ), site
        for site in ("none", "same-origin"):
            own = (("sec-fetch-site", site), ("origin", "http://127.0.0.1:8080"))
            assert GuardHarness(auth=auth).ask(method, path, BEARER, *own, *JSON.items()) == 200


@pytest.mark.parametrize("auth", [True, False])
def test_a_page_of_another_origin_opens_no_websocket(*, auth: bool) -> None:
    for origin in ORIGINS_OF_OTHERS:
        harness = GuardHarness(auth=auth)
        asked = harness.ask(
            "", "/client", BEARER, ("origin", origin), scheme="ws", kind="websocket"
        )
        assert (asked, harness.reached) == (403, [])
    own = ("origin", "http://127.0.0.1:8080")
    harness = GuardHarness(auth=auth)
    assert harness.ask("", "/client", BEARER, own, scheme="ws", kind="websocket") == 200
    assert harness.ask("", "/client", scheme="ws", kind="websocket") == (401 if auth else 200)


def test_a_websocket_that_cannot_be_answered_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    headers = [(b"host", b"evil.example")]
    scope = {"type": "websocket", "scheme": "ws", "path": "/client", "headers": headers}
    asyncio.run(GuardHarness().guard(scope, None, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_own_origin_is_that_of_the_scheme_and_of_a_proxy_before_a_configured_name() -> None:
    def status(origin: str, host: str, scheme: str) -> int:
        return GuardHarness().ask("PUT", "/x", BEARER, ("origin", origin), host=host, scheme=scheme)

    assert status("https://127.0.0.1", "127.0.0.1", "https") == 200
    assert status("http://127.0.0.1", "127.0.0.1", "https") == 403
    assert status("https://box.example", "box.example", "http") == 200
    assert status("http://box.example", "box.example", "http") == 200
    assert status("http://box.example", "box.example", "https") == 403
    assert status("https://box.example:444", "box.example", "http") == 403


def test_public_functions_need_no_token_and_obey_all_other_rules() -> None:
    path = "/functions/a/open"
    assert GuardHarness().ask("POST", path) == 200
    assert GuardHarness().ask("POST", path, *JSON.items()) == 200
    assert GuardHarness().ask("GET", path) == 401
    assert GuardHarness().ask("POST", "/operations/a/open") == 401, "operations are never public"
    assert GuardHarness().ask("POST", path, host="evil.example") == 421
    assert GuardHarness().ask("POST", path, ("sec-fetch-site", "cross-site")) == 403
    assert GuardHarness().ask("POST", path, ("content-type", "text/plain")) == 415


JSON_KINDS = ["application/json", "application/json; charset=utf-8", "Application/JSON"]
SIMPLE_KINDS = ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x", "", "text/x-python, text/plain", "*/*",
                "text/plain; application/json"]  # fmt: skip


@pytest.mark.parametrize("auth", [True, False])
@pytest.mark.parametrize("path", ["/apps", "/apps/x", "/functions/a/closed", "/logs/x/records",
                                  "/logs/x/trim", "/nowhere"])  # fmt: skip
def test_a_body_of_a_type_that_any_web_page_may_send_is_refused(path: str, *, auth: bool) -> None:
    for method in ("POST", "PUT", "DELETE"):
        for kind in SIMPLE_KINDS:
            harness = GuardHarness(auth=auth)
            assert harness.ask(method, path, BEARER, ("content-type", kind)) == 415, kind
            assert harness.reached == []
        for kind in JSON_KINDS:
            assert GuardHarness(auth=auth).ask(method, path, BEARER, ("content-type", kind)) == 200
        for length in (("content-length", "1"), ("transfer-encoding", "chunked")):
            assert GuardHarness(auth=auth).ask(method, path, BEARER, length) == 415, (
                "no type at all"
            )
        assert GuardHarness(auth=auth).ask(method, path, BEARER, ("content-length", "0")) == 200


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        ("/apps", {"text/x-python", "application/octet-stream"}),
        ("/apps/x", {"text/x-python", "application/octet-stream"}),
        ("/logs/x/records", {"application/octet-stream"}),
        ("/appsx", set()),
        ("/functions/a/closed", set()),
        ("*", set()),
    ],
)
def test_source_and_bytes_are_accepted_on_their_own_routes_only(path: str, kinds: set[str]) -> None:
    taken = {
        kind
        for kind in ("text/x-python", "application/octet-stream")
        if GuardHarness().ask("POST", path, BEARER, ("content-type", kind)) == 200
    }
    assert taken == kinds


def cookie(secret: str, port: int = 8080) -> tuple[str, str]:
    return ("cookie", f"a=b; indilog-{port}={secret}; c=d")


def signed_in(harness: GuardHarness) -> str:
    secret = harness.credentials.begin_session(harness.credentials.new_code())
    assert secret is not None
    return secret


def test_a_session_cookie_replaces_the_token_on_own_pages_only() -> None:
    harness = GuardHarness()
    own = cookie(signed_in(harness))
    for method in METHODS:
        assert harness.ask(method, "/apps", own) == 200
        assert harness.ask(method, "/apps", own, ("sec-fetch-site", "same-origin")) == 200
        for foreign in (
            ("sec-fetch-site", "same-site"),  # another port of this address gets the cookie too
            ("sec-fetch-site", "cross-site"),
            ("origin", "http://127.0.0.1:9999"),
        ):
            assert harness.ask(method, "/apps", own, foreign) == 403
    assert harness.ask("", "/client", own, scheme="ws", kind="websocket") == 200
    assert harness.ask("GET", "/apps", own, host="evil.example") == 421


def test_a_session_cookie_holds_for_one_port_and_one_scheme() -> None:
    harness = GuardHarness(port=9000)
    secret = signed_in(harness)
    assert harness.ask("GET", "/apps", cookie(secret)) == 401
    assert harness.ask("GET", "/apps", cookie(secret, 9000)) == 200
    assert harness.ask("GET", "/apps", cookie(secret, 9000), scheme="https") == 401
    secure = ("cookie", f"__Host-indilog-9000={secret}")
    assert harness.ask("GET", "/apps", secure, scheme="https") == 200
    assert harness.ask("GET", "/apps", ("cookie", f"indilog-9000={secret[:-1]}")) == 401
    assert harness.ask("GET", "/apps", ("cookie", "indilog-9000=")) == 401


def test_a_sign_in_code_works_once_and_for_a_short_time() -> None:
    harness = GuardHarness()
    code = harness.credentials.new_code()
    assert harness.credentials.begin_session(code) is not None
    assert harness.credentials.begin_session(code) is None
    late = harness.credentials.new_code()
    harness.clock.now += 10
    assert harness.credentials.begin_session(late) is None
    assert harness.credentials.begin_session("") is None


def test_a_session_cookie_ends_by_time_by_signing_out_and_by_too_many() -> None:
    harness = GuardHarness()
    first, second = signed_in(harness), signed_in(harness)
    assert [harness.ask("GET", "/apps", cookie(one)) for one in (first, second)] == [200, 200]
    third = signed_in(harness)
    assert harness.ask("GET", "/apps", cookie(first)) == 401, "the oldest of three"
    harness.credentials.end_session(second.encode())
    assert harness.ask("GET", "/apps", cookie(second)) == 401
    harness.clock.now += 100
    assert harness.ask("GET", "/apps", cookie(third)) == 401


def test_a_browser_without_a_session_gets_a_page_on_how_to_sign_in() -> None:
    harness = GuardHarness()
    assert harness.ask("GET", "/docs", ("accept", "text/html,*/*")) == 401
    assert b"indilog open" in harness.body
    assert "default-src 'none'" in harness.headers["content-security-policy"]
    assert "unsafe" not in harness.headers["content-security-policy"]
    assert harness.ask("POST", "/docs", ("accept", "text/html")) == 401
    assert harness.headers["content-type"] == "application/problem+json"


def test_without_authentication_all_other_rules_hold() -> None:
    harness = GuardHarness(auth=False)
    assert harness.ask("GET", "/apps") == 200
    assert harness.ask("GET", "/apps", host="evil.example") == 421
    assert harness.ask("POST", "/apps", ("origin", "http://evil.example")) == 403
    assert harness.ask("POST", "/apps", ("content-type", "text/plain")) == 415
