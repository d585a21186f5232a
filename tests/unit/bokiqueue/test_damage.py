"""A queue with a lost checkpoint is refused only where no other checkpoint or record helps."""

from __future__ import annotations

import pytest

from bokiqueue import Queue, QueueReplica, checkpoints
from bokiqueue import replica as replica_module
from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.testing import MemoryLog
from tests.support.damaged_log import DamagedLogs

pytestmark = pytest.mark.asyncio
EVERY = 6


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "CHECKPOINT_EVERY", EVERY)


@pytest.fixture
def logs() -> DamagedLogs:
    return DamagedLogs()


def process(logs: DamagedLogs) -> Queue:
    """Return the queue in a process that has read nothing of it."""
    return Queue(logs.log("work"), "mail", shards=1, replica=QueueReplica("mail", 1))


async def checkpoint_of(queue: Queue) -> SeqNum:
    """Return the seqnum of the last checkpoint."""
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
    """The writer of the checkpoint crashed before the trim."""
    queue = process(logs)
    await deliver(queue, 1)
    (shard,), (tag,) = queue.replica.shards, queue.replica.tags.checkpoints
    await checkpoints.write(queue.log, tag, shard.state.checkpoint())
    logs.lost = {await checkpoint_of(queue)}
    await queue.push(b"last")
    assert (await process(logs).stats()).depth == 1


async def test_a_lost_checkpoint_is_skipped_if_another_one_suffices(
    logs: DamagedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", 1)
    queue = process(logs)
    await deliver(queue, EVERY)
    kept, _ = await checkpoints.find_furthest(queue.log, queue.replica.tags.checkpoints[0])
    assert kept is not None
    await checkpoints.write(queue.log, queue.replica.tags.checkpoints[0], kept.checkpoint)
    logs.lost = {await checkpoint_of(queue)}
    await queue.push(b"last")
    assert (await process(logs).stats()).depth == 1


async def test_a_queue_with_its_only_checkpoint_lost_is_reported_as_damaged_not_trimmed(
    logs: DamagedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", 1)
    queue = process(logs)
    await deliver(queue, EVERY)
    with pytest.raises(TrimmedError):
        await queue.log.read_range(queue.replica.tags.shards[0])
    logs.lost = {await checkpoint_of(queue)}
    newcomer = process(logs)
    with pytest.raises(DataLossError):
        await newcomer.take()
    logs.lost.clear()
    assert await newcomer.take() is None, "it is repaired"


async def test_a_lagging_process_does_not_trim_a_lost_checkpoint_after_its_own(
    logs: DamagedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost checkpoint may be repaired, and no other one reaches as far."""
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", 1)
    queue, stale = process(logs), process(logs)
    await deliver(queue, 1)
    await stale.stats()
    await deliver(queue, EVERY)
    logs.lost = {await checkpoint_of(queue)}
    (shard,) = stale.replica.shards
    shard.unsaved = EVERY
    await stale.replica.save(stale.log, shard)
    logs.lost.clear()
    assert (await process(logs).stats()).depth == 0


async def test_a_lost_checkpoint_is_trimmed_after_a_later_checkpoint(
    logs: DamagedLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "KEPT_BEHIND", 1)
    queue = process(logs)
    await deliver(queue, EVERY)
    logs.lost = {await checkpoint_of(queue)}
    await deliver(queue, EVERY)
    assert isinstance(queue.log, MemoryLog)
    with pytest.raises(TrimmedError):
        await queue.log.read_range(queue.replica.tags.checkpoints[0], min(logs.lost))
    assert (await process(logs).stats()).depth == 0
