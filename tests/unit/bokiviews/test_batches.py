"""Changes of concurrent callers share records, and none harms another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from bokiviews import replica
from indilog.base.errors import AppendOutcomeUnknownError, NotReadyError, TooLargeError
from indilog.base.log import Entry
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs
from tests.support.hooked_log import HookedLog
from tests.unit.bokiviews.groups import process

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class Held(HookedLog):
    """A log whose appends wait, once they are in the log, or fail before that."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.may_return = asyncio.Event()
        self.appends = 0
        self.error: Exception | None = None

    async def before_append(self, entries: Sequence[Entry]) -> None:
        if self.error is not None:
            await asyncio.sleep(0)
            raise self.error

    async def after_append(self, entries: Sequence[Entry]) -> None:
        self.appends += 1
        await self.may_return.wait()


async def test_commands_of_concurrent_callers_share_records() -> None:
    log = Held("objects")
    views = process(log)
    counter, users = await views.counter("c"), await views.map("users")
    callers = [asyncio.create_task(counter.add(1)) for _ in range(100)]
    callers += [asyncio.create_task(users.put_if_absent("a", n)) for n in range(100)]
    await asyncio.sleep(0.01)
    later = [asyncio.create_task(counter.add(1)) for _ in range(100)]
    await asyncio.sleep(0.01)
    log.may_return.set()
    assert await asyncio.gather(*callers) == [*range(1, 101), True, *[False] * 99]
    assert await asyncio.gather(*later) == [*range(101, 201)]
    assert await log.tail() == 2


async def test_a_lone_caller_waits_for_no_other() -> None:
    log = MemoryLog("objects")
    counter = await process(log).counter("c")
    assert [await counter.add(1) for _ in range(3)] == [1, 2, 3]
    assert await log.tail() == 3


async def test_an_append_has_limited_changes_records_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Counting(HookedLog):
        appends = 0

        async def before_append(self, entries: Sequence[Entry]) -> None:
            self.appends += 1

    monkeypatch.setattr(replica, "CHANGES_MAX", 10)
    monkeypatch.setattr(replica, "BYTES_MAX", 4096)
    monkeypatch.setattr(replica, "RECORDS_MAX", 2)
    log = Counting("objects")
    views = process(log)
    counter, items = await views.counter("c"), await views.list("l")
    await asyncio.gather(*(counter.add(1) for _ in range(40)))
    assert await log.tail() == 4
    await asyncio.gather(*(items.append("x" * 1500) for _ in range(6)))
    assert (await log.tail(), log.appends) == (7, 4 + 2)
    await items.append("x" * 9000)
    assert await log.tail() == 8


async def test_a_batch_too_large_for_the_log_is_split_and_only_a_large_change_fails() -> None:
    logs = MemoryLogs(ClusterConfig(record_bytes_max=2048))
    items = await process(logs.log("objects")).list("l")
    outcomes = await asyncio.gather(
        *(items.append("x" * size) for size in (*[900] * 8, 4096)), return_exceptions=True
    )
    assert sorted(outcomes[:8]) == list(range(1, 9))  # type: ignore[type-var]
    assert isinstance(outcomes[8], TooLargeError)
    assert len(await items.items()) == 8


async def test_after_a_change_that_was_too_large_changes_share_records_again() -> None:
    log = MemoryLog("objects")
    users = await process(log).map("users")
    values = ["x"] * 7 + ["x" * (1 << 20)]
    outcomes = await asyncio.gather(*map(users.put, range(8), values), return_exceptions=True)
    assert isinstance(outcomes[7], TooLargeError)
    for _ in range(10):
        await users.put("a", 1)
    before = await log.tail()
    await asyncio.gather(*(users.put(key, 1) for key in range(1_000)))
    assert await log.tail() - before <= 2


async def test_a_cancelled_caller_harms_no_other() -> None:
    log = Held("objects")
    counter = await process(log).counter("c")
    first = asyncio.create_task(counter.add(1))
    await asyncio.sleep(0.01)
    others = [asyncio.create_task(counter.add(1)) for _ in range(3)]
    await asyncio.sleep(0.01)
    first.cancel()  # its change is in the record that is being appended
    await asyncio.sleep(0.01)
    log.may_return.set()
    assert await asyncio.gather(*others) == [2, 3, 4]


async def test_a_caller_cancelled_before_its_change_is_appended_has_no_effect() -> None:
    log = Held("objects")
    counter = await process(log).counter("c")
    first = asyncio.create_task(counter.add(1))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(counter.add(10))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.sleep(0.01)
    log.may_return.set()
    assert await first == 1
    assert await counter.add(100) == 101


async def test_an_error_of_an_append_reaches_each_caller_and_the_next_record_is_appended() -> None:
    log = Held("objects")
    log.may_return.set()
    counter = await process(log).counter("c")
    log.error = NotReadyError("Not now.")
    callers = [asyncio.create_task(counter.add(1)) for _ in range(3)]
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert all(isinstance(outcome, NotReadyError) for outcome in outcomes)
    log.error = None
    assert await counter.add(1) == 1


async def test_an_unknown_outcome_is_reported_as_such() -> None:
    class Unknown(HookedLog):
        async def after_append(self, entries: Sequence[Entry]) -> None:
            raise AppendOutcomeUnknownError

    counter = await process(Unknown("objects")).counter("c")
    with pytest.raises(AppendOutcomeUnknownError):
        await counter.add(1)
    assert await counter.value() == 1
