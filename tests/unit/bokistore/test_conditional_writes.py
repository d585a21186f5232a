"""Writes with a condition that the log decides: no transaction, no retries."""

from __future__ import annotations

import asyncio

import pytest

from bokistore import InvalidObjectError, MismatchError, Store
from indilog.testing import MemoryLog
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.bokistore.processes import newcomer


@pytest.mark.asyncio
async def test_a_decrement_succeeds_while_enough_is_left(log: MemoryLog) -> None:
    store = Store(log)
    await store.set("seat", "free", 5)
    taken = await asyncio.gather(*[store.decrement_if("seat", "free", 1) for _ in range(20)])
    assert sorted(new for new in taken if new is not None) == [0, 1, 2, 3, 4]
    assert taken.count(None) == 15
    assert await log.tail() == 21 + 1, "one record each, and a checkpoint"
    for reader in (store, newcomer(log)):
        assert (await reader.get("seat"))["free"] == 0
    assert await store.decrement_if("seat", "free", 3, at_least=-3) == -3
    assert await store.decrement_if("seat", "free", 0.5, at_least=-3) is None
    assert await store.decrement_if("seat", "free", -10) == 7


@pytest.mark.asyncio
async def test_a_missing_number_counts_as_zero_and_is_not_created_if_unmet(log: MemoryLog) -> None:
    store = Store(log)
    assert await store.decrement_if("a", "x.y", 1) is None
    assert not (await newcomer(log).get("a")).exists
    assert await store.decrement_if("a", "x.y", 1, at_least=-1) == -1
    assert (await newcomer(log).get("a")).value == {"x": {"y": -1}}


@pytest.mark.asyncio
async def test_a_value_of_another_type_is_a_mismatch(log: MemoryLog) -> None:
    store = Store(log)
    await store.put("a", {"text": "x", "flag": True})
    for path in ("text", "flag", ""):
        for by in (0, 2):  # as a number, true would be too small for 2
            with pytest.raises(MismatchError):
                await store.decrement_if("a", path, by)
    with pytest.raises(MismatchError):
        await store.append_if("a", "text", 1, limit=3)
    with pytest.raises(MismatchError):
        await store.test_and_set("a", "", {"text": "x", "flag": True}, 1)
    assert (await newcomer(log).get("a")).value == {"text": "x", "flag": True}


@pytest.mark.asyncio
async def test_of_several_that_expect_the_same_value_one_succeeds(log: MemoryLog) -> None:
    store = Store(log)
    done = await asyncio.gather(
        *[store.test_and_set("job", "owner", None, f"w{number}") for number in range(9)]
    )
    assert done.count(True) == 1
    winner = f"w{done.index(True)}"
    assert (await newcomer(log).get("job"))["owner"] == winner
    assert await store.test_and_set("job", "owner", winner, None)
    assert await store.test_and_set("job", "owner", None, 1)
    assert not await store.test_and_set("job", "owner", True, 2), "1 and true are two values"


@pytest.mark.asyncio
async def test_the_whole_object_can_be_compared_without_its_tags(log: MemoryLog) -> None:
    store = Store(log)
    await store.put("a", {"n": 1}, tags=["x"])
    assert not await store.test_and_set("a", "", {"n": 2}, {"n": 3})
    assert await store.test_and_set("a", "", {"n": 1}, {"n": 3})
    assert await store.test_and_set("b", "", None, {"n": 1})
    assert not await store.test_and_set("b", "", None, {"n": 2})
    assert (await newcomer(log).multi_get(["a", "b"]))["a"].value == {"n": 3}


@pytest.mark.asyncio
async def test_a_value_is_appended_if_it_is_absent_and_there_is_room(log: MemoryLog) -> None:
    store = Store(log)
    joined = [await store.append_if("team", "of", who, absent=True, limit=2) for who in "aabc"]
    assert joined == [True, False, True, False]
    assert (await newcomer(log).get("team"))["of"] == ["a", "b"]
    assert not await store.append_if("team", "of", "a", absent=True)
    assert await store.append_if("team", "of", "a", limit=3)
    with pytest.raises(InvalidObjectError, match="condition"):
        await store.append_if("team", "of", "a")


@pytest.mark.asyncio
async def test_a_transaction_sees_the_outcome_at_once(log: MemoryLog) -> None:
    store = Store(log)
    await store.put("a", {"n": 3, "l": [1]})
    async with store.transaction() as txn:
        a = await txn.get("a")
        assert a.decrement_if("n", 2) == 1
        assert a.decrement_if("n", 2) is None
        assert a.test_and_set("s", None, "x")
        assert not a.test_and_set("s", None, "y")
        assert a.append_if("l", 2, limit=2)
        assert not a.append_if("l", 3, limit=2)
    log.logs.drop_aux()
    for reader in (store, newcomer(log)):
        assert (await reader.get("a")).value == {"n": 1, "l": [1, 2], "s": "x"}
    assert len((await log.read_range())[-1].data) < 250, "only writes that took effect"


@pytest.mark.asyncio
async def test_bad_arguments_append_nothing(log: MemoryLog) -> None:
    store = Store(log)
    for by, at_least in ((True, 0), ("1", 0), (1, None), (float("inf"), 0)):
        with pytest.raises(InvalidObjectError):
            await store.decrement_if("a", "n", by, at_least)  # type: ignore[arg-type]
    with pytest.raises(InvalidObjectError):
        await store.test_and_set("a", "n", object(), 1)
    with pytest.raises(InvalidObjectError):
        await store.append_if("a", "n", 1, limit=0)
    assert await log.tail() == 0


def test_the_last_one_is_taken_once_in_every_interleaving() -> None:
    def taken(choose: Choose) -> tuple[object, ...]:
        log = MemoryLog("objects")
        run_stepped([newcomer(log).set("a", "n", 1)], lambda ready: ready[0])
        results = run_stepped(
            [newcomer(SteppedLog(log)).decrement_if("a", "n", 1) for _ in "ab"], choose
        )
        (final,) = run_stepped([newcomer(log).get("a")], lambda ready: ready[0])
        return (*results, final["n"])

    assert set(interleavings(taken)) == {(0, None, 0), (None, 0, 0)}
