"""Locks for their callers: who gets a lock, which errors callers get, what is released."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from bokiflow import (
    FlowVersionError,
    HeldLock,
    Lock,
    LockLostError,
    LockQueueFullError,
    LockSettingsError,
    LockTimeoutError,
)
from bokiflow.locks import lock as lock_module
from bokiflow.locks import lock_replica, lock_state
from bokiflow.locks.lock_records import Release, encode
from bokiflow.locks.lock_replica import new_replica, replica_of
from indilog.base.errors import DiskFullError, NotReadyError, TrimmedError
from indilog.base.ids import UserTag
from indilog.replayed import ReplicaCache
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = pytest.mark.leaping

Log = Callable[[], MemoryLog]


@pytest.fixture
def log() -> Log:
    """A further process's view of one log: nothing is shared but the records."""
    logs = MemoryLogs()
    return lambda: _Apart(logs)


class _Apart(MemoryLog):
    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("work", logs=logs)

    @property
    def scope(self) -> MemoryLogs:
        return self  # type: ignore[return-value]


async def waiting(log: MemoryLog, name: str, count: int) -> None:
    """Return when so many stand in the line of a lock."""
    replica = new_replica(name)
    await replica.catch_up(log)
    while len(replica.state) < count:
        assert await log.read_next(f"lock:{name}", replica.end, wait=10)
        await replica.catch_up(log)


@pytest.mark.asyncio
async def test_a_free_lock_costs_one_append_to_take_and_one_to_release(log: Log) -> None:
    mine = log()
    async with Lock(mine, "hotel:7", renew=False) as held:
        assert mine.logs.position == 1
        assert held.token == 0
    assert mine.logs.position == 2


@pytest.mark.asyncio
async def test_waiting_callers_get_the_lock_in_order_with_growing_tokens(log: Log) -> None:
    got: list[tuple[int, int]] = []

    async def want(number: int) -> None:
        async with Lock(log(), "hotel:7") as held:
            got.append((number, held.token))

    async with Lock(log(), "hotel:7") as first:
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(want(number)))
            await waiting(log(), "hotel:7", number + 2)
    await asyncio.gather(*tasks)
    assert [number for number, _ in got] == list(range(5))
    tokens = [first.token, *(token for _, token in got)]
    assert tokens == sorted(set(tokens))


@pytest.mark.asyncio
async def test_the_end_of_a_lease_releases_the_lock_and_fails_its_holder(log: Log) -> None:
    slow = await Lock(log(), "hotel:7", lease=0.05).acquire()
    quick = await Lock(log(), "hotel:7").acquire()
    assert quick.token > slow.token
    with pytest.raises(LockLostError) as reported:
        await slow.extend()
    assert (reported.value.name, reported.value.token) == ("hotel:7", slow.token)
    with pytest.raises(LockLostError):
        await slow.release()
    await quick.release()


@pytest.mark.asyncio
async def test_a_waiter_that_died_costs_no_more_than_its_wait(log: Log) -> None:
    """If the dead waiter's wait did not end, it would hold the lock for a lease of a year."""
    held = await Lock(log(), "hotel:7", lease=0.1).acquire()
    dead = asyncio.create_task(Lock(log(), "hotel:7", wait=0.05, lease=3e7, owner="dead").acquire())
    await waiting(log(), "hotel:7", 2)
    dead.cancel()
    await asyncio.wait([dead])
    async with Lock(log(), "hotel:7", wait=10) as next_one:
        assert next_one.token > held.token


@pytest.mark.asyncio
async def test_a_caller_that_times_out_gets_an_error_and_leaves_the_queue(log: Log) -> None:
    async with Lock(log(), "hotel:7"):
        with pytest.raises(LockTimeoutError, match="not free within 0 s"):
            await Lock(log(), "hotel:7", wait=0).acquire()
        with pytest.raises(LockTimeoutError):
            await Lock(log(), "hotel:7", wait=0.02).acquire()
        replica = new_replica("hotel:7")
        await replica.catch_up(log())
        assert len(replica.state) == 1


@pytest.mark.asyncio
async def test_an_interrupted_wait_leaves_the_queue(log: Log) -> None:
    async with Lock(log(), "hotel:7"):
        task = asyncio.create_task(Lock(log(), "hotel:7").acquire())
        await waiting(log(), "hotel:7", 2)
        task.cancel()
        await asyncio.wait([task])
        replica = new_replica("hotel:7")
        await replica.catch_up(log())
        assert len(replica.state) == 1


@pytest.mark.asyncio
async def test_an_owner_that_asks_again_gets_the_same_token(log: Log) -> None:
    first = await Lock(log(), "hotel:7", owner="run-1/3").acquire()
    again = await Lock(log(), "hotel:7", owner="run-1/3").acquire()
    assert again.token == first.token
    await again.release()
    await first.release()  # a released lock may be released again ...
    with pytest.raises(LockLostError):
        await first.extend()  # ... but it is not held


