"""Runs that ended long ago are trimmed, running ones are not."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from bokiflow import Flow, FlowSettingsError, UnknownRunError, Workflow, collecting
from bokiflow.collecting import Collector
from bokiflow.runs.records import (
    LATE_TAG,
    PARTITIONS,
    RUNS_TAG,
    ended_tag,
    ends_tag,
    partition_of,
    run_tag,
    starts_tag,
)
from bokiflow.runs.states import State
from indilog.base.errors import NotReadyError, TrimmedError
from indilog.base.log import Log, Record
from indilog.testing import MemoryLogs

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

RETENTION_S = 100.0


class Shop:
    """A flow with a workflow that waits for its gate, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.writers_ahead_s = 0.0
        self.logs = MemoryLogs(
            clock=lambda: self.now, writer_clock=lambda: self.now + self.writers_ahead_s
        )
        self.log = self.logs.log("shop/flow")
        self.flow = Flow("shop")
        self.flow.attach(self.logs)
        self.gate = asyncio.Event()
        self.quick = self.flow.workflow(self._quick)
        self.slow = self.flow.workflow(self._slow)
        self.flow.runner.settings = replace(self.flow.runner.settings, retention_s=RETENTION_S)
        self.collector = Collector(self.flow.runner, RETENTION_S)

    async def _quick(self, wf: Workflow, number: int) -> int:
        return number

    async def _slow(self, wf: Workflow) -> None:
        await wf.step(self.gate.wait)

    async def own_all(self) -> None:
        """Own all partitions, so that this process collects all runs."""
        await self.flow.runner.join(self.logs, range(PARTITIONS))

    async def ended(self, run: str, number: int = 0) -> None:
        await self.own_all()
        assert await (await self.quick.start(number, id=run)).result(5) == number

    async def clean(self) -> int:
        return await self.collector.collect(self.log, self.now)

    async def listed(self) -> list[str]:
        return [run.id for run in await self.flow.runs()]


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(monkeypatch)


async def test_a_run_that_ended_long_ago_is_trimmed(shop: Shop) -> None:
    await shop.ended("old")
    shop.now += RETENTION_S / 2
    await shop.ended("young")
    assert await shop.clean() == 0
    shop.now += RETENTION_S / 2 + 1
    assert await shop.clean() == 1
    assert await shop.listed() == ["young"]
    with pytest.raises(UnknownRunError, match="trimmed after its"):
        await shop.quick.handle("old").status()
    with pytest.raises(UnknownRunError):
        await shop.flow.fork("old", "1")


async def test_a_running_run_is_kept_and_ended_ones_after_it_are_trimmed(shop: Shop) -> None:
    await shop.own_all()
    handle = await shop.slow.start(id="slow")
    await shop.ended("quick")
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 1
    assert await shop.listed() == ["slow"]
    shop.gate.set()
    await handle.result(5)
    assert await shop.clean() == 0, "it has just ended"
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 1
    assert await shop.listed() == []


async def test_a_run_that_is_open_for_long_does_not_pin_the_list_of_runs(shop: Shop) -> None:
    """It is listed nevertheless, while it is open and after its end."""
    await shop.own_all()
    handle = await shop.slow.start(id="slow")
    await shop.ended("quick")
    shop.now += RETENTION_S + 1
    await shop.ended("young")
    assert await shop.clean() == 1
    with pytest.raises(TrimmedError):
        await shop.log.read_next(RUNS_TAG)
    assert await shop.listed() == ["young", "slow"]
    assert [run.id for run in await shop.flow.runs(workflow="_slow", limit=1)] == ["slow"]
    shop.gate.set()
    await handle.result(5)
    assert await shop.listed() == ["young", "slow"]
    page = await shop.flow.runs(limit=1)
    assert [run.id for run in await shop.flow.runs(before=page.next)] == ["slow"]
    assert [run.id for run in await shop.flow.runs(state=State.DONE)] == ["slow", "young"]
    assert [run.id for run in await shop.flow.runs(workflow="_slow")] == ["slow"]
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 2
    assert await shop.listed() == []
    for tag in (LATE_TAG, starts_tag("_slow"), ends_tag("done", None), ends_tag("done", "_slow")):
        with pytest.raises(TrimmedError):
            await shop.log.read_next(tag)


async def test_a_young_start_stays_in_the_list_after_the_old_one_before_it_is_trimmed(
    shop: Shop,
) -> None:
    await shop.own_all()
    old = await shop.log.append(b"old", tags=[RUNS_TAG])
    shop.now += RETENTION_S
    young = await shop.log.append(b"young", tags=[RUNS_TAG])
    assert young == old + 1
    shop.now += 1
    await shop.clean()
    with pytest.raises(TrimmedError):
        await shop.log.read_next(RUNS_TAG, bound=old)
    kept = await shop.log.read_next(RUNS_TAG, bound=young)
    assert kept is not None
    assert kept.data == b"young"


async def child_kept_for_its_parent(shop: Shop) -> str:
    """Let a child outlast its retention while its parent runs, then end the parent; return the
    child's id. Both can be trimmed now.
    """

    @shop.flow.workflow
    async def parent(wf: Workflow) -> int:
        result = await wf.run(shop.quick, 7)
        await wf.step(shop.gate.wait)
        return result

    await shop.own_all()
    handle = await parent.start(id="p")
    child = f"p@{(await handle.status()).place}/1"
    assert await shop.log.read_next(run_tag(child), wait=5) is not None
    assert await shop.quick.handle(child).result(5) == 7
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 0
    shop.gate.set()
    assert await handle.result(5) == 7
    shop.now += RETENTION_S + 1
    return child


