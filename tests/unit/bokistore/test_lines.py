"""Transactions in conflict wait in line instead of retrying all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from bokistore import ConflictError, Store, Transaction, ViewCache, lines
from bokistore.lines import Contender, Lines
from indilog.base.errors import NotReadyError
from indilog.base.ids import SeqNum, UserTag
from indilog.testing import MemoryLog

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class SlowLog(MemoryLog):
    """Lets other tasks run before each append and tail, as a platform does."""

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        await asyncio.sleep(0)
        return await super().append(data, tags=tags)

    async def tail(self) -> SeqNum:
        await asyncio.sleep(0)
        return await super().tail()


@pytest.fixture
def log() -> MemoryLog:
    return SlowLog("objects")


@pytest.fixture
def store(log: MemoryLog) -> Store:
    return Store(log, cache=ViewCache())


class Taking:
    """A body that takes one piece by reading and writing, and counts its runs."""

    def __init__(self, *names: str) -> None:
        self.names = names or ("stock",)
        self.runs = 0

    async def __call__(self, txn: Transaction) -> int:
        self.runs += 1
        objects = [await txn.get(name) for name in self.names]
        for obj in objects:
            obj.set("n", obj.get("n", 0) + 1)
        return int(objects[0]["n"])


@pytest.mark.parametrize("ids", [False, True])
async def test_each_of_many_transactions_on_one_object_runs_twice_at_most(
    store: Store, *, ids: bool
) -> None:
    body = Taking()
    results = await asyncio.gather(
        *[store.transact(body, id=f"id-{n}" if ids else None) for n in range(100)]
    )
    assert sorted(results) == list(range(1, 101))
    assert body.runs <= 200
    assert len(store._cache.lines) == 0, "lines end with their conflicts"


async def test_transactions_that_must_lose_append_no_record(log: MemoryLog, store: Store) -> None:
    await asyncio.gather(*[store.transact(Taking()) for _ in range(97)])
    assert (await store.get("stock"))["n"] == 97
    assert await log.tail() <= 6, "the first one, four groups, and a checkpoint at most"


async def test_a_lone_transaction_that_must_lose_appends_no_record(
    log: MemoryLog, store: Store
) -> None:
    async def late(txn: Transaction) -> None:
        (await txn.get("stock")).set("n", -1)
        await store.transact(Taking())

    with pytest.raises(ConflictError):
        await store.transact(late, retries=0)
    assert await log.tail() == 1
    assert (await store.get("stock"))["n"] == 1


async def test_an_append_that_fails_makes_no_other_transaction_lose(
    log: MemoryLog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail = asyncio.Event()

    async def failing(data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        monkeypatch.undo()
        await may_fail.wait()
        raise NotReadyError("a node is away")

    monkeypatch.setattr(log, "append", failing)
    body = Taking()
    calls = [asyncio.create_task(store.transact(body)) for _ in range(2)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert await log.tail() == 0, "the second one waits for the first one's append"
    may_fail.set()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes[0], NotReadyError)
    assert outcomes[1] == 1
    assert body.runs == 2
    assert len(store._cache.appends) == 0


async def test_those_in_line_run_in_the_order_of_their_arrival(store: Store) -> None:
    done: list[int] = []

    async def take(number: int) -> None:
        await store.transact(body)
        done.append(number)

    body = Taking()
    await asyncio.gather(*map(take, range(30)))
    late = done[1:]
    assert late == sorted(late), "all but the one that committed first"


async def test_one_that_arrives_while_others_wait_stands_in_line(
    log: MemoryLog, store: Store
) -> None:
    contender = Contender(store._cache.lines, "objects")
    await contender.wait_for_turn(["stock"])
    body = Taking()
    arrived = [asyncio.create_task(store.transact(body)) for _ in range(5)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert body.runs == 5
    assert await log.tail() == 0, "they wait at the first read"
    contender.leave()
    await asyncio.gather(*arrived)
    assert body.runs == 5, "each reads a snapshot of its turn"


async def test_transactions_on_several_objects_in_any_order_all_commit(store: Store) -> None:
    bodies = [Taking("a", "b"), Taking("b", "a"), Taking("a"), Taking("b", "c", "a")]
    await asyncio.wait_for(
        asyncio.gather(*[store.transact(bodies[n % 4], retries=40) for n in range(60)]), 20
    )
    final = await store.multi_get("abc")
    assert [final[name]["n"] for name in "abc"] == [60, 45, 15]


async def test_a_transaction_inside_another_ones_body_does_not_wait(store: Store) -> None:
    inner = Taking()

    async def outer(txn: Transaction) -> int:
        obj = await txn.get("stock")
        obj.set("seen", len(store._cache.lines))
        return await store.transact(inner)

    contender = Contender(store._cache.lines, "objects")
    await contender.wait_for_turn(["stock"])
    asyncio.get_running_loop().call_soon(contender.leave)
    with pytest.raises(ConflictError):  # it reads what its inner transaction changes
        await asyncio.wait_for(store.transact(outer, retries=2), 5)
    assert inner.runs == 3


async def test_a_cancelled_transaction_gives_its_turn_to_the_next(store: Store) -> None:
    entered = asyncio.Event()

    async def hanging(txn: Transaction) -> None:
        await txn.get("stock")
        entered.set()
        await asyncio.sleep(60)

    first = Contender(store._cache.lines, "objects")
    await first.wait_for_turn(["stock"])
    hangs = asyncio.create_task(store.transact(hanging))
    waits = asyncio.create_task(store.transact(Taking()))
    gone = asyncio.create_task(store.transact(Taking()))
    for _ in range(10):
        await asyncio.sleep(0)
    gone.cancel()
    first.leave()
    await entered.wait()
    hangs.cancel()
    assert await asyncio.wait_for(waits, 5) == 1
    assert len(store._cache.lines) == 0


async def test_a_slow_transaction_is_overtaken(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "TURN_S", 0.02)
    slow = Contender(store._cache.lines, "objects")
    await slow.wait_for_turn(["stock"])
    body = Taking()
    await asyncio.wait_for(asyncio.gather(*[store.transact(body) for _ in range(5)]), 5)
    slow.leave()
    assert len(store._cache.lines) == 0


async def test_a_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_MAX", 3)
    line = Lines()
    contenders = [Contender(line, "objects") for _ in range(6)]
    tasks = [asyncio.create_task(line.enter(("objects", "a"), each)) for each in contenders]
    for _ in range(3):
        await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, False, False, False, True, True]
    for each, task in zip(contenders, tasks, strict=True):
        await task
        line.leave(("objects", "a"), each)
    assert [task.result() for task in tasks] == [True] * 4 + [False] * 2
    assert len(line) == 0
