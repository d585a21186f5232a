"""A page of another origin, in a real Chromium, cannot deploy, read or invoke anything, with a
signed-in visitor or without. Nor can a page whose name was rebound to this machine.

The platform's own page can, so the attacks are real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Response

from indilog.link.access import reach
from tests.browser.attacks import ATTACK, KINDS, MODES, SOURCE
from tests.browser.browser import chromium
from tests.cluster.platform_process import platform
from tests.support.repeated import repeated

APP = """
import indilog
app = indilog.App("edge")

@app.function
async def touch(ctx: indilog.Context) -> str:
    await ctx.log("edge").append(b"touched")
    return "done by touch"

@app.function(public=True)
async def hook(ctx: indilog.Context) -> str:
    await ctx.log("edge").append(b"hooked")
    return "done by hook"
"""
SECRET = "a secret of the log"
PAGE = b"<!doctype html><title>evil</title><body>"
JSON = "application/json"
Kinds: TypeAlias = Sequence[str | None]
SENT_MIN = 100
"""Minimum number of requests that reach the platform in one attack; browsers withhold some."""
REFUSED = {400, 401, 403, 415, 421}
OTHER_NAME, REBOUND_NAME = "evil.example", "rebound.example"
pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.timeout(600)]


class Evil(BaseHTTPRequestHandler):
    """Serves an empty page, under any host name."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002, ANN401
        """Log nothing."""


class World(NamedTuple):
    """A platform, a hostile server, and a browser."""

    url: str
    evil_port: int
    browser: Browser

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:  # noqa: ANN401
        """Send a request to the platform with its token."""
        return httpx.request(
            method, self.url + path, headers=reach(self.url).headers, timeout=120, **more
        )

    def refused(self) -> int:
        """Return the number of requests that the platform's rules have refused."""
        count: int = self.ask("GET", "/status").json()["gateway"]["requests_refused"]
        return count

    def state(self) -> tuple[list[str], list[str], object]:
        """Return the state that an attack could change: applications, records, a policy."""
        apps = [app["name"] for app in self.ask("GET", "/apps").json()["apps"]]
        records = self.ask("GET", "/logs/edge/records").json()["records"]
        policy = self.ask("GET", "/logs/edge/retention").json()
        return apps, [record["data"] for record in records], policy


@contextmanager
def hostile_server() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def world_in(directory: Path, browser: Browser) -> Iterator[World]:
    with hostile_server() as port, platform(directory) as up:
        there = World(up.url, port, browser)
        there.ask("POST", "/apps", json={"sources": {"edge.py": APP}}).raise_for_status()
        there.ask("POST", "/logs/edge/records", json={"data": SECRET}).raise_for_status()
        yield there


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run one Chromium for all tests; each test has its own context in it."""
    with chromium({OTHER_NAME: "127.0.0.1", REBOUND_NAME: "127.0.0.1"}) as running:
        yield running


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[World]:
    """Run the processes shared by all tests that change nothing."""
    with world_in(tmp_path_factory.mktemp("browser"), browser) as there:
        yield there


@contextmanager
def visitor(world: World, *, signed_in: bool) -> Iterator[BrowserContext]:
    """Yield a browser window with its own cookies, signed in at the platform or not."""
    context = world.browser.new_context()
    context.set_default_timeout(150_000)
    try:
        if signed_in:
            link = world.ask("POST", "/session/codes").json()["path"]
            page = context.new_page()
            page.goto(world.url + link)
            page.wait_for_url("**/docs")
            page.close()
            assert [cookie["httpOnly"] for cookie in context.cookies()] == [True]
        yield context
    finally:
        context.close()


def attacked(
    world: World,
    page: Page,
    gateway: str,
    *,
    modes: Sequence[str] = MODES,
    kinds: Kinds = KINDS,
    silent_ms: int = 3_000,
) -> tuple[list[tuple[str, str]], list[int]]:
    """Attack from a page; return what it read, and the platform's status codes."""
    statuses: list[int] = []

    def note(response: Response) -> None:
        if urlsplit(response.url).port == urlsplit(world.url).port:
            statuses.append(response.status)

    page.on("response", note)
    seen: list[tuple[str, str]] = page.evaluate(
        ATTACK,
        {
            "gateway": gateway,
            "source": SOURCE,
            "modes": modes,
            "kinds": kinds,
            "silent": silent_ms,
        },
    )
    return seen, statuses


