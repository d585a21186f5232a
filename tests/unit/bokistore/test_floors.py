"""Trim floors that are visible before the records that were appended ahead of them (A22 for
objects).

A read may be answered as of an older position of the log while its floors are already current:
floors reach the index early. Then the records from before a trim are read again, as of the tail.
"""

from __future__ import annotations

import asyncio

import pytest

from bokistore import ConflictError, Replica, Store
from indilog.base.errors import TrimmedError
from indilog.testing import MemoryLog
from tests.support.lagging_log import Behind
from tests.unit.bokistore.processes import newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("small_cells")]


async def test_an_unchanged_object_does_not_count_as_deleted(log: MemoryLog) -> None:
    store = Store(log)
    for _ in range(10):
        await store.increment("a", "n")
    behind = Behind("objects", log.logs)
    await store.collect(keep=0)
    with pytest.raises(TrimmedError):
        await behind.read_prev("store:a")
    assert (await newcomer(behind).get("a")).value == {"n": 10}


async def test_a_deleted_object_counts_as_deleted(log: MemoryLog) -> None:
    store = Store(log)
    for _ in range(10):
        await store.increment("a", "n")
    await store.delete("a")
    behind = Behind("objects", log.logs)
    await store.collect(keep=0)
    assert not await newcomer(behind).get("a")


async def test_an_object_trimmed_with_its_log_does_not_count_as_deleted(log: MemoryLog) -> None:
    store = Store(log)
    await store.set("a", "n", 1)
    behind = Behind("objects", log.logs)
    await log.trim(await log.tail())
    with pytest.raises(TrimmedError):
        await newcomer(behind).get("a")


async def test_a_decision_is_found_after_its_history_is_trimmed(log: MemoryLog) -> None:
    """Whether `b` was written depends on the history of `a`, which is trimmed."""
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


async def test_a_replica_finds_the_snapshot_that_covers_trimmed_commands(log: MemoryLog) -> None:
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
