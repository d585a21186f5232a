"""Checkpoints are automatic; a process that starts from one is like one that read all records."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiviews import ConflictError, Views, places, replica
from indilog.base.errors import NotReadyError, TrimmedError
from indilog.base.log import Entry
from indilog.testing import MemoryLog
from tests.support.hooked_log import HookedLog, Read
from tests.unit.bokiviews.groups import Deposit, Ledger, process, refused

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]
EVERY = 4


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr(replica, "CHECKPOINT_EVERY", EVERY)
    return MemoryLog("objects")


async def filled(log: MemoryLog) -> Views:
    """Return a group with objects of all kinds, whose first records are trimmed."""
    views = process(log, machines=[Ledger])
    users, items, count, tags, bank = (
        await views.map("users"), await views.list("items"), await views.counter("count"),
        await views.set("tags"), await views.machine("bank", Ledger),
    )  # fmt: skip
    for number in range(4 * EVERY):
        await users.put(number % 5, number)
        await items.append(number)
        await count.add(2**62)
        await tags.add(f"t{number % 3}")
        await bank.submit(Deposit("ann", number))
    with pytest.raises(TrimmedError):
        await log.read_range("views:views:changes", 0)
    return views


async def test_a_new_process_continues_from_a_checkpoint(log: MemoryLog) -> None:
    old = await filled(log)
    new = process(log, machines=[Ledger])
    count = 4 * EVERY
    assert dict((await new.map("users")).view) == dict((await old.map("users")).view)
    assert list((await new.list("items")).view) == list(range(count))
    assert (await new.counter("count")).view == count * 2**62
    assert set((await new.set("tags")).view) == {"t0", "t1", "t2"}
    assert (await new.machine("bank", Ledger)).view.accounts == {"ann": sum(range(count))}
    for views in (old, new):
        views._replica.state.check_invariants()
    assert new._replica.state.size == old._replica.state.size


async def test_of_callers_whose_record_makes_a_checkpoint_due_one_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They resume together. A checkpoint of each would hold all objects in memory 64 times."""
    monkeypatch.setattr(replica, "CHECKPOINT_EVERY", EVERY)
    may_append = asyncio.Event()

    class Saving(HookedLog):
        checkpoints = 0

        async def before_append(self, entries: Sequence[Entry]) -> None:
            if "views:views:checkpoints" in entries[0].tags:
                self.checkpoints += 1
                await may_append.wait()

    log = Saving("objects")
    users = await process(log).map("users")
    for number in range(EVERY - 1):
        await users.put(0, number)
    putting = [asyncio.create_task(users.put(number % 2, number)) for number in range(64)]
    await asyncio.wait(putting, return_when=asyncio.FIRST_COMPLETED)
    for _ in range(8):
        await asyncio.sleep(0)
    assert log.checkpoints == 1
    assert sum(task.done() for task in putting) == 63
    may_append.set()
    await asyncio.gather(*putting)
    assert log.checkpoints == 1


async def test_a_process_that_starts_from_a_checkpoint_decides_like_the_others(
    log: MemoryLog,
) -> None:
    """A checkpoint has the recent writes, because transactions may have begun before it."""
    old = await filled(log)
    users = await old.map("users")
    async with refused(ConflictError, old.transaction()) as txn:
        txn[users].put("n", txn[users].get(0, 0))
        other = process(log, machines=[Ledger])
        await (await other.map("users")).put(0, -1)
        await other.save()
        await other.save()
    late = process(log, machines=[Ledger])
    assert (await late.map("users")).view.get("n") is None
    async with old.transaction() as txn:
        txn[users].put("n", txn[users].get(0, 0))
        await (await other.map("users")).put(1, -1)
        await other.save()
    assert (await process(log, machines=[Ledger]).map("users")).view["n"] == -1


async def test_the_floor_of_recent_writes_is_in_checkpoints(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "RECENT_MAX", 4)
    old, other = process(log), process(log)
    users, theirs = await old.map("users"), await other.map("users")
    async with refused(ConflictError, old.transaction()) as txn:
        txn[users].put("n", txn[users].get("never written", 0))
        for key in range(8):
            await theirs.put(key, 1)
        await other.save()
        await other.save()
    late = await process(log).map("users")
    assert late.view.get("n") is None
    assert late._replica.state.recent.floor == other._replica.state.recent.floor > 0


async def test_a_checkpoint_that_fails_fails_no_command(log: MemoryLog) -> None:
    class Unreadable(HookedLog):
        async def before_read(self, read: Read) -> None:
            if str(read.tag).endswith("checkpoints"):
                raise NotReadyError("Not now.")

    counter = await process(Unreadable("objects")).counter("c")
    for number in range(3 * EVERY):
        assert await counter.add(1) == number + 1


async def test_concurrent_callers_write_one_checkpoint(log: MemoryLog) -> None:
    class Slow(HookedLog):
        async def before_read(self, read: Read) -> None:
            await asyncio.sleep(0)

    counter = await process(Slow("objects", logs=log.logs)).counter("c")
    for _ in range(EVERY):
        await asyncio.gather(*(counter.add(1) for _ in range(20)))
    assert await log.tail() == EVERY + 1


async def test_a_process_writes_one_checkpoint_at_a_time(log: MemoryLog) -> None:
    class Held(HookedLog):
        begun = 0
        may_continue = asyncio.Event()

        async def before_read(self, read: Read) -> None:
            if str(read.tag).endswith("checkpoints"):
                self.begun += 1
                await self.may_continue.wait()

    held = Held("objects", logs=log.logs)
    counter = await process(held).counter("c")
    callers = []
    for _ in range(4 * EVERY):
        callers.append(asyncio.create_task(counter.add(1)))
        while counter.view < len(callers):  # noqa: ASYNC110 - some callers wait for the checkpoint
            await asyncio.sleep(0)
    assert held.begun == 1
    held.may_continue.set()
    assert await asyncio.gather(*callers) == list(range(1, 4 * EVERY + 1))


async def test_a_group_is_followed_until_its_reader_is_cancelled(log: MemoryLog) -> None:
    writer, views = await process(log).counter("c"), process(log)
    reader = await views.counter("c")
    following = asyncio.create_task(views.follow())
    async with asyncio.timeout(10):
        for number in range(1, 3 * EVERY):
            await writer.add(1)
            while reader.view < number:  # noqa: ASYNC110 - the view is not awaited
                await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_a_follower_that_lags_behind_a_trim_continues_from_a_checkpoint(
    log: MemoryLog,
) -> None:
    views = process(log)
    reader = await views.counter("count")
    await filled(log)
    following = asyncio.create_task(views.follow())
    async with asyncio.timeout(10):
        while reader.view < 4 * EVERY * 2**62:  # noqa: ASYNC110 - the view is not awaited
            await asyncio.sleep(0)
    following.cancel()
