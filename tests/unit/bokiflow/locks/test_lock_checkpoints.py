"""A process that opens a lock starts from a checkpoint, or gets an error that says why not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bokiflow import Lock
from bokiflow.locks import lock_replica
from bokiflow.locks.lock_replica import LockReplica
from indilog.base.errors import DataLossError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.damaged_log import DamagedLogs
from tests.support.hooked_log import HookedLog, Read
from tests.support.lagging_log import Behind

pytestmark = pytest.mark.asyncio
CHECKPOINTS = "lock:x:checkpoint"


@pytest.fixture(autouse=True)
def _checkpoint_after_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_replica, "CHECKPOINT_EVERY", 2)


@pytest.fixture
def logs() -> DamagedLogs:
    return DamagedLogs()


async def use(log: MemoryLog, times: int = 4) -> SeqNum:
    """Take the lock so often; return the last checkpoint's place."""
    for _ in range(times):
        async with Lock(log, "x", renew=False):
            pass
    last = await log.read_prev(CHECKPOINTS)
    assert last is not None
    return last.seqnum


async def end_of(log: MemoryLog) -> SeqNum:
    """Return how far a process reads that knows nothing of the lock."""
    replica = LockReplica("x")
    await replica.catch_up(log)
    return replica.state.end


async def test_a_floor_that_is_seen_before_its_checkpoint_is_not_taken_for_a_trimmed_log() -> None:
    logs = MemoryLogs()
    behind = Behind("work", logs)
    last = await use(logs.log("work"))
    with pytest.raises(TrimmedError):
        await behind.read_range("lock:x")
    assert await behind.read_range(CHECKPOINTS, last) == []
    assert await end_of(behind) == last


async def test_a_log_that_was_trimmed_as_a_whole_is_an_error() -> None:
    log = MemoryLog("work")
    await use(log)
    await log.trim(await log.tail())
    with pytest.raises(TrimmedError):
        await end_of(log)


async def test_a_read_that_finds_a_trim_after_the_checkpoint_was_loaded_continues(
    logs: DamagedLogs,
) -> None:
    """Both read for the same copy of the lock."""

    class Late(HookedLog):
        gate = asyncio.Event()

        async def before_read(self, read: Read) -> None:
            await self.gate.wait()

    plain = MemoryLogs()
    log, late = plain.log("work"), Late("work", logs=plain)
    await use(log)
    replica = LockReplica("x")
    reading = asyncio.create_task(replica.catch_up(late))
    await asyncio.sleep(0)
    await replica.catch_up(log)
    late.gate.set()
    await reading


@pytest.mark.parametrize("which", [lambda places: places[:1], lambda places: places[1:]])
async def test_a_lost_checkpoint_is_skipped_while_another_one_helps(
    logs: DamagedLogs, which: Callable[[list[SeqNum]], list[SeqNum]]
) -> None:
    log = logs.log("work")
    last = await use(log)
    kept = await log.read(last)
    assert kept is not None
    places = [last, await log.append(kept.data, tags=[CHECKPOINTS])]
    logs.lost = set(which(places))
    assert await end_of(log) == last


async def test_a_lock_of_which_the_only_checkpoint_is_lost_is_damaged_not_trimmed(
    logs: DamagedLogs,
) -> None:
    log = logs.log("work")
    logs.lost = {await use(log)}
    with pytest.raises(DataLossError):
        await end_of(log)
    logs.lost.clear()
    assert await end_of(log) == logs.position - 1


async def test_a_lost_checkpoint_that_may_go_further_is_not_trimmed(logs: DamagedLogs) -> None:
    """By a process that stood still: it may be repaired, and nothing else goes as far."""
    log = logs.log("work")
    stale = LockReplica("x")
    await use(log, 1)
    await stale.catch_up(log)
    lost = await use(log)
    logs.lost = {lost}
    await stale.save(log)
    logs.lost.clear()
    assert await end_of(log) == lost


async def test_a_lost_checkpoint_is_trimmed_once_another_covers_more(logs: DamagedLogs) -> None:
    log = logs.log("work")
    lost = await use(log)
    logs.lost = {lost}
    last = await use(log, 1)
    with pytest.raises(TrimmedError):
        await log.read_range(CHECKPOINTS, last - 1)
    assert await end_of(log) == last
