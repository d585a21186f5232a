"""The commands `indilog schedules` without a platform: what they ask, and what they print."""

from __future__ import annotations

import json

import httpx
import pytest
from typer.testing import CliRunner, Result

from indilog.cli.commands import app

SCHEDULE = {
    "workflow": "report", "expression": "5 0 * * *", "timezone": "UTC", "overlap": "skip",
    "catch_up": "last", "is_paused": True, "next_due": 1.7e9, "open_runs": ["a", "b"],
}  # fmt: skip
ANSWERS = {
    "list": [SCHEDULE],
    "pause": None,
    "resume": None,
    "backfill": {"ids": ["report@1", "report@2"]},
}
Asked = list[tuple[str, object]]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["schedules", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found: Asked = []
    real = httpx.Client

    def answer(request: httpx.Request) -> httpx.Response:
        found.append((request.url.path, json.loads(request.content)))
        operation = request.url.path.rpartition(".")[2]
        return httpx.Response(200, text=json.dumps(ANSWERS[operation]))

    def client(**given: object) -> httpx.Client:
        return real(base_url=str(given["base_url"]), transport=httpx.MockTransport(answer))

    monkeypatch.setattr(httpx, "Client", client)
    return found


def test_the_list_shows_state_and_next_due_time(asked: Asked) -> None:
    lines = run("list", "shop").stdout.splitlines()
    assert lines[2].split() == [
        "report", "5", "0", "*", "*", "*", "UTC", "skip", "paused", "2023-11-14", "22:13:20", "2",
    ]  # fmt: skip
    assert asked == [("/operations/shop/schedules.list", {})]
    assert json.loads(run("list", "shop", "--json").stdout) == [SCHEDULE]


@pytest.mark.parametrize("action", ["pause", "resume"])
def test_a_schedule_is_paused_and_resumed(asked: Asked, action: str) -> None:
    assert f"The schedule of report is {action}d." in run(action, "shop", "report").stdout
    assert asked == [(f"/operations/shop/schedules.{action}", {"workflow": "report"})]


def test_a_backfill_prints_the_runs(asked: Asked) -> None:
    done = run("backfill", "shop", "report", "2026-11-01T00:00Z", "2026-11-03T00:00Z")
    assert done.stdout.splitlines() == ["report@1", "report@2"]
    given = {"workflow": "report", "start": "2026-11-01T00:00Z", "end": "2026-11-03T00:00Z"}
    assert asked == [("/operations/shop/schedules.backfill", given)]
