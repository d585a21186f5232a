"""Acknowledged messages are freed from the log and from memory, for any number of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiqueue import Queue, QueueReplica, waiting
from bokiqueue import shard as shard_module
from bokiqueue.message_cache import MessageCache
from bokiqueue.records import SetAside, decode_commands
from bokiqueue.shard import CHECKPOINT_EVERY
from indilog.base.errors import AppendOutcomeUnknownError, TrimmedError
from indilog.base.log import Entry, Log
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog
from tests.support.repeated import repeated

pytestmark = pytest.mark.asyncio

SHARDS = 2
MESSAGES = 3000
RECORDS_PER_DELIVERY = 3
KEPT_MAX = 2 * (CHECKPOINT_EVERY + RECORDS_PER_DELIVERY)
DAY_S = 86_400.0
PINS = ("pushed with a delay", "requeued with a delay", "dead", "leased for long")


def process(logs: MemoryLogs, *, tries: int = 5) -> Queue:
    """Return the queue in a process that has read nothing of it."""
    return Queue(logs.log("work"), "mail", shards=1, tries=tries, replica=QueueReplica("mail", 1))


async def deliver(queue: Queue, count: int) -> None:
    for number in range(count):
        await queue.push(b"%d" % number)
        async with queue.pop() as message:
            assert message is not None


async def trimmed_until(log: Log, tag: str) -> int:
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_range(tag)
    return trimmed.value.first_seqnum


async def records_left(log: Log, tag: str) -> int:
    """Return the number of readable records of a sub-stream."""
    start, count = 0, 0
    while True:
        try:
            page = await log.read_range(tag, start)
        except TrimmedError as error:
            start = error.first_seqnum
            continue
        if not page:
            return count
        count += len(page)
        start = page[-1].seqnum + 1


@pytest.mark.heavy
@pytest.mark.timeout(1800)
async def test_acknowledged_messages_leave_log_and_memory(messages_wanted: int | None) -> None:
    """The kept records never exceed those after the last checkpoints; `--messages` for a long
    run.
    """
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=SHARDS)
    tags = queue.replica.tags
    for number in range(messages_wanted or MESSAGES):
        await queue.push(b"%d" % number)
        async with queue.pop() as message:
            assert message is not None
        if number % 500 == 499:
            for shard in tags.shards:
                assert await records_left(log, shard) <= KEPT_MAX
            for checkpoint in tags.checkpoints:
                assert await records_left(log, checkpoint) <= 1
            assert await records_left(log, tags.pushed) <= SHARDS * KEPT_MAX
    for part in queue.replica.shards:
        assert len(part.state) == 0
        assert not part.state.snapshot().messages
        assert not part._replica._outcomes
    assert len(queue.replica._contents) == 0


async def test_an_outcome_that_was_trimmed_before_it_was_read_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processes write several checkpoints between an append and the read of its outcome."""
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 2)
    logs = MemoryLogs()
    other = Queue(MemoryLog("work", logs=logs), "mail", shards=1)

    class Overtaken(HookedLog):
        is_slow = False

        async def after_append(self, entries: Sequence[Entry]) -> None:
            if self.is_slow:
                await deliver(other, 8)

    slow = Overtaken("work", logs=logs)
    mine = Queue(slow, "mail", shards=1, replica=QueueReplica("mail", 1))
    await mine.push(b"x")
    held = await mine.take()
    assert held is not None
    slow.is_slow = True
    with pytest.raises(AppendOutcomeUnknownError, match="was trimmed before"):
        await held.acknowledge()
    slow.is_slow = False
    assert (await mine.stats()).depth == 0


