"""The applications under load while worker processes are killed at random: what they promise holds
(WORKLOADS 4 and 5).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from functions.media.load import Media
from functions.workload.demonstration import Application, checked
from functions.workload.load import Run, run_load
from tests.cluster.function_platform import Platform, running

ROOT = Path(__file__).resolve().parents[2]
KILLS = 8
pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]


async def deploy(platform: Platform, app: str) -> None:
    folder = ROOT / "functions" / app
    sources = {path.name: path.read_text() for path in folder.glob("*.py")}
    answer = await platform.http.put(f"/apps/{app}", json={"sources": sources})
    assert answer.status_code == 200, answer.text


@asynccontextmanager
async def killing(platform: Platform, seed: int, killed: list[int]) -> AsyncIterator[None]:
    """Kill a worker now and then while the block runs, one that has calls to run."""
    choose = random.Random(seed)

    async def kill() -> None:
        while len(killed) < KILLS:
            await asyncio.sleep(choose.uniform(0.05, 0.3))
            busy = [w["pid"] for w in platform.host.status()["workers"] if w["calls"]]
            if busy:
                killed.append(choose.choice(busy))
                os.kill(killed[-1], signal.SIGKILL)

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run(platform: Platform, application: Application, seed: int) -> tuple[Run, list[str]]:
    """Run the application's load while workers die, and its check afterwards."""
    await deploy(platform, application.name)
    await application.load(platform.url, lambda _: None)
    killed: list[int] = []
    async with killing(platform, seed, killed):
        run = await run_load(
            platform.url,
            application.name,
            application.visitors(8, seed),
            functions=application.functions,
            seconds=3.0,
        )
    assert killed
    assert run.all.failures, "calls were under way in the workers that died"
    await application.settled(platform.url)
    _, faults = await checked(platform.url, application, lambda *_: None)
    return run, faults


@pytest.mark.parametrize("seed", range(2))
async def test_each_review_is_there_once_although_workers_are_killed(
    tmp_path: Path, seed: int
) -> None:
    application = Media(users=30, movies=20)
    async with running(tmp_path, workers=2) as platform:
        done, faults = await run(platform, application, seed)
    assert faults == []
    assert not application.unknown
    assert len(application.acknowledged) >= done.requests
