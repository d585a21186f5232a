"""The permissions of callers of a running platform. They come with its token, by its Unix socket,
in a browser's session, over TLS, or without any of these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme

import indilog
from indilog.base.errors import NotReadyError, UnauthorizedError
from indilog.link.access import reach
from tests.cluster.platform_process import ROOT, SETTINGS, PlatformProcess, platform
from tests.support.clients import http_client, token_headers

APP = """
import os
import indilog

app = indilog.App("edge")

@app.function
async def closed(ctx: indilog.Context) -> int:
    return await ctx.log("edge").append(b"x")

@app.function
async def sees() -> list[str]:
    return sorted(os.environ)

@app.function(public=True)
async def hook(ctx: indilog.Context, n: int = 0) -> int:
    return n + 1
"""
pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the platform of these tests keeps its data; the path is too long for a Unix socket."""
    return tmp_path_factory.mktemp("a-path-" + "x" * 100) / "data"


@pytest.fixture(scope="module")
def up(data: Path) -> Iterator[PlatformProcess]:
    """Run a platform with an application."""
    with platform(data) as running:
        answer = httpx.post(
            f"{running.url}/apps",
            json={"sources": {"edge.py": APP}},
            headers=token_headers(running.url),
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        yield running


@contextmanager
def caller(url: str, **headers: str) -> Iterator[httpx.Client]:
    """Return a client that sends only these headers."""
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=120) as client:
        yield client


