"""The applications keep their guarantees under load while workers are killed at random.

See docs/WORKLOADS.md, 3 to 5.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from functions.media.load import Media
from functions.orders.load import Orders
from functions.orders.outside import services
from functions.social.graph import synthetic_graph
from functions.social.load import SocialNetwork
from functions.travel.hotels import generated_hotels
from functions.travel.load import Travel
from functions.workload.demonstration import checked
from functions.workload.load import LoadError, LoadRequest, LoadRun, run_load
from tests.cluster import platform_process
from tests.cluster.function_platform import Platform, running, until
from tests.cluster.platform_process import PlatformProcess
from tests.support.clients import http_client
from tests.support.repeated import repeated

ROOT = Path(__file__).resolve().parents[3]
KILLS = 4
pytestmark = pytest.mark.cluster


async def deploy(http: httpx.AsyncClient, app: str) -> None:
    """Deploy an application; its workflows have a short lease, so that a test need not wait."""
    folder = ROOT / "functions" / app
    sources = {path.name: path.read_text() for path in folder.glob("*.py")}
    code = sources["app.py"]
    sources["app.py"] = code.replace("Flow(app)", "Flow(app, lease=1.0)")
    assert ("Flow" in code) is (sources["app.py"] != code)
    answer = await http.put(f"/apps/{app}", json={"sources": sources})
    assert answer.status_code == 200, answer.text


def busy_workers(platform: Platform) -> list[int]:
    """Return the processes that run calls just now."""
    return [worker["pid"] for worker in platform.host.status()["workers"] if worker["calls"]]


@asynccontextmanager
async def killing(
    platform: Platform, seed: int, killed: list[int], *, most: int = KILLS
) -> AsyncIterator[None]:
    """Kill a worker now and then while the block runs, one that has calls to run."""
    choose = random.Random(seed)

    async def kill() -> None:
        while len(killed) < most:
            await asyncio.sleep(choose.uniform(0.05, 0.3))
            while not (busy := busy_workers(platform)):  # noqa: ASYNC110 no event announces it
                await asyncio.sleep(0.001)  # calls are short: there may be none just now
            killed.append(choose.choice(busy))
            os.kill(killed[-1], signal.SIGKILL)

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run(
    platform: Platform, application: Travel | Media | SocialNetwork | Orders, seed: int
) -> tuple[int, list[str]]:
    """Run the application's load while workers are killed, and its check afterwards.

    Returns how many requests were answered, and the faults.
    """
    await deploy(platform.http, application.name)
    await application.load(platform.url, lambda _: None)
    runs: list[LoadRun] = []
    failed = False
    # On a slow machine a kill may only hit workers that still load the application: then no request
    # fails, or none is answered. The load runs again until both have happened.
    while not failed or not any(application.acknowledged.values()):
        killed: list[int] = []
        async with killing(platform, seed + len(runs), killed):
            load = run_load(
                platform.url,
                application.name,
                application.visitors(8, seed + 1000 * len(runs)),
                functions=application.functions,
                seconds=1.5,
            )
            runs.append(await load)
        failed = failed or bool(killed and runs[-1].all.failures)
        assert len(runs) < 60, "no kill failed a request"
    await application.settle(platform.url)
    _, faults = await checked(platform.url, application, lambda *_: None)
    return sum(run.requests for run in runs), faults


@pytest.mark.heavy
@pytest.mark.parametrize("capacity", [repeated(60), 2])
@pytest.mark.asyncio
async def test_reservations_equal_capacity_used_and_orders_although_workers_are_killed(
    tmp_path: Path, capacity: int, seeds_wanted: int | None
) -> None:
    for seed in range(seeds_wanted or 1):
        application = Travel(
            generated_hotels(count=5), flights=4, users=8, capacity=capacity, mix={"reserve": 100.0}
        )
        async with running(tmp_path / str(seed), workers=2) as platform:
            _, faults = await run(platform, application, seed)
        assert faults == [], f"seed {seed}"
        assert not application.unknown
        assert any(application.acknowledged.values())


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_each_review_is_stored_once_although_workers_are_killed(
    tmp_path: Path, seeds_wanted: int | None
) -> None:
    for seed in range(seeds_wanted or 1):
        application = Media(users=30, movies=20)
        async with running(tmp_path / str(seed), workers=2) as platform:
            answered, faults = await run(platform, application, seed)
        assert faults == [], f"seed {seed}"
        assert not application.unknown
        assert len(application.acknowledged) >= answered


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_each_order_ends_once_with_its_money_stock_and_mail_although_workers_are_killed(
    tmp_path: Path, seeds_wanted: int | None
) -> None:
    for seed in range(seeds_wanted or 1):
        with services(seed=seed, failing=0.3) as outside:
            application = Orders(outside, items=10, customers=8, pieces=20, approval_s=1.0)
            async with running(tmp_path / str(seed), workers=2) as platform:
                _, faults = await run(platform, application, seed)
        assert faults == [], f"seed {seed}"
        assert application.acknowledged, "orders were placed"


@pytest.mark.asyncio
async def test_acknowledged_posts_are_stored_once_although_workers_are_killed(
    tmp_path: Path,
) -> None:
    application = SocialNetwork(synthetic_graph(people=40, friends_each=3))
    async with running(tmp_path, workers=2) as platform:
        _, faults = await run(platform, application, 1)
    assert faults == []
    assert application.acknowledged


@pytest.mark.repeated("tests/cluster/test_invocations.py")
@pytest.mark.asyncio
async def test_a_review_with_an_idempotency_key_is_composed_once_without_being_repeated(
    tmp_path: Path,
) -> None:
    """The platform accepts the request although workers are killed, and runs it again if needed."""
    application = Media(users=5, movies=5)
    reviewers = application.visitors(1, 1)
    composed = 0
    killed: list[int] = []
    async with running(tmp_path, workers=2, worker_stop_s=60.0) as platform:
        await deploy(platform.http, "media")
        await application.load(platform.url, lambda _: None)

        async def compose(request: LoadRequest) -> None:
            arguments = {k: v for k, v in request.arguments.items() if k != "request"}
            headers = {"idempotency-key": request.arguments["request"]}
            path = "/functions/media/compose"
            answer = await platform.http.post(path, json=arguments, headers=headers)
            assert answer.status_code == 200, answer.text
            application.keep(request, answer.json())

        async with killing(platform, 1, killed, most=3):
            while not killed:
                await asyncio.gather(*[compose(reviewers[0].request()) for _ in range(30)])
                composed += 30
        replay, faults = await checked(platform.url, application, lambda *_: None)
    assert faults == []
    assert (
        len(application.acknowledged)
        == sum(1 for _ in replay.objects_of_kind("review"))
        == composed
    )


async def killed_amid_load(there: PlatformProcess, application: Travel | Media | Orders) -> None:
    """Run an application's load, and kill everything once some requests are acknowledged."""
    async with http_client(there.url, timeout=150) as http:
        await deploy(http, application.name)
    await application.load(there.url, lambda _: None)
    load = asyncio.create_task(
        run_load(
            there.url,
            application.name,
            application.visitors(8, 1),
            functions=application.functions,
            seconds=600,
        )
    )
    await until(lambda: len(application.acknowledged) >= 20)
    there.kill_everything()
    with pytest.raises(LoadError, match="times in a row"):
        await load


async def faults_after(there: PlatformProcess, application: Travel | Media | Orders) -> list[str]:
    await application.settle(there.url)
    _, faults = await checked(there.url, application, lambda *_: None)
    return faults


@pytest.mark.repeated("tests/cluster/test_invocations.py")
@pytest.mark.parametrize("name", [repeated("travel"), repeated("media"), "orders"])
def test_requests_in_flight_take_effect_once_after_a_kill_of_all_processes(
    tmp_path: Path, name: str
) -> None:
    with services() as outside:
        application: Travel | Media | Orders = Media(users=30, movies=20)
        if name == "travel":
            hotels = generated_hotels(count=5)
            application = Travel(hotels, flights=4, users=8, mix={"reserve": 100.0})
        elif name == "orders":
            application = Orders(outside, items=10, customers=8)
        with platform_process.platform(tmp_path) as first:
            asyncio.run(killed_amid_load(first, application))
        assert application.unknown
        with platform_process.platform(tmp_path) as second:
            faults = asyncio.run(faults_after(second, application))
    assert faults == []
    assert not application.unknown
