"""History is collected without calls, within a share of the time, and visibly."""

from __future__ import annotations

import asyncio
import math

import pytest

import indilog
from bokistore import Store, collect_automatically, collection, decisions
from bokistore.automatic import AutomaticCollection
from indilog.testing import MemoryLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def cells(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collection, decisions):
        monkeypatch.setattr(module, "CELL", 8)


class Time:
    """A clock of work, and pauses that only note their length."""

    def __init__(self, log_clock: Clock, looks: int) -> None:
        self._log_clock = log_clock
        self._looks = looks
        self.worked_s = self.paused_s = 0.0
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.005
        self.worked_s += 0.005
        return self.now_s

    async def pause(self, seconds: float) -> None:
        self.now_s += seconds
        if seconds == 60.0:
            self._looks -= 1
            self._log_clock.now += seconds
            if self._looks == 0:
                raise asyncio.CancelledError
        else:
            self.paused_s += seconds


def automatic(time: Time, *, keep: float = 10, share: float = 0.25) -> AutomaticCollection:
    return AutomaticCollection(
        "objects", keep=keep, share=share, pause=time.pause, monotonic=time.monotonic
    )


async def run(log: MemoryLog, automatic: AutomaticCollection) -> None:
    with pytest.raises(asyncio.CancelledError):
        await automatic.run(log.logs)


async def alive(log: MemoryLog) -> int:
    return sum(not log.logs.is_dead(seqnum) for seqnum in range(await log.tail()))


async def test_history_is_collected_without_calls_within_a_share_of_the_time(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    for number in range(40):
        for _ in range(20):
            await store.increment(f"o{number}", "n")
    clock.now += 100
    before = await store.collection_status(keep=10)
    assert (before.end, before.due_end, before.idle_s) == (0, await log.tail() // 8 * 8, math.inf)
    assert before.is_behind
    time = Time(clock, looks=1)
    await run(log, automatic(time))
    assert await alive(log) < 100
    after = await store.collection_status(keep=10)
    assert after.end >= before.due_end
    assert after.idle_s < 61
    assert 2 * time.worked_s < time.paused_s < 3 * time.worked_s, "a quarter, apart from the looks"
    for number in range(40):
        assert (await newcomer(log).get(f"o{number}"))["n"] == 20


async def test_of_several_processes_one_collects(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    for _ in range(100):
        await store.increment("a", "n")
    clock.now += 100
    first, second = (automatic(Time(clock, looks=1)) for _ in range(2))
    assert await first.is_due(store)
    await store.collect(keep=10)
    for _ in range(20):
        await store.increment("a", "n")
    clock.now += 20
    assert not await second.is_due(store), "a collection made progress a moment ago"
    clock.now += 60
    assert await second.is_due(store)


async def test_without_old_history_nothing_is_appended(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    for _ in range(100):
        await store.increment("a", "n")
    tail = await log.tail()
    await run(log, automatic(Time(clock, looks=3), keep=1000))
    assert await log.tail() == tail
    clock.now += 2000
    await run(log, automatic(Time(clock, looks=2), keep=1000))
    tail = await log.tail()
    await run(log, automatic(Time(clock, looks=5), keep=1000))
    assert await log.tail() == tail, "all is collected"


async def test_an_application_collects_its_logs_with_one_line_each() -> None:
    app = indilog.App("shop")
    collect_automatically(app, "orders", keep=3600)
    collect_automatically(app, "users")
    assert list(app.services) == ["collect-1", "collect-2"]


@pytest.mark.parametrize("wrong", [{"keep": -1}, {"keep_ids": -1}, {"share": 0}, {"share": 1.5}])
async def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        collect_automatically(indilog.App("shop"), "orders", **wrong)
