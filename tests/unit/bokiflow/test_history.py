"""The list of runs, and forks: runs that continue from a step of another one."""

from __future__ import annotations

import itertools

import pytest
import structlog.testing

from bokiflow import (
    Flow,
    FlowSettingsError,
    RunFailedError,
    Startable,
    State,
    UnknownRunError,
    Workflow,
)
from bokiflow.runs.records import RUNS_TAG, RunStarted, run_record, run_tag
from indilog.testing import MemoryLogs
from tests.support.damaged_log import DamagedView

pytestmark = pytest.mark.asyncio


class Shop:
    """A flow whose second step fails until it is repaired, and what its steps did."""

    def __init__(self, view: DamagedView | None = None) -> None:
        self.logs = MemoryLogs()
        self.flow = Flow("shop")
        self.flow.attach(view or self.logs)
        self.is_broken = True
        self.numbers = itertools.count(1)
        self.keys: list[str] = []
        self.order: Startable[list[int]] = self.flow.workflow(self._order)
        self.other: Startable[None] = self.flow.workflow(self._other)

    async def _order(self, wf: Workflow, count: int) -> list[int]:
        async def pay() -> int:
            self.keys.append(wf.key)
            return next(self.numbers)

        async def send() -> int:
            self.keys.append(wf.key)
            if self.is_broken:
                raise ValueError("no stamps")
            return next(self.numbers)

        paid = [await wf.step(pay) for _ in range(count)]
        return [*paid, await wf.step(send, retries=0)]

    _order.__name__ = "order"

    async def _other(self, wf: Workflow) -> None: ...

    _other.__name__ = "other"


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def failed(shop: Shop) -> None:
    with pytest.raises(RunFailedError, match="no stamps"):
        await (await shop.order.start(2, id="old")).result(5)
    shop.is_broken = False


async def test_a_fork_continues_from_a_step_with_the_current_code(shop: Shop) -> None:
    await failed(shop)
    fork = await shop.flow.fork("old", "send")
    assert await fork.result(5) == [1, 2, 3], "what was paid is not paid again"
    old = f"shop/flow/old@{(await shop.order.handle('old').status()).place}"
    assert shop.keys[:-1] == [f"{old}/1", f"{old}/2", f"{old}/3"]
    assert shop.keys[-1] == f"shop/flow/{fork.id}@{(await fork.status()).place}/3"
    assert (await shop.order.handle("old").status()).state is State.FAILED, "it stays as it is"
    (first, *_) = await shop.logs.log("shop/flow").read_range(run_tag(fork.id))
    started = run_record(first.data)
    assert isinstance(started, RunStarted)
    assert started.forked is not None
    assert (started.forked.run, started.forked.step) == ("old", "3")


async def test_a_fork_from_a_number_does_that_step_again(shop: Shop) -> None:
    await failed(shop)
    assert await (await shop.flow.fork("old", "2")).result(5) == [1, 3, 4]
    assert await (await shop.flow.fork("old", "pay")).result(5) == [5, 6, 7], "the first of them"


async def test_a_fork_from_an_unknown_step_or_run_is_refused(shop: Shop) -> None:
    await failed(shop)
    with pytest.raises(FlowSettingsError, match=r"decided: 1 pay, 2 pay, 3 send\. If several"):
        await shop.flow.fork("old", "4")
    with pytest.raises(UnknownRunError):
        await shop.flow.fork("new", "1")


async def test_runs_are_listed_newest_first(shop: Shop) -> None:
    await failed(shop)
    for number in range(3):
        await (await shop.other.start(id=f"other-{number}")).result(5)
    await shop.other.start(id="other-1")  # there is one already
    listed = [*await shop.flow.runs()]
    assert [run.id for run in listed] == ["other-2", "other-1", "other-0", "old"]
    assert listed[-1].problem == "ValueError: Step 'send' failed: ValueError: no stamps"
    assert (listed[-1].steps, listed[-1].state) == (3, State.FAILED)
    assert listed[-1].began <= listed[0].began
    assert [run.id for run in await shop.flow.runs(state=State.FAILED)] == ["old"]
    page = await shop.flow.runs(workflow="other", limit=2)
    assert [run.id for run in page] == ["other-2", "other-1"]
    rest = await shop.flow.runs(before=page.next)
    assert [run.id for run in rest] == ["other-0", "old"]
    for limit in (0, 1001):
        with pytest.raises(FlowSettingsError, match=r"^limit must be 1 to 1,000\.$"):
            await shop.flow.runs(limit=limit)


async def test_an_unreadable_run_hides_no_other_run() -> None:
    """A lost start is left out. A run whose end is lost, or of a later version, is named."""
    logs = MemoryLogs()
    view = DamagedView(logs)
    shop = Shop(view)
    log = logs.log(shop.flow.log_name)
    await log.append(b"\xb0F\x7fwhatever", tags=[run_tag("later"), RUNS_TAG])
    for number in range(5):
        await (await shop.other.start(id=f"other-{number}")).result(5)
    await shop.flow.runs()  # the partitions are read while their records are whole
    start = (await shop.other.handle("other-0").status()).place
    last = await log.read_prev(run_tag("other-2"), await log.tail())
    assert last is not None
    await log.append(b"\xb0F\x7fwhatever", tags=[run_tag("other-3")])
    view.lost |= {start, last.seqnum}
    with structlog.testing.capture_logs() as logged:
        runs = await shop.flow.runs(workflow="other")
    assert [(run.id[-1], run.state) for run in runs] == [
        ("4", "done"), ("3", "unreadable"), ("2", "unreadable"), ("1", "done"),
    ]  # fmt: skip
    damage = {line["place"] for line in logged if line["event"] == "list of runs is damaged"}
    assert damage == {start}
    view.lost.clear()
    assert len(await shop.flow.runs()) == 5
