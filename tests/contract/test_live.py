"""What every kind of log guarantees over time (PITFALLS A1, 3): sessions, concurrency, waiting,
subscriptions, aux data, reopening.

Every wait ends by its event; a deadline ends it only if the log has a bug.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from indilog.base.errors import TooLargeError
from indilog.base.log import Entry, Log, LogSource, Session
from indilog.config import ClusterConfig
from tests.contract.kinds import Kind
from tests.contract.reading import all_of, data_of

pytestmark = pytest.mark.asyncio

LIMITS = ClusterConfig()
WOKEN_S_MAX = 120.0
WAIT_S = 290.0
"""Longer than `WOKEN_S_MAX`: a read that is not woken does not return in time."""


async def test_a_session_reads_its_own_writes_at_once(session_of: Callable[[], Log]) -> None:
    async def person(n: int) -> None:
        log = session_of()
        for turn in range(10):
            seqnum = await log.append(b"%d" % turn, tags=[f"p{n}"])
            last, exact = await log.read_prev(f"p{n}"), await log.read(seqnum)
            assert last is not None
            assert exact is not None
            assert last.seqnum == exact.seqnum == seqnum
            assert len(await all_of(log, f"p{n}")) == turn + 1

    await asyncio.gather(*[person(n) for n in range(8)])


async def test_a_session_that_takes_another_ones_position_sees_its_records(
    logs: LogSource, name: str
) -> None:
    parent = Session()
    await logs.log(name, parent).append(b"x", tags=["t"])
    child = Session(parent.position)
    assert await logs.log(name, child).read_prev("t") is not None
    assert child.position >= parent.position


async def test_a_fresh_read_sees_records_acknowledged_to_another_session(
    session_of: Callable[[], Log],
) -> None:
    writer = session_of()
    for n in range(10):
        seqnum = await writer.append(b"%d" % n, tags=["f"])
        found = [
            await session_of().read(seqnum, fresh=True),
            await session_of().read_next("f", seqnum, fresh=True),
            await session_of().read_prev("f", fresh=True),
            await session_of().read_next(bound=seqnum, wait=WAIT_S, fresh=True),
            (await session_of().read_range("f", fresh=True))[-1],
        ]
        assert [record and record.seqnum for record in found] == [seqnum] * 5


async def test_concurrent_appends_get_distinct_seqnums_and_are_all_readable(
    session_of: Callable[[], Log],
) -> None:
    people = [session_of() for _ in range(5)]
    seqnums = await asyncio.gather(
        *[people[n % 5].append(b"%d" % n, tags=["c"]) for n in range(300)]
    )
    assert len(set(seqnums)) == 300
    reader = session_of()
    assert await reader.tail() > max(seqnums)
    assert await reader.read_next("c", max(seqnums), wait=10) is not None
    found = {record.seqnum: record.data for record in await all_of(reader, "c")}
    assert found == {seqnum: b"%d" % n for n, seqnum in enumerate(seqnums)}


async def test_sequential_appends_of_one_caller_keep_their_order(
    session_of: Callable[[], Log],
) -> None:
    one, two = session_of(), session_of()
    last = -1
    for n in range(20):
        seqnum = await (one, two)[n % 2].append(b"x")
        assert seqnum > last
        last = seqnum


async def test_a_waiting_read_wakes_on_an_append_of_another_session(
    session_of: Callable[[], Log],
) -> None:
    reader, writer = session_of(), session_of()
    async with asyncio.timeout(WOKEN_S_MAX):
        waiting = asyncio.create_task(reader.read_next("t", wait=WAIT_S))
        await writer.tail()
        await writer.append(b"now", tags=["t"])
        record = await waiting
    assert record is not None
    assert record.data == b"now"


async def test_many_waiting_reads_all_wake(session_of: Callable[[], Log]) -> None:
    async with asyncio.timeout(WOKEN_S_MAX):
        waiting = [asyncio.create_task(session_of().read_next("t", wait=WAIT_S)) for _ in range(20)]
        log = session_of()
        await log.tail()
        seqnum = await log.append(b"now", tags=["t"])
        records = await asyncio.gather(*waiting)
    assert [record and record.seqnum for record in records] == [seqnum] * 20


async def test_a_waiting_read_wakes_only_for_its_tag_its_log_and_its_bound(
    logs: LogSource, name: str
) -> None:
    session = Session()
    log, other = logs.log(name, session), logs.log(name + "/other", session)
    async with asyncio.timeout(WOKEN_S_MAX):
        early = await log.append(b"before the bound", tags=["t"])
        waiting = asyncio.create_task(
            logs.log(name, Session()).read_next("t", early + 1, wait=WAIT_S)
        )
        await log.append(b"other tag", tags=["u"])
        await other.append(b"other log", tags=["t"])
        await log.tail()
        assert not waiting.done()
        await log.append(b"it", tags=["t"])
        record = await waiting
    assert record is not None
    assert record.data == b"it"


async def test_a_wait_for_any_record_of_the_log_wakes_without_a_tag(
    session_of: Callable[[], Log],
) -> None:
    async with asyncio.timeout(WOKEN_S_MAX):
        waiting = asyncio.create_task(session_of().read_next(wait=WAIT_S))
        log = session_of()
        await log.tail()
        await log.append(b"untagged")
        record = await waiting
    assert record is not None
    assert record.data == b"untagged"


async def test_a_wait_times_out_on_an_idle_log(log: Log) -> None:
    async with asyncio.timeout(WOKEN_S_MAX):
        assert await log.read_next("t", wait=0.05) is None
        assert await log.read_next("t", wait=0.0) is None
        assert await log.read_next(wait=0.05) is None


async def test_a_wait_for_an_existing_record_returns_at_once(log: Log) -> None:
    await log.append(b"there", tags=["t"])
    async with asyncio.timeout(WOKEN_S_MAX):
        record = await log.read_next("t", wait=WAIT_S)
    assert record is not None
    assert record.data == b"there"


async def test_the_log_works_after_a_cancelled_wait(log: Log) -> None:
    waiting = asyncio.create_task(log.read_next("t", wait=WAIT_S))
    await log.tail()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await log.append(b"x", tags=["t"])
    async with asyncio.timeout(WOKEN_S_MAX):
        assert await log.read_next("t", wait=WAIT_S) is not None


async def test_a_subscription_yields_history_and_then_new_records_without_gaps(
    session_of: Callable[[], Log],
) -> None:
    writer = session_of()
    await writer.append_batch([Entry(b"%d" % n, tags=["s"]) for n in range(280)])
    seen: list[bytes] = []

    async def read() -> None:
        async for record in session_of().subscribe("s"):
            seen.append(record.data)
            if len(seen) == 320:
                return

    async with asyncio.timeout(WOKEN_S_MAX):
        reading = asyncio.create_task(read())
        for n in range(280, 320):
            await writer.append(b"noise", tags=["noise"])
            await writer.append(b"%d" % n, tags=["s"])
        await reading
    assert seen == [b"%d" % n for n in range(320)]


async def test_a_subscription_starts_at_its_bound(log: Log) -> None:
    seqnums = await log.append_batch([Entry(b"%d" % n) for n in range(5)])
    seen: list[bytes] = []
    async for record in log.subscribe(bound=seqnums[3]):
        seen.append(record.data)
        if len(seen) == 2:
            break
    assert seen == [b"3", b"4"]


async def test_aux_data_is_stored_with_its_record_and_replaceable(log: Log) -> None:
    seqnum = await log.append(b"x", tags=["t"])
    other = await log.append(b"y", tags=["t"])
    for aux in (b"first", b"second", b""):
        await log.set_aux(seqnum, aux)
        (found, second) = await all_of(log, "t")
        exact = await log.read(seqnum)
        assert exact is not None
        assert found.aux == exact.aux == aux
        assert (found.data, second.seqnum, second.aux) == (b"x", other, None)


async def test_oversize_aux_data_is_refused_with_the_limit(log: Log) -> None:
    seqnum = await log.append(b"x")
    with pytest.raises(TooLargeError, match=re.escape(f"{LIMITS.aux_bytes_max:,}")):
        await log.set_aux(seqnum, bytes(LIMITS.aux_bytes_max + 1))
    record = await log.read(seqnum)
    assert record is not None
    assert record.aux is None


async def test_setting_aux_data_of_no_record_is_harmless(log: Log) -> None:
    tail = await log.tail()
    await log.set_aux(tail + 1000, b"early")
    assert await log.append(b"x") == tail


async def test_aux_data_is_not_set_through_another_log(logs: LogSource, name: str) -> None:
    session = Session()
    log, other = logs.log(name, session), logs.log(name + "/other", session)
    seqnum = await log.append(b"x")
    await other.set_aux(seqnum, b"foreign")
    record = await log.read(seqnum)
    assert record is not None
    assert record.aux is None


async def test_every_kind_of_read_returns_the_same_time_of_a_record(
    session_of: Callable[[], Log],
) -> None:
    log, other = session_of(), session_of()
    seqnum = await log.append(b"x", tags=["t"])
    found = [
        await log.read(seqnum),
        await log.read_next("t"),
        *await log.read_range("t"),
        await other.read_next("t", wait=WAIT_S),
    ]
    assert len({(r.time, r.ordered_at) for r in found if r is not None}) == 1
    assert None not in found


async def test_ordering_times_never_decrease_and_find_their_records(
    session_of: Callable[[], Log],
) -> None:
    log = session_of()
    seqnums = [await log.append(b"%d" % n, tags=["t"]) for n in range(6)]
    seqnums += await log.append_batch([Entry(b"b", ["t"])] * 3)
    for reader in (log, session_of()):
        found = await reader.read_range("t")
        assert [record.seqnum for record in found] == seqnums
        times = [record.ordered_at for record in found]
        assert times == sorted(times)
        assert len(set(times[6:])) == 1, "one entry ordered the batch"
        for record in found:
            at = await reader.find_time(record.ordered_at)
            assert at <= record.seqnum < await reader.find_time(record.ordered_at + 1e-6)


@pytest.mark.exact_seqnums
async def test_the_tail_is_the_first_seqnum_not_yet_written(
    session_of: Callable[[], Log],
) -> None:
    writer, other = session_of(), session_of()
    for _ in range(5):
        seqnum = await writer.append(b"x")
        assert await writer.tail() == await other.tail() == seqnum + 1


async def test_find_time_returns_the_seqnum_between_earlier_and_later_appends(
    session_of: Callable[[], Log],
) -> None:
    log = session_of()
    before = await log.append(b"before", tags=["t"])
    moment, now, after = time.time() + 0.02, 0.0, before
    while now < moment + 0.02:
        after = await log.append(b"after", tags=["t"])
        record = await log.read(after)
        assert record is not None
        now = record.ordered_at
    for asker in (log, session_of()):
        found = await asker.find_time(moment)
        assert before < found <= after
        page = await asker.read_range("t", found)
        assert page
        assert page[-1].seqnum <= after
    assert await log.find_time(0) == 0
    tail = await log.tail()  # it may move, where the platform appends, too
    assert tail <= await log.find_time(moment + 3600) <= await log.tail()


async def test_the_time_of_the_log_lies_between_the_records_before_and_after_it(
    session_of: Callable[[], Log],
) -> None:
    log, other = session_of(), session_of()
    for _ in range(3):
        before = await log.read(await log.append(b"before"))
        now = await other.now()
        after = await log.read(await log.append(b"after"))
        assert before is not None
        assert after is not None
        assert before.ordered_at <= now <= after.ordered_at


@pytest.mark.parametrize("time", [-1, float("nan"), float("inf"), "yesterday", True])
async def test_an_invalid_time_is_refused(log: Log, time: float) -> None:
    with pytest.raises(ValueError, match="seconds since 1970"):
        await log.find_time(time)


@pytest.mark.parametrize("wait", [-1, float("nan"), "long", True])
async def test_an_invalid_wait_is_refused(log: Log, wait: float) -> None:
    for read in (log.read_next, log.read_range):
        with pytest.raises(ValueError, match="seconds"):
            await read("t", wait=wait)


@pytest.mark.exact_seqnums
async def test_a_reopened_log_holds_all_acknowledged_records(
    kind: Kind, tmp_path: Path, name: str
) -> None:
    if not kind.durable:
        return
    async with kind.open(tmp_path) as logs:
        log = logs.log(name, Session())
        seqnums = await asyncio.gather(
            *[log.append(b"%d" % n, tags=[f"t{n % 3}"]) for n in range(50)]
        )
        tail = await log.tail()
    async with kind.open(tmp_path) as logs:
        log = logs.log(name, Session())
        assert await log.tail() == tail
        found = {record.seqnum: record.data for record in await all_of(log)}
        assert found == {seqnum: b"%d" % n for n, seqnum in enumerate(seqnums)}
        assert data_of(await all_of(log, "t1")) == [
            found[seqnum] for seqnum in sorted(found) if int(found[seqnum]) % 3 == 1
        ]
        assert await log.append(b"after") == tail
