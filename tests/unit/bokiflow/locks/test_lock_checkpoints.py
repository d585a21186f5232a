"""A process that opens a lock starts from a checkpoint, which is all that the lock is.

`tests/unit/replayed` has the tests of checkpoints that are lost, late, large or incomplete.
"""

from __future__ import annotations

import asyncio

import pytest

from bokiflow import HeldLock, Lock, LockLostError, LockTimeoutError
from bokiflow.locks import lock_replica
from bokiflow.locks.lock_replica import LockReplica, new_replica
from bokiflow.locks.lock_state import LockState
from indilog.base.errors import DataLossError, TrimmedError
from indilog.testing import MemoryLog
from tests.support.damaged_log import DamagedLogs

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _checkpoint_after_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_replica, "CHECKPOINT_EVERY", 2)


async def use(log: MemoryLog, times: int) -> list[HeldLock]:
    """Acquire and release the lock so often."""
    released = []
    for _ in range(times):
        async with Lock(log, "x", renew=False) as held:
            released.append(held)
    return released


async def newcomer(log: MemoryLog) -> LockReplica:
    """Return what a process sees that knows nothing of the lock."""
    replica = new_replica("x")
    await replica.catch_up(log)
    return replica


async def trimmed_until(log: MemoryLog) -> int:
    with pytest.raises(TrimmedError) as trimmed:
        await log.read_range("lock:x")
    return trimmed.value.first_seqnum


async def test_a_repeated_release_has_the_same_answer_after_a_checkpoint() -> None:
    log = MemoryLog("work")
    released = await use(log, 6)
    assert released[0].token < await trimmed_until(log), "only a checkpoint knows it"
    other = await newcomer(log)
    for held in released:
        await HeldLock(log, "x", other, held.token).release()
    with pytest.raises(LockLostError):
        await HeldLock(log, "x", other, released[-1].token + 1).release()


@pytest.mark.parametrize("how", ["extend", "time out"])
async def test_a_lock_that_stays_held_has_checkpoints(how: str) -> None:
    """A leader extends its lease for months, and others try to get the lock."""
    log = MemoryLog("work")
    held = await Lock(log, "x").acquire()
    for _ in range(100):
        if how == "extend":
            await held.extend()
        else:
            with pytest.raises(LockTimeoutError):
                await Lock(log, "x", wait=0).acquire()
        await asyncio.sleep(0)
    assert await trimmed_until(log) > held.token
    assert (await newcomer(log)).state.holds(held.token)


async def test_a_checkpoint_restores_the_queue_the_time_and_the_released_tokens() -> None:
    log = MemoryLog("work")
    await use(log, 3)
    await Lock(log, "x", owner="ann", lease=5).acquire()
    replica = await newcomer(log)
    await Lock(log, "x", owner="ann", lease=7).acquire()
    for each in (replica, lock_replica.replica_of(log, "x")):
        await each.catch_up(log)
        snapshot = each.state.snapshot()
        assert LockState(snapshot).snapshot() == snapshot
        assert len(snapshot.released) == 3
        assert snapshot.queue[0].until == snapshot.clock + 7


async def test_a_lock_of_which_the_only_checkpoint_is_lost_is_damaged_not_trimmed() -> None:
    logs = DamagedLogs()
    log = logs.log("work")
    await use(log, 4)
    logs.lost = {r.seqnum for r in await log.read_range("lock:x:checkpoint", logs.position - 1)}
    assert logs.lost
    with pytest.raises(DataLossError, match=r"^Lock 'x' cannot be read"):
        await newcomer(log)
    logs.lost.clear()
    assert len((await newcomer(log)).state) == 0