def nothing_was_read(seen: list[tuple[str, str]]) -> None:
    for what, text in seen:
        for secret in (SECRET, "done by", '"edge"', "OPENED", "openapi", "indilog_"):
            assert secret not in text, (what, text)


@pytest.mark.parametrize("name", ["127.0.0.1", repeated("localhost"), repeated(OTHER_NAME)])
@pytest.mark.parametrize("signed_in", [repeated(False), True])
def test_a_page_of_another_origin_can_neither_read_nor_change_anything(
    world: World, name: str, *, signed_in: bool
) -> None:
    """The origins include another port of the platform's address, to which browsers send its
    cookies.
    """
    before, refused = world.state(), world.refused()
    with visitor(world, signed_in=signed_in) as context:
        page = context.new_page()
        page.goto(f"http://{name}:{world.evil_port}/")
        seen, statuses = attacked(world, page, world.url)
    nothing_was_read(seen)
    assert len(seen) > 100
    # A page does not learn the status of most requests, so the platform's count is checked.
    assert world.refused() - refused > SENT_MIN, "the browser sent them"
    assert set(statuses) <= REFUSED | {200}, "the sign-in page needs no token"
    assert world.state() == before


def test_a_page_of_a_rebound_name_can_neither_read_nor_change_anything(world: World) -> None:
    """The page came from its own server under that name; then the name resolves to 127.0.0.1."""
    before, refused = world.state(), world.refused()
    with visitor(world, signed_in=True) as context:
        page = context.new_page()
        gateway = f"http://{REBOUND_NAME}:{urlsplit(world.url).port}"
        html = {"content-type": "text/html"}
        page.route(f"{gateway}/", lambda route: route.fulfill(status=200, headers=html, body=PAGE))
        page.goto(f"{gateway}/")
        page.unroute(f"{gateway}/")
        seen, statuses = attacked(world, page, gateway)
    nothing_was_read(seen)
    assert world.refused() - refused > SENT_MIN
    assert set(statuses) == {421}
    assert world.state() == before


def test_the_platforms_own_page_can_do_all_of_it_after_a_sign_in(
    tmp_path: Path, browser: Browser
) -> None:
    """Otherwise the tests above could not fail."""
    with world_in(tmp_path, browser) as world, visitor(world, signed_in=True) as context:
        page = context.new_page()
        faults: list[str] = []
        elsewhere: list[str] = []
        page.on(
            "console",
            lambda message: faults.append(message.text) if message.type == "error" else None,
        )
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(world.url) else elsewhere.append(asked.url),
        )
        page.goto(f"{world.url}/docs")
        page.get_by_text("/functions/edge/touch").click()
        form = page.locator("details", has_text="/functions/edge/touch").locator("form")
        form.get_by_role("button").click()
        form.get_by_text("done by touch").wait_for()
        assert (faults, elsewhere) == ([], [])
        deploy = {"method": "PUT", "headers": {"content-type": "text/x-python"}, "body": SOURCE}
        status = "async (deploy) => (await fetch('/apps/evil', deploy)).status"
        assert page.evaluate(status, deploy) == 200
        seen, statuses = attacked(
            world, page, world.url, modes=["cors"], kinds=[None, JSON], silent_ms=4_000
        )
        read = "\n".join(text for _, text in seen)
        for text in (SECRET, "done by touch", "done by hook", "OPENED"):
            assert text in read
        assert {200, 201} <= set(statuses)
        _, records, policy = world.state()
        assert {"touched", "hooked", "evil"} <= set(records)
        assert policy == {"age_s": 86400, "size_bytes": None}


def test_the_sign_in_link_works_once_and_the_next_browser_gets_an_explanation(world: World) -> None:
    link = world.ask("POST", "/session/codes").json()["path"]
    with visitor(world, signed_in=False) as first, visitor(world, signed_in=False) as second:
        page = first.new_page()
        page.goto(f"{world.url}/docs")
        page.get_by_text("run indilog open in a terminal").wait_for()
        page.goto(world.url + link)
        page.wait_for_url("**/docs")
        page.get_by_text("/functions/edge/touch").wait_for()
        again = second.new_page()
        again.goto(world.url + link)
        again.get_by_text("This link was already used or has expired").wait_for()
        assert again.url == f"{world.url}/login", "the code is gone from the address"
        assert second.cookies() == []