@pytest.mark.asyncio
async def test_an_interrupted_owner_keeps_its_place_in_the_queue(log: Log) -> None:
    held = await Lock(log(), "hotel:7").acquire()
    task = asyncio.create_task(Lock(log(), "hotel:7", owner="run-1/3").acquire())
    await waiting(log(), "hotel:7", 2)
    task.cancel()
    await asyncio.wait([task])
    later = asyncio.create_task(Lock(log(), "hotel:7").acquire())
    await waiting(log(), "hotel:7", 3)
    await held.release()
    again = await Lock(log(), "hotel:7", owner="run-1/3").acquire()
    await again.release()
    assert again.token < (await later).token


@pytest.mark.asyncio
async def test_a_lock_is_renewed_while_its_block_runs(log: Log) -> None:
    mine = log()
    async with Lock(mine, "hotel:7", lease=0.06) as held:
        extended = await mine.read_next("lock:hotel:7", held.token + 4, wait=10)
        assert extended is not None
        with pytest.raises(LockTimeoutError):
            await Lock(log(), "hotel:7", wait=0).acquire()


@pytest.mark.asyncio
async def test_a_block_ends_when_the_loss_of_its_lock_is_noticed(log: Log) -> None:
    async def hold() -> None:
        async with Lock(log(), "hotel:7", lease=0.06) as held:
            await held._replica.append(log(), encode(Release(held.token)))
            await asyncio.sleep(60)

    with pytest.raises(LockLostError):
        await hold()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.asyncio
