"""Transactions in line share records: they commit together, or conflict together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import pytest

from bokistore import (
    AlreadyCommittedError,
    InvalidObjectError,
    Store,
    Transaction,
    ViewCache,
    groups,
    lines,
)
from bokistore.records import decode_command
from indilog.base.errors import NotReadyError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Entry, Record
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog, Read
from tests.unit.bokistore.processes import newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class SlowLog(MemoryLog):
    """Lets other tasks run before each append, as a platform does; may fail once."""

    failure: Exception | None = None

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        await asyncio.sleep(0)
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return await super().append(data, tags=tags)


@pytest.fixture
def log() -> SlowLog:
    return SlowLog("objects")


@pytest.fixture
def store(log: SlowLog) -> Store:
    return Store(log, cache=ViewCache())


async def one(txn: Transaction) -> int:
    """Add 1 by reading and setting; the result is the new number."""
    obj = await txn.get("a")
    number: int = obj.get("n", 0) + 1
    obj.set("n", number)
    return number


async def groups_in(log: MemoryLog) -> list[int]:
    """Return the number of ids of each record with ids."""
    commands = [decode_command(record.data) for record in await log.read_range()]
    return [len(command.ids) for command in commands if command and command.ids]


async def test_those_in_line_share_records_and_each_gets_its_own_result(
    log: SlowLog, store: Store
) -> None:
    names = [f"t{number}" for number in range(60)]
    results = await asyncio.gather(*[store.transact(one, id=name) for name in names])
    assert sorted(results) == list(range(1, 61))
    sizes = await groups_in(log)
    assert max(sizes) == lines.MEMBERS_MAX
    assert len(sizes) <= 5, "the first one, then 3 or 4 groups"
    log.logs.drop_aux()
    for reader in (store, newcomer(log)):
        assert (await reader.get("a"))["n"] == 60
        for name, result in zip(names[:5], results[:5], strict=True):
            assert await reader.transact(one, id=name) == result


async def test_a_body_that_raises_leaves_the_group_and_changes_nothing(
    log: SlowLog, store: Store
) -> None:
    async def poor(txn: Transaction) -> None:
        (await txn.get("a")).increment("n", 1000)
        raise ValueError("too poor")

    async def bad_result(txn: Transaction) -> object:
        (await txn.get("a")).increment("n", 1000)
        return object()

    bodies = [one, poor, one, bad_result, one] * 6
    results = await asyncio.gather(
        *[store.transact(body, id=f"t{n}") for n, body in enumerate(bodies)],
        return_exceptions=True,
    )
    kinds = [type(result) for result in results]
    assert kinds == [int, ValueError, int, InvalidObjectError, int] * 6
    assert (await newcomer(log).get("a"))["n"] == 18
    assert len(store._cache.lines) == 0


async def test_a_failed_append_fails_all_members_and_nothing_is_done(
    log: SlowLog, store: Store
) -> None:
    first = lines.Contender(store._cache.lines, "objects")
    await first.wait_for_turn(["a"])
    calls = [asyncio.create_task(store.transact(one)) for _ in range(4)]
    contenders = [asyncio.create_task(_in_line(store)) for _ in range(4)]
    for _ in range(10):
        await asyncio.sleep(0)
    log.failure = NotReadyError()
    first.leave()
    results = await asyncio.gather(*calls, *contenders, return_exceptions=True)
    failed = sum(isinstance(result, NotReadyError) for result in results)
    assert failed >= 1
    assert (await newcomer(log).get("a"))["n"] == 8 - failed
    assert len(store._cache.lines) == 0


async def _in_line(store: Store) -> int:
    """Run a transaction that conflicts once, so that it stands in line."""
    tries = 0

    async def body(txn: Transaction) -> int:
        nonlocal tries
        tries += 1
        number = await one(txn)
        if tries == 1:
            await newcomer(store.log).set("a", "seen", value=True)
        return number

    return await store.transact(body)


async def test_a_cancelled_member_stops_no_other_one(log: SlowLog, store: Store) -> None:
    calls = [asyncio.create_task(store.transact(one, id=f"t{n}")) for n in range(30)]
    for step in range(40):
        await asyncio.sleep(0)
        if step % 4 == 0:
            calls[step // 4 * 3].cancel()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    done = [result for result in results if isinstance(result, int)]
    assert len(done) >= 20
    assert len(set(done)) == len(done)
    assert (await newcomer(log).get("a"))["n"] >= len(done)
    assert len(store._cache.lines) == 0


async def lose_first(
    store: Store, arrives_s: float, then_s: float = 0, error: Exception | None = None
) -> int:
    """Run a transaction that conflicts after `arrives_s` seconds and then, in line, takes `then_s`
    seconds.
    """
    runs = 0

    async def body(txn: Transaction) -> int:
        nonlocal runs
        runs += 1
        number = await one(txn)
        await asyncio.sleep((arrives_s, then_s, 0)[runs - 1])
        if runs == 2 and error is not None:
            raise error
        return number

    return await store.transact(body)


@pytest.mark.parametrize("error", [None, ValueError("slow, and failed")])
async def test_a_group_does_not_wait_for_a_slow_transaction_behind_it(
    store: Store, error: Exception | None
) -> None:
    """The slow one has the turn, so it would commit the record of those before it."""
    before, first, member, slow, behind = [
        asyncio.create_task(call)
        for call in (
            lose_first(store, 1),
            lose_first(store, 1.1, 1),
            lose_first(store, 1.2),
            lose_first(store, 1.3, 10 * lines.TURN_S, error),
            lose_first(store, 1.4),
        )
    ]
    assert await before == 1
    assert await first == 2
    assert not member.done(), "it is in a group with the slow one"
    assert await asyncio.wait_for(member, 2 * lines.TURN_S) == 3
    assert await asyncio.wait_for(behind, 2 * lines.TURN_S) == 4
    (ended,) = await asyncio.gather(slow, return_exceptions=True)
    assert ended == (error or 5)
    assert len(store._cache.lines) == 0


async def test_a_group_commits_if_the_last_in_line_is_cancelled_when_it_gets_the_turn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = asyncio.create_task(lose_first(store, 1.3, 60))
    calls = (lose_first(store, 1), lose_first(store, 1.1, 1), lose_first(store, 1.2), last)
    join = groups.Group.end_turn

    async def pass_on_and_cancel(
        group: groups.Group[Transaction], contender: lines.Contender
    ) -> None:
        await join(group, contender)
        last.cancel()

    monkeypatch.setattr(groups.Group, "end_turn", pass_on_and_cancel)
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert list(results[:3]) == [1, 2, 3]
    assert isinstance(results[3], asyncio.CancelledError)
    assert len(store._cache.lines) == 0


async def test_blind_writes_and_large_transactions_have_records_of_their_own(
    log: SlowLog, store: Store
) -> None:
    async def blind(txn: Transaction) -> int:
        txn.increment("b", "n")
        return await one(txn)

    async def large(txn: Transaction) -> int:
        (await txn.get("a")).set("text", "x" * (groups.BYTES_MAX + 1))
        return await one(txn)

    bodies = [one, blind, large] * 10
    await asyncio.gather(*[store.transact(body, retries=60) for body in bodies])
    final = await newcomer(log).multi_get("ab")
    assert (final["a"]["n"], final["b"]["n"]) == (30, 10)


async def test_a_group_too_large_for_the_log_fails_none_of_its_transactions() -> None:
    logs = MemoryLogs(ClusterConfig(record_bytes_max=8192))
    store = Store(SlowLog("objects", logs=logs), cache=ViewCache())

    async def push(txn: Transaction) -> None:
        (await txn.get("a")).push("texts", "x" * 1024, limit=2)
        await one(txn)

    await asyncio.gather(*[store.transact(push) for _ in range(20)])
    assert (await newcomer(store.log).get("a"))["n"] == 20


class OwnSession(HookedLog):
    """A session that sees new records only after its own appends and calls of `tail`."""

    end = 0

    async def before_append(self, entries: Sequence[Entry]) -> None:
        await asyncio.sleep(0)

    async def after_append(self, entries: Sequence[Entry]) -> None:
        self.end = self.logs.position

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        return [record for record in records if record.seqnum < self.end]

    async def tail(self) -> int:
        self.end = await super().tail()
        return self.end


async def test_each_session_sees_its_transaction_in_a_record_of_another_session() -> None:
    logs, cache = MemoryLogs(), ViewCache()

    async def add(_: int) -> bool:
        store = Store(OwnSession("objects", logs=logs), cache=cache)
        number = await store.transact(one)
        seen: int = (await store.get("a")).get("n", 0)
        return seen >= number

    assert all(await asyncio.gather(*map(add, range(20))))


async def test_the_same_id_twice_in_line_takes_effect_once(log: SlowLog, store: Store) -> None:
    results = await asyncio.gather(*[store.transact(one, id=f"t{n % 10}") for n in range(40)])
    assert sorted(results) == sorted([*range(1, 11)] * 4)
    assert (await newcomer(log).get("a"))["n"] == 10


async def test_a_group_conflicts_as_a_whole_and_runs_again(log: SlowLog, store: Store) -> None:
    """Another process changes the object between the members."""
    other, interfered = newcomer(log), 0

    async def body(txn: Transaction) -> int:
        nonlocal interfered
        number = await one(txn)
        if interfered < 3 and store._cache.lines:
            interfered += 1
            await other.increment("a", "other")
        return number

    results = await asyncio.gather(*[store.transact(body, id=f"t{n}") for n in range(20)])
    assert sorted(results) == list(range(1, 21))
    final = await newcomer(log).get("a")
    assert final.value == {"n": 20, "other": 3}


async def test_members_read_their_own_log_order(log: SlowLog, store: Store) -> None:
    """The order in which members ran is the order in which their writes apply."""

    async def push(number: int) -> list[int]:
        async def body(txn: Transaction) -> list[int]:
            a = await txn.get("a")
            seen = list(a.get("l", []))
            a.push("l", number)
            return seen

        return await store.transact(body)

    seen = await asyncio.gather(*map(push, range(40)))
    final = (await newcomer(log).get("a"))["l"]
    for number, before in enumerate(seen):
        assert before == final[: final.index(number)]
    with pytest.raises(AlreadyCommittedError):
        await _once_twice(store)


async def _once_twice(store: Store) -> None:
    for _ in range(2):
        async with store.transaction(id="block") as txn:
            await one(txn)