def indilog_says(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "indilog", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_without_the_token_only_health_is_answered_and_the_error_names_the_token(
    up: PlatformProcess,
) -> None:
    with caller(up.url) as stranger:
        for path in ("/livez", "/healthz", "/readyz"):
            assert stranger.get(path).status_code == 200
        for path in ("/", "/apps", "/status", "/metrics", "/docs", "/openapi.json", "/logs/a/tail"):
            refused = stranger.get(path)
            assert (refused.status_code, "indilog token" in refused.json()["detail"]) == (401, True)
        assert stranger.post("/functions/edge/closed", json={}).status_code == 401
        assert stranger.put("/apps/mine", json={"sources": {"a.py": ""}}).status_code == 401
        assert stranger.delete("/apps/edge").status_code == 401
    with caller(up.url, **token_headers(up.url)) as known:
        assert [app["name"] for app in known.get("/apps").json()["apps"]] == ["edge"]
        assert known.get("/status").headers["cross-origin-resource-policy"] == "same-origin"


def test_no_request_that_a_web_page_could_send_deploys_or_runs_anything(
    up: PlatformProcess,
) -> None:
    """Each request has the token, so that only the other rules can refuse it."""
    with caller(up.url, **token_headers(up.url)) as client:
        for headers, status in (
            ({"content-type": "text/plain"}, 415),
            ({"content-type": "application/x-www-form-urlencoded"}, 415),
            ({"content-type": "text/x-python", "origin": "http://evil.example"}, 403),
            ({"content-type": "text/x-python", "sec-fetch-site": "same-site"}, 403),
            ({"content-type": "text/x-python", "host": "evil.example"}, 421),
            ({}, 415),
        ):
            answer = client.put("/apps/evil", content=APP.encode(), headers=headers)
            assert answer.status_code == status, answer.text
            assert not [name for name in answer.headers if name.startswith("access-control")]
        preflight = {"origin": "http://evil.example", "access-control-request-method": "PUT"}
        assert client.options("/apps/evil", headers=preflight).status_code == 403
        assert [app["name"] for app in client.get("/apps").json()["apps"]] == ["edge"]
        octets = {"content-type": "application/octet-stream"}
        assert client.put("/apps/mine", content=APP.encode(), headers=octets).status_code == 200
        assert client.delete("/apps/mine").status_code == 200


def test_a_public_function_is_called_without_a_token(up: PlatformProcess) -> None:
    with caller(up.url) as stranger:
        assert stranger.post("/functions/edge/hook", json={"n": 6}).json() == 7
        foreign = {"origin": "http://evil.example"}
        assert stranger.post("/functions/edge/hook", json={}, headers=foreign).status_code == 403
        assert stranger.post("/functions/edge/hook", data={"n": "6"}).status_code == 415
        assert stranger.get("/functions/edge/hook").status_code == 401


def test_a_function_sees_neither_token_nor_the_environment_of_the_platform(
    up: PlatformProcess,
) -> None:
    assert any(name.startswith("INDILOG_") for name in SETTINGS), (
        "the environment of the platform is not empty"
    )
    answer = httpx.post(
        f"{up.url}/functions/edge/sees", json={}, headers=token_headers(up.url), timeout=120
    )
    assert "PATH" in answer.json()
    assert not [name for name in answer.json() if name.startswith(("INDILOG_", "PYTEST_"))]


def test_the_unix_socket_needs_no_token_and_only_its_user_may_use_it(
    up: PlatformProcess, data: Path
) -> None:
    folder = data / "socket"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (data / "token").stat().st_mode & 0o777 == 0o600
    assert data.stat().st_mode & 0o777 == 0o700
    here = os.open(folder, os.O_PATH)
    transport = httpx.HTTPTransport(uds=f"/proc/self/fd/{here}/gateway")
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as client:
        assert client.get("/apps").status_code == 200
        assert client.get("/apps", headers={"host": "evil.example"}).status_code == 421
        assert client.post("/functions/edge/hook", json={}).json() == 1
    os.close(here)


@pytest.mark.asyncio
async def test_clients_find_the_token_by_themselves(up: PlatformProcess) -> None:
    port = urlsplit(up.url).port
    for url in (up.url, f"http://localhost:{port}"):
        async with indilog.connect(url) as client:
            assert await client.call("edge.hook", n=1) == 2
    known = reach(up.url).token
    async with indilog.connect(up.url, token=known) as client:
        assert await client.log("edge").tail() >= 0
    for wrong in ("", "wrong", known[:-1]):
        with pytest.raises(UnauthorizedError, match="run `indilog token` as the user that runs it"):
            async with indilog.connect(up.url, token=wrong):
                raise AssertionError("it was taken")


@pytest.mark.repeated("tests/unit/link/test_access.py")
def test_commands_find_the_token_or_say_where_it_is(up: PlatformProcess, data: Path) -> None:
    token = (data / "token").read_text().strip()
    assert indilog_says("token", "--url", up.url).stdout.strip() == token
    assert indilog_says("invoke", "edge.hook", "n:=1", "--url", up.url).stdout == "2\n"
    there = {"INDILOG_URL": up.url, "INDILOG_TOKEN": "wrong"}
    refused = indilog_says("apps", **there)
    assert (refused.returncode, "`indilog token` prints it" in refused.stderr) == (2, True)
    unknown = indilog_says("token", "--url", "http://127.0.0.1:1")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "No token is known for http://127.0.0.1:1" in unknown.stderr


def test_a_browser_signs_in_once_by_the_printed_link(up: PlatformProcess) -> None:
    link = indilog_says("open", "--url", up.url, DISPLAY="", WAYLAND_DISPLAY="").stdout.strip()
    assert link.startswith(f"{up.url}/login#")
    code = {"code": urlsplit(link).fragment}
    with caller(up.url) as browser, caller(up.url) as thief:
        assert b"<script>" in browser.get("/login").content
        foreign = {"origin": "http://127.0.0.1:1"}
        assert thief.post("/session", json=code, headers=foreign).status_code == 403
        assert thief.post("/session", json={"code": "guess"}).status_code == 401
        assert thief.post("/session", json={"code": "x" * 200}).status_code == 422
        begun = browser.post("/session", json=code)
        assert begun.status_code == 204
        given = begun.headers["set-cookie"].lower()
        assert "httponly" in given
        assert "samesite=strict" in given
        assert "secure" not in given
        assert browser.get("/docs").status_code == 200
        assert thief.post("/session", json=code).status_code == 401, "the link was used"
        assert thief.get("/docs").status_code == 401
        assert browser.delete("/session", headers=foreign).status_code == 403
        assert browser.post("/functions/edge/hook", json={}).status_code == 200
        assert browser.get("/status", headers={"sec-fetch-site": "same-site"}).status_code == 403
        kept = dict(browser.cookies)
        assert browser.delete("/session").status_code == 204
        assert browser.get("/docs").status_code == 401
        again = httpx.get(f"{up.url}/docs", cookies=kept, trust_env=False, timeout=120)
        assert again.status_code == 401


@pytest.mark.repeated("tests/unit/runtime/cluster/test_token_file.py")
def test_the_token_stays_over_a_restart_and_without_one_all_is_open(tmp_path: Path) -> None:
    with platform(tmp_path) as first:
        token = reach(first.url).token
        assert len(token) >= 43
    with platform(tmp_path) as second:
        assert reach(second.url).token == token
    with platform(tmp_path, "--no-auth") as third, caller(third.url) as stranger:
        assert reach(third.url).token == ""
        assert stranger.get("/apps").status_code == 200
        assert stranger.get("/apps", headers={"host": "evil.example"}).status_code == 421
        refused = stranger.post("/apps", json={}, headers={"origin": "http://evil.example"})
        assert refused.status_code == 403
        assert "no authentication" in third.interrupted()


@pytest.mark.asyncio
async def test_every_request_works_over_tls_as_without_it(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    issued = ca.issue_cert("127.0.0.1", "localhost")
    files = {name: tmp_path / name for name in ("cert", "key", "ca", "other")}
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    ca.cert_pem.write_to_path(str(files["ca"]))
    other.cert_pem.write_to_path(str(files["other"]))
    options = ("--tls-cert", str(files["cert"]), "--tls-key", str(files["key"]))
    with platform(tmp_path / "data", *options) as up:
        assert up.url.startswith("https://")
        async with http_client(up.url) as client:  # trusts the certificate of its own machine
            assert (await client.get("/apps")).json() == {"apps": []}
            code = (await client.post("/session/codes")).json()["path"].partition("#")[2]
            begun = await client.post("/session", json={"code": code})
        given = begun.headers["set-cookie"].lower()
        assert given.startswith("__host-indilog-")
        assert "secure" in given
        for ca_file in (None, files["ca"]):
            async with indilog.connect(up.url, ca=ca_file) as there:
                assert await there.log("x").append(b"1") >= 0
        with pytest.raises(NotReadyError, match="is not trusted here"):
            async with indilog.connect(up.url, ca=files["other"]):
                raise AssertionError("it was trusted")
        assert indilog_says("apps", "--url", up.url).returncode == 0
        refused = indilog_says("apps", "--url", up.url, INDILOG_CA=str(files["other"]))
        assert (refused.returncode, "is not trusted here" in refused.stderr) == (2, True)
        async with httpx.AsyncClient(
            base_url=up.url.replace("https", "http"), timeout=120
        ) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/livez")


@pytest.mark.repeated("tests/unit/runtime/cluster/test_token_file.py")
def test_each_compute_node_takes_the_token_of_the_platform(tmp_path: Path) -> None:
    config = tmp_path / "two.toml"
    config.write_text("[cluster]\nengines = 2\n")
    with platform(tmp_path / "data", "--processes", "--config", str(config)) as up:
        status = httpx.get(f"{up.url}/status", headers=token_headers(up.url), timeout=120)
        assert status.status_code == 200
        tokens = []
        for path in Path(f"/tmp/indilog-{os.getuid()}").glob("*.json"):
            with suppress(FileNotFoundError):  # of a platform of another test, which has ended
                tokens.append(json.loads(path.read_text()))
        ours = [one for one in tokens if one["token_file"] == str(tmp_path / "data" / "token")]
        assert len(ours) == 2
        for one in ours:
            with caller(one["url"], **token_headers(up.url)) as known:
                assert known.get("/apps").status_code == 200
            with caller(one["url"]) as stranger:
                assert stranger.get("/apps").status_code == 401
            assert Path(one["socket"]).parent.stat().st_mode & 0o777 == 0o700
