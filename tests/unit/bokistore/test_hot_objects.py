"""Objects that are written all the time, by writers that leave no checkpoints, are collected too
(A22 for objects).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bokistore import Store, Transaction, checkpoints, collection, decisions
from bokistore.checkpoints import CHECKPOINT_EVERY
from indilog.base.errors import NotReadyError, TrimmedError
from indilog.base.ids import SeqNum
from indilog.testing import MemoryLog
from indilog.testing.stepper import SteppedLog
from tests.unit.bokistore.counted_log import CountedLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("small_cells")]


async def put_in_turns(stores: tuple[Store, Store], number: int) -> None:
    """Each writer replaces the other's value, so neither has anything to replay."""
    await stores[number % 2].put("hot", {"n": number})


async def put_several(stores: tuple[Store, Store], number: int) -> None:
    await stores[0].multi_put({"hot": {"n": number}, "other": {"n": number}})


async def write_blindly(stores: tuple[Store, Store], number: int) -> None:
    async with stores[0].transaction() as txn:
        txn.set("hot", "n", number)


async def alive_of(log: MemoryLog, tag: str) -> list[int]:
    """Return the untrimmed seqnums of a sub-stream."""
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
    assert len(await alive_of(log, "store:hot")) == 12, "the recent writes and two checkpoints"
    log.logs.drop_aux()
    assert (await newcomer(log).at(young - 1).get("hot"))["n"] == 499
    assert (await newcomer(log).at(young).get("hot"))["n"] == 500
    for reader in (stores[0], newcomer(log)):
        assert (await reader.get("hot"))["n"] == 509


async def test_hot_objects_over_the_limit_of_one_collection_are_collected(
    log: MemoryLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects are in the first part of a log, or where the previous collection ended."""
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
            assert len(await alive_of(log, f"store:{name}")) <= 12 + 32, (
                "as within the limit of one collection"
            )


@pytest.mark.parametrize("write", WAYS)
async def test_collections_write_few_records_and_leave_few(
    log: MemoryLog, clock: Clock, write: Callable[[tuple[Store, Store], int], Awaitable[None]]
) -> None:
    """A span of 24, collected after each record; 10 writes in between, so that few writes lie below
    the span.
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


async def test_a_checkpoint_of_an_old_state_is_found_at_a_much_later_seqnum(
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


async def test_a_checkpoint_in_the_objects_own_sub_stream_alone_is_found(log: MemoryLog) -> None:
    """Two concurrent collections may trim the checkpoints' sub-stream further than the object's
    history.
    """
    stores = newcomer(log), newcomer(log)
    for number in range(600):
        await write_blindly(stores, number)
    replay = stores[0]._replay
    stored = await replay.checkpoint("hot", await replay.view("hot", 100))
    assert stored is not None
    assert stored.seqnum == 600
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
    with pytest.raises(TrimmedError) as raised:
        await log.read_range("store:$tag:paid")
    assert len(await log.read_range("store:$tag:paid", raised.value.first_seqnum)) <= 3
    log.logs.drop_aux()
    assert sorted(await newcomer(log).find("paid")) == [f"o{number}" for number in range(5)]


async def test_a_lookup_that_replayed_many_records_writes_a_checkpoint_of_the_index(
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


async def test_a_snapshot_appends_nothing_after_any_replay(log: MemoryLog) -> None:
    store = newcomer(log)
    for number in range(300):
        await store.put("a", {"n": number}, tags=["paid"])
    tail = await log.tail()
    log.logs.drop_aux()
    async with newcomer(log).snapshot() as view:
        assert await view.find("paid")
    assert await log.tail() == tail


async def test_history_before_a_later_checkpoint_is_collected(
    log: MemoryLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection that read the writes could not append a checkpoint."""
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
    """Refuse to append a checkpoint."""


async def test_a_lookup_succeeds_although_its_checkpoint_append_fails(
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


class LateLog(SteppedLog):
    """A log whose calls take a few iterations of the event loop, as over a network."""

    async def append(self, data: bytes, **options: Any) -> SeqNum:  # noqa: ANN401
        await asyncio.sleep(0.002)
        seqnum = await super().append(data, **options)
        await asyncio.sleep(0.002)
        return seqnum


async def test_one_lost_transaction_tells_all_others_of_its_process(log: MemoryLog) -> None:
    """They append no record that cannot commit; the first record of each process may be lost."""
    stores = [newcomer(LateLog(log)) for _ in range(3)]
    await stores[0].set("hot", "n", 0)
    begun, everyone = 0, asyncio.Event()

    async def body(txn: Transaction) -> None:
        nonlocal begun
        hot = await txn.get("hot")
        hot.set("n", hot["n"] + 1)
        begun += 1
        if begun == 60:
            everyone.set()
        await everyone.wait()  # all have read the same value

    before = await log.tail()
    await asyncio.gather(*[stores[n % 3].transact(body, retries=1000) for n in range(60)])
    assert (await newcomer(log).get("hot"))["n"] == 60
    records = await log.read_range("store:hot", bound=before, limit=1000)
    assert len(records) <= 20
