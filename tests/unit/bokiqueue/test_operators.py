"""Peek, purge and redrive; pushes with an id; and which shards a process reads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bokiqueue import LeaseLostError, Queue, QueueReplica, QueueSettingsError, QueueVersionError
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.log import Entry
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio


def process(log: MemoryLog, *, shards: int = 2, tries: int = 5) -> Queue:
    """Return the queue in a process that has read nothing of it."""
    mine = MemoryLog(log.name, logs=log.logs)
    return Queue(mine, "mail", shards=shards, tries=tries, replica=QueueReplica("mail", shards))


async def drained(queue: Queue) -> list[bytes]:
    got = []
    while (delivery := await queue.take()) is not None:
        await delivery.acknowledge()
        got.append(delivery.data)
    return got


# --- ids


async def test_a_second_push_with_an_id_has_no_effect() -> None:
    log = MemoryLog("work")
    await Queue(log, "mail").push(b"x", id="order-7")
    await process(log, shards=4).push(b"x", id="order-7")
    await Queue(log, "mail").push(b"y", id="order-8")
    assert sorted(await drained(Queue(log, "mail"))) == [b"x", b"y"]
    await Queue(log, "mail").push(b"x", id="order-7")
    assert await drained(process(log, shards=4)) == [], "also after it was acknowledged"


async def test_ids_of_different_keys_are_separate() -> None:
    queue = Queue(MemoryLog("work"), "mail", shards=64)
    for key in "ab":
        await queue.push(b"x", id="1", shard_key=key)
    await queue.push(b"x", id="1", shard_key="a")
    assert len(await drained(queue)) == 2


async def test_a_push_with_an_id_is_repeated_after_an_unknown_outcome() -> None:
    class Unsure(HookedLog):
        failing = 2

        async def after_append(self, entries: Sequence[Entry]) -> None:
            if any("pushed" in str(entry.tags) for entry in entries) and self.failing:
                self.failing -= 1
                raise AppendOutcomeUnknownError("perhaps")

    queue = Queue(Unsure("work"), "mail", shards=1)
    await queue.push(b"x", id="order-7")
    assert len(await queue.log.read_range("queue:mail:pushed")) == 3
    assert await drained(queue) == [b"x"]


@pytest.mark.parametrize("push_id", ["", "x" * 1025, 7])
async def test_an_invalid_id_is_refused(push_id: str) -> None:
    with pytest.raises(QueueSettingsError, match="id must be 1 to 1,024 characters"):
        await Queue(MemoryLog("work"), "mail").push(b"x", id=push_id)


# --- operators


async def test_peek_shows_messages_in_order_and_takes_none() -> None:
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=1)
    await queue.push(b"usual")
    await queue.push(b"later", delay=60)
    await queue.push(b"urgent", priority=9)
    await queue.push(b"held", priority=9)
    assert await drained(process(log, shards=1)) == [b"urgent", b"held", b"usual"]
    for data in (b"one", b"two"):
        await queue.push(data)
    assert await queue.take() is not None
    found = await process(log, shards=1).peek()
    assert [(one.data, one.state, one.tries) for one in found] == [
        (b"two", "ready", 0), (b"one", "leased", 1), (b"later", "delayed", 0),
    ]  # fmt: skip
    assert [one.data for one in await queue.peek(1)] == [b"two"]
    assert await queue.take() is not None


async def test_a_message_that_was_peeked_at_is_delivered_from_memory() -> None:
    queue = Queue(MemoryLog("work"), "mail", shards=1)
    await queue.push(b"x")
    await queue.peek()
    assert len(queue.replica._contents) == 1
    assert await drained(queue) == [b"x"]
    assert len(queue.replica._contents) == 0


async def test_purge_removes_all_but_dead_letters() -> None:
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=2, tries=1)
    for number in range(10):
        await queue.push(b"%d" % number)
    dead = await queue.take()
    held = await queue.take()
    assert dead is not None
    assert held is not None
    await dead.requeue()
    assert await process(log).purge() == 9
    with pytest.raises(LeaseLostError):
        await held.acknowledge()
    stats = await queue.stats()
    assert (stats.depth, stats.leased, stats.dead) == (0, 0, 1)
    assert await queue.purge(dead=True) == 1
    assert (await process(log).stats()).dead == 0
    await queue.push(b"new")
    assert await drained(queue) == [b"new"]


async def test_redrive_makes_all_dead_letters_ready() -> None:
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=2, tries=1)
    for number in range(600):
        await queue.push(b"%d" % number)
    while (delivery := await queue.take()) is not None:
        await delivery.requeue()
    assert (await queue.stats()).dead == 600
    assert await process(log).redrive() == 600
    assert await queue.redrive() == 0
    assert len(await drained(queue)) == 600


# --- which shards a process reads


class Counting(HookedLog):
    """A log that counts the reads of each tag."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("work", logs=logs)
        self.tags: list[str] = []

    async def before_read(self, read: Read) -> None:
        self.tags.append(str(read.tag))


