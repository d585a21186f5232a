"""Blocks of several messages: one claim and one acknowledgement for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from bokiqueue import LeaseLostError, Queue, QueueReplica, QueueSettingsError
from indilog.base.ids import SeqNum, UserTag
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Time:
    """Seconds of the log, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def log(time: Time) -> MemoryLog:
    return MemoryLog("work", logs=MemoryLogs(clock=time))


def queue_of(log: MemoryLog, *, tries: int = 5) -> Queue:
    return Queue(log, "mail", shards=1, tries=tries, replica=QueueReplica("mail", 1))


async def push(queue: Queue, count: int) -> None:
    for number in range(count):
        await queue.push(b"%d" % number)


async def test_messages_of_a_block_share_a_claim_and_an_acknowledgement(log: MemoryLog) -> None:
    queue = queue_of(log)
    await push(queue, 32)
    pushed = await log.tail()
    got: list[int] = []
    for _ in range(2):
        async with queue.pop_many(16) as messages:
            got += [int(message.data) for message in messages]
    assert got == list(range(32))
    assert await log.tail() - pushed == 4
    assert (await queue.stats()).depth == 0


async def test_a_block_gets_what_is_ready_and_an_empty_list_if_nothing_is(log: MemoryLog) -> None:
    queue = queue_of(log)
    async with queue.pop_many(5) as messages:
        assert messages == []
    await push(queue, 2)
    async with queue.pop_many(5, wait=1) as messages:
        assert len(messages) == 2


async def test_messages_that_the_block_settles_itself_are_not_settled_again(log: MemoryLog) -> None:
    queue = queue_of(log)
    await push(queue, 3)
    async with queue.pop_many(3) as messages:
        await messages[0].acknowledge()
        await messages[1].requeue()
    async with queue.pop_many(3) as messages:
        assert [(message.data, message.tries) for message in messages] == [(b"1", 2)]


async def test_a_block_that_raises_returns_all_messages_after_a_pause(
    log: MemoryLog, time: Time
) -> None:
    queue = queue_of(log)
    await push(queue, 3)
    before = await log.tail()
    with pytest.raises(LookupError):
        async with queue.pop_many(3, backoff=10):
            raise LookupError
    assert await log.tail() - before == 2, "a claim and one return"
    assert await queue.take() is None
    time.now += 10
    async with queue_of(log).pop_many(3) as messages:
        assert [message.tries for message in messages] == [2, 2, 2]


async def test_after_the_last_try_a_failed_block_leaves_dead_letters(log: MemoryLog) -> None:
    queue = queue_of(log, tries=1)
    await push(queue, 2)
    with pytest.raises(LookupError):
        async with queue.pop_many(2):
            raise LookupError
    assert [data for _, data in await queue.dead_letters()] == [b"0", b"1"]


async def test_messages_whose_leases_ended_are_reported_and_delivered_again(
    log: MemoryLog, time: Time
) -> None:
    queue = queue_of(log)
    await push(queue, 3)

    async def consume() -> None:
        async with queue.pop_many(3, lease=5) as messages:
            await messages[1].extend(60)
            time.now += 6

    with pytest.raises(LeaseLostError, match="2 of 3 messages"):
        await consume()
    async with queue_of(log).pop_many(3) as messages:
        assert [message.data for message in messages] == [b"0", b"2"]


async def test_consumers_of_one_record_get_messages_in_the_order_in_which_they_asked(
    log: MemoryLog,
) -> None:
    queue = queue_of(log)
    await push(queue, 5)
    await queue.stats()
    several, one = await asyncio.gather(
        queue.pop_many(3).__aenter__(), queue.pop_many(2).__aenter__()
    )
    assert [message.data for message in several] == [b"0", b"1", b"2"]
    assert [message.data for message in one] == [b"3", b"4"]


async def test_messages_of_a_block_that_is_cancelled_before_it_begins_are_returned(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = queue_of(log)
    await push(queue, 3)
    appended = log.append
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slow(data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        reached.set()
        await go_on.wait()
        return await appended(data, tags=tags)

    monkeypatch.setattr(log, "append", slow)
    taking = asyncio.create_task(queue.pop_many(3).__aenter__())
    await reached.wait()
    taking.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await taking
    async with queue.pop_many(3, wait=1) as messages:
        assert [message.tries for message in messages] == [1, 1, 1], "this delivery is no try"


@pytest.mark.parametrize("limit", [0, 257, 1.5, True])
async def test_an_invalid_limit_is_refused(log: MemoryLog, limit: int) -> None:
    with pytest.raises(QueueSettingsError, match="limit must be 1 to 256 messages"):
        queue_of(log).pop_many(limit)
