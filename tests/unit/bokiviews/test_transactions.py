"""Transactions across objects: one state is read, and the order of the log decides."""

from __future__ import annotations

import asyncio

import pytest

from bokiviews import ConflictError, ViewKindError, ViewsError, places
from bokiviews.transaction import Transaction
from indilog.testing import MemoryLog
from tests.unit.bokiviews.groups import Deposit, Ledger, Move, process, refused

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog("objects")


async def test_a_transaction_is_one_record_across_objects(log: MemoryLog) -> None:
    one, two = process(log, machines=[Ledger]), process(log, machines=[Ledger])
    users, moves, count, tags, bank = (
        await one.map("users"), await one.list("moves"), await one.counter("count"),
        await one.set("tags"), await one.machine("bank", Ledger),
    )  # fmt: skip
    async with one.transaction() as txn:
        txn[users].put("ann", 5)
        txn[moves].append("in")
        txn[count].add(2)
        txn[tags].add("a")
        txn[bank].submit(Deposit("ann", 5))
    assert await log.tail() == 1
    assert await (await two.map("users")).get("ann") == 5
    assert await (await two.list("moves")).items() == ["in"]
    assert await (await two.counter("count")).value() == 2
    assert await (await two.set("tags")).members() == {"a"}
    assert (await two.machine("bank", Ledger)).view.accounts == {"ann": 5}


async def test_a_transaction_sees_its_own_writes(log: MemoryLog) -> None:
    views = process(log)
    users, items, count, tags = (
        await views.map("users"), await views.list("items"), await views.counter("count"),
        await views.set("tags"),
    )  # fmt: skip
    await users.update({"ann": 1, "bob": 2})
    await items.extend([1, 2, 3])
    await tags.add("a", "b")
    async with views.transaction() as txn:
        a_map, a_list, a_set = txn[users], txn[items], txn[tags]
        a_map["ann"] = 3
        del a_map["bob"]
        a_map.put("eve", 4)
        assert (a_map["ann"], a_map.get("bob"), a_map.get("bob", 9)) == (3, None, 9)
        assert "bob" not in a_map
        with pytest.raises(KeyError):
            a_map["bob"]
        assert a_map.items() == [("ann", 3), ("eve", 4)]
        a_map.clear()
        assert a_map.items() == []
        a_map.update({"dan": 1})
        assert (a_map.get("dan"), a_map.get("ann")) == (1, None)
        a_list[0] = 9
        assert a_list.pop() == 3
        a_list.append(7)
        assert (a_list.items(), len(a_list), a_list[-1]) == ([9, 2, 7], 3, 7)
        with pytest.raises(IndexError, match="has 3 values"):
            a_list[3] = 1
        txn[count].add(2)
        txn[count].add()
        assert txn[count].value == 3
        a_set.discard("a")
        a_set.add("c")
        assert ("a" in a_set, "b" in a_set, "c" in a_set) == (False, True, True)
        assert a_set.members() == ["b", "c"]
        a_set.clear()
        assert "b" not in a_set
        assert txn[users] is a_map
    assert dict(users.view) == {"dan": 1}
    assert list(items.view) == [9, 2, 7]
    assert (count.view, set(tags.view)) == (3, set())


async def test_of_two_transactions_that_read_what_the_other_writes_one_commits(
    log: MemoryLog,
) -> None:
    """Write skew (PITFALLS 11): each is right alone."""
    one, two = process(log), process(log)
    x1, y1, x2, y2 = (
        await one.map("x"), await one.map("y"), await two.map("x"), await two.map("y"),
    )  # fmt: skip
    async with refused(ConflictError, two.transaction()) as txn2, one.transaction() as txn1:
        assert txn1[x1].get("on") is None
        txn1[y1].put("on", 1)
        assert txn2[y2].get("on") is None
        txn2[x2].put("on", 1)
    assert await x2.get("on") is None
    assert await y2.get("on") == 1


async def test_transactions_on_different_keys_do_not_conflict(log: MemoryLog) -> None:
    one, two = process(log), process(log)
    mine, theirs = await one.map("users"), await two.map("users")
    async with one.transaction() as txn:
        txn[mine].put("ann", txn[mine].get("ann", 0) + 1)
        await theirs.put("bob", 1)
    async with refused(ConflictError, one.transaction()) as txn:
        txn[mine].put("ann", txn[mine].get("ann", 0) + 1)
        await theirs.clear()
    async with refused(ConflictError, one.transaction()) as txn:
        txn[mine].put("count", len(txn[mine].items()))
        await theirs.put("eve", 1)


