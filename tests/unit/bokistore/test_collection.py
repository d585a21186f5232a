"""Checkpoints and collection: the cost of a read does not depend on the length of the history, and
unneeded history is garbage-collected (A22 for objects).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import indilog
from bokistore import ConflictError, Store, checkpoints, collection, decisions
from bokistore.checkpoints import CHECKPOINT_EVERY, CHECKPOINT_EVERY_SMALL, SMALL_BYTES
from indilog.base.errors import TrimmedError
from indilog.testing import MemoryLog, cluster
from tests.support.repeated import repeated
from tests.unit.bokistore.counted_log import CountedLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("count", [repeated(9_990), repeated(10_000), 10_047])
@pytest.mark.parametrize("in_transactions", [False, True], ids=["operations", "transactions"])
async def test_ten_thousand_operations_cost_as_many_calls_as_ten(
    log: MemoryLog, count: int, *, in_transactions: bool
) -> None:
    """After a restart: neither the process nor the aux data has a cached view."""
    store = Store(log)
    for name, operations in (("young", 10), ("old", count)):
        for _ in range(operations):
            if in_transactions:
                async with store.transaction() as txn:
                    (await txn.get(name)).increment("n")
            else:
                await store.increment(name, "n")
    cost = {}
    for name in ("young", "old"):
        log.logs.drop_aux()
        counted = CountedLog(log)
        assert (await newcomer(counted).get(name))["n"] == (10 if name == "young" else count)
        cost[name] = counted.calls
        assert counted.records <= CHECKPOINT_EVERY_SMALL + 3
    assert cost["old"] <= 1.2 * cost["young"]


async def test_after_a_restart_of_the_platform_a_long_history_costs_three_calls(
    tmp_path: Path,
) -> None:
    async with indilog.open(tmp_path) as client:
        store = Store(client.log("objects"))
        for _ in range(10):
            await store.increment("young", "n")
        for _ in range(30):
            await asyncio.gather(*[store.increment("old", "n") for _ in range(10)])
    async with indilog.open(tmp_path) as client:
        for name, count in (("young", 10), ("old", 300)):
            counted = CountedLog(client.log("objects"))
            assert (await Store(counted).get(name))["n"] == count
            assert counted.calls == 3


@pytest.mark.parametrize(
    ("size", "every"), [(0, CHECKPOINT_EVERY_SMALL), (SMALL_BYTES + 1, CHECKPOINT_EVERY)]
)
async def test_a_small_object_has_a_checkpoint_per_16_records_and_a_large_one_per_64(
    log: MemoryLog, size: int, every: int
) -> None:
    store = Store(log)
    await store.set("a", "text", "x" * size)
    for _ in range(639):
        await store.increment("a", "n")
    assert len(await log.read_range("ckpt:a")) == 640 // every
    assert await log.tail() == 640 + 640 // every


async def test_a_get_that_replayed_many_records_writes_a_checkpoint(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer due to append one crashed, or wrote blindly."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "CHECKPOINT_EVERY_SMALL", 1 << 30)
        for _ in range(300):
            await Store(log).increment("a", "n")
    log.logs.drop_aux()
    async with newcomer(log).snapshot() as view:
        assert (await view.get("a"))["n"] == 300
    assert not await log.read_range("ckpt:a"), "a snapshot appends nothing"
    log.logs.drop_aux()
    assert (await newcomer(log).get("a"))["n"] == 300
    assert len(await log.read_range("ckpt:a")) == 1
    log.logs.drop_aux()
    counted = CountedLog(log)
    assert (await newcomer(counted).get("a"))["n"] == 300
    assert counted.calls <= 3
    assert len(await log.read_range("ckpt:a")) == 1


async def test_a_checkpoint_is_no_write(log: MemoryLog) -> None:
    store = Store(log)
    async with store.transaction() as txn:
        await txn.get("a")
        txn.set("b", "n", 1)
        await store._replay.checkpoint("a", await store._replay.view("a", 0))
    assert txn.seqnum is not None


async def alive(log: MemoryLog) -> int:
    """Return the number of untrimmed records of objects."""
    tail = await log.tail()
    kept = [seqnum for seqnum in range(tail) if not log.logs.is_dead(seqnum)]
    records = [log.logs.record(seqnum) for seqnum in kept]
    return sum(r is not None and any(str(t).startswith("store:") for t in r.tags) for r in records)


@pytest.mark.usefixtures("small_cells")
async def test_superseded_history_is_collected(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    for _ in range(1000):
        await store.increment("a", "n")
    await store.set("b", "n", 1)
    clock.now += 100
    assert await store.collect(keep=10) > 1000
    assert await alive(log) == 2, "a checkpoint of a, and b"
    for reader in (store, newcomer(log)):
        assert (await reader.get("a"))["n"] == 1000
        assert (await reader.get("a")).seqnum == (await store.get("a")).seqnum
        assert (await reader.get("b"))["n"] == 1
    assert await newcomer(log).increment("a", "n") == 1000


@pytest.mark.usefixtures("small_cells")
async def test_time_travel_works_within_the_span_and_raises_a_trimmed_error_below(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    for _ in range(300):
        await store.increment("a", "n")
    clock.now += 100
    young = await log.tail()
    for _ in range(300):
        await store.increment("a", "n")
    clock.now += 10
    await store.collect(keep=60)
    for reader in (store, newcomer(log)):
        assert (await reader.at(young - 1).get("a"))["n"] == 300
        assert (await reader.at(young).get("a"))["n"] == 301
        with pytest.raises(TrimmedError) as refused:
            await reader.at(100).get("a")
        first = refused.value.first_seqnum
        assert 100 < first <= young
        with pytest.raises(TrimmedError):
            await anext(reader.history("a"))
        kept = [version.object["n"] async for version in reader.history("a", first)]
        assert kept[-1] == 600
        assert kept == list(range(kept[0], 601))


@pytest.mark.usefixtures("small_cells")
async def test_an_unchanged_object_is_readable_at_every_seqnum_of_the_span(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    for _ in range(10):
        await store.increment("a", "n")
    clock.now += 100
    await store.set("b", "n", 1)
    between = await log.tail()
    await store.set("b", "n", 2)
    await store.collect(keep=50)
    assert (await newcomer(log).at(between).get("a"))["n"] == 10
    await store.increment("a", "n")
    assert (await newcomer(log).at(between).get("a"))["n"] == 10
    assert (await newcomer(log).get("a"))["n"] == 11


@pytest.mark.usefixtures("small_cells")
async def test_deleted_objects_are_trimmed_completely(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    for number in range(200):
        await store.increment(f"o{number % 20}", "n")
    for number in range(20):
        await store.delete(f"o{number}")
    clock.now += 100
    await store.collect(keep=10)
    assert await alive(log) == 0
    reader = newcomer(counted := CountedLog(log))
    assert not await reader.get("o1")
    assert counted.calls == 3, "a result below the floor is read twice"
    assert await reader.increment("o1", "n") is None
    assert (await newcomer(log).get("o1")).value == {"n": 1}
    with pytest.raises(TrimmedError):
        await reader.at(100).get("o1")


@pytest.mark.usefixtures("small_cells")
async def test_a_transaction_whose_snapshot_was_trimmed_conflicts(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    await store.set("a", "n", 1)
    async with store.transaction() as txn:
        await txn.get("b")
        for _ in range(100):
            await store.increment("a", "n")
        clock.now += 100
        await store.collect(keep=10)
        with pytest.raises(ConflictError, match="was trimmed; run it again"):
            await txn.get("a")
    assert (await store.get("a"))["n"] == 101


@pytest.mark.usefixtures("small_cells")
async def test_a_decision_stays_when_the_records_that_decided_it_are_trimmed(
    log: MemoryLog, clock: Clock
) -> None:
    """`b` is kept by a record that read `a`, whose history is trimmed."""
    store = Store(log)
    await store.set("a", "n", 1)
    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction() as late:
            await late.get("a")
            late.set("b", "n", 2)
            await store.set("a", "n", 2)
    for _ in range(100):
        await store.increment("a", "n")
    clock.now += 100
    await store.collect(keep=10)
    log.logs.drop_aux()
    assert not await newcomer(log).get("b")


@pytest.mark.usefixtures("small_cells")
async def test_a_collection_reads_each_record_once(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    for _ in range(100):
        await store.increment("a", "n")
    clock.now += 100
    end = await store.collect(keep=10)
    counted = CountedLog(log)
    assert await newcomer(counted).collect(keep=10) >= end
    assert counted.records < 20


async def test_the_platform_collects_like_the_log_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collection, "CELL", 8)
    monkeypatch.setattr(decisions, "CELL", 8)
    async with cluster() as client:
        log = client.log("objects")
        store = Store(log)
        for _ in range(100):
            await store.increment("a", "n")
            await store.increment("gone", "n")
        await store.delete("gone")
        for _ in range(8):
            await store.increment("b", "n")
        assert await store.collect(keep=0.0) > 200
        reader = newcomer(client.log("objects"))
        assert (await reader.get("a"))["n"] == 100
        assert not await reader.get("gone")
        with pytest.raises(TrimmedError):
            await reader.at(50).get("a")
        with pytest.raises(TrimmedError):
            await log.read_next("store:gone", 0)
        assert await reader.increment("a", "n") == 100


async def test_a_log_trimmed_as_a_whole_differs_from_deleted_objects(log: MemoryLog) -> None:
    store = Store(log)
    await store.set("a", "n", 1)
    await log.trim(await log.tail())
    with pytest.raises(TrimmedError):
        await newcomer(log).get("a")


async def test_a_negative_span_is_refused(log: MemoryLog) -> None:
    with pytest.raises(ValueError, match="keep"):
        await Store(log).collect(keep=-1)
