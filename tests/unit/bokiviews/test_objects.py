"""Maps, lists, counters, sets and own state machines, each as several processes see it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bokiviews import InvalidValueError, Map, ValueTypeError, ViewKindError, Views, replica
from indilog.base.ids import MAX_SEQNUM
from indilog.testing import MemoryLog
from tests.support.hooked_log import HookedLog, Read
from tests.unit.bokiviews.groups import Deposit, Ledger, Move, process

pytestmark = pytest.mark.asyncio


@dataclass
class User:
    """A value of a map."""

    name: str
    age: int = 0


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog("objects")


async def test_a_map_is_the_same_in_all_processes(log: MemoryLog) -> None:
    one, two = [await process(log).map("users", User) for _ in range(2)]
    assert await one.put("ann", User("Ann", 3)) is None
    assert await two.put("ann", User("Ann", 4)) == User("Ann", 3)
    await two.update({"bob": User("Bob"), 7: User("Seven")})
    assert await one.get("ann") == User("Ann", 4)
    assert await one.get("eve") is None
    assert await one.get_many(["bob", 7, "eve"]) == {"bob": User("Bob"), 7: User("Seven")}
    assert await one.put_if_absent("bob", User("Other")) is False
    assert await one.put_if_absent("dan", User("Dan")) is True
    assert await one.replace("dan", User("Wrong"), User("Dan", 1)) is False
    assert await one.replace("dan", User("Dan"), User("Dan", 1)) is True
    assert await one.remove("dan") == User("Dan", 1)
    assert await one.remove("dan") is None
    assert dict(await two.sync()) == dict(one.view)
    assert list(two.view) == ["ann", "bob", 7]
    await two.clear()
    assert not await one.sync()


async def test_a_list_is_the_same_in_all_processes(log: MemoryLog) -> None:
    one, two = [await process(log).list("moves", int) for _ in range(2)]
    assert await one.append(1) == 1
    assert await two.extend([2, 3, 4]) == 4
    assert await one.set(-1, 5) == 4
    assert await two.pop() == 5
    assert await two.pop(0) == 1
    assert await one.items() == [2, 3]
    assert (one.view[0], one.view[-1], one.view[0:1], len(one.view)) == (2, 3, [2], 2)
    for index in (2, -3):
        with pytest.raises(IndexError, match="List 'moves' has no value at index"):
            await one.set(index, 0)
        with pytest.raises(IndexError, match="no value at index"):
            await one.pop(index)
    await two.clear()
    assert await one.items() == []


async def test_a_counter_has_no_limit_but_those_of_its_callers(log: MemoryLog) -> None:
    one, two = [await process(log).counter("seats") for _ in range(2)]
    assert await one.add(3) == 3
    assert await two.add_within(-2, at_least=0) == 1
    assert await two.add_within(-2, at_least=0) is None
    assert await one.add_within(5, at_most=5) is None
    assert await one.value() == two.view == 1
    for _ in range(3):
        await one.add(2**63 - 1)
    assert await two.value() == 1 + 3 * (2**63 - 1)
    with pytest.raises(InvalidValueError):
        await one.add(2**64)


async def test_a_set_is_the_same_in_all_processes(log: MemoryLog) -> None:
    one, two = [await process(log).set("tags") for _ in range(2)]
    assert await one.add("a", "b", 3) == 3
    assert await two.add("a", "c") == 1
    assert await two.discard("b", "z") == 1
    assert await one.contains("c")
    assert not await one.contains("b")
    assert await one.members() == {"a", "c", 3}
    assert one.view & {"a", "b"} == {"a"}
    assert await two.clear() == 3
    assert await one.members() == frozenset()


async def test_an_own_machine_is_the_same_in_all_processes(log: MemoryLog) -> None:
    one, two = [await process(log, machines=[Ledger]).machine("bank", Ledger) for _ in range(2)]
    assert await one.submit(Deposit("ann", 5)) is True
    assert await two.submit(Move("ann", "bob", 3)) is True
    assert await two.submit(Move("ann", "bob", 3)) is False
    assert (await one.sync()).accounts == {"ann": 2, "bob": 3}
    assert one.view.changed_at == two.view.changed_at > 0


async def test_a_value_that_was_read_can_be_changed_without_changing_the_view(
    log: MemoryLog,
) -> None:
    users = await process(log).map("users")
    await users.put("ann", {"tags": ["a"]})
    users.view["ann"]["tags"].append("b")
    assert users.view["ann"] == {"tags": ["a"]}


async def test_a_local_read_asks_the_log_only_if_the_view_is_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(HookedLog):
        reads = 0

        async def before_read(self, read: Read) -> None:
            self.reads += 1

    now = [100.0]
    monkeypatch.setattr(replica, "seconds_now", lambda: now[0])
    log = Counting("objects")
    writer, reader = await process(log).counter("c"), await process(log).counter("c")
    await writer.add(1)
    before = log.reads
    assert await reader.sync(within_s=5.0) == 0
    assert log.reads == before
    now[0] += 5.1
    assert await reader.sync(within_s=5.0) == 1
    await writer.add(1)
    assert reader.view == 1
    assert await reader.sync() == 2


async def test_the_age_of_a_view_counts_from_before_its_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that is appended during a read may be missing after it."""
    now = [100.0]
    monkeypatch.setattr(replica, "seconds_now", lambda: now[0])

    class Slow(HookedLog):
        async def before_read(self, read: Read) -> None:
            now[0] += 3.0

    log = Slow("objects")
    counter = await process(log).counter("c")
    assert now == [103.0]
    now[0] = 105.0
    await counter.sync(within_s=5.0)
    assert now == [105.0]
    now[0] = 105.1
    await counter.sync(within_s=5.0)
    assert now == [108.1]


