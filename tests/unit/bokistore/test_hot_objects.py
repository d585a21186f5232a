"""Objects that are always written, and to which nobody who writes leaves checkpoints, are collected
too (A22 for objects).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from bokistore import Store, checkpoints, collection, decisions
from bokistore.checkpoints import CHECKPOINT_EVERY
from indilog.base.errors import NotReadyError, TrimmedError
from indilog.testing import MemoryLog
from tests.unit.bokistore.counted_log import CountedLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("small_cells")]


async def put_in_turns(stores: tuple[Store, Store], number: int) -> None:
    """Each replaces what the other wrote, so nobody has anything to replay."""
    await stores[number % 2].put("hot", {"n": number})


async def put_several(stores: tuple[Store, Store], number: int) -> None:
    await stores[0].multi_put({"hot": {"n": number}, "other": {"n": number}})


async def write_blindly(stores: tuple[Store, Store], number: int) -> None:
    async with stores[0].transaction() as txn:
        txn.set("hot", "n", number)


async def alive_of(log: MemoryLog, tag: str) -> list[int]:
    """Return the seqnums of a sub-stream that are left."""
    kept = filter(lambda seqnum: not log.logs.is_dead(seqnum), range(await log.tail()))
    records = [record for record in map(log.logs.record, kept) if record is not None]
    return [record.seqnum for record in records if tag in record.tags]


WAYS = [put_in_turns, put_several, write_blindly]


@pytest.mark.parametrize("write", WAYS)
async def test_a_hot_object_without_checkpoints_is_collected(
    log: MemoryLog, clock: Clock, write: Callable[[tuple[Store, Store], int], Awaitable[None]]
) -> None:
    stores = newcomer(log), newcomer(log)
    for number in range(500):
        await write(stores, number)
    clock.now += 100
    young = await log.tail()
    for number in range(500, 510):
        await write(stores, number)
    await newcomer(log).collect(keep=50)
    assert len(await alive_of(log, "store:hot")) == 12, "the young ones and two checkpoints"
    log.logs.drop_aux()
    assert (await newcomer(log).at(young - 1).get("hot"))["n"] == 499
    assert (await newcomer(log).at(young).get("hot"))["n"] == 500
    for reader in (stores[0], newcomer(log)):
        assert (await reader.get("hot"))["n"] == 509


async def test_more_hot_objects_than_wait_for_the_end_of_a_collection_are_collected(
    log: MemoryLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first part of a log, and in one that begins where a collection before ended."""
    monkeypatch.setattr(collection, "_HOT_MAX", 1)
    for module in (collection, decisions):
        monkeypatch.setattr(module, "CELL", 32)
    store = newcomer(log)
    for ended in (0, 300):
        for number in range(ended, ended + 300):
            await store.multi_put({"hot": {"n": number}, "other": {"n": number}})
        clock.now += 100
        for number in range(ended + 300, ended + 310):
            await store.multi_put({"hot": {"n": number}, "other": {"n": number}})
        await newcomer(log).collect(keep=50)
        for name in ("hot", "other"):
            assert len(await alive_of(log, f"store:{name}")) <= 12 + 32, "as if they had waited"


