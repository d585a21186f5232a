"""A queue with a lost checkpoint is refused only where no other checkpoint or record helps.

`tests/unit/replayed` has the tests of checkpoints that are late, large or incomplete.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from bokiqueue import Queue, QueueReplica
from bokiqueue import shard as shard_module
from bokiqueue.records import SetAside, decode_commands
from indilog.base.errors import DataLossError, TooLargeError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Record
from indilog.testing import MemoryLog
from tests.support.damaged_log import DamagedLogs

pytestmark = pytest.mark.asyncio
EVERY = 4


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> DamagedLogs:
    monkeypatch.setattr(shard_module, "CHECKPOINT_EVERY", EVERY)
    return DamagedLogs()


def process(logs: DamagedLogs) -> Queue:
    """Return the queue in a process that has read nothing of it."""
    return Queue(logs.log("work"), "mail", shards=1, replica=QueueReplica("mail", 1))


async def last_checkpoint(queue: Queue) -> SeqNum:
    last = await queue.log.read_prev(queue.replica.tags.checkpoints[0])
    assert last is not None
    return last.seqnum


async def deliver(queue: Queue, count: int) -> None:
    for number in range(count):
        await queue.push(b"%d" % number)
        async with queue.pop() as message:
            assert message is not None


async def test_a_lost_checkpoint_is_skipped_if_all_records_are_untrimmed(
    logs: DamagedLogs,
) -> None:
    queue = process(logs)
    await deliver(queue, 2)
    logs.lost = {await last_checkpoint(queue)}
    await queue.push(b"last")
    assert (await process(logs).stats()).depth == 1


async def test_a_queue_with_its_only_checkpoint_lost_is_reported_as_damaged_not_trimmed(
    logs: DamagedLogs,
) -> None:
    queue = process(logs)
    await deliver(queue, 3 * EVERY)
    with pytest.raises(TrimmedError):
        await queue.log.read_range(queue.replica.tags.shards[0])
    logs.lost = {await last_checkpoint(queue)}
    newcomer = process(logs)
    with pytest.raises(DataLossError, match=r"^Shard 0 of queue 'mail' cannot be read"):
        await newcomer.take()
    logs.lost.clear()
    assert await newcomer.take() is None, "it is repaired"


async def test_a_lost_checkpoint_is_trimmed_after_a_later_checkpoint(logs: DamagedLogs) -> None:
    queue = process(logs)
    await deliver(queue, 3 * EVERY)
    lost = await last_checkpoint(queue)
    logs.lost = {lost}
    await deliver(queue, EVERY)
    assert await last_checkpoint(queue) > lost
    with pytest.raises(TrimmedError):
        await queue.log.read_range(queue.replica.tags.checkpoints[0], lost)
    assert (await process(logs).stats()).depth == 0


class LosingLog(MemoryLog):
    """A log whose records at `lost` cannot be read any more by their seqnums."""

    lost: frozenset[SeqNum] = frozenset()

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        if seqnum in self.lost:
            raise DataLossError("Lost.", seqnum=seqnum, next_seqnum=seqnum + 1)
        return await super().read(seqnum, fresh=fresh)


async def test_a_lost_message_becomes_a_dead_letter_and_the_others_are_delivered() -> None:
    log = LosingLog("work")
    queue = Queue(log, "mail", shards=1, tries=3)
    lost = await queue.push(b"lost")
    for number in range(4):
        await queue.push(b"%d" % number)
    await queue.stats()
    log.lost = frozenset({lost})
    queue.replica._contents.forget([lost])
    got: list[bytes] = []
    for _ in range(3):
        with pytest.raises(DataLossError, match=f"message at seqnum {lost} of queue 'mail'"):
            async with queue.pop_many(2, wait=5):
                pass
        async with queue.pop(wait=5) as message:
            assert message is not None
            assert message.tries == 1, "a delivery that failed for another message is no try"
            got.append(message.data)
        await log.logs.skip(seconds=1)
    stats = await queue.stats()
    assert (got, stats.depth, stats.dead) == ([b"0", b"1", b"2"], 1, 1)
    assert await queue.discard(lost)


@pytest.mark.usefixtures("logs")  # for frequent checkpoints
async def test_checkpoints_do_without_the_bytes_of_a_lost_dead_letter() -> None:
    log = LosingLog("work")
    queue = Queue(log, "mail", shards=1, tries=1, replica=QueueReplica("mail", 1))
    lost = await queue.push(b"lost")
    assert await queue.take(lease=0.5) is not None
    await log.logs.skip(seconds=1)
    log.lost = frozenset({lost})
    queue.replica._contents.forget([lost])
    await deliver(queue, 8 * EVERY)
    assert await last_checkpoint(queue) > log.logs.position - 8 * EVERY


@pytest.mark.usefixtures("logs")  # for frequent checkpoints
async def test_a_message_too_large_to_be_stored_again_prevents_no_checkpoint() -> None:
    """At a large seqnum, the record that sets a message aside is larger than the push."""

    class TightLog(MemoryLog):
        async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
            if any(isinstance(command, SetAside) for command in decode_commands(data)):
                raise TooLargeError("The record", size=len(data), limit=len(data) - 1)
            return await super().append(data, tags=tags)

    queue = Queue(TightLog("work"), "mail", shards=1, tries=1)
    await queue.push(b"large")
    delivery = await queue.take()
    assert delivery is not None
    await delivery.requeue()
    assert (await queue.stats()).dead == 1
    tail = await queue.log.tail()
    await deliver(queue, 8 * EVERY)
    assert await last_checkpoint(queue) > tail + 4 * EVERY