async def test_reads_of_each_kind_of_object_are_validated(log: MemoryLog) -> None:
    one, two = process(log, machines=[Ledger]), process(log, machines=[Ledger])
    out = await one.counter("out")
    items, count, tags = await one.list("l"), await one.counter("c"), await one.set("s")
    other_items, other_tags = await two.list("l"), await two.set("s")
    other_count = await two.counter("c")
    async with refused(ConflictError, one.transaction()) as txn:
        txn[out].add(len(txn[items]))
        await other_items.append(1)
    async with refused(ConflictError, one.transaction()) as txn:
        txn[out].add(txn[count].value)
        await other_count.add(1)
    async with refused(ConflictError, one.transaction()) as txn:
        txn[out].add(len(txn[tags].members()))
        await other_tags.add("a")
    async with refused(ConflictError, one.transaction()) as txn:
        txn[out].add(int("b" in txn[tags]))
        await other_tags.add("b")
    async with refused(ConflictError, one.transaction()) as txn:
        txn[out].add(int("b" in txn[tags]))
        await two.drop("s")
    async with one.transaction() as txn:
        txn[out].add(int("b" in txn[tags]))
        await other_tags.add("c")
    assert await out.value() == 0


async def test_a_body_never_sees_two_states(log: MemoryLog) -> None:
    one, two = process(log), process(log)
    x, y = await one.map("x"), await one.map("y")
    other_x, other_y = await two.map("x"), await two.map("y")
    async with refused(ConflictError, one.transaction()) as txn:
        assert txn[x].get("n") is None
        await other_x.put("n", 1)
        await other_y.put("n", 1)
        await one.sync()
        txn[y].get("n")
    async with one.transaction() as txn:
        assert txn[x].get("n") == 1
        await other_y.put("n", 2)
        await one.sync()
        assert txn[y].get("n") == 2, "nothing that was read before has changed"


async def test_a_body_without_writes_runs_again_if_a_state_changed_in_its_hands(
    log: MemoryLog,
) -> None:
    views = process(log, machines=[Ledger])
    bank = await views.machine("bank", Ledger)
    await bank.submit(Deposit("ann", 10))
    runs = 0

    async def total(txn: Transaction) -> int:
        nonlocal runs
        runs += 1
        accounts = txn[bank].state.accounts
        ann = accounts["ann"]
        if runs == 1:
            await bank.submit(Move("ann", "bob", 3))
        return ann + accounts.get("bob", 0)

    assert await views.transact(total) == 10
    assert runs == 2


async def test_a_transaction_without_writes_appends_nothing_and_sees_what_was_acknowledged(
    log: MemoryLog,
) -> None:
    one, two = process(log), process(log)
    reader, writer = await one.map("x"), await two.map("x")
    await writer.put("n", 1)
    before = await log.tail()
    async with one.transaction() as txn:
        assert txn[reader].get("n") == 1
    assert await log.tail() == before


async def test_writes_without_reads_never_conflict(log: MemoryLog) -> None:
    one, two = process(log), process(log)
    mine, theirs = await one.map("x"), await two.map("x")
    async with one.transaction() as txn:
        txn[mine].put("n", 1)
        await theirs.put("n", 2)
    assert await theirs.get("n") == 1