@pytest.mark.parametrize("write", WAYS)
async def test_collections_write_little_and_leave_little(
    log: MemoryLog, clock: Clock, write: Callable[[tuple[Store, Store], int], Awaitable[None]]
) -> None:
    """A span of 24, collected every 1; 10 writes meanwhile, so that most that lie below the span
    are few.
    """
    stores = newcomer(log), newcomer(log)
    for hour in range(72):
        for number in range(10):
            await write(stores, 10 * hour + number)
            clock.now += 0.1
        await newcomer(log).collect(keep=24.0)
    alive = await alive_of(log, "store:hot")
    assert len(alive) <= 240 + CHECKPOINT_EVERY + 10 + 2 * (240 // CHECKPOINT_EVERY + 1)
    written = [seqnum for seqnum in range(await log.tail()) if is_checkpoint(log, seqnum)]
    assert 4 <= len(written) <= 2 * 720 // CHECKPOINT_EVERY


def is_checkpoint(log: MemoryLog, seqnum: int) -> bool:
    record = log.logs.record(seqnum)
    return record is not None and "ckpt:hot" in record.tags


async def test_a_checkpoint_of_the_past_is_found_far_behind_it(
    log: MemoryLog, clock: Clock
) -> None:
    stores = newcomer(log), newcomer(log)
    for number in range(500):
        await write_blindly(stores, number)
    clock.now += 100
    young = await log.tail()
    for number in range(500, 3000):
        await write_blindly(stores, number)
    await newcomer(log).collect(keep=50)
    log.logs.drop_aux()
    counted = CountedLog(log)
    assert (await newcomer(counted).at(young).get("hot"))["n"] == 500
    assert counted.calls <= 8
    counted = CountedLog(log)
    assert (await newcomer(counted).get("hot"))["n"] == 2999
    assert counted.calls <= 3, "the newest checkpoint is of now"


async def test_a_checkpoint_that_is_left_among_the_writes_only_is_found(log: MemoryLog) -> None:
    """Two collections at once may trim what stands alone further than the object's history."""
    stores = newcomer(log), newcomer(log)
    for number in range(600):
        await write_blindly(stores, number)
    replay = stores[0]._replay
    assert await replay.checkpoint("hot", await replay.view("hot", 100)) == 600
    await log.trim(101, tag="store:hot")
    await log.trim(601, tag="ckpt:hot")
    log.logs.drop_aux()
    assert (await newcomer(log).at(100).get("hot"))["n"] == 100
    assert (await newcomer(log).get("hot"))["n"] == 599


async def test_the_index_of_a_tag_is_collected(log: MemoryLog, clock: Clock) -> None:
    store = newcomer(log)
    for number in range(200):
        await store.put(f"o{number % 5}", {"n": number}, tags=["paid"])
    clock.now += 100
    await store.put("o1", {"n": 200}, tags=["paid"])
    await newcomer(log).collect(keep=50)
    with pytest.raises(TrimmedError) as told:
        await log.read_range("store:$tag:paid")
    assert len(await log.read_range("store:$tag:paid", told.value.first_seqnum)) <= 3
    log.logs.drop_aux()
    assert sorted(await newcomer(log).find("paid")) == [f"o{number}" for number in range(5)]


async def test_a_lookup_that_replayed_much_leaves_a_checkpoint_of_the_index(
    log: MemoryLog,
) -> None:
    store = newcomer(log)
    for number in range(300):
        await store.put(f"o{number % 2}", {"n": number}, tags=["paid"])
    log.logs.drop_aux()
    assert len(await newcomer(log).find("paid")) == 2
    assert len(await log.read_range("ckpt:$tag:paid")) == 1
    log.logs.drop_aux()
    await newcomer(log).find("paid")
    async with newcomer(log).snapshot() as view:
        await view.find("paid")
    assert len(await log.read_range("ckpt:$tag:paid")) == 1


async def test_a_snapshot_appends_nothing_however_much_it_replayed(log: MemoryLog) -> None:
    store = newcomer(log)
    for number in range(300):
        await store.put("a", {"n": number}, tags=["paid"])
    tail = await log.tail()
    log.logs.drop_aux()
    async with newcomer(log).snapshot() as view:
        assert await view.find("paid")
    assert await log.tail() == tail


async def test_what_a_later_checkpoint_supersedes_is_given_back(
    log: MemoryLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection that looked at the writes could not append one."""
    stores = newcomer(log), newcomer(log)
    for number in range(300):
        await write_blindly(stores, number)
    clock.now += 100
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.ObjectCheckpoints, "append", refused)
        await newcomer(log).collect(keep=50)
    assert len(await alive_of(log, "store:hot")) == 300
    log.logs.drop_aux()
    await newcomer(log).get("hot")
    clock.now += 100
    await newcomer(log).collect(keep=50)
    assert len(await alive_of(log, "store:hot")) == 1
    assert (await newcomer(log).get("hot"))["n"] == 299


async def refused(*_: object) -> None:
    """Append no checkpoint."""


async def test_a_lookup_does_not_fail_because_tidying_does(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = newcomer(log)
    for number in range(20):
        await store.put(f"o{number}", {"n": number}, tags=["paid"])
        await store.put(f"o{number}", {"n": number})

    async def unready(*_: object, **__: object) -> None:
        raise NotReadyError("a node is away")

    monkeypatch.setattr(store, "transact", unready)
    assert await store.find("paid") == {}
