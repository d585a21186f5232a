"""Waiting consumers of one process: the message of one that fails goes to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from bokiqueue import Delivery, Queue, QueueReplica
from bokiqueue.records import Claim, decode_commands
from indilog.base.errors import NotReadyError
from indilog.base.ids import UserTag
from indilog.base.log import READ_RANGE_LIMIT_MAX
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
