"""After an append to a lock, no error claims that nothing was done, unless it was undone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from bokiflow import HeldLock, Lock, LockLostError
from bokiflow.locks.lock_replica import LockReplica, new_replica
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError
from indilog.base.log import Entry
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio


class Shaky(HookedLog):
    """A log, seen from a process of its own, whose reads fail when the test says so.

    Attributes:
        failing: so many of the next reads fail.
        failing_behind: so many fail behind the next append.
    """

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("work", logs=logs)
        self.failing = self.failing_behind = 0

    @property
    def scope(self) -> MemoryLogs:
        return self  # type: ignore[return-value]

    async def after_append(self, entries: Sequence[Entry]) -> None:
        self.failing += self.failing_behind
        self.failing_behind = 0

    async def before_read(self, read: Read) -> None:
        if self.failing:
            self.failing -= 1
            raise NotReadyError("a node is away")


@pytest.fixture
def log() -> Shaky:
    return Shaky(MemoryLogs())


async def line_of(log: MemoryLog) -> LockReplica:
    """Return what another process sees of the lock."""
    replica = new_replica("x")
    await replica.catch_up(MemoryLog("work", logs=log.logs))
    return replica


ASKS: dict[str, Callable[[Lock, HeldLock], Awaitable[object]]] = {
    "acquire": lambda lock, _: lock.acquire(),
    "extend": lambda _, held: held.extend(),
    "release": lambda _, held: held.release(),
}


@pytest.mark.parametrize("what", ASKS)
async def test_a_record_whose_effect_cannot_be_read_has_an_unknown_outcome(
    log: Shaky, what: str
) -> None:
    lock = Lock(log, "x", owner="ann")
    held = await lock.acquire()
    log.failing_behind = 1
    with pytest.raises(AppendOutcomeUnknownError, match="appended at 1") as reported:
        await ASKS[what](lock, held)
    assert not reported.value.retryable
    assert isinstance(reported.value.__cause__, NotReadyError)
    if what == "release":
        with pytest.raises(LockLostError):
            await held.extend()
    else:
        assert (await lock.acquire()).token == held.token


@pytest.mark.parametrize(("owner", "failing"), [("ann", 1), (None, 2)])
async def test_a_caller_that_cannot_read_and_stays_queued_gets_an_unknown_outcome(
    log: Shaky, owner: str | None, failing: int
) -> None:
    """An owner keeps its place; so does a waiting process if it cannot leave either."""
    held = await Lock(MemoryLog("work", logs=log.logs), "x").acquire()
    waiting = asyncio.create_task(Lock(log, "x", owner=owner).acquire())
    assert await log.read_next("lock:x", held.token + 1, wait=10)
    log.failing = failing
    await held.extend()
    with pytest.raises(AppendOutcomeUnknownError, match="appended at 1"):
        await waiting
    assert len((await line_of(log)).state) == 2


async def test_a_caller_that_cannot_read_and_left_the_queue_may_retry(log: Shaky) -> None:
    held = await Lock(MemoryLog("work", logs=log.logs), "x").acquire()
    waiting = asyncio.create_task(Lock(log, "x").acquire())
    assert await log.read_next("lock:x", held.token + 1, wait=10)
    log.failing = 1
    await held.extend()
    with pytest.raises(NotReadyError) as reported:
        await waiting
    assert reported.value.retryable
    assert len((await line_of(log)).state) == 1
