"""The commands in the READMEs of the applications work as they are written there."""

from __future__ import annotations

import asyncio
import itertools
import re
import shlex
from pathlib import Path

import httpx
import pytest

from functions.orders.outside import services
from tests.cluster.function_platform import Platform, running

FUNCTIONS = Path(__file__).resolve().parents[3] / "functions"
OPEN = {"scheduled", "running"}
pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]


def commands(app: str) -> list[list[str]]:
    """Return the curl commands in an application's README, in order."""
    text = (FUNCTIONS / app / "README.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^curl .*$", text, re.MULTILINE)]


async def run_typed(platform: Platform, command: list[str]) -> httpx.Response:
    """Do what curl would do."""
    options = list(itertools.pairwise(command))
    [url] = [word for word in command if word.startswith("localhost:8080/")]
    given = [value for name, value in options if name == "-H"]
    assert given.pop(0) == "$AUTH", "each command carries the token"
    headers = dict(value.split(": ", 1) for value in given)
    [body] = [value for name, value in options if name == "--json"]
    headers["content-type"] = "application/json"
    path = url.removeprefix("localhost:8080")
    return await platform.http.post(path, content=body, headers=headers)


async def wait_for_end(platform: Platform, accepted: httpx.Response) -> httpx.Response:
    """Wait for the end of an asynchronous invocation; return its outcome."""
    path = f"/invocations/{accepted.json()['invocation']}"
    async with asyncio.timeout(200):
        while (reported := await platform.http.get(path, params={"wait": 30})).json()[
            "state"
        ] in OPEN:
            pass
    return reported


@pytest.mark.parametrize("app", ["social", "travel", "media", "orders"])
async def test_every_curl_command_in_its_readme_does_what_it_says(tmp_path: Path, app: str) -> None:
    with services() as outside:
        async with running(tmp_path, workers=1) as platform:
            await every_command_does_what_it_says(platform, app, outside.url)


async def every_command_does_what_it_says(platform: Platform, app: str, outside: str) -> None:
    sources = {path.name: path.read_text() for path in (FUNCTIONS / app).glob("*.py")}
    deployed = await platform.http.put(f"/apps/{app}", json={"sources": sources})
    assert deployed.status_code == 200, deployed.text
    if app == "orders":  # as the shop does, which the README starts before
        settings = {"goods": {}, "settings": {"services": outside}}
        assert (await platform.call("orders.load", **settings)).json() == 0
    reported: list[object] = []
    for command in commands(app):
        answer = await run_typed(platform, command)
        assert answer.status_code in {200, 202}, (command, answer.text)
        if answer.status_code == 202:
            answer = await wait_for_end(platform, answer)
            assert answer.json()["state"] == "done", answer.text
        reported.append(answer.json())
    assert len(reported) >= 3
    assert all(one not in (None, [], False) for one in reported), reported
