"""A queue with a lost checkpoint is refused only where no other checkpoint or record helps.

`tests/unit/replayed` has the tests of checkpoints that are late, large or incomplete.
"""

from __future__ import annotations

import pytest

from bokiqueue import Queue, QueueReplica
from bokiqueue import shard as shard_module
from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum
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
