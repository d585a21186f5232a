"""Acknowledged messages are freed from the log and from memory, for any number of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiqueue import Queue, QueueReplica, checkpoints
from bokiqueue import replica as replica_module
from bokiqueue.message_cache import MessageCache
from bokiqueue.records import QueueCheckpoint, encode
from bokiqueue.replica import CHECKPOINT_EVERY, KEPT_BEHIND
from indilog.base.errors import AppendOutcomeUnknownError, TrimmedError
from indilog.base.log import Entry
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio

SHARDS = 2
MESSAGES = 6000
RECORDS_PER_DELIVERY = 3
KEPT_MAX = CHECKPOINT_EVERY + KEPT_BEHIND + RECORDS_PER_DELIVERY


async def records_left(log: MemoryLog, tag: str) -> int:
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
        assert not part.state.checkpoint().messages
        assert not part._outcomes
    assert len(queue.replica._contents) == 0


class SlowReads(HookedLog):
    """A log whose reads of a shard start when the test permits it."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("work", logs=logs)
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def before_read(self, read: Read) -> None:
        if "shard" in str(read.tag):
            await self.go_on.wait()


@pytest.mark.parametrize("kept_behind", [1, KEPT_BEHIND])
@pytest.mark.parametrize("what", ["acknowledge", "claim"])
async def test_a_record_trimmed_before_its_outcome_is_read_has_an_unknown_outcome(
    what: str, kept_behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes trim behind a margin. After it an acknowledgement raises, and a claim gets
    nothing.
    """
    monkeypatch.setattr(replica_module, "CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", kept_behind)
    logs = MemoryLogs()
    slow = SlowReads(logs)
    mine, other = (
        Queue(log, "mail", shards=1, replica=QueueReplica("mail", 1))
        for log in (slow, MemoryLog("work", logs=logs))
    )
    await mine.push(b"0")
    held = await mine.take() if what == "acknowledge" else None
    await mine.stats()
    slow.go_on.clear()
    telling = asyncio.create_task(mine.take() if held is None else held.acknowledge())
    if held is None:
        async with other.pop() as message:
            assert message is not None
    for _ in range(20):
        await asyncio.sleep(0)
    await other.push(b"1")
    for _ in range(1 + (held is not None)):
        async with other.pop() as message:
            assert message is not None or held is not None
    slow.go_on.set()
    if held is not None and kept_behind == 1:
        with pytest.raises(AppendOutcomeUnknownError, match="was trimmed before"):
            await telling
    else:
        assert await telling is None
    assert (await mine.stats()).depth == 0


async def test_an_unused_shard_does_not_keep_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "CHECKPOINT_EVERY", 20)
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


class SlowCheckpoints(HookedLog):
    """A log that appends checkpoints when the test permits it."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("work", logs=logs)
        self.go_on = asyncio.Event()
        self.reached = asyncio.Event()

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if any("checkpoint" in str(entry.tags) for entry in entries):
            self.reached.set()
            await self.go_on.wait()


async def test_the_checkpoint_of_a_lagging_process_replaces_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", 1)
    logs = MemoryLogs()
    slow = SlowCheckpoints(logs)
    ahead, behind, newcomer = (
        Queue(log, "mail", shards=1, replica=QueueReplica("mail", 1))
        for log in (MemoryLog("work", logs=logs), slow, MemoryLog("work", logs=logs))
    )
    for data in (b"0", b"1"):
        await ahead.push(data)
    first, second = await ahead.take(), await behind.take()
    assert first is not None
    assert second is not None
    lagging = asyncio.create_task(second.acknowledge())
    await slow.reached.wait()
    await first.acknowledge()
    for data in (
        b"2",
        b"3",
    ):  # the records that the lagging process would need are trimmed meanwhile
        await ahead.push(data)
        async with ahead.pop() as message:
            assert message is not None
    slow.go_on.set()
    await lagging
    assert await newcomer.take() is None
    await newcomer.push(b"4")
    assert (await newcomer.stats()).depth == 1


@pytest.mark.parametrize("record_bytes_max", [600, 1024 * 1024])
async def test_a_checkpoint_may_be_larger_than_a_record(
    record_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "CHECKPOINT_EVERY", 50)
    monkeypatch.setattr(checkpoints, "_HELD_MAX", 100)
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", 1)
    logs = MemoryLogs(ClusterConfig(record_bytes_max=record_bytes_max), page_bytes_max=1000)
    log = MemoryLog("work", logs=logs)
    queue = Queue(log, "mail", shards=1)
    (tag,) = queue.replica.tags.checkpoints
    for number in range(350):
        await queue.push(b"%d" % number)
    for _ in range(50):
        async with queue.pop() as message:
            assert message is not None
    parts = await records_left(log, tag)
    assert 3 <= parts <= 60
    assert await records_left(log, queue.replica.tags.shards[0]) < 500, "some are trimmed"
    newcomer = Queue(
        MemoryLog("work", logs=logs), "mail", shards=1, replica=QueueReplica("mail", 1)
    )
    assert (await newcomer.stats()).depth == 300
    async with newcomer.pop() as message:
        assert message is not None
        assert message.data == b"50"


async def test_a_checkpoint_with_a_missing_part_is_ignored() -> None:
    log = MemoryLog("work")
    whole, half = QueueCheckpoint(5, 0.0, ()), QueueCheckpoint(9, 0.0, (), parts=2)
    await log.append(encode(whole), tags=["c"])
    first = await log.append(encode(half), tags=["c"])
    kept = await checkpoints.find_furthest(log, "c")
    assert kept == checkpoints.ShardCheckpoints(checkpoints.StoredCheckpoint(0, whole), None)
    await log.append(encode(QueueCheckpoint(9, 0.0, (), parts=2, part=1, first=0)), tags=["c"])
    assert await checkpoints.find_furthest(log, "c") == kept, (
        "the new part belongs to another checkpoint"
    )
    await log.append(encode(QueueCheckpoint(9, 0.0, (), parts=2, part=1, first=first)), tags=["c"])
    kept = await checkpoints.find_furthest(log, "c")
    assert kept.furthest == checkpoints.StoredCheckpoint(first, QueueCheckpoint(9, 0.0, ()))