async def test_an_error_in_the_body_discards_its_writes(log: MemoryLog) -> None:
    views = process(log)
    users = await views.map("users")
    with pytest.raises(ZeroDivisionError):
        async with views.transaction() as txn:
            txn[users].put("ann", 1 // 0)
    assert await log.tail() == 0


async def test_a_transaction_with_an_object_of_another_kind_has_no_effect(log: MemoryLog) -> None:
    one, two = process(log), process(log)
    users, name = await one.map("users"), await one.map("name")
    await (await two.list("name")).append(1)
    async with refused(ViewKindError, one.transaction()) as txn:
        txn[users].put("ann", 1)
        txn[name].put("ann", 1)
        assert await log.tail() == 1, "the process does not know the list yet"
    assert await users.get("ann") is None


async def test_a_transaction_is_used_inside_its_block_and_with_its_own_group(
    log: MemoryLog,
) -> None:
    views, other = process(log), process(log)
    users, foreign = await views.map("users"), await other.map("users")
    transaction = views.transaction()
    with pytest.raises(ViewsError, match="is not open"):
        transaction[users]
    async with transaction as txn:
        part = txn[users]
        with pytest.raises(ViewsError, match="of another group"):
            txn[foreign]
    with pytest.raises(ViewsError, match="is not open"):
        part.put("ann", 1)


async def test_the_state_of_an_own_machine_is_read_before_it_is_written(log: MemoryLog) -> None:
    one, two = process(log, machines=[Ledger]), process(log, machines=[Ledger])
    bank, other = await one.machine("bank", Ledger), await two.machine("bank", Ledger)
    await bank.submit(Deposit("ann", 5))
    async with one.transaction() as txn:
        assert txn[bank].state.accounts == {"ann": 5}
        txn[bank].submit(Move("ann", "bob", 5))
        with pytest.raises(ViewsError, match="read it before"):
            _ = txn[bank].state
    async with refused(ConflictError, one.transaction()) as txn:
        assert txn[bank].state.accounts["ann"] == 0
        txn[bank].submit(Deposit("ann", 1))
        await other.submit(Deposit("eve", 1))


async def test_many_callers_change_one_value_with_one_further_attempt_each(
    log: MemoryLog,
) -> None:
    views = process(log)
    users = await views.map("users")
    attempts = 0

    async def body(txn: Transaction) -> int:
        nonlocal attempts
        attempts += 1
        value: int = txn[users].get("n", 0) + 1
        await asyncio.sleep(0)
        txn[users].put("n", value)
        return value

    results = await asyncio.gather(*(views.transact(body) for _ in range(50)))
    assert sorted(results) == list(range(1, 51))
    assert attempts < 2 * 50 + 5


async def test_a_transaction_inside_one_that_has_its_turn_does_not_wait(log: MemoryLog) -> None:
    views, other = process(log), process(log)
    users, theirs = await views.map("users"), await other.map("users")
    attempts = {"outer": 0, "inner": 0}

    async def lose_once(txn: Transaction, key: str) -> None:
        attempts[key] += 1
        txn[users].put(key, txn[users].get(key, 0) + 1)
        if attempts[key] == 1:
            await theirs.put(key, 10)

    async def outer(txn: Transaction) -> None:
        await lose_once(txn, "outer")
        if attempts["outer"] == 2:
            await views.transact(lambda inner: lose_once(inner, "inner"))

    async with asyncio.timeout(10):
        await views.transact(outer)
    assert await users.get_many(attempts) == {"outer": 11, "inner": 11}
    assert attempts == {"outer": 2, "inner": 2}


async def test_a_transaction_that_hangs_in_its_turn_delays_the_others_by_a_limited_time(
    log: MemoryLog,
) -> None:
    views = process(log)
    count = await views.counter("count")

    async def add(hangs: asyncio.Event | None = None) -> None:
        runs = 0

        async def body(txn: Transaction) -> None:
            nonlocal runs
            runs += 1
            txn[count].add(txn[count].value)
            if runs == 1:
                await count.add(1)
            elif hangs is not None:
                hangs.set()
                await asyncio.sleep(3600)

        await views.transact(body)

    hangs = asyncio.Event()
    hanging = asyncio.create_task(add(hangs))
    await hangs.wait()
    await asyncio.wait_for(asyncio.gather(*(add() for _ in range(5))), 60)
    hanging.cancel()


async def test_a_transaction_that_keeps_losing_ends_with_the_conflict(log: MemoryLog) -> None:
    one, two = process(log), process(log)
    mine, theirs = await one.map("x"), await two.map("x")
    attempts = 0

    async def body(txn: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        txn[mine].put("n", txn[mine].get("n", 0) + 1)
        await theirs.put("n", attempts)

    for retries in (0, 3):
        attempts = 0
        with pytest.raises(ConflictError):
            await one.transact(body, retries=retries)
        assert attempts == retries + 1
    assert await one.transact(lambda _: asyncio.sleep(0, "free")) == "free", "the turn has ended"


async def test_a_transaction_that_began_too_long_ago_conflicts(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "RECENT_MAX", 8)
    one, two = process(log), process(log)
    mine, theirs = await one.map("x"), await two.map("y")
    async with refused(ConflictError, one.transaction()) as txn:
        txn[mine].put("n", txn[mine].get("n", 0) + 1)
        for key in range(10):
            await theirs.put(key, 1)
    async with one.transaction() as txn:
        txn[mine].put("n", txn[mine].get("n", 0) + 1)
        await theirs.put(1, 1)
    assert len(one._replica.state.recent) == 8


async def test_the_place_that_was_not_written_for_longest_is_dropped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(places, "RECENT_MAX", 2)
    recent = places.RecentWrites()
    for seqnum, place in enumerate([b"a", b"b", b"a", b"c"]):
        recent.note(place, seqnum)
    assert recent.floor == 1
    assert recent.snapshot() == (b"ac", (2, 3))
    assert recent.is_written([b"b"], 1)
    assert not recent.is_written([b"b"], 2)
    assert recent.is_written([b"b", b"a"], 2)
