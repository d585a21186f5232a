"""A floor that is seen before the records that were appended ahead of it (A22 for objects).

Where a read is answered as of an older place of the log, its floors may already be those of now:
they reach the index early. What was appended before a trim is then looked for again, as of the
tail.
"""

from __future__ import annotations

import asyncio

import pytest

from bokistore import ConflictError, Replica, Store
from indilog.base.errors import TrimmedError
from indilog.testing import MemoryLog
from tests.support.behind_log import Behind
from tests.unit.bokistore.processes import newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("small_cells")]


async def test_an_object_at_rest_is_not_taken_as_deleted(log: MemoryLog) -> None:
    store = Store(log)
    for _ in range(10):
        await store.increment("a", "n")
    behind = Behind("objects", log.logs)
    await store.collect(keep=0)
    with pytest.raises(TrimmedError):
        await behind.read_prev("store:a")
    assert (await newcomer(behind).get("a")).value == {"n": 10}


async def test_an_object_that_was_deleted_is_taken_as_such(log: MemoryLog) -> None:
    store = Store(log)
    for _ in range(10):
        await store.increment("a", "n")
    await store.delete("a")
    behind = Behind("objects", log.logs)
    await store.collect(keep=0)
    assert not await newcomer(behind).get("a")


async def test_what_was_trimmed_with_its_log_is_not_taken_as_deleted(log: MemoryLog) -> None:
    store = Store(log)
    await store.set("a", "n", 1)
    behind = Behind("objects", log.logs)
    await log.trim(await log.tail())
    with pytest.raises(TrimmedError):
        await newcomer(behind).get("a")


async def test_what_was_decided_is_found(log: MemoryLog) -> None:
    """Whether `b` was written hangs on the history of `a`, which is trimmed."""
    store = Store(log)
    await store.set("a", "n", 1)
    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction() as late:
            await late.get("a")
            late.set("b", "n", 2)
            await store.set("a", "n", 2)
    async with store.transaction() as txn:
        await txn.get("a")
        txn.set("c", "n", 3)
        await store.set("d", "n", 1)
    await store.increment("a", "n")
    behind = Behind("objects", log.logs)
    await store.collect(keep=0)
    log.logs.drop_aux()
    reader = newcomer(behind)
    assert not await reader.get("b")
    behind.end = 5
    assert (await newcomer(behind).get("c"))["n"] == 3


async def test_a_replica_finds_the_snapshot_of_what_was_trimmed(log: MemoryLog) -> None:
    one = Replica(log, lambda _: None, snapshot=lambda: b"state", restore=lambda _: None)
    await one.propose(b"a")
    behind = Behind("objects", log.logs)
    await one.save()
    await one.trim()
    restored: asyncio.Queue[bytes] = asyncio.Queue()
    two = Replica(behind, lambda _: None, snapshot=bytes, restore=restored.put_nowait)
    following = asyncio.create_task(two.follow())
    assert await asyncio.wait_for(restored.get(), 10) == b"state"
    assert two.commands == 1
    following.cancel()
