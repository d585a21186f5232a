"""`python -m bokiflow replay-check` asks a running platform."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cluster.function_platform import running
from tests.cluster.platform_process import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]
CODE = """
import bokiflow, indilog

app = indilog.App("code")
flow = bokiflow.Flow(app)

async def pay(n: int) -> int:
    raise AssertionError("a check executes nothing")

async def paid(n: int) -> int:
    return n

@flow.workflow
async def order(wf: bokiflow.Workflow, n: int) -> None:
    await wf.step(paid, n, name="pay")
    await wf.signal("go")

@app.function
async def start(n: int, id: str) -> str:
    return (await order.start(n, id=id)).id
"""


def check(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bokiflow", "replay-check", *words, "--url", url]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "libs")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)


@pytest.mark.repeated("tests/unit/bokiflow/runs/test_replay_check_command.py")
async def test_the_command_names_the_runs_that_changed_code_does_not_continue(
    tmp_path: Path,
) -> None:
    same, changed, empty = (tmp_path / f"{name}.py" for name in ("same", "changed", "empty"))
    same.write_text(CODE.replace("wf.step(paid", "wf.step(pay"))
    changed.write_text(CODE.replace('name="pay"', 'name="charge"'))
    empty.write_text("x = 1\n")
    async with running(tmp_path / "data") as platform:
        assert (await platform.deploy("travel", CODE)).status_code == 200
        for number in range(2):
            await platform.call("travel.start", n=number, id=f"order-{number}")
        await decided(platform.http, "order-1")

        async def run(*words: str) -> tuple[int, str, str]:
            done = await asyncio.to_thread(check, platform.url, *words)
            return done.returncode, done.stdout, done.stderr

        words = "The checked open runs of travel continue with this code.\n"
        assert await run("travel", str(same)) == (0, words, "")
        code, out, _ = await run("travel", str(changed), "--json")
        assert code == 1
        found = [json.loads(line) for line in out.splitlines()]
        assert [one["run"] for one in found] == ["order-1", "order-0"]
        assert "was decided as 'step pay'" in found[0]["reason"]
        code, out, _ = await run("travel", str(changed), "--limit", "1")
        assert (code, out.count("\n")) == (1, 1)
        mistakes = (
            (("nix", str(same)), "No app 'nix' is deployed"),
            (("travel", str(empty)), f"{empty} has no bokiflow.Flow"),
            (("travel", str(tmp_path)), f"{tmp_path} is no Python file."),
        )
        for given, sentence in mistakes:
            code, out, err = await run(*given)
            assert (code, out) == (2, "")
            assert err.startswith(sentence)
            assert err.count("\n") == 1
        shown = (await platform.http.get("/runs/travel/order-0")).json()
        assert len(shown["steps"]) == 1, "nothing was executed"


async def decided(http: httpx.AsyncClient, run: str) -> None:
    async with asyncio.timeout(200):
        while not (await http.get(f"/runs/travel/{run}")).json()["steps"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
