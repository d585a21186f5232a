"""Workflows of a deployed application: the examples of the documentation, unchanged."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import indilog
from bokistore import Store
from tests.cluster.function_platform import Platform, running

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "API.md"
LIBRARY_PAGE = DOCS / "libs" / "bokiflow.md"
BEFORE = """
from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import bokiflow
import indilog
from bokistore import Store, Transaction

app = indilog.App("travel")


@dataclass
class Order:
    hotel: str
    flight: str


@dataclass
class Room:
    hotel: str


@dataclass
class Receipt:
    room: Room
    seat: str


async def book_room(ctx: indilog.Context, hotel: str) -> Room:
    await Store(ctx.log("travel")).increment(f"hotel:{hotel}", "booked")
    return Room(hotel)


async def book_seat(flight: str) -> str:
    return f"{flight}/12a"


async def release_seat(seat: str) -> None:
    pass


@app.function
async def send_mail(room: Room, seat: str) -> None:
    pass


async def charge(txn: Transaction) -> None:
    (await txn.get("charged")).increment("n")

"""
AFTER = """

@app.function
async def reserve_now(ctx: indilog.Context, order: Order, id: str) -> str:
    return (await reserve.start(order, id=id)).id


@app.function
async def pay(ctx: indilog.Context, id: str) -> None:
    await reserve.handle(id).signal("paid")


@app.function
def receipt(ctx: indilog.Context, id: str) -> Receipt:
    return ctx.wait(reserve.handle(id).result(55))


@app.function
async def stop(ctx: indilog.Context, id: str) -> str:
    handle = reserve.handle(id)
    await handle.cancel()
    try:
        await handle.result(55)
    except bokiflow.RunCancelledError as error:
        return error.kind
    return ""


@app.function
async def states(ctx: indilog.Context) -> list[str]:
    return [run.state for run in await flow.runs()]
"""


def example() -> str:
    """Return the workflow of the documentation, without the function that uses it, and with an hour
    replaced by a short time.
    """
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "bokiflow.Flow(app)" in block]
    workflow, _, _ = str(block).partition("handle = await")
    assert "timedelta(hours=1)" in workflow
    return workflow.replace("timedelta(hours=1)", "timedelta(milliseconds=1)")


@pytest_asyncio.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with running(tmp_path, workers=2) as there:
        answer = await there.deploy("travel", BEFORE + example() + AFTER)
        assert answer.status_code == 200, answer.text
        yield there


async def test_the_example_of_the_interface_runs_unchanged(platform: Platform) -> None:
    order = {"hotel": "ritz", "flight": "LH1"}
    for _ in range(2):
        started = await platform.call("travel.reserve_now", order=order, id="order-42")
        assert started.json() == "order-42"
    receipt = asyncio.ensure_future(platform.call("travel.receipt", id="order-42"))
    assert (await platform.call("travel.pay", id="order-42")).status_code == 200
    assert (await receipt).json() == {"room": {"hotel": "ritz"}, "seat": "LH1/12a"}
    await platform.call("travel.reserve_now", order=order, id="order-43")
    assert (await platform.call("travel.stop", id="order-43")).json() == "Cancelled"
    assert (await platform.call("travel.states")).json() == ["cancelled", "done"]


async def test_a_new_version_continues_the_runs_of_the_old_one(platform: Platform) -> None:
    """The old executors end in order, so no takeover waits for a lease."""
    order = {"hotel": "ritz", "flight": "LH1"}
    await platform.call("travel.reserve_now", order=order, id="order-44")
    source = BEFORE + example() + AFTER
    assert (await platform.deploy("travel", source)).json()["version"] == 2
    assert (await platform.call("travel.pay", id="order-44")).status_code == 200
    receipt = await platform.call("travel.receipt", id="order-44")
    assert receipt.json()["room"] == {"hotel": "ritz"}


@pytest.mark.repeated("tests/unit/bokiflow/test_broken_off.py")
async def test_a_deployment_stops_the_body_of_a_step_and_runs_it_again(tmp_path: Path) -> None:
    source = """
