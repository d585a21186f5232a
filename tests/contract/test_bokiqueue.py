"""A queue on every kind of log: two consumers share the work, and one of them crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bokiqueue import Queue, QueueReplica
from indilog.base.log import Log

pytestmark = pytest.mark.asyncio

MESSAGES = 30


async def test_each_message_is_acknowledged_once_although_a_consumer_crashes(
    session_of: Callable[[], Log],
) -> None:
    def process() -> Queue:
        return Queue(session_of(), "mail", shards=2, replica=QueueReplica("mail", 2))

    done: list[int] = []

    async def consume(queue: Queue) -> None:
        while len(done) < MESSAGES:  # a slow producer may pause for longer than a take waits
            if (delivery := await queue.take(wait=1.0, lease=60.0)) is not None:
                await delivery.acknowledge()
                done.append(int(delivery.data))

    producer = process()
    consuming = [asyncio.create_task(consume(process())) for _ in range(2)]
    lost = None
    for number in range(MESSAGES):
        await producer.push(b"%d" % number)
        if number == MESSAGES // 2:
            lost = await process().take(wait=0.5, lease=0.2)
    await asyncio.gather(*consuming)
    assert sorted(done) == list(range(MESSAGES)), f"crashed with {lost}"
    assert (await process().stats()).depth == 0
