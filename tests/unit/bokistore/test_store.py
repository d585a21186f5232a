"""Single operations: their results, snapshots of objects, and foreign records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest

from bokistore import InvalidObjectError, MismatchError, Store, StoreVersionError
from bokistore.records import AUX_BYTES_MAX
from bokistore.replay import AUX_EVERY
from indilog.base.ids import SeqNum, UserTag
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs
from tests.unit.bokistore.counted_log import CountedLog
from tests.unit.bokistore.processes import newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


async def test_each_operation_returns_the_previous_value(store: Store) -> None:
    assert await store.set("a", "p.q", 1) is None
    assert await store.set("a", "p.q", 2) == 1
    assert await store.increment("a", "p.q", 3) == 2
    assert await store.increment("a", "n") is None
    assert await store.push("a", "l", "x") is None
    assert await store.push("a", "l", "y") == ["x"]
    assert await store.add_to_set("a", "l", "y") == ["x", "y"]
    assert await store.delete("a", "p") == {"q": 5}
    assert await store.delete("a") == {"n": 1, "l": ["x", "y"]}
    assert await store.delete("a") is None


async def test_a_push_at_the_limit_drops_the_oldest(store: Store) -> None:
    for number in range(5):
        await store.push("a", "l", number, limit=3)
    assert (await store.get("a"))["l"] == [2, 3, 4]


async def test_a_snapshot_reads_like_a_mapping_with_paths(store: Store) -> None:
    await store.set("a", "profile.name", "Ann")
    seqnum = (await store.log.tail()) - 1
    obj = await store.get("a")
    assert obj
    assert obj.exists
    assert (obj.name, obj.seqnum) == ("a", seqnum)
    assert obj["profile.name"] == obj["profile"]["name"] == obj.at(["profile", "name"]) == "Ann"
    assert "profile.name" in obj
    assert "profile.age" not in obj
    assert obj.get("profile.age") is None
    assert obj.get("profile.age", 7) == 7
    assert (list(obj), len(obj), dict(obj)) == (["profile"], 1, {"profile": {"name": "Ann"}})
    assert obj.value == {"profile": {"name": "Ann"}}
    with pytest.raises(KeyError, match=r"profile\.age"):
        obj["profile.age"]


async def test_an_object_never_written_is_false_and_empty(store: Store) -> None:
    obj = await store.get("a")
    assert not obj
    assert (obj.value, obj.seqnum, len(obj)) == ({}, None, 0)
    assert obj.get("x", 1) == 1


async def test_a_deleted_object_is_false_and_names_the_record_that_deleted_it(store: Store) -> None:
    await store.set("a", "x", 1)
    await store.delete("a")
    obj = await store.get("a")
    assert not obj
    assert obj.seqnum == 1
    await store.set("a", "y", 2)
    assert (await store.get("a")).value == {"y": 2}


async def test_changing_a_snapshot_changes_nothing_in_the_store(store: Store) -> None:
    await store.set("a", "l", [1])
    obj = await store.get("a")
    obj.value["l"].append(2)
    obj["l"].append(3)
    assert (await store.get("a")).value == {"l": [1]}


async def test_changing_a_value_after_the_write_changes_nothing(store: Store) -> None:
    value = {"l": [1]}
    await store.set("a", "v", value)
    value["l"].append(2)
    assert (await store.get("a"))["v"] == {"l": [1]}


async def test_a_mismatching_operation_raises_an_error_and_has_no_effect(
    store: Store, log: MemoryLog
) -> None:
    await store.set("a", "n", 1)
    with pytest.raises(MismatchError, match="a list at 'n' of 'a', not a number") as refused:
        await store.push("a", "n", 2)
    assert (refused.value.name, refused.value.path) == ("a", "n")
    for reader in (store, newcomer(log)):
        assert (await reader.get("a")).value == {"n": 1}
    assert await store.increment("a", "n") == 1


@pytest.mark.parametrize("name", ["", "a\x1fb", "x" * 251, "\ud800", 7])
async def test_a_bad_name_is_refused_and_nothing_is_appended(store: Store, name: str) -> None:
    with pytest.raises(InvalidObjectError, match="name"):
        await store.set(name, "a", 1)
    with pytest.raises(InvalidObjectError):
        await store.get(name)
    assert await store.log.tail() == 0


async def test_a_bad_argument_is_refused_and_nothing_is_appended(store: Store) -> None:
    with pytest.raises(InvalidObjectError):
        await store.set("a", "a..b", 1)
    with pytest.raises(InvalidObjectError):
        await store.set("a", "a", float("nan"))
    with pytest.raises(InvalidObjectError):
        await store.increment("a", "a", True)
    with pytest.raises(InvalidObjectError):
        await store.increment("a", "a", "1")  # type: ignore[arg-type]
    with pytest.raises(InvalidObjectError):
        await store.push("a", "a", 1, limit=0)
    assert await store.log.tail() == 0


async def test_the_longest_name_is_accepted(store: Store) -> None:
    await store.set("ü" * 125, "a", 1)
    assert (await store.get("ü" * 125)).value == {"a": 1}


async def test_objects_are_separate_from_tags_of_other_users_of_the_log(
    store: Store, log: MemoryLog
) -> None:
    await log.append(b"not JSON", tags=["a"])
    await store.set("a", "x", 1)
    assert len(await log.read_range("a")) == 1
    assert (await store.get("a")).value == {"x": 1}


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"{}", b'{"store":1}', b'{"store":1,"writes":{"a":[["set",["x"]]]}}',
             b'{"store":0,"writes":{"a":[["delete",[]]]}}', b"[" * 5000,
             b'{"store":1,"writes":{"a":[["delete",[]]]},"reads":[""],"horizon":0}',
             b'{"store":1,"writes":{"a":[["delete",[]]]},"reads":["a"],"horizon":-1}',
             b'{"store":1,"writes":{"b":[["delete",[]]]}}'],
)  # fmt: skip
async def test_a_foreign_record_under_an_objects_tag_is_ignored(
    store: Store, log: MemoryLog, data: bytes
) -> None:
    await store.set("a", "x", 1)
    await log.append(data, tags=["store:a"])
    assert await store.increment("a", "x") == 1
    for reader in (store, newcomer(log)):
        assert (await reader.get("a")).value == {"x": 2}


async def test_a_record_of_a_later_version_raises_an_error(store: Store, log: MemoryLog) -> None:
    await log.append(b'{"store":4,"deeds":[]}', tags=["store:a"])
    with pytest.raises(StoreVersionError, match="format 4; this program reads up to 3"):
        await store.get("a")


@pytest.mark.parametrize("aux", [b"\xff", b"{}", b'{"store":4,"committed":true,"views":{}}'])
async def test_foreign_aux_data_is_ignored(store: Store, log: MemoryLog, aux: bytes) -> None:
    for _ in range(3):
        await store.increment("a", "n")
    for seqnum in range(3):
        await log.set_aux(seqnum, aux)
    assert (await newcomer(log).get("a")).value == {"n": 3}


async def test_a_record_describes_its_writes_in_json(store: Store, log: MemoryLog) -> None:
    await store.push("a", "l.m", {"x": 1}, limit=5)
    record = await log.read(0)
    assert record is not None
    assert record.tags == ("store:a",)
    assert json.loads(record.data) == {
        "store": 3,
        "writes": {"a": [["push", ["l", "m"], {"x": 1}, 5]]},
    }


async def test_a_read_of_a_hot_object_costs_one_log_call(log: MemoryLog) -> None:
    counted = CountedLog(log)
    store = Store(counted)
    for _ in range(3):
        await store.increment("a", "n")
    counted.calls = 0
    for _ in range(10):
        assert (await store.get("a"))["n"] == 3
    assert counted.calls == 10


async def test_a_new_process_reads_back_only_to_the_nearest_view(log: MemoryLog) -> None:
    store = Store(log)
    for _ in range(20 * AUX_EVERY):
        await store.increment("a", "n")
    counted = CountedLog(log)
    assert (await newcomer(counted).get("a"))["n"] == 20 * AUX_EVERY
    assert counted.calls <= AUX_EVERY + 1


async def test_history_before_a_whole_write_is_not_read(log: MemoryLog) -> None:
    store = Store(log)
    for number in range(5):
        await store.increment("a", "n", number)
    await store.set("a", "", {"n": 7})
    log.logs.drop_aux()
    counted = CountedLog(log)
    assert (await newcomer(counted).get("a")).value == {"n": 7}
    assert counted.calls == 1


async def test_a_mismatching_whole_write_hides_no_history(log: MemoryLog) -> None:
    store = Store(log)
    await store.set("a", "n", 1)
    with pytest.raises(MismatchError, match="whole"):
        await store.set("a", "", [1])
    log.logs.drop_aux()
    assert (await newcomer(log).get("a")).value == {"n": 1}


async def test_calls_of_one_platform_share_a_cache(log: MemoryLog) -> None:
    await Store(log).set("a", "n", 1)
    counted = CountedLog(log)
    assert (await Store(counted).get("a")).value == {"n": 1}
    assert counted.calls == 1


async def test_without_aux_data_a_new_process_reads_pages(log: MemoryLog) -> None:
    store = Store(log)
    for _ in range(1000):
        await store.increment("a", "n")
    log.logs.drop_aux()
    counted = CountedLog(log)
    assert (await newcomer(counted).get("a"))["n"] == 1000
    assert counted.calls <= 2 * AUX_EVERY + 6
    counted.calls = 0
    assert (await newcomer(counted).get("a"))["n"] == 1000
    assert counted.calls == 1, "the first reader stored a view as aux data of the newest record"


async def test_a_lagging_process_uses_the_nearest_view(log: MemoryLog) -> None:
    behind, ahead = CountedLog(log), Store(log)
    store = newcomer(behind)
    await store.increment("a", "n")
    for _ in range(1000):
        await ahead.increment("a", "n")
    behind.calls = 0
    assert (await store.get("a"))["n"] == 1001
    assert behind.calls <= AUX_EVERY + 3


async def test_pages_bounded_in_bytes_are_read_to_the_end() -> None:
    log = MemoryLog("objects", logs=MemoryLogs(page_bytes_max=100))
    store = Store(log)
    for number in range(40):
        await store.push("a", "l", number)
    log.logs.drop_aux()
    assert (await newcomer(log).get("a"))["l"] == list(range(40))


async def test_an_object_too_large_for_aux_data_is_replayed(log: MemoryLog) -> None:
    store = Store(log)
    for number in range(AUX_EVERY + 2):
        await store.set("a", f"k{number}", "x" * (AUX_BYTES_MAX // AUX_EVERY))
    assert all(record.aux is None for record in await log.read_range())
    obj = await newcomer(log).get("a")
    assert len(obj) == AUX_EVERY + 2


async def test_a_log_without_aux_data_works_too() -> None:
    log = MemoryLog("objects", logs=MemoryLogs(ClusterConfig(aux_bytes_max=1)))
    store = Store(log)
    for _ in range(3 * AUX_EVERY):
        await store.increment("a", "n")
    assert (await newcomer(log).get("a"))["n"] == 3 * AUX_EVERY


async def test_stores_of_two_platforms_with_equal_names_are_separate() -> None:
    first, second = Store(MemoryLog("objects")), Store(MemoryLog("objects"))
    await first.set("a", "x", 1)
    await second.set("a", "x", 2)
    assert (await first.get("a"))["x"] == 1


async def test_concurrent_operations_each_count_once(log: MemoryLog) -> None:
    class TurningLog(MemoryLog):
        """Yields to other tasks at each append."""

        async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
            await asyncio.sleep(0)
            seqnum = await super().append(data, tags=tags)
            await asyncio.sleep(0)
            return seqnum

    store = Store(TurningLog("objects", logs=log.logs))
    olds = await asyncio.gather(*[store.increment("a", "n") for _ in range(50)])
    assert sorted(old or 0 for old in olds) == list(range(50))
