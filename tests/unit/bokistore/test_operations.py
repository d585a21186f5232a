"""Concurrent operations on one object: each returns the previous value, and few reads serve all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokistore import MismatchError, Store
from bokistore.cache import ViewCache
from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Record
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Read
from tests.unit.bokistore.processes import newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
CALLERS = 64
INCREMENT = b'{"store": 1, "writes": {"hot": [["increment", ["n"], 1]]}}'


class Busy(HookedLog):
    """A log whose calls yield to other tasks; its reads of the hot object wait for `arrive`."""

    def __init__(self, logs: MemoryLogs | None = None) -> None:
        super().__init__("work", logs=logs or MemoryLogs())
        self.arrive = asyncio.Event()
        self.arrive.set()
        self.reads = 0

    async def after_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(0)

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        self.reads += 1
        await asyncio.sleep(0)
        if "hot" in str(read.tag):
            await self.arrive.wait()
        return records


async def test_each_of_many_concurrent_operations_returns_the_value_before_it() -> None:
    stores = [newcomer(Busy(logs)) for logs in [MemoryLogs()] for _ in range(3)]
    results = await asyncio.gather(
        *(stores[caller % 3].set("hot", "by", caller) for caller in range(CALLERS))
    )
    last = (await stores[0].get("hot"))["by"]
    assert sorted(results, key=lambda old: -1 if old is None else old) == [
        None, *(caller for caller in range(CALLERS) if caller != last),
    ]  # fmt: skip


async def test_a_few_reads_serve_many_concurrent_operations() -> None:
    log = Busy()
    store = newcomer(log)
    await store.set("hot", "n", 0)
    for turn in range(3):
        log.reads = 0
        results = await asyncio.gather(*(store.increment("hot", "n") for _ in range(CALLERS)))
        assert set(results) == set(range(turn * CALLERS, (turn + 1) * CALLERS))
        assert log.reads <= 3


async def test_operations_on_other_objects_do_not_wait() -> None:
    log = Busy()
    store = newcomer(log)
    await store.set("hot", "n", 0)
    log.arrive.clear()
    log.reads = 0
    slow = asyncio.create_task(store.increment("hot", "n"))
    while not log.reads:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    assert await store.increment("cold", "n") is None
    assert not slow.done()
    log.arrive.set()
    assert await slow == 0


async def test_a_cancelled_reader_leaves_the_read_for_all_to_the_next_operation() -> None:
    log = Busy()
    store = newcomer(log)
    await store.set("hot", "n", 0)
    log.arrive.clear()
    log.reads = 0
    calls = [asyncio.create_task(store.increment("hot", "n")) for _ in range(4)]
    while not log.reads:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.sleep(0)
    log.arrive.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [1, 2, 3], "the first operation is in the log as well"


async def test_nothing_is_noted_for_a_cancelled_operation() -> None:
    """One looks for all, from the first on; that one is gone when the answer comes."""
    log, cache = Busy(), ViewCache()
    store = Store(log, cache=cache)
    await store.set("hot", "n", 0)
    log.arrive.clear()
    log.reads = 0
    seqnums = [await log.append(INCREMENT, tags=["store:hot"]) for _ in range(2)]
    waiting = cache.waiting(log.name, "hot")
    second = asyncio.create_task(store._operations.view_before("hot", seqnums[1]))
    waiting.seqnums.add(seqnums[0])
    while not log.reads:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    waiting.seqnums.discard(seqnums[0])
    log.arrive.set()
    assert (await second).document == b'{"n":1}'
    assert waiting.views == {}


async def test_a_write_that_does_not_fit_fails_for_its_caller_only() -> None:
    store = newcomer(Busy())
    await store.set("hot", "n", "text")
    results = await asyncio.gather(
        store.increment("hot", "n"), store.set("hot", "n", 5), store.increment("hot", "n"),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(results[0], MismatchError)
    assert list(results[1:]) == ["text", 5]


async def test_concurrent_operations_store_aux_views_as_often_as_sequential_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, kept = Busy(), list[SeqNum]()
    set_aux = log.set_aux

    async def record_aux(seqnum: SeqNum, aux: bytes) -> None:
        kept.append(seqnum)
        await set_aux(seqnum, aux)

    monkeypatch.setattr(log, "set_aux", record_aux)
    store = newcomer(log)
    await asyncio.gather(*(store.increment("hot", "n") for _ in range(CALLERS)))
    assert len(kept) == CALLERS // 8