async def test_a_child_is_kept_while_its_parent_runs(shop: Shop) -> None:
    await child_kept_for_its_parent(shop)
    assert await shop.clean() == 2


async def test_a_run_that_could_not_be_trimmed_is_trimmed_later(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept before as the child of an open run; its entry in the list is not read again."""
    child = await child_kept_for_its_parent(shop)

    async def refuse(*_: object, **__: object) -> None:
        raise NotReadyError("away")

    with monkeypatch.context() as patched:
        patched.setattr(shop.log, "trim", refuse)
        with pytest.raises(NotReadyError):
            await shop.clean()
    assert await shop.clean() == 2
    with pytest.raises(TrimmedError):
        await shop.log.read_next(run_tag(child))


async def test_a_child_that_is_kept_does_not_pin_the_list_of_ended_runs(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is listed again, so a process that reads the list later finds it, too."""
    monkeypatch.setattr(collecting, "_PINNED_MAX", 4)

    @shop.flow.workflow
    async def parent(wf: Workflow) -> int:
        result = await wf.run(shop.quick, 7)
        await wf.step(shop.gate.wait)
        return result

    await shop.own_all()
    handle = await parent.start(id="p")
    child = f"p@{(await handle.status()).place}/1"
    assert await shop.log.read_next(run_tag(child), wait=5) is not None
    assert await shop.quick.handle(child).result(5) == 7
    number = partition_of("p", PARTITIONS)
    tag, beside = ended_tag(number), (f"r{n}" for n in itertools.count())
    for _ in range(4):
        for run in itertools.islice(
            (r for r in beside if partition_of(r, PARTITIONS) == number), 8
        ):
            await shop.ended(run)
        shop.now += RETENTION_S + 1
        assert await shop.clean() == 8
    assert len(await entries_of(shop.log, tag)) <= 4 + 8 + 2, "of 33 ended runs"
    assert await shop.quick.handle(child).result(5) == 7
    shop.gate.set()
    assert await handle.result(5) == 7
    shop.now += RETENTION_S + 1
    later = Collector(shop.flow.runner, RETENTION_S)  # as of another process
    assert await later.collect(shop.log, shop.now) == 2
    assert await entries_of(shop.log, tag) == []
    with pytest.raises(TrimmedError):
        await shop.log.read_next(run_tag(child))


async def test_a_child_of_an_earlier_round_is_not_kept(shop: Shop) -> None:
    """An endless run would otherwise keep the children of all its rounds."""
    rounds: list[int] = []

    @shop.flow.workflow
    async def endless(wf: Workflow, left: int = 3) -> None:
        await wf.run(shop.quick, left)
        await wf.run(nesting, left)
        rounds.append(left)
        if left:
            wf.continue_as_new(left - 1)
        await wf.step(shop.gate.wait)

    @shop.flow.workflow
    async def nesting(wf: Workflow, number: int) -> int:
        return await wf.run(shop.quick, number)

    await shop.own_all()
    handle = await endless.start(id="p")
    async with asyncio.timeout(30):
        while rounds != [3, 2, 1, 0]:  # noqa: ASYNC110 - of the code under test
            await asyncio.sleep(0.01)
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 4 * 3 - 2, "the nested child went with its ended parent"
    shop.gate.set()
    await handle.result(5)
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 3


async def entries_of(log: Log, tag: str) -> list[Record]:
    try:
        return await log.read_range(tag)
    except TrimmedError as error:
        return await log.read_range(tag, error.first_seqnum)


async def test_a_trimmed_id_can_be_used_again(shop: Shop) -> None:
    await shop.ended("again", 1)
    shop.now += RETENTION_S + 1
    assert await shop.clean() == 1
    await shop.ended("again", 2)
    assert await shop.quick.handle("again").result(5) == 2
    assert await shop.listed() == ["again"]
    collector = Collector(shop.flow.runner, RETENTION_S)
    assert await collector.collect(shop.log, shop.now) == 0, "of the new one nothing goes"


@pytest.mark.parametrize("ahead_s", [366 * 86_400.0, -366 * 86_400.0])
async def test_runs_are_trimmed_in_time_for_all_clocks_of_their_writers(
    shop: Shop, ahead_s: float
) -> None:
    shop.writers_ahead_s = ahead_s
    await shop.ended("wrong")
    shop.writers_ahead_s = 0.0
    shop.now += 10
    await shop.ended("right")
    shop.now += RETENTION_S - 9
    assert await shop.clean() == 1
    assert await shop.listed() == ["right"]
    shop.now += 10
    assert await shop.clean() == 1
    assert await shop.listed() == []


async def test_a_retention_is_a_time(shop: Shop) -> None:
    with pytest.raises(FlowSettingsError, match="retention"):
        Flow("shop", retention=-1)
    assert Collector(shop.flow.runner, 10).interval_s == 1
    assert Collector(shop.flow.runner, 7 * 86_400).interval_s == 600
