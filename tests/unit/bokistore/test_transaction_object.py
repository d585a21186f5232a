"""Objects inside a transaction cannot be changed outside its record: every reader sees the value in
the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from bokistore import Store, TxnObject
from bokistore.checkpoints import CHECKPOINT_EVERY
from bokistore.records import checkpoint_in, decode_aux, decode_command, view_in, view_of
from indilog.base.ids import SeqNum, UserTag
from indilog.testing import MemoryLog
from tests.unit.bokistore.processes import newcomer

pytestmark = pytest.mark.asyncio


class Slow(MemoryLog):
    """A log whose appends and tail reads start and end when the test permits it."""

    def __init__(self) -> None:
        super().__init__("objects")
        self.has_begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        self.has_begun.set()
        await self.may_end.wait()
        return await super().append(data, tags=tags)

    async def tail(self) -> SeqNum:
        self.is_asked.set()
        await self.may_answer.wait()
        return await super().tail()


async def sorted_and_counted(store: Store) -> None:
    """Change in place a list that a transaction returned, and write another value."""
    async with store.transaction() as txn:
        cart = await txn.get("cart")
        items = cart["items"]
        items.sort()
        cart.set("n", len(items))


async def test_changing_a_read_value_changes_no_later_read() -> None:
    log = MemoryLog("objects")
    store = Store(log)
    await store.put("cart", {"items": [3, 1, 2]})
    for _ in range(2 * CHECKPOINT_EVERY):
        await sorted_and_counted(store)
        assert (await store.get("cart"))["items"] == [3, 1, 2]
    assert (await newcomer(log).get("cart"))["items"] == [3, 1, 2]
    records = await log.read_range()
    views = [view_in(decode_aux(record.aux), "cart", record.seqnum) for record in records]
    checkpoints = [checkpoint_in(decode_command(record.data), "cart") for record in records]
    kept = [view.document for view in views if view]
    kept += [view_of(checkpoint).document for checkpoint in checkpoints if checkpoint]
    assert len(kept) > 10
    assert set(kept) <= {b'{"items":[3,1,2],"n":3}', b'{"items":[3,1,2]}'}


async def test_all_read_operations_return_copies() -> None:
    store = Store(MemoryLog("objects"))
    await store.put("a", {"l": [1], "o": {"l": [2]}})
    async with store.transaction() as txn:
        a = await txn.get("a")
        a["l"].append(0)
        a.at("o")["l"].append(0)
        a.get("o.l", []).append(0)
        a.get([], {})["x"] = 0
        a.value["o"]["l"].append(0)
        dict(a.items())["l"].append(0)
        for value in a.values():
            value.clear()
        assert a.value == {"l": [1], "o": {"l": [2]}}
        assert (list(a), len(a), "o.l" in a) == (["l", "o"], 2, True)


async def test_a_write_while_the_record_is_appended_is_refused() -> None:
    log = Slow()
    store = newcomer(log)
    log.may_answer.set()
    held: list[TxnObject] = []

    async def transaction() -> None:
        async with store.transaction() as txn:
            held.append(await txn.get("a"))
            held[0].set("n", 1)

    running = asyncio.create_task(transaction())
    await log.has_begun.wait()
    with pytest.raises(RuntimeError, match="over"):
        held[0].set("n", 2)
    log.may_end.set()
    await running
    for reader in (store, newcomer(log)):
        assert (await reader.get("a")).value == {"n": 1}
    assert held[0].value == {"n": 1}


async def test_an_object_read_completed_after_the_transaction_is_refused() -> None:
    """A write to such an object would be in no record."""
    log = Slow()
    async with Store(log).transaction() as txn:
        reading = asyncio.create_task(txn.get("a"))
        await log.is_asked.wait()
    log.may_answer.set()
    with pytest.raises(RuntimeError, match="over"):
        await reading