async def test_a_lock_that_cannot_be_renewed_counts_as_lost_when_its_lease_is_over(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = log()

    async def unready(*_: object, **__: object) -> int:
        raise NotReadyError("starting")

    async def hold() -> None:
        async with Lock(mine, "hotel:7", lease=0.05):
            monkeypatch.setattr(mine, "append", unready)
            await asyncio.sleep(60)

    with pytest.raises(LockLostError):
        await hold()


@pytest.mark.asyncio
async def test_a_lease_whose_record_was_answered_late_is_over_before_the_next_holder_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease begins at the record, and the log does not answer the renewals either."""
    now = asyncio.get_running_loop().time
    monkeypatch.setattr(lock_module, "seconds_now", now)
    logs = MemoryLogs(clock=now)
    mine, is_held = _Apart(logs), asyncio.Event()
    append = mine.append

    async def late(data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        if is_held.is_set():
            raise NotReadyError("starting")
        seqnum = await append(data, tags=tags)
        await asyncio.sleep(8)
        return seqnum

    async def hold() -> None:
        async with Lock(mine, "hotel:7", lease=10):
            is_held.set()
            await asyncio.sleep(60)

    monkeypatch.setattr(mine, "append", late)
    holding = asyncio.create_task(hold())
    await is_held.wait()
    await Lock(_Apart(logs), "hotel:7").acquire()
    with pytest.raises(LockLostError):
        await asyncio.wait_for(holding, 1)


@pytest.mark.asyncio
async def test_the_error_of_a_block_has_priority_over_the_loss_of_its_lock(log: Log) -> None:
    async def hold(raised: BaseException | None) -> None:
        async with Lock(log(), "hotel:7", lease=0.01, renew=False):
            other = await Lock(log(), "hotel:7").acquire()
            await other.release()
            if raised is not None:
                raise raised

    with pytest.raises(ZeroDivisionError):
        await hold(ZeroDivisionError())
    with pytest.raises(LockLostError):
        await hold(None)


@pytest.mark.asyncio
async def test_a_block_that_is_cancelled_releases_and_stays_cancelled(log: Log) -> None:
    entered = asyncio.Event()

    async def hold() -> None:
        async with Lock(log(), "hotel:7"):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    async with Lock(log(), "hotel:7", wait=0):
        pass


@pytest.mark.asyncio
async def test_a_used_lock_keeps_few_records_and_new_processes_agree(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_replica, "CHECKPOINT_EVERY", 8)
    old = log()
    waits = asyncio.create_task(Lock(old, "hotel:7", owner="early").acquire())
    held: HeldLock = await waits
    for _ in range(20):
        line = asyncio.create_task(Lock(log(), "hotel:7").acquire())
        await waiting(log(), "hotel:7", 2)
        await held.release()
        held = await line
    with pytest.raises(TrimmedError) as trimmed:
        await old.read_range("lock:hotel:7", 0)
    assert len(await old.read_range("lock:hotel:7", trimmed.value.first_seqnum)) <= 2 * 8
    with pytest.raises(LockLostError):
        await HeldLock(old, "hotel:7", replica_of(old, "hotel:7"), 0).extend()
    with pytest.raises(LockTimeoutError):
        await Lock(log(), "hotel:7", wait=0).acquire()
    await held.release()


@pytest.mark.asyncio
async def test_a_late_checkpoint_removes_none_that_covers_more(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_replica, "CHECKPOINT_EVERY", 4)
    stalled, other, gate = log(), log(), asyncio.Event()
    first = await Lock(stalled, "hotel:7").acquire()
    for _ in range(6):
        await first.extend()
    await asyncio.sleep(0)  # writes the first checkpoint; the next one is due at the release
    append = stalled.append

    async def late(data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        tags = list(tags)
        if tags == ["lock:hotel:7:checkpoint"]:
            await gate.wait()
        return await append(data, tags=tags)

    monkeypatch.setattr(stalled, "append", late)
    release = asyncio.create_task(first.release())
    tokens = []
    for _ in range(13):
        async with Lock(other, "hotel:7", renew=False) as held:
            tokens.append(held.token)
    gate.set()
    await release
    async with Lock(log(), "hotel:7", wait=0) as found:  # all who were up to date are gone
        assert found.token > tokens[-1]


@pytest.mark.asyncio
async def test_a_checkpoint_that_cannot_be_written_fails_no_release(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_replica, "CHECKPOINT_EVERY", 2)
    mine = log()
    append = mine.append

    async def full(data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        tags = list(tags)
        if tags == ["lock:hotel:7:checkpoint"]:
            raise DiskFullError("full")
        return await append(data, tags=tags)

    monkeypatch.setattr(mine, "append", full)
    for _ in range(3):
        async with Lock(mine, "hotel:7", renew=False):
            pass
    monkeypatch.undo()
    assert await mine.read_next("lock:hotel:7:checkpoint") is None


@pytest.mark.asyncio
async def test_a_release_is_known_after_any_number_of_concurrent_records(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The releasing process reads beyond its own record before that append returns."""
    mine, gate = log(), asyncio.Event()
    held = await Lock(mine, "hotel:7").acquire()
    append = mine.append

    async def late(data: bytes, *, tags: Iterable[UserTag] = ()) -> int:
        seqnum = await append(data, tags=tags)
        await gate.wait()
        return seqnum

    monkeypatch.setattr(mine, "append", late)
    release = asyncio.create_task(held.release())
    other = log()
    for _ in range(700):
        async with Lock(other, "hotel:7", renew=False):
            pass
        await replica_of(mine, "hotel:7").catch_up(mine)
    gate.set()
    await release
    assert not replica_of(mine, "hotel:7")._outcomes, "no caller asks for them any more"


@pytest.mark.asyncio
async def test_a_process_that_only_watches_a_lock_keeps_none_of_its_records(log: Log) -> None:
    mine, other = log(), log()
    async with Lock(other, "hotel:7", renew=False) as held:
        for _ in range(100):
            await held.extend()
        replica = replica_of(mine, "hotel:7")
        await replica.catch_up(mine)
        assert not replica._outcomes


def test_a_process_keeps_the_locks_that_were_used_last(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_replica, "_REPLICAS", ReplicaCache(2))
    mine = log()
    first, second = replica_of(mine, "first"), replica_of(mine, "second")
    assert replica_of(mine, "first") is first
    replica_of(mine, "third")
    assert replica_of(mine, "first") is first
    assert replica_of(mine, "second") is not second


@pytest.mark.asyncio
async def test_the_queue_of_a_lock_has_a_limit(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_state, "QUEUE_MAX", 1)
    async with Lock(log(), "hotel:7"):
        with pytest.raises(LockQueueFullError):
            await Lock(log(), "hotel:7").acquire()


@pytest.mark.asyncio
@pytest.mark.parametrize("version", [b"\x01", b"\x03"])
async def test_records_of_others_are_skipped_and_other_formats_refused(
    log: Log, version: bytes
) -> None:
    mine = log()
    await mine.append(b"hello", tags=["lock:hotel:7"])
    await mine.append(b"\xb0L\x02\x93", tags=["lock:hotel:7"])
    async with Lock(mine, "hotel:7", renew=False) as held:
        assert held.token == 2
    await mine.append(b"\xb0L" + version, tags=["lock:hotel:7"])
    with pytest.raises(FlowVersionError, match=f"a lock has format {version[0]}"):
        await Lock(log(), "hotel:7").acquire()


@pytest.mark.parametrize(
    "make",
    [
        lambda log: Lock(log, ""),
        lambda log: Lock(log, "x" * 250),
        lambda log: Lock(log, "a", lease=0),
        lambda log: Lock(log, "a", lease=float("nan")),
        lambda log: Lock(log, "a", wait=-1),
        lambda log: Lock(log, "a", owner=""),
    ],
)
def test_invalid_settings_of_a_lock_are_refused(
    log: Log, make: Callable[[MemoryLog], Awaitable[object]]
) -> None:
    with pytest.raises(LockSettingsError):
        make(log())
