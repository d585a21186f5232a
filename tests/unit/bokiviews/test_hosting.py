"""Processes that keep views of some objects only decide every transaction like the others."""

from __future__ import annotations

import pytest

from bokiviews import ConflictError, NotHostedError, replica
from indilog.base.errors import TrimmedError
from indilog.testing import MemoryLog
from tests.unit.bokiviews.groups import Deposit, Ledger, process, refused

pytestmark = pytest.mark.asyncio
EVERY = 4


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    monkeypatch.setattr(replica, "CHECKPOINT_EVERY", EVERY)
    return MemoryLog("objects")


async def test_a_partial_host_decides_a_transaction_by_reads_of_objects_it_does_not_host(
    log: MemoryLog,
) -> None:
    full, partial = process(log), process(log, hosts=["y"])
    x, y = await full.map("x"), await full.map("y")
    part = await partial.map("y")
    async with refused(ConflictError, full.transaction()) as txn:
        txn[y].put("n", txn[x].get("n", 0) + 1)
        await (await process(log).map("x")).put("n", 9)
    assert await part.get("n") is None, "the transaction had no effect here either"
    async with full.transaction() as txn:
        txn[y].put("n", txn[x].get("n", 0) + 1)
        await x.put("m", 1)
    assert await part.get("n") == 10
    assert partial._replica.state.machine("x") is None
    assert set(partial.names()) == {"x", "y"}


async def test_a_process_without_a_machine_does_not_host_its_objects(log: MemoryLog) -> None:
    knows, lacks = process(log, machines=[Ledger]), process(log)
    bank, users = await knows.machine("bank", Ledger), await knows.map("users")
    await bank.submit(Deposit("ann", 5))
    async with knows.transaction() as txn:
        if txn[bank].state.accounts["ann"] == 5:
            txn[users].put("ann", "rich")
    assert await (await lacks.map("users")).get("ann") == "rich"
    with pytest.raises(NotHostedError, match="keeps no view of object 'bank' as a ledger"):
        await lacks.machine("bank", Ledger)


async def test_an_object_that_is_not_hosted_is_refused_before_anything_is_appended(
    log: MemoryLog,
) -> None:
    views, other = process(log, hosts=["y"]), process(log)
    with pytest.raises(NotHostedError, match="name it in Views"):
        await views.map("x")
    y = await views.map("y")
    await (await other.map("x")).put("n", 1)
    await y.put("n", 1)
    with pytest.raises(NotHostedError, match="does not host all objects"):
        await views.save()


async def test_only_processes_that_host_all_objects_write_checkpoints(log: MemoryLog) -> None:
    full, partial = process(log), process(log, hosts=["y"])
    await (await full.map("x")).put("n", 1)
    y = await partial.map("y")
    for number in range(3 * EVERY):
        await y.put("n", number)
    assert await log.read_prev("views:views:checkpoints") is None
    await log.read_range("views:views:changes", 0)
    theirs = await full.map("y")
    for _ in range(3):
        await theirs.put("n", 0)
        await y.put("n", 0)
    assert await log.read_prev("views:views:checkpoints") is not None


async def test_a_record_of_a_partial_host_elects_no_process_and_the_next_one_does(
    log: MemoryLog,
) -> None:
    full, partial = process(log), process(log, hosts=["y"])
    x, y = await full.map("x"), await partial.map("y")
    await x.put("n", 1)
    await y.put("n", 0)
    for number in range(EVERY):  # the last one makes a checkpoint due
        await y.put("n", number)
    assert await log.tail() == EVERY + 2
    await x.put("n", 2)
    assert await log.read_prev("views:views:checkpoints") is not None


async def test_a_process_that_meets_an_unknown_machine_after_its_election_writes_no_checkpoint(
    log: MemoryLog,
) -> None:
    knows, lacks = process(log, machines=[Ledger]), process(log)
    counter = await lacks.counter("c")
    bank = await knows.machine("bank", Ledger)
    for _ in range(EVERY - 2):
        await counter.add(1)
    await bank.submit(Deposit("ann", 1))  # ordered before the record that makes one due
    assert await counter.add(1) == EVERY - 1
    assert await log.tail() == EVERY, "the author of the last record cannot write one"


async def test_a_partial_host_starts_from_a_checkpoint_of_a_full_host(log: MemoryLog) -> None:
    full = process(log)
    x, y = await full.map("x"), await full.map("y")
    for number in range(4 * EVERY):
        await x.put(number, 1)
        await y.put("n", number)
    with pytest.raises(TrimmedError):
        await log.read_range("views:views:changes", 0)
    partial = process(log, hosts=["y"])
    part = await partial.map("y")
    assert await part.get("n") == 4 * EVERY - 1
    async with refused(ConflictError, full.transaction()) as txn:
        txn[y].put("n", txn[x].get(3, 0))
        await (await process(log).map("x")).put(3, 2)
    assert await part.get("n") == 4 * EVERY - 1
