"""Subscriptions (`indilog.base.subscription`): memory, cost, and behaviour on interruptions
(A29).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from indilog.base import subscription
from indilog.base.errors import DataLossError, NotReadyError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, Record
from indilog.base.subscription import SUBSCRIBE_PAGE, pages
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class WatchedLog(HookedLog):
    """Records the reads from it; the `errors` are raised first."""

    def __init__(self, logs: MemoryLogs) -> None:
        super().__init__("orders", logs=logs)
        self.reads: list[tuple[SeqNum, float | None]] = []
        self.given = 0
        self.given_bytes = 0
        self.errors: list[Exception] = []

    async def before_read(self, read: Read) -> None:
        self.reads.append((read.bound, read.wait))
        if self.errors:
            raise self.errors.pop(0)

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        self.given += len(records)
        self.given_bytes += sum(len(record.data) for record in records)
        return records


async def quiet() -> None:
    """Run every task until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def take(log: Log, count: int, *, resume_s: float = 0.0) -> list[bytes]:
    found: list[bytes] = []
    async with aclosing(pages(log, "t", 0, resume_s=resume_s)) as given:
        async for page in given:
            found += [record.data for record in page]
            if len(found) >= count:
                break
    return found


async def test_a_slow_subscriber_holds_two_pages_bounded_in_records() -> None:
    """A29: the log is read no further until the subscriber continues."""
    log = WatchedLog(MemoryLogs())
    for n in range(10 * SUBSCRIBE_PAGE):
        await log.append(b"%d" % n, tags=["t"])
    async with aclosing(log.subscribe("t")) as records:  # type: ignore[type-var]
        async for _ in records:
            await quiet()
            break
        assert log.given == 2 * SUBSCRIBE_PAGE


async def test_a_slow_subscriber_holds_two_pages_bounded_in_bytes() -> None:
    """A29: the log is read no further until the subscriber continues."""
    log = WatchedLog(MemoryLogs(page_bytes_max=10_000))
    for _ in range(100):
        await log.append(bytes(1_000), tags=["t"])
    async with aclosing(log.subscribe("t")) as records:  # type: ignore[type-var]
        async for _ in records:
            await quiet()
            break
        assert 10_000 <= log.given_bytes <= 2 * 10_000


async def test_the_next_page_is_read_while_one_is_consumed() -> None:
    log = WatchedLog(MemoryLogs())
    for n in range(3 * SUBSCRIBE_PAGE):
        await log.append(b"%d" % n, tags=["t"])
    seen = 0
    async for _ in log.subscribe("t"):
        seen += 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        pages_needed = -(-seen // SUBSCRIBE_PAGE)
        if seen % SUBSCRIBE_PAGE == SUBSCRIBE_PAGE // 2:
            assert len(log.reads) == pages_needed + 1
        if seen == 3 * SUBSCRIBE_PAGE:
            break
    assert [bound for bound, _ in log.reads] == [n * SUBSCRIBE_PAGE for n in range(4)]


async def test_an_idle_subscription_has_one_read_in_flight_and_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case A29 of docs/PITFALLS.md."""
    log = WatchedLog(MemoryLogs())
    loop = asyncio.get_running_loop()

    def no_timer(*_: object) -> None:
        raise AssertionError("an idle subscription sets no timer")

    following = asyncio.create_task(take(log, 2))
    await quiet()
    monkeypatch.setattr(loop, "call_at", no_timer)
    monkeypatch.setattr(loop, "call_later", no_timer)
    await quiet()
    assert len(log.reads) == 1
    await log.append(b"other", tags=["u"])
    await quiet()
    assert len(log.reads) == 1
    await log.append(b"a", tags=["t"])
    await quiet()
    assert [bound for bound, _ in log.reads] == [0, 2]
    await log.append(b"b", tags=["t"])
    assert await following == [b"a", b"b"]


async def test_an_interrupted_subscription_resumes_at_the_next_seqnum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscription, "_PAUSE_S_MIN", 0.0)
    log = WatchedLog(MemoryLogs())
    following = asyncio.create_task(take(log, 4, resume_s=60))
    for n in range(4):
        await quiet()
        log.errors = [NotReadyError("away")] * 3
        await log.append(b"%d" % n, tags=["t"])
    async with asyncio.timeout(20):
        assert await following == [b"0", b"1", b"2", b"3"]
    assert len(log.reads) >= 4 + 3 * 3


async def test_a_subscription_fails_when_the_platform_stays_unreachable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscription, "_PAUSE_S_MIN", 0.01)
    log = WatchedLog(MemoryLogs())
    log.errors = [NotReadyError("away")] * 1000
    with pytest.raises(NotReadyError, match="away"):
        await take(log, 1, resume_s=0.1)
    assert 1 < len(log.reads) < 20


@pytest.mark.parametrize("resume_s", [0.0, 60.0])
async def test_a_final_error_ends_a_subscription_at_once(
    resume_s: float,
) -> None:
    log = WatchedLog(MemoryLogs())
    log.errors = [DataLossError("gone")]
    with pytest.raises(DataLossError):
        await take(log, 1, resume_s=resume_s)
    assert len(log.reads) == 1


async def test_an_idle_subscription_yields_heartbeats() -> None:
    log = WatchedLog(MemoryLogs())
    async with aclosing(pages(log, None, 0, idle_s=0.01)) as given:
        assert await anext(given) == []
        await log.append(b"x")
        found: list[Record] = []
        while not found:
            found = await anext(given)
        assert found[0].data == b"x"


async def test_leaving_a_subscription_ends_its_read_ahead() -> None:
    log = WatchedLog(MemoryLogs())
    await log.append(b"x", tags=["t"])
    before = asyncio.all_tasks()
    async for _ in log.subscribe("t"):
        await quiet()
        assert len(asyncio.all_tasks() - before) == 1
        break
    await quiet()
    assert asyncio.all_tasks() - before == set()