async def test_a_queue_that_is_only_purged_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No consumer writes a checkpoint."""
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 8)
    logs = MemoryLogs()
    queue = process(logs)
    for _ in range(60):
        for number in range(4):
            await queue.push(b"%d" % number)
        assert await queue.purge() == 4
    assert await records_left(queue.log, queue.replica.tags.shards[0]) < 100


async def test_an_unused_shard_does_not_keep_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=2)
    for number in range(200):
        await queue.push(b"%d" % number, shard_key="ann")
        async with queue.pop() as message:
            assert message is not None
    assert await records_left(log, queue.replica.tags.pushed) <= 50


async def test_messages_consumed_by_other_processes_are_freed_from_memory() -> None:
    logs = MemoryLogs()
    mine, other = (
        Queue(MemoryLog("work", logs=logs), "mail", shards=1, replica=QueueReplica("mail", 1))
        for _ in range(2)
    )
    for _ in range(3):
        await mine.push(b"x")
    await mine.stats()
    assert len(mine.replica._contents) == 3
    for _ in range(2):
        async with other.pop() as message:
            assert message is not None
    await mine.stats()
    assert len(mine.replica._contents) == 1


async def test_small_messages_take_bounded_memory() -> None:
    contents = MessageCache()
    for number in range(100_000):
        contents.keep(number, b"")
    assert len(contents) < 60_000
    assert contents.take(0) is None
    assert contents.take(99_999) == b""
    contents.keep(0, bytes(17 * 1024 * 1024))
    assert contents.take(0) is None


async def test_a_checkpoint_may_be_larger_than_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 50)
    logs = MemoryLogs(ClusterConfig(record_bytes_max=2000), page_bytes_max=1000)
    queue = Queue(MemoryLog("work", logs=logs), "mail", shards=1)
    for number in range(400):
        await queue.push(b"%d" % number)
    for _ in range(120):
        async with queue.pop() as message:
            assert message is not None
    assert await records_left(queue.log, queue.replica.tags.checkpoints[0]) > 3
    assert await records_left(queue.log, queue.replica.tags.shards[0]) < 640, "some are trimmed"
    newcomer = process(logs)
    assert (await newcomer.stats()).depth == 280
    async with newcomer.pop() as message:
        assert message is not None
        assert message.data == b"120"


# --- queues that were emptied


async def consume(queue: Queue, count: int, *, together: int = 1) -> None:
    while count:
        async with queue.pop_many(min(together, count)) as messages:
            assert messages
            count -= len(messages)


async def all_left(queue: Queue) -> int:
    tags = queue.replica.tags
    of_shards = (*tags.shards, *tags.checkpoints, *tags.aside)
    return sum([await records_left(queue.log, tag) for tag in (*of_shards, tags.pushed)])


@pytest.mark.parametrize("together", [1, 7, 30])
@pytest.mark.parametrize("delay", [0.0, 0.001])
@pytest.mark.parametrize("backlog", [*map(repeated, (1000, 1003, 1010)), 1018])
async def test_an_emptied_queue_keeps_a_bounded_number_of_records(
    backlog: int, delay: float, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no record comes after the last acknowledgement. The bound does not depend on the
    number of messages.
    """
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)
    queue = process(MemoryLogs())
    for number in range(backlog):
        await queue.push(b"%d" % number, delay=delay)
    await consume(queue, backlog, together=together)
    of_delayed = 20 * together if delay else 0
    assert await all_left(queue) <= 4 * (20 + RECORDS_PER_DELIVERY) + 2 * together + of_delayed


async def test_a_queue_emptied_by_a_new_process_keeps_a_bounded_number_of_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 200)
    logs = MemoryLogs()
    queue = process(logs)
    for number in range(1000):
        await queue.push(b"%d" % number)
    await consume(queue, 955)
    await consume(process(logs), 45)
    assert await all_left(process(logs)) <= 4 * (200 + RECORDS_PER_DELIVERY)


async def test_a_few_messages_do_not_keep_the_records_of_a_backlog_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They stay because messages of a higher priority go first."""
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 100)
    logs = MemoryLogs()
    queue = process(logs)
    for number in range(5):
        await queue.push(b"last %d" % number)
    for _ in range(400):
        await queue.push(b"first", priority=1)
        async with queue.pop() as message:
            assert message is not None
            assert message.data == b"first"
    assert await all_left(queue) <= 2 * (2 * 100 + RECORDS_PER_DELIVERY) + 5
    left = [message.data for message in await process(logs).peek(10)]
    assert left == [b"last %d" % number for number in range(5)]


@pytest.mark.parametrize("backlog", range(300, 314))
async def test_collecting_an_emptied_queue_spares_appends_in_flight(
    backlog: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that reads late still finds the outcome of its acknowledgement."""
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 40)
    logs = MemoryLogs()
    other = Queue(MemoryLog("work", logs=logs), "mail", shards=1)

    class Late(HookedLog):
        left = 0

        async def after_append(self, entries: Sequence[Entry]) -> None:
            if self.left:
                count, self.left = self.left, 0
                await consume(other, count, together=5)

    log = Late("work", logs=logs)
    mine = Queue(log, "mail", shards=1, replica=QueueReplica("mail", 1))
    for number in range(backlog):
        await mine.push(b"%d" % number)
    await consume(other, backlog - 31)
    held = await mine.take()
    assert held is not None
    log.left = 30
    await held.acknowledge()
    assert (await mine.stats()).depth == 0


# --- delayed messages and dead letters


async def pinned(queue: Queue, what: str) -> None:
    """Put a message into the queue that stays."""
    if what == "pushed with a delay":
        await queue.push(b"pin", delay=DAY_S)
        return
    await queue.push(b"pin")
    held = await queue.take(lease=DAY_S)
    assert held is not None
    if what == "requeued with a delay":
        await held.requeue(delay=DAY_S)
    elif what == "dead":
        await held.requeue()