async def test_a_producer_reads_no_shard() -> None:
    log = Counting(MemoryLogs())
    queue = Queue(log, "mail")
    for number in range(20):
        await queue.push(b"%d" % number, id=str(number))
    assert set(log.tags) == {"queue:mail:settings"}


async def test_a_process_that_consumes_some_shards_reads_only_those() -> None:
    logs = MemoryLogs()
    queue = Queue(logs.log("work"), "mail", shards=4)
    for number in range(40):
        await queue.push(b"%d" % number)
    log = Counting(logs)
    some = Queue(log, "mail", shards=4, consumes=[2, 0])
    assert len(await drained(some)) == 20
    assert {tag for tag in log.tags if "shard" in tag} == {
        "queue:mail:shard:0", "queue:mail:shard:2",
    }  # fmt: skip
    assert len(await drained(Queue(log, "mail", shards=4, consumes=[1, 3]))) == 20


@pytest.mark.parametrize("consumes", [[], [2], [-1], ["0"]])
async def test_shards_that_do_not_exist_cannot_be_consumed(consumes: list[int]) -> None:
    with pytest.raises(QueueSettingsError, match="consumes must be numbers of shards, 0 to 1"):
        Queue(MemoryLog("work"), "mail", shards=2, consumes=consumes)


@pytest.mark.parametrize("version", [1, 2])
async def test_records_of_an_earlier_format_are_refused(version: int) -> None:
    log = MemoryLog("work")
    await log.append(b"\xb0Q%c\x91\x04" % version, tags=["queue:mail:settings"])
    with pytest.raises(
        QueueVersionError, match=f"BokiQueue has format {version}; this program reads format 3"
    ):
        await Queue(log, "mail").push(b"x")


async def test_leases_that_ended_without_a_further_record_are_over_for_operators() -> None:
    """Both consumers have crashed, and no consumer is left."""
    log = MemoryLog("work")
    queue = Queue(log, "mail", shards=1)
    last = await Queue(log, "mail", shards=1, tries=1).push(b"last", priority=9)
    first = await queue.push(b"first")
    await queue.push(b"later", delay=20)
    for _ in range(2):
        assert await queue.take(lease=10) is not None
    before = await queue.stats()
    assert (before.depth, before.leased, before.dead) == (3, 2, 0)
    await log.logs.skip(seconds=15)
    stats = await queue.stats()
    assert (stats.depth, stats.leased, stats.dead) == (2, 0, 1)
    assert [(m.data, m.state) for m in await queue.peek()] == [
        (b"first", "ready"), (b"later", "delayed"),
    ]  # fmt: skip
    assert await queue.dead_letters() == [(last, b"last")]
    assert not await queue.discard(first)
    assert await queue.redrive() == 1
    assert [m.data for m in await queue.peek()] == [b"last", b"first", b"later"]


async def test_no_retryable_error_follows_a_part_of_a_purge() -> None:
    class Failing(HookedLog):
        left = 100

        async def before_append(self, entries: Sequence[Entry]) -> None:
            self.left -= 1
            if self.left < 0:
                raise NotReadyError("a node is away")

    log = Failing("work")
    queue = Queue(log, "mail", shards=2)
    for _ in range(4):
        await queue.push(b"x")
    log.left = 0
    with pytest.raises(NotReadyError):
        await queue.purge()
    log.left = 1
    with pytest.raises(AppendOutcomeUnknownError, match=r"^2 messages were changed"):
        await queue.purge()
    log.left = 100
    assert await queue.purge() == 2
