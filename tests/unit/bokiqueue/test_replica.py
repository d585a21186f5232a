"""Callers of one process share a queue's replica: one caller opens it and reads for all."""

from __future__ import annotations

import asyncio

import pytest

from bokiqueue import Queue, QueueReplica
from indilog.base.errors import NotReadyError
from indilog.base.log import Record
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


async def test_of_many_concurrent_first_users_one_opens_the_queue() -> None:
    class Slow(MemoryLog):
        asked = 0

        async def tail(self) -> int:
            self.asked += 1
            await asyncio.sleep(0)
            if self.asked == 1:
                raise NotReadyError("not yet")
            return await super().tail()

    log = Slow("work")
    queue = Queue(log, "mail")
    pushing = [asyncio.create_task(queue.push(b"x")) for _ in range(20)]
    results = await asyncio.gather(*pushing, return_exceptions=True)
    assert sum(isinstance(one, NotReadyError) for one in results) == 1
    assert log.asked == 2, "the second caller opens the queue for all waiting callers"
    assert (await queue.stats()).depth == 19


class SlowReads(HookedLog):
    """A log whose reads of a shard return when the test permits it."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("work", logs=logs)
        self.arrive = asyncio.Event()
        self.under_way = 0
        self.made = 0

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if "shard" in str(read.tag):
            self.made += 1
            self.under_way += 1
            await self.arrive.wait()
            self.under_way -= 1
        return records


async def until_reading(log: SlowReads) -> None:
    while not log.under_way:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)


async def test_a_record_being_read_by_another_consumer_does_not_count_as_absent() -> None:
    logs = MemoryLogs()
    for data in (b"1", b"2"):
        await Queue(MemoryLog("work", logs=logs), "mail", shards=1).push(data)
    log = SlowReads(logs)
    queue = Queue(log, "mail", shards=1, replica=QueueReplica("mail", 1))
    first = asyncio.create_task(queue.take())
    await until_reading(log)
    second = asyncio.create_task(queue.take())
    for _ in range(20):
        await asyncio.sleep(0)
    log.arrive.set()
    got = await asyncio.gather(first, second)
    assert [delivery.data for delivery in got if delivery is not None] == [b"1", b"2"]


async def test_of_many_concurrent_acknowledgements_a_few_read_for_all() -> None:
    log = SlowReads(MemoryLogs())
    log.arrive.set()
    queue = Queue(log, "mail", shards=1)
    for _ in range(50):
        await queue.push(b"x")
    held = [delivery for _ in range(50) if (delivery := await queue.take()) is not None]
    log.arrive.clear()
    log.made = 0
    telling = [asyncio.create_task(delivery.acknowledge()) for delivery in held]
    await until_reading(log)
    log.arrive.set()
    await asyncio.gather(*telling)
    assert log.made <= 2
    assert (await queue.stats()).depth == 0