@pytest.mark.parametrize("what", PINS)
async def test_a_message_that_stays_does_not_keep_its_shard_from_being_trimmed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=1, tries=1 if what == "dead" else 2)
    await pinned(queue, what)
    await deliver(queue, 360)
    before = await log.tail()
    await deliver(queue, 40)
    tags = queue.replica.tags
    assert await trimmed_until(log, tags.shards[0]) > before, "trims advance past the message"
    assert await records_left(log, tags.shards[0]) <= 60
    assert await records_left(log, tags.pushed) <= 60
    assert await records_left(log, tags.aside[0]) <= 1
    newcomer = process(log.logs)
    (kept,) = await newcomer.peek(dead=what == "dead")
    assert kept.data == b"pin"


@pytest.mark.parametrize("what", PINS)
async def test_a_message_that_stayed_is_delivered_with_its_bytes(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)
    now = [1000.0]
    monkeypatch.setattr(waiting, "seconds_now", lambda: now[0])
    logs = MemoryLogs(clock=lambda: now[0])
    queue = Queue(logs.log("work"), "mail", shards=1, tries=1 if what == "dead" else 2)
    await pinned(queue, what)
    await deliver(queue, 100)
    now[0] += DAY_S
    newcomer = process(logs)
    if what == "dead":
        assert await newcomer.redrive() == 1
    message = await newcomer.take()
    assert message is not None
    assert message.data == b"pin"
    await message.acknowledge()
    await deliver(queue, 100)
    assert await records_left(queue.log, queue.replica.tags.aside[0]) == 0


async def test_a_dead_letter_of_a_crashed_consumer_is_aside_before_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process has its bytes when its last lease ends."""
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)
    now = [1000.0]
    monkeypatch.setattr(waiting, "seconds_now", lambda: now[0])
    logs = MemoryLogs(clock=lambda: now[0])
    crashed = process(logs, tries=1)
    await crashed.push(b"pin")
    assert await crashed.take(lease=5) is not None
    now[0] += 5
    queue = process(logs)
    before = await queue.log.tail()
    await deliver(queue, 100)
    assert await trimmed_until(queue.log, queue.replica.tags.shards[0]) > before
    assert await process(logs).dead_letters() == [(1, b"pin")]


async def test_one_of_concurrent_callers_writes_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)

    moved: list[int] = []

    class Slow(HookedLog):
        async def before_append(self, entries: Sequence[Entry]) -> None:
            for entry in entries:
                if queue.replica.tags.aside[0] in entry.tags:
                    commands = decode_commands(entry.data)
                    moved.extend(c.message for c in commands if isinstance(c, SetAside))
            await asyncio.sleep(0)

    log = Slow("work")
    queue = Queue(log, "mail", shards=1, replica=QueueReplica("mail", 1))
    for _ in range(5):
        await queue.push(b"pin")
        assert await queue.take(lease=DAY_S) is not None
    for _ in range(8):
        for _ in range(10):
            await queue.push(b"x")
        held = [await queue.take() for _ in range(10)]
        await asyncio.gather(*(one.acknowledge() for one in held if one is not None))
    assert len(moved) == 5
    assert len(set(moved)) == 5


async def test_a_process_with_an_older_state_finds_bytes_that_were_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", 20)
    logs = MemoryLogs()
    queue, stale = process(logs, tries=1), process(logs)
    await pinned(queue, "dead")
    (letter,) = await stale.peek(dead=True)
    message = stale.replica.shards[0].state.message(letter.seqnum)
    assert message is not None
    message.aside_at = None  # as before it was set aside
    await deliver(queue, 100)
    with pytest.raises(TrimmedError):
        await stale.log.read(letter.seqnum)
    stale.replica._contents.forget([letter.seqnum])
    (shard,) = stale.replica.shards
    assert await stale.replica.data(stale.log, shard, message, is_delivered=False) == b"pin"


@pytest.mark.parametrize(
    ("tries", "delay", "is_aside"), [(1, 0.0, True), (2, 60.0, True), (2, 59.0, False)]
)
async def test_a_message_that_will_stay_is_aside_when_it_is_returned(
    tries: int, delay: float, *, is_aside: bool
) -> None:
    """Its consumer has the bytes, so a checkpoint need not read them again."""
    queue = process(MemoryLogs(), tries=tries)
    await queue.push(b"x")
    held = await queue.take()
    assert held is not None
    await held.requeue(delay=delay)
    message = queue.replica.shards[0].state.message(held.seqnum)
    assert message is not None
    assert (message.aside_at is not None) is is_aside