import bokiflow, indilog

app = indilog.App("steps")
flow = bokiflow.Flow(app)

async def first_waits(ctx: indilog.Context) -> int:
    log = ctx.log("bodies")
    await log.append(b"", tags=["began"])
    if len(await log.read_range("began", fresh=True)) == 1:
        await log.read_next("never", wait=120)
    return len(await log.read_range("began", fresh=True))

@flow.workflow
async def one(wf: bokiflow.Workflow) -> int:
    return await wf.step(first_waits)

@app.function
async def begin(ctx: indilog.Context) -> str:
    return (await one.start(id="r")).id

@app.function
async def outcome(ctx: indilog.Context) -> int:
    return await flow.handle("one", "r").result(60)
"""
    async with running(tmp_path, workers=1) as there:
        assert (await there.deploy("steps", source)).status_code == 200
        assert (await there.call("steps.begin")).json() == "r"
        async with indilog.connect(there.url) as client:
            assert await client.log("bodies").read_next("began", wait=100) is not None
        assert (await there.deploy("steps", source + "# new")).json()["version"] == 2
        assert (await there.call("steps.outcome")).json() == 2


@pytest.mark.repeated("tests/unit/bokiflow/ownership/test_crash_loops.py")
async def test_a_run_whose_step_ends_its_worker_is_parked_and_others_continue(
    tmp_path: Path,
) -> None:
    source = """
import os
import bokiflow, indilog

app = indilog.App("steps")
flow = bokiflow.Flow(app, lease=0.5)

async def ends() -> None:
    os._exit(3)

@flow.workflow
async def poison(wf: bokiflow.Workflow) -> None:
    await wf.step(ends)

@flow.workflow
async def waits(wf: bokiflow.Workflow) -> str:
    return await wf.signal("go")

@app.function
async def begin(ctx: indilog.Context) -> None:
    await waits.start(id="beside")
    await poison.start(id="poison")

@app.function
async def state(ctx: indilog.Context, id: str) -> str:
    return (await flow.handle("poison" if id == "poison" else "waits", id).status()).state.value

@app.function
async def go(ctx: indilog.Context) -> str:
    handle = flow.handle("waits", "beside")
    await handle.signal("go", "on")
    return await handle.result(60)
"""

    async def state(there: Platform, id: str) -> str | None:  # noqa: A002 - it is called so
        answer = await there.call("steps.state", id=id)
        return answer.json() if answer.status_code == 200 else None

    async with running(tmp_path, workers=2) as there:
        assert (await there.deploy("steps", source)).status_code == 200
        await there.call("steps.begin")  # whose worker may end before it answers
        for _ in range(600):
            if await state(there, "poison") == "parked":
                break
            await asyncio.sleep(0.1)
        assert await state(there, "poison") == "parked"
        assert await state(there, "beside") == "running"
        assert (await there.call("steps.go")).json() == "on"


async def test_the_application_of_the_library_page_works_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command runs unchanged; its comment is what it prints."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", LIBRARY_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    [source] = [text for kind, text in blocks if kind == "python" and "indilog.App(" in text]
    [commands] = [text for kind, text in blocks if kind == "sh"]
    (tmp_path / "shop.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    async with running(tmp_path / "data", workers=2) as there:
        monkeypatch.setenv("INDILOG_URL", there.url)
        for line in commands.splitlines():
            command, _, comment = line.partition(" # ")
            [_, *arguments] = shlex.split(command)
            typed = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "indilog", *arguments, stdout=PIPE, stderr=STDOUT
            )
            printed, _ = await typed.communicate()
            assert typed.returncode == 0, (line, printed)
            assert printed.decode().strip() == comment or not comment, line
        async with indilog.connect(there.url) as client:
            goods = await Store(client.log("stock")).get("tea")
            assert goods["taken"] == 2
