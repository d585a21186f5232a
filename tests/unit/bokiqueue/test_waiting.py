"""Waiting consumers of one process: the message of one that fails goes to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from bokiqueue import Delivery, Queue, QueueReplica
from bokiqueue.records import Claim, decode_commands
from indilog.base.errors import NotReadyError
from indilog.base.ids import UserTag
from indilog.base.log import READ_RANGE_LIMIT_MAX, Entry, Record
from indilog.testing import MemoryLog
from tests.support.hooked_log import HookedLog, Read

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

SOON_S = 5.0
"""Far less than the 30 s after which a consumer checks again anyway."""


class HeldClaims(MemoryLog):
    """A log in which the first claim waits until the test permits it, and then may fail.

    Attributes:
        lands: whether the claim is in the log before it waits.
    """

    def __init__(self, *, lands: bool = False) -> None:
        super().__init__("work")
        self.lands = lands
        self.fails = False
        self.claims = 0
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        if not any(isinstance(command, Claim) for command in decode_commands(data)):
            return await super().append(data, tags=tags)
        self.claims += 1
        if self.claims > 1:
            return await super().append(data, tags=tags)
        seqnum = await super().append(data, tags=tags) if self.lands else None
        self.reached.set()
        await self.go_on.wait()
        if self.fails:
            raise NotReadyError("not now")
        return await super().append(data, tags=tags) if seqnum is None else seqnum


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def delivered(taking: asyncio.Task[Delivery | None]) -> bytes:
    delivery = await asyncio.wait_for(taking, SOON_S)
    assert delivery is not None
    return delivery.data


async def test_a_consumer_that_fails_after_it_was_woken_wakes_another() -> None:
    log = HeldClaims()
    log.fails = True
    queue = Queue(log, "mail")
    first = asyncio.create_task(queue.take(wait=20))
    await some_turns()
    second = asyncio.create_task(queue.take(wait=20))
    await some_turns()
    await queue.push(b"x")
    await log.reached.wait()
    log.go_on.set()
    assert await delivered(second) == b"x"
    with pytest.raises(NotReadyError):
        await first


async def test_a_consumer_that_is_cancelled_after_it_was_woken_wakes_another() -> None:
    log = HeldClaims()
    queue = Queue(log, "mail")
    first = asyncio.create_task(queue.take(wait=20))
    await some_turns()
    second = asyncio.create_task(queue.take(wait=20))
    await some_turns()
    await queue.push(b"x")
    await log.reached.wait()
    first.cancel()
    await some_turns()
    log.go_on.set()
    delivery = await asyncio.wait_for(second, SOON_S)
    assert delivery is not None
    assert delivery.tries == 1, "no consumer got it before"


@pytest.mark.parametrize("wait", [None, 20.0])
async def test_the_message_of_a_failed_claim_goes_to_a_consumer_that_found_none(
    wait: float | None,
) -> None:
    log = HeldClaims()
    log.fails = True
    queue = Queue(log, "mail")
    await queue.push(b"x")
    first = asyncio.create_task(queue.take())
    await log.reached.wait()
    second = asyncio.create_task(queue.take(wait=wait))
    await some_turns()
    log.go_on.set()
    assert await delivered(second) == b"x"
    with pytest.raises(NotReadyError):
        await first


async def test_a_failure_just_before_another_consumer_waits_is_not_missed() -> None:
    """The claim fails after the other consumer checked and before it waits."""
    log = HeldClaims()
    log.fails = True
    queue = Queue(log, "mail")
    await queue.push(b"x")
    first = asyncio.create_task(queue.take())
    await log.reached.wait()
    since = await log.tail()
    assert await queue._try_claim(30.0, 1) == []
    log.go_on.set()
    with pytest.raises(NotReadyError):
        await first
    await asyncio.wait_for(queue.replica.notifications.wait(log, since, 20.0), SOON_S)
    assert await taken(queue) == b"x"


async def test_the_lease_of_a_consumer_that_crashed_during_its_claim_expires() -> None:
    log = HeldClaims(lands=True)
    crashed = Queue(log, "mail", replica=QueueReplica("mail", 4))
    await crashed.push(b"x")
    first = asyncio.create_task(crashed.take(lease=0.2))
    await log.reached.wait()
    second = asyncio.create_task(Queue(log, "mail").take(wait=20))
    await some_turns()
    assert await delivered(second) == b"x"
    assert log.claims == 2
    first.cancel()


async def taken(queue: Queue) -> bytes | None:
    delivery = await queue.take()
    return None if delivery is None else delivery.data


async def test_a_lease_unknown_to_the_watcher_expires_in_time() -> None:
    """The watcher starts to wait before the claim with the short lease is applied."""
    log = HeldClaims()
    queue = Queue(log, "mail")
    first = asyncio.create_task(queue.take(wait=20, lease=0.1))
    await some_turns()
    second = asyncio.create_task(queue.take(wait=20))
    await some_turns()
    await queue.push(b"x")
    await log.reached.wait()
    await some_turns()
    log.go_on.set()
    assert await delivered(first) == b"x"
    assert await delivered(second) == b"x"


async def test_more_consumers_can_wait_than_one_read_can_watch_for() -> None:
    log = MemoryLog("work")
    news = Queue(log, "mail").replica.notifications
    waits = [asyncio.create_task(news.wait(log, 0, 20)) for _ in range(READ_RANGE_LIMIT_MAX + 1)]
    await some_turns()
    seqnum = await log.append(b"", tags=["queue:mail:pushed"])
    assert await asyncio.wait_for(waits[0], SOON_S) == seqnum + 1
    for wait in waits[1:]:
        wait.cancel()
    await asyncio.gather(*waits[1:], return_exceptions=True)


async def test_an_error_of_the_watcher_reaches_all_waiting_consumers() -> None:
    class Broken(HookedLog):
        async def before_read(self, read: Read) -> None:
            if read.wait:
                raise ValueError("a limit")

    queue = Queue(Broken("work"), "mail")
    takings = [asyncio.create_task(queue.take(wait=20)) for _ in range(3)]
    for taking in takings:
        with pytest.raises(ValueError, match="a limit"):
            await asyncio.wait_for(taking, SOON_S)


@pytest.mark.parametrize("how", ["delay ends", "delay ends at a record", "redrive"])
async def test_messages_that_become_ready_together_wake_as_many_consumers(how: str) -> None:
    """None of the woken consumers acknowledges its message and takes another one."""
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=1)
    operator = Queue(log, "mail", shards=1, tries=1, replica=QueueReplica("mail", 1))
    for number in range(4):
        await operator.push(b"%d" % number, delay=0 if how == "redrive" else 1)
    if how == "redrive":
        with pytest.raises(ValueError, match="dead"):
            async with operator.pop_many(4):
                raise ValueError("dead now")
    takes = [asyncio.create_task(queue.take(wait=60)) for _ in range(4)]
    await some_turns()
    if how == "redrive":
        assert await operator.redrive() == 4
    elif how == "delay ends at a record":
        await log.logs.skip(seconds=1)
        await queue.purge(dead=True)
    assert len({await delivered(taking) for taking in takes}) == 4


class BehindUntilFresh(HookedLog):
    """A session that sees new records only with fresh and waiting reads, and its own appends."""

    end = 0

    async def after_append(self, entries: Sequence[Entry]) -> None:
        self.end = self.logs.position

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        if read.fresh or read.wait:
            self.end = self.logs.position
        return [record for record in records if record.seqnum < self.end]

    async def tail(self) -> int:
        self.end = await super().tail()
        return self.end


async def test_a_consumer_is_woken_by_a_read_of_another_session() -> None:
    """The session that reads for all consumers sees a record before the session of the woken one
    does.
    """
    log = MemoryLog("work")
    reads = asyncio.create_task(Queue(log, "mail", shards=1).take(wait=1))
    await some_turns()
    behind = Queue(BehindUntilFresh("work", logs=log.logs), "mail", shards=1)
    taking = asyncio.create_task(behind.take(wait=60))
    assert await reads is None
    await Queue(log, "mail", shards=1, replica=QueueReplica("mail", 1)).push(b"x")
    assert await delivered(taking) == b"x"