async def test_invalid_arguments_get_one_sentence_and_append_nothing(log: MemoryLog) -> None:
    views = process(log, machines=[Ledger])
    users = await views.map("users", User)
    bank = await views.machine("bank", Ledger)
    with pytest.raises(InvalidValueError, match=r"cannot be stored as User"):
        await users.put("ann", "Ann")  # type: ignore[arg-type]
    for key in (1.5, None, True, 2**64, b"a"):
        with pytest.raises(InvalidValueError, match="A key must be"):
            await users.put(key, User("x"))  # type: ignore[arg-type]
    for name in ("", "x" * 256, 3):
        with pytest.raises(InvalidValueError, match="The name of an object"):
            await views.map(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="is no command of a ledger"):
        await bank.submit("deposit")
    for group in ("", "a\x1fb", "x" * 300):
        with pytest.raises(InvalidValueError, match="The name of a group"):
            Views(log, group)
    with pytest.raises(InvalidValueError, match="a kind of its own"):
        Views(log, machines=[Ledger, Ledger])
    assert await log.tail() == 0


async def test_the_first_command_decides_the_kind_of_an_object(log: MemoryLog) -> None:
    """Two processes may open one name with two kinds; then the log decides."""
    one, two = await process(log).map("x"), await process(log).list("x")
    await one.put("a", 1)
    with pytest.raises(ViewKindError, match=r"Object 'x' is a map, not a list"):
        await two.append(1)
    assert await log.read_prev(None, MAX_SEQNUM) is not None
    assert await log.tail() == 2
    with pytest.raises(ViewKindError):
        await two.append(1)
    assert await log.tail() == 2, "a kind that is known to be wrong is not appended"
    assert await one.get("a") == 1
    with pytest.raises(ViewKindError):
        await process(log).set("x")


async def test_a_dropped_object_is_empty_and_may_get_another_kind(log: MemoryLog) -> None:
    views = process(log)
    users = await views.map("users")
    await users.put("ann", 1)
    assert views.names() == ("users",)
    assert await views.drop("users") is True
    assert await views.drop("users") is False
    assert await users.get("ann") is None
    assert views.names() == ()
    assert await (await process(log).counter("users")).add(1) == 1


async def test_a_value_of_another_type_is_an_error_of_its_reader(log: MemoryLog) -> None:
    await (await process(log).map("users")).put("ann", 1)
    users: Map[User] = await process(log).map("users", User)
    with pytest.raises(ValueTypeError, match="A stored value is no User"):
        await users.get("ann")


async def test_records_of_other_programs_with_the_tag_are_ignored(log: MemoryLog) -> None:
    await log.append(b"unrelated", tags=["views:views:changes"])
    counter = await process(log).counter("c")
    assert await counter.add(1) == 1


async def test_views_of_a_platform_share_one_replica(log: MemoryLog) -> None:
    assert Views(log)._replica is Views(log)._replica
    assert Views(log)._replica is not Views(log, "other")._replica
    assert Views(log)._replica is not Views(log, machines=[Ledger])._replica
    one, other = await Views(log).counter("c"), await Views(log, "other").counter("c")
    await one.add(1)
    assert await other.value() == 0
