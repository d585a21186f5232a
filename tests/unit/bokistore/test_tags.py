"""Objects found by their tags: all objects that have a tag, and none that had it earlier."""

from __future__ import annotations

import random

import pytest

from bokistore import ConflictError, InvalidObjectError, Store, Transaction
from bokistore.tags import STALE_MAX
from indilog.testing import MemoryLog
from tests.unit.bokistore.processes import newcomer

pytestmark = pytest.mark.asyncio


async def test_objects_are_found_by_each_of_their_tags(log: MemoryLog) -> None:
    store = Store(log)
    assert await store.put("order:1", {"n": 1}, tags=["paid", "customer:ann", "paid"]) is None
    assert await store.put("order:2", {"n": 2}, tags=["paid"]) is None
    assert await store.put("order:3", {"n": 3}) is None
    assert await log.tail() == 3, "one record each"
    for reader in (store, newcomer(log)):
        assert {name: obj["n"] for name, obj in (await reader.find("paid")).items()} == {
            "order:1": 1, "order:2": 2,
        }  # fmt: skip
        assert list(await reader.find("customer:ann")) == ["order:1"]
        assert not await reader.find("unknown")
    assert await log.tail() == 3


async def test_tags_are_an_attribute_of_the_object_not_part_of_its_value(log: MemoryLog) -> None:
    store = Store(log)
    await store.put("a", {"n": 1}, tags=["x", "y"])
    obj = await store.get("a")
    assert (obj.tags, obj.value, dict(obj), len(obj)) == (("x", "y"), {"n": 1}, {"n": 1}, 1)
    assert obj.at("") == {"n": 1}
    assert "tags" not in repr(obj)
    assert await store.increment("a", "n") == 1
    assert await store.merge("a", "", {"m": None}) == {"n": 2}
    assert (await store.get("a")).tags == ("x", "y"), "a part was changed"
    assert await store.put("a", {"n": 3}, tags=["y"]) == {"n": 2}
    assert await store.delete("a") == {"n": 3}
    assert (await store.get("a")).tags == ()


@pytest.mark.parametrize("how", ["put", "set", "delete", "transaction"])
async def test_an_object_is_not_found_by_a_former_tag(log: MemoryLog, how: str) -> None:
    store = Store(log)
    await store.put("a", {"n": 1}, tags=["x"])
    match how:
        case "put":
            await store.put("a", {"n": 2}, tags=["y"])
        case "set":
            await store.set("a", "", {"n": 2})
        case "delete":
            await store.delete("a")
        case _:
            async with store.transaction() as txn:
                (await txn.get("a")).delete()
    assert not await store.find("x")
    assert not await newcomer(log).find("x")
    assert list(await store.find("y")) == (["a"] if how == "put" else [])


async def test_lookups_work_at_earlier_seqnums_too(log: MemoryLog) -> None:
    store = Store(log)
    await store.put("a", {}, tags=["x"])
    await store.put("b", {}, tags=["x"])
    await store.put("a", {}, tags=["y"])
    assert list(await store.find("x")) == ["b"]
    assert list(await store.at(1).find("x")) == ["a", "b"]
    assert list(await store.at(0).find("x")) == ["a"]


async def test_a_lookup_in_a_transaction_conflicts_with_a_write_that_sets_the_tag(
    log: MemoryLog,
) -> None:
    store = Store(log)

    async def at_most_one(name: str, txn: Transaction) -> None:
        if not await txn.find("leader"):
            txn.put(name, {}, tags=["leader"])
            assert list(await txn.find("leader")) == [name]

    with pytest.raises(ConflictError):  # noqa: PT012
        async with store.transaction() as txn:
            await at_most_one("a", txn)
            await store.transact(lambda other: at_most_one("b", other))
    assert list(await store.find("leader")) == ["b"]


async def test_names_without_the_tag_are_removed_from_the_index_when_they_are_many(
    log: MemoryLog,
) -> None:
    store = Store(log)
    for number in range(STALE_MAX + 1):
        await store.put(f"o{number}", {}, tags=["x"])
        await store.delete(f"o{number}")
    await store.put("left", {}, tags=["x"])
    assert list(await store.find("x")) == ["left"]
    assert list(await store.get("$tag:x")) == ["left"]
    assert list(await newcomer(log).find("x")) == ["left"]


async def test_one_lookup_removes_a_limited_number_of_names(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bokistore.store.STALE_REMOVED_MAX", 5)
    store = Store(log)
    for number in range(STALE_MAX + 1):
        await store.put(f"o{number}", {}, tags=["x"])
        await store.delete(f"o{number}")
    assert not await store.find("x")
    assert len(await store.get("$tag:x")) == STALE_MAX + 1 - 5


async def test_lookup_results_follow_from_the_objects(log: MemoryLog) -> None:
    """Random puts and deletes against a dictionary."""
    chance, store = random.Random(7), Store(log)
    expected: dict[str, set[str]] = {}
    for _ in range(400):
        name, tags = f"o{chance.randrange(30)}", chance.sample("xyz", chance.randrange(3))
        if chance.random() < 0.4:
            await store.delete(name)
            expected.pop(name, None)
        else:
            await store.put(name, {}, tags=tags)
            expected[name] = set(tags)
        tag = chance.choice("xyz")
        found = await (store if chance.random() < 0.8 else newcomer(log)).find(tag)
        assert set(found) == {name for name, tags in expected.items() if tag in tags}


async def test_the_stores_own_names_and_keys_are_refused(log: MemoryLog) -> None:
    store = Store(log)
    with pytest.raises(InvalidObjectError, match="reserved"):
        await store.put("$tag:x", {})
    with pytest.raises(InvalidObjectError, match="reserved"):
        await store.put("a", {"$tags": ["x"]})
    with pytest.raises(InvalidObjectError, match="reserved"):
        await store.set("a", "$tags", ["x"])
    with pytest.raises(InvalidObjectError, match="reserved"):
        await store.set("a", "", {"$tags": ["x"]})
    with pytest.raises(InvalidObjectError, match="reserved"):
        await store.merge("a", "", {"$tags": None})
    with pytest.raises(InvalidObjectError, match=r"tags=\['x'\]"):
        await store.put("a", {}, tags="x")
    with pytest.raises(InvalidObjectError, match="tag must be text"):
        await store.put("a", {}, tags=[7])  # type: ignore[list-item]
    with pytest.raises(InvalidObjectError):
        await store.find("")
    async with store.transaction() as txn:
        with pytest.raises(InvalidObjectError, match="reserved"):
            txn.delete("$tag:x")
    assert await log.tail() == 0
