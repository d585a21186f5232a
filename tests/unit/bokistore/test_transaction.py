"""Transactions: atomic, serializable, decided by the order of the log."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

import pytest

from bokistore import ConflictError, MismatchError, Store, Transaction, ViewCache
from bokistore.replay import ObjectReplay
from indilog.base.errors import TooLargeError
from indilog.testing import MemoryLog, MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.bokistore.processes import newcomer


@pytest.mark.asyncio
async def test_all_writes_take_effect_together_in_one_record(store: Store, log: MemoryLog) -> None:
    await store.set("a", "n", 1)
    async with store.transaction() as txn:
        a, b = await txn.get("a"), await txn.get("b")
        assert a.increment("n", 5) == 1
        assert b.set("x.y", [1]) is None
        txn.push("c", "l", "z")
    assert txn.seqnum == 1
    assert await log.tail() == 2
    record = await log.read(1)
    assert record is not None
    assert set(record.tags) == {"store:a", "store:b", "store:c"}
    for reader in (store, newcomer(log)):
        assert [(await reader.get(name)).value for name in "abc"] == [
            {"n": 6}, {"x": {"y": [1]}}, {"l": ["z"]},
        ]  # fmt: skip
        assert (await reader.get("c")).seqnum == 1


@pytest.mark.asyncio
async def test_own_writes_are_visible_inside(store: Store) -> None:
    async with store.transaction() as txn:
        txn.set("a", "n", 1)
        a = await txn.get("a")
        assert a["n"] == 1
        txn.increment("a", "n")
        assert (await txn.get("a"))["n"] == a["n"] == 2
        assert a.push("l", 1) is None
        assert a.push("l", 2, limit=1) == [1]
        assert a.add_to_set("l", 2) == [2]
        assert a.delete("n") == 2
        assert a.value == {"l": [2]}
    assert (await store.get("a")).value == {"l": [2]}


@pytest.mark.asyncio
async def test_an_error_inside_appends_nothing(store: Store, log: MemoryLog) -> None:
    with pytest.raises(ValueError, match="planted"):  # noqa: PT012
        async with store.transaction() as txn:
            (await txn.get("a")).set("x", 1)
            raise ValueError("planted")
    assert await log.tail() == 0


@pytest.mark.asyncio
async def test_a_transaction_that_only_reads_appends_nothing(store: Store, log: MemoryLog) -> None:
    await store.set("a", "n", 1)
    async with store.transaction() as txn:
        await txn.get("a")
        await txn.get("b")
    assert (txn.seqnum, await log.tail()) == (None, 1)


@pytest.mark.asyncio
async def test_all_reads_are_of_one_snapshot(store: Store) -> None:
    await store.set("a", "n", 1)
    async with store.transaction() as txn:
        assert (await txn.get("a"))["n"] == 1
        await store.set("a", "n", 2)
        await store.set("b", "n", 2)
        assert not await txn.get("b")
        assert (await txn.get("a"))["n"] == 1


@pytest.mark.asyncio
async def test_a_concurrent_write_to_a_read_object_is_a_conflict_without_effect(
    store: Store, log: MemoryLog
) -> None:
    await store.set("a", "n", 1)
    with pytest.raises(ConflictError, match="'a'") as refused:  # noqa: PT012
        async with store.transaction() as txn:
            (await txn.get("a")).increment("n")
            txn.set("b", "x", 1)
            await store.increment("a", "n", 10)
    assert refused.value.retryable
    assert txn.seqnum is None
    for reader in (store, newcomer(log)):
        assert (await reader.get("a")).value == {"n": 11}
        assert not await reader.get("b")
        assert (await reader.get("b")).seqnum is None


@pytest.mark.asyncio
async def test_a_concurrent_write_to_an_object_that_was_only_read_is_a_conflict_too(
    store: Store,
) -> None:
    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction() as txn:
            await txn.get("a")
            txn.set("b", "x", 1)
            await store.set("a", "n", 1)


@pytest.mark.asyncio
async def test_an_aborted_transaction_is_no_conflict_for_others(
    store: Store, log: MemoryLog
) -> None:
    async with store.transaction() as late:
        await late.get("b")
        late.set("c", "n", 1)
        with pytest.raises(ConflictError):  # noqa: PT012
            async with store.transaction() as early:
                await early.get("a")
                early.set("b", "n", 1)
                await store.set("a", "n", 1)
    assert late.seqnum == await log.tail() - 1


@pytest.mark.asyncio
async def test_blind_writes_are_never_in_conflict(store: Store) -> None:
    async with store.transaction() as txn:
        txn.increment("a", "n", 1)
        await store.set("a", "n", 10)
    assert (await store.get("a")).value == {"n": 11}


@pytest.mark.asyncio
async def test_a_mismatching_blind_write_has_no_effect(store: Store, log: MemoryLog) -> None:
    await store.set("a", "n", 1)
    async with store.transaction() as txn:
        txn.push("a", "n", 1)
        txn.set("b", "x", 1)
    for reader in (store, newcomer(log)):
        assert (await reader.get("a")).value == {"n": 1}
        assert (await reader.get("b")).value == {"x": 1}


@pytest.mark.asyncio
async def test_a_write_that_does_not_fit_raises_at_once_and_is_not_buffered(store: Store) -> None:
    await store.set("a", "n", 1)
    async with store.transaction() as txn:
        a = await txn.get("a")
        with pytest.raises(MismatchError, match="a list at 'n'"):
            a.push("n", 1)
        a.increment("n")
    assert (await store.get("a")).value == {"n": 2}
    async with store.transaction() as txn:
        txn.push("a", "n", 1)
        with pytest.raises(MismatchError, match="a list at 'n'"):
            await txn.get("a")


@pytest.mark.asyncio
async def test_a_later_change_of_a_written_value_is_not_committed(store: Store) -> None:
    value = [1]
    async with store.transaction() as txn:
        a = await txn.get("a")
        a.set("l", value)
        value.append(2)
        a.push("l", 3)
    assert (await store.get("a")).value == {"l": [1, 3]}


@pytest.mark.asyncio
async def test_a_transaction_ends_with_its_block(store: Store) -> None:
    async with store.transaction() as txn:
        pass
    with pytest.raises(RuntimeError, match="over"):
        await txn.get("a")
    with pytest.raises(RuntimeError, match="over"):
        txn.set("a", "x", 1)
    with pytest.raises(RuntimeError, match="over"):
        await txn.__aenter__()


@pytest.mark.asyncio
async def test_more_objects_than_a_record_has_tags_are_refused(
    store: Store, log: MemoryLog
) -> None:
    with pytest.raises(TooLargeError, match="limit is 64"):  # noqa: PT012
        async with store.transaction() as txn:
            for number in range(65):
                txn.set(f"o{number}", "x", 1)
    assert await log.tail() == 0


@pytest.mark.asyncio
async def test_transact_retries_until_it_commits(store: Store) -> None:
    runs = 0

    async def body(txn: Transaction) -> int:
        nonlocal runs
        runs += 1
        a = await txn.get("a")
        if runs < 4:
            await store.increment("a", "n")
        a.increment("n", 100)
        value = a["n"]
        assert isinstance(value, int)
        return value

    assert await store.transact(body) == 103
    assert (runs, (await store.get("a"))["n"]) == (4, 103)


@pytest.mark.asyncio
async def test_transact_fails_after_its_retries(store: Store) -> None:
    runs = 0

    async def body(txn: Transaction) -> None:
        nonlocal runs
        runs += 1
        await txn.get("a")
        await store.increment("a", "n")
        txn.set("b", "x", 1)

    with pytest.raises(ConflictError):
        await store.transact(body, retries=3)
    assert runs == 4


@pytest.mark.asyncio
async def test_a_long_chain_of_undecided_transactions_is_decided(log: MemoryLog) -> None:
    """Each transaction depends on the previous one; deciding the last one first reads back to the
    start.
    """
    store = Store(log, cache=ViewCache(decisions_max=0))
    for number in range(3000):
        data = {
            "store": 1,
            "writes": {f"o{number + 1}": [["set", ["n"], number]]},
            "reads": [f"o{number}"],
            "horizon": 0,
        }
        await log.append(json.dumps(data).encode(), tags=[f"store:o{number + 1}"])
    # Record 0 wrote o1 and read no written object: it commits. Record 1 read o1 as of before record
    # 0: it aborts. So record 2 commits, and so on.
    assert (await store.get("o3000")).exists is False
    assert (await store.get("o2999")).exists is True


@pytest.mark.asyncio
async def test_decisions_do_not_need_the_caches(log: MemoryLog) -> None:
    store = Store(log, cache=ViewCache(decisions_max=0, bytes_max=0))
    await store.set("a", "n", 0)
    outcomes = []
    for number in range(30):
        try:
            async with store.transaction() as txn:
                a = await txn.get("a")
                if number % 3 == 0:
                    await store.increment("a", "n", 1000)
                a.increment("n")
            outcomes.append(1)
        except ConflictError:
            outcomes.append(0)
        log.logs.drop_aux()
    assert outcomes == [number % 3 != 0 for number in range(30)]
    assert (await newcomer(log).get("a"))["n"] == 10 * 1000 + 20


async def attempt(body: Coroutine[Any, Any, None]) -> bool:
    try:
        await body
    except ConflictError:
        return False
    return True


async def withdraw(store: Store, *, mine: str, other: str) -> None:
    """Take 1 from one account, as long as both together keep at least 1 (both begin with 1)."""
    async with store.transaction() as txn:
        a, b = await txn.get(mine), await txn.get(other)
        if a["n"] + b["n"] >= 2:
            a.increment("n", -1)


def warm(log: MemoryLog) -> Store:
    """Return a store whose own cache has both accounts, so that a read is one call."""
    cache = ViewCache()
    store = Store(log, cache=cache)
    run_stepped([store.get("a"), store.get("b")], lambda ready: ready[0])
    return Store(SteppedLog(log), cache=cache)


def skew(choose: Choose) -> tuple[int, int]:
    """Run two withdrawals; return the number of commits and the final values."""
    log = MemoryLog("objects", logs=MemoryLogs())
    setup = Store(log)
    run_stepped([setup.set("a", "n", 1), setup.set("b", "n", 1)], lambda ready: ready[0])
    first, second = warm(log), warm(log)
    committed = run_stepped(
        [
            attempt(withdraw(first, mine="a", other="b")),
            attempt(withdraw(second, mine="b", other="a")),
        ],
        choose,
    )
    final = newcomer(log)
    left = run_stepped([final.get("a"), final.get("b")], lambda ready: ready[0])
    return sum(committed), sum(obj["n"] for obj in left)


def test_write_skew_is_impossible_in_every_interleaving() -> None:
    outcomes = set(interleavings(skew))
    assert {left for _, left in outcomes} == {1}
    assert {committed for committed, _ in outcomes} == {1, 2}, (
        "one finds too small a balance, or conflicts"
    )


def test_the_check_detects_a_store_that_does_not_validate_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def committed(*_: object) -> bool:
        return True

    monkeypatch.setattr(ObjectReplay, "is_committed", committed)
    monkeypatch.setattr(ObjectReplay, "_is_effective", committed)
    assert {left for _, left in interleavings(skew)} == {0, 1}


async def read_then_set(log: SteppedLog) -> None:
    async with newcomer(log).transaction() as txn:
        a = await txn.get("a")
        a.set("n", a.get("n", 0) + 1)


def lost_update(choose: Choose) -> tuple[int, int]:
    log = MemoryLog("objects", logs=MemoryLogs())
    committed = run_stepped([attempt(read_then_set(SteppedLog(log))) for _ in "ab"], choose)
    (obj,) = run_stepped([newcomer(log).get("a")], lambda ready: ready[0])
    return sum(committed), obj["n"]


def test_lost_updates_are_impossible_in_every_interleaving() -> None:
    assert set(interleavings(lost_update)) == {(1, 1), (2, 2)}
