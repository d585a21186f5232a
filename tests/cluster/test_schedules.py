"""Schedules on a real platform, whose clock for due times the test moves."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

import indilog
from tests.cluster.function_platform import Platform, running, running_two, until
from tests.support.moved_time import MovedTime, moved_time

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

APP = """
import indilog

app = indilog.App("demo")

@app.schedule("* * * * *", catch_up="all")
@app.function
async def tick(ctx: indilog.Context) -> None:
    await ctx.log("ticks").append(ctx.invocation_id.encode())
"""


OTHER = """
import indilog

app = indilog.App("other")

@app.function
async def nothing() -> None: ...
"""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedTime:
    return moved_time(monkeypatch)


def to_next_minute(clock: MovedTime) -> None:
    """Set the clock to the first second of the next minute."""
    clock.wall_s += 60.5 - clock.time() % 60


async def look_at_the_clock(platform: Platform) -> None:
    """Let executors find due times that came when a test moved the clock: any change does."""
    assert (await platform.deploy("other", OTHER)).status_code == 200


async def ticks(url: str, count: int) -> list[str]:
    """Wait for this many ticks; return their invocations."""
    found: list[str] = []
    bound = 0
    async with indilog.connect(url) as client:
        log = client.log("ticks")
        while len(found) < count:
            record = await log.read_next(bound=bound, wait=300)
            assert record is not None
            found.append(record.data.decode())
            bound = record.seqnum + 1
        return [r.data.decode() for r in await log.read_range(fresh=True)]


async def test_a_schedule_runs_each_due_time_once_over_nodes_and_restarts(
    tmp_path: Path, clock: MovedTime
) -> None:
    async with running_two(tmp_path) as (one, two):
        to_next_minute(clock)
        assert (await one.deploy("demo", APP)).status_code == 200
        await until(lambda: bool(two.host.apps()))
        to_next_minute(clock)
        await look_at_the_clock(one)
        first = await ticks(one.url, 1)
        for tick in first:  # one that had not ended would run again after the restart
            ended = await one.http.get(f"/invocations/{tick}?wait=100")
            assert ended.json()["state"] == "done", ended.text
        [reported] = one.host.status()["schedules"]
        assert reported["schedule"] == "demo.tick * * * * * UTC"
        assert reported["last"] is not None
        assert (await one.http.get("/apps/demo")).json()["schedules"][0]["catch_up"] == "all"
    clock.wall_s += 180.0  # three due times pass while no process is up
    async with running_two(tmp_path) as (one, _):
        seen = await ticks(one.url, 4)
    assert len(set(seen)) == len(seen) >= 4, "each due time once"
    assert seen[0] == first[0]


async def test_a_schedule_that_cannot_be_kept_is_refused_at_deployment(tmp_path: Path) -> None:
    async with running(tmp_path, workers=1) as there:
        bad = await there.deploy("demo", APP.replace("* * * * *", "61 * * * *"))
        assert (bad.status_code, bad.json()["title"]) == (422, "DeployError")
        assert bad.json()["detail"].startswith(
            "demo.py, line 6: ValueError: '61 * * * *' is no schedule: bad minute"
        )
        needs = await there.deploy("demo", APP.replace("Context)", "Context, n: int)"))
        assert needs.json()["detail"] == (
            "demo.tick is called by a schedule, without arguments; give n a default."
        )


FLOW_APP = """
from datetime import datetime

import bokiflow
import indilog

app = indilog.App("demo")
flow = bokiflow.Flow(app)

@flow.workflow(schedule="* * * * *", overlap="queue")
async def tick(wf: bokiflow.Workflow, due: datetime) -> str:
    return due.isoformat()
"""


@pytest.mark.repeated("tests/unit/bokiflow/ownership/test_schedules.py")
async def test_a_scheduled_workflow_runs_each_due_time_once(
    tmp_path: Path, clock: MovedTime
) -> None:
    async with running(tmp_path) as platform:
        to_next_minute(clock)
        began = clock.time()
        deployed = await platform.deploy("demo", FLOW_APP)
        assert deployed.status_code == 200, deployed.text
        to_next_minute(clock)
        await look_at_the_clock(platform)
        async with indilog.connect(platform.url) as client:
            async with asyncio.timeout(300):
                while not (found := await client.runs("demo", state="done")):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            dues = []
            for run in found:
                shown = await run.show()
                due = datetime.fromisoformat(shown.result)
                assert run.id == f"tick@{due:%Y-%m-%dT%H:%M:%SZ}"
                dues.append(due.timestamp())
                assert due.timestamp() % 60 == 0
            # On a slow machine a further minute begins before the first run has ended.
            assert len(set(dues)) == len(dues)
            assert began < min(dues) <= max(dues) <= clock.time()
