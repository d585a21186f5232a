"""Snapshots, time travel, history, several objects at once, and objects as typed values."""

from __future__ import annotations

import dataclasses

import msgspec
import pydantic
import pytest

from bokistore import (
    ConflictError,
    InvalidObjectError,
    ObjectTypeError,
    Store,
    Transaction,
)
from indilog.base.errors import InvalidTagError
from indilog.testing import MemoryLog
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.bokistore.processes import newcomer

pytestmark = pytest.mark.asyncio


@dataclasses.dataclass
class Account:
    """A type as a dataclass."""

    owner: str
    balance: int = 0


class Model(pydantic.BaseModel):
    """A type as a pydantic model."""

    owner: str
    balance: int = pydantic.Field(ge=0)


class Struct(msgspec.Struct):
    """A type as a msgspec Struct."""

    owner: str
    balance: int = 0


async def test_a_snapshot_does_not_see_later_writes(store: Store) -> None:
    await store.set("a", "n", 1)
    async with store.snapshot() as view:
        await store.set("a", "n", 2)
        await store.set("b", "n", 2)
        both = await view.multi_get(["a", "b", "a"])
    assert {name: dict(obj) for name, obj in both.items()} == {"a": {"n": 1}, "b": {}}


async def test_a_snapshot_appends_nothing(store: Store, log: MemoryLog) -> None:
    await store.set("a", "n", 1)
    end = await log.tail()
    async with store.snapshot() as view:
        assert view.end == end
        assert (await view.get("a"))["n"] == 1
    assert await log.tail() == end


async def test_the_state_at_any_seqnum_can_be_read_again(store: Store, log: MemoryLog) -> None:
    seqnums = []
    for number in range(20):
        await store.set("a", "n", number)
        seqnums.append((await store.get("a")).seqnum)
    for reader in (store, newcomer(log)):
        for number, seqnum in enumerate(seqnums):
            assert seqnum is not None
            assert (await reader.at(seqnum).get("a"))["n"] == number


async def test_a_seqnum_in_the_future_is_refused(store: Store) -> None:
    await store.set("a", "n", 1)
    with pytest.raises(ValueError, match="there is no state as of 5 yet"):
        await store.at(5).get("a")
    with pytest.raises(ValueError, match="seqnum"):
        store.at(-1)


async def test_history_has_every_committed_write_and_no_other(store: Store) -> None:
    await store.set("a", "n", 1)

    async def too_late(txn: Transaction) -> None:
        a = await txn.get("a")
        await store.increment("a", "n")
        a.set("n", 99)

    with pytest.raises(ConflictError):
        await store.transact(too_late, retries=0)
    await store.delete("a")
    seen = [(version.seqnum, version.object.exists) async for version in store.history("a")]
    values = [dict(version.object) async for version in store.history("a")]
    assert [exists for _, exists in seen] == [True, True, False]
    assert values == [{"n": 1}, {"n": 2}, {}]
    later = [version.seqnum async for version in store.history("a", start=seen[1][0])]
    assert later == [seqnum for seqnum, _ in seen[1:]]


async def test_pop_returns_the_element_and_merge_the_previous_value(store: Store) -> None:
    await store.set("a", "l", [1, [2]])
    assert await store.pop("a", "l") == [2]
    assert await store.pop("a", "l") == 1
    assert await store.pop("a", "l") is None
    assert await store.pop("a", "nowhere") is None
    assert await store.merge("a", "", {"l": None, "m": {"x": 1, "y": 2}}) == {"l": []}
    assert await store.merge("a", "m", {"x": None, "z": 3}) == {"x": 1, "y": 2}
    assert dict(await store.get("a")) == {"m": {"y": 2, "z": 3}}
    with pytest.raises(InvalidObjectError, match="merge patch must be a JSON object"):
        await store.merge("a", "m", [1])  # type: ignore[arg-type]


async def test_multi_put_is_one_record(store: Store, log: MemoryLog) -> None:
    await store.multi_put({"a": {"n": 1}, "b": Account("bob", 2), "c": Struct("cy")})
    assert await log.tail() == 1
    assert dict(await store.get("b")) == {"owner": "bob", "balance": 2}


async def test_a_multi_put_with_an_invalid_value_changes_nothing(
    store: Store, log: MemoryLog
) -> None:
    with pytest.raises(InvalidObjectError, match="not list"):
        await store.multi_put({"a": {"n": 1}, "b": [1]})
    assert await log.tail() == 0


async def test_test_and_multi_put_writes_only_if_the_tests_hold(
    store: Store, log: MemoryLog
) -> None:
    assert await store.test_and_multi_put({"a": None}, {"a": {"n": 1}, "b": {"n": 1}})
    assert not await store.test_and_multi_put({"a": None}, {"b": {"n": 2}})
    assert not await store.test_and_multi_put({"a": {"n": 2}}, {"b": {"n": 2}})
    assert await log.tail() == 1
    assert await store.test_and_multi_put({"a": {"n": 1}}, {"b": {"n": 3}})
    assert (await store.get("b"))["n"] == 3


@pytest.mark.parametrize("other", [True, 1.0])
async def test_test_and_multi_put_distinguishes_what_python_calls_equal(
    store: Store, log: MemoryLog, other: object
) -> None:
    await store.put("a", {"n": 1, "m": 2})
    assert not await store.test_and_multi_put({"a": {"n": other, "m": 2}}, {"a": {}})
    with pytest.raises(InvalidObjectError, match="finite"):  # JSON would have null
        await store.test_and_multi_put({"a": {"n": float("nan")}}, {"a": {}})
    assert await log.tail() == 1
    assert await store.test_and_multi_put({"a": {"m": 2, "n": 1}}, {"a": {}})


async def test_one_of_two_equal_test_and_put_operations_succeeds_in_every_interleaving() -> None:
    def run(choose: Choose) -> list[bool]:
        log = MemoryLog("objects")

        async def take(owner: str) -> bool:
            mine = newcomer(SteppedLog(log))
            return await mine.test_and_multi_put({"lock": None}, {"lock": {"owner": owner}})

        return run_stepped([take("ann"), take("bob")], choose)

    assert all(sorted(outcome) == [False, True] for outcome in interleavings(run))


@pytest.mark.parametrize("kind", [Account, Model, Struct])
async def test_an_object_is_read_and_written_as_a_type(store: Store, kind: type[Account]) -> None:
    assert await store.get("ann", type=kind) is None
    await store.put("ann", kind(owner="ann", balance=3))
    assert await store.get("ann", type=kind) == kind(owner="ann", balance=3)
    assert await store.at(0).get("ann", kind) == kind(owner="ann", balance=3)


@pytest.mark.parametrize("kind", [Account, Model, Struct])
async def test_a_type_mismatch_names_the_path(store: Store, kind: type[Account]) -> None:
    await store.put("ann", {"owner": "ann", "balance": "much"})
    with pytest.raises(ObjectTypeError, match=f"'ann' is no {kind.__name__}: .*balance"):
        await store.get("ann", type=kind)
    async with store.snapshot() as view:
        with pytest.raises(ObjectTypeError, match="does not exist"):
            (await view.get("unknown")).to(kind)


async def test_an_invalid_object_name_is_refused_before_any_read(
    store: Store,
) -> None:
    with pytest.raises((InvalidObjectError, InvalidTagError)):
        await store.multi_get(["", "a"])
