"""Ids of transactions are known as long as their owner needs them, and then forgotten."""

from __future__ import annotations

import pytest

from bokistore import InvalidObjectError, Store, Transaction, cache, collection
from bokistore.records import decode_command, id_tag_of
from indilog.base.errors import NotReadyError
from indilog.testing import MemoryLog
from tests.unit.bokistore.processes import Clock, newcomer

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("small_cells")]
DAY = 86_400


@pytest.fixture(autouse=True)
def one_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ids share one tag, so that each record shows what was collected."""
    monkeypatch.setattr("bokistore.records._ID_TAGS", 1)


async def pay(txn: Transaction) -> int:
    """Add 1 by reading and setting; the result is the new number."""
    obj = await txn.get("a")
    number: int = obj.get("n", 0) + 1
    obj.set("n", number)
    return number


async def alive_ids(log: MemoryLog) -> set[str]:
    """Return the ids in untrimmed records."""
    alive = [seqnum for seqnum in range(await log.tail()) if not log.logs.is_dead(seqnum)]
    commands = [decode_command(record.data) for record in map(log.logs.record, alive) if record]
    return {txn_id for command in commands if command for txn_id in command.ids}


async def test_an_id_is_known_for_a_week_whatever_history_is_collected(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    assert await store.transact(pay, id="x") == 1
    clock.now += 6 * DAY
    await store.collect(keep=10)
    log.logs.drop_aux()
    assert await newcomer(log).transact(pay, id="x") == 1
    assert await store.transact(pay, id="y") == 2
    clock.now += 2 * DAY
    await store.collect(keep=10)
    assert await alive_ids(log) == {"y"}
    assert await newcomer(log).transact(pay, id="y") == 2
    assert await newcomer(log).transact(pay, id="x") == 3, "a forgotten id takes effect again"


async def test_ids_are_kept_as_long_as_asked(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    await store.transact(pay, id="x")
    clock.now += 100
    await store.collect(keep=200, keep_ids=10)
    assert await store.transact(pay, id="x") == 1, "keep is longer"
    await store.collect(keep=50, keep_ids=50)
    assert await store.transact(pay, id="x") == 2
    with pytest.raises(ValueError, match="keep_ids"):
        await store.collect(keep_ids=-1)


async def test_a_held_id_is_known_until_it_is_released(log: MemoryLog, clock: Clock) -> None:
    store = Store(log)
    assert await store.transact(pay, id="held", hold=True) == 1
    for number in range(50):
        await store.transact(pay, id=f"other-{number}")
    clock.now += 300 * DAY
    await store.collect(keep=10, keep_ids=10)
    await store.increment("a", "n", 1000)
    log.logs.drop_aux()
    assert await newcomer(log).transact(pay, id="held", hold=True) == 1
    assert (await newcomer(log).get("a"))["n"] == 1051
    store.release("held")
    await store.transact(pay, id="next")
    assert await newcomer(log).transact(pay, id="held", hold=True) == 1, "not collected yet"
    clock.now += 100
    await store.collect(keep=10, keep_ids=10)
    assert await alive_ids(log) == set()


async def test_a_released_id_is_known_as_long_as_history_is_kept(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    await store.transact(pay, id="held", hold=True)
    await store.transact(pay, id="other")
    clock.now += 300 * DAY
    store.release("held")
    await store.transact(pay, id="next")
    await store.collect(keep=10, keep_ids=10)
    assert await newcomer(log).transact(pay, id="held", hold=True) == 1, "released just now"
    clock.now += 100
    await store.collect(keep=10, keep_ids=10)
    assert await alive_ids(log) == set()


async def test_an_id_that_is_never_released_is_forgotten_after_a_year(
    log: MemoryLog, clock: Clock
) -> None:
    store = Store(log)
    await store.transact(pay, id="lost", hold=True)
    clock.now += collection.HELD_S_MAX - 10
    await store.collect(keep=10)
    assert await alive_ids(log) == {"lost"}
    await store.transact(pay, id="next")
    clock.now += 100
    await store.collect(keep=10)
    assert await alive_ids(log) == {"next"}


async def test_releases_share_the_records_of_later_transactions(log: MemoryLog) -> None:
    store = Store(log)
    for number in range(20):
        await store.transact(pay, id=f"t{number}", hold=True)
        store.release(f"t{number}")
    commands = [decode_command(record.data) for record in await log.read_range()]
    released = [command.released for command in commands if command and command.ids]
    assert released == [(), *[(f"t{number}",) for number in range(19)]]
    assert len(commands) == 20 + 1, "and a checkpoint; no record for releases alone"


async def test_a_release_that_could_not_be_appended_is_repeated(log: MemoryLog) -> None:
    class FailingLog(MemoryLog):
        fails = False

        async def append(self, *args: object, **named: object) -> int:
            if self.fails:
                raise NotReadyError
            return await super().append(*args, **named)  # type: ignore[arg-type]

    failing = FailingLog("objects", logs=log.logs)
    store = Store(failing)
    store.release("x", "y")
    failing.fails = True
    with pytest.raises(NotReadyError):
        await store.transact(pay, id="a")
    failing.fails = False
    await store.transact(pay, id="a")
    command = decode_command((await log.read_range())[0].data)
    assert command is not None
    assert command.released == ("x", "y")


async def test_releases_leave_room_for_what_a_transaction_writes(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bokistore.records._ID_TAGS", 65_536)

    async def put_many(txn: Transaction) -> None:
        for number in range(log.logs.config.record_tags_max - 1):
            txn.set(f"o{number}", "n", 1)

    store = newcomer(log)
    store.release("x", "y")
    await store.transact(put_many, id="many")
    await store.transact(pay, id="next")
    commands = [decode_command(record.data) for record in await log.read_range()]
    assert [command.released for command in commands if command] == [(), ("x", "y")]


async def test_releases_are_bounded(log: MemoryLog) -> None:
    store = newcomer(log)
    store.release(*map(str, range(cache._RELEASES_MAX + 5)))
    assert store._cache.releases.take("objects") == ["5", "6", "7", "8", "9", "10", "11", "12"]
    with pytest.raises(InvalidObjectError):
        store.release("")


async def test_collected_ids_leave_a_bounded_number_of_floors(
    log: MemoryLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bokistore.records._ID_TAGS", 8)
    store = Store(log)
    for number in range(200):
        await store.transact(pay, id=f"t{number}", hold=True)
        store.release(f"t{number}")
    clock.now += 100
    await store.collect(keep=10, keep_ids=10)
    assert len({id_tag_of(f"t{number}") for number in range(200)}) == 8
    assert len(await alive_ids(log)) <= 8, "the last one of each tag may not be released"
    assert len(log.logs._floors) <= 8 + 3
