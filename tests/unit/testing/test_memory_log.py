"""The in-memory log's features beyond the interface, which `tests/contract` covers."""

from __future__ import annotations

import pytest

from indilog.base.errors import TooLargeError
from indilog.base.log import Entry, Session
from indilog.config import ClusterConfig
from indilog.testing import MemoryLog, MemoryLogs

pytestmark = pytest.mark.asyncio


async def test_a_single_log_has_its_own_logspace() -> None:
    assert [await MemoryLog("x").append(b"a"), await MemoryLog("x").append(b"b")] == [0, 0]


async def test_logs_of_one_source_with_the_same_name_are_the_same_log() -> None:
    logs = MemoryLogs()
    await logs.log("x").append(b"a")
    assert await logs.log("x").read(0) is not None
    assert logs.log("x").scope is logs.log("y").scope is logs


async def test_each_call_raises_the_session() -> None:
    logs, session = MemoryLogs(), Session()
    await logs.log("x").append_batch([Entry(b"a")] * 3)
    assert session.position == 0
    await logs.log("x", session).read_prev()
    assert session.position == 3


async def test_limits_are_set_by_the_configuration() -> None:
    log = MemoryLog("x", logs=MemoryLogs(ClusterConfig(record_bytes_max=10, record_tags_max=2)))
    await log.append(b"0123456789", tags=["a", "b"])
    with pytest.raises(TooLargeError, match="the limit is 10;"):
        await log.append(b"0123456789A")
    with pytest.raises(TooLargeError, match="the limit is 2;"):
        await log.append(b"", tags=["a", "b", "c"])


async def test_a_page_is_bounded_in_bytes_but_holds_at_least_one_record() -> None:
    log = MemoryLog("x", logs=MemoryLogs(page_bytes_max=10))
    await log.append_batch([Entry(b"01234")] * 3 + [Entry(b"x" * 50)])
    assert [record.seqnum for record in await log.read_range()] == [0, 1]
    assert [record.seqnum for record in await log.read_range(bound=3)] == [3]


async def test_aux_data_can_be_made_to_vanish() -> None:
    log = MemoryLog("x")
    for seqnum in range(3):
        await log.append(b"")
        await log.set_aux(seqnum, b"aux")
    log.logs.drop_aux(1)
    assert [record.aux for record in await log.read_range()] == [b"aux", None, b"aux"]
    log.logs.drop_aux()
    assert [record.aux for record in await log.read_range()] == [None, None, None]


async def test_record_times_come_from_the_given_clock() -> None:
    log = MemoryLog("x", logs=MemoryLogs(clock=lambda: 42.5))
    await log.append(b"")
    record = await log.read(0)
    assert record is not None
    assert record.time == 42.5
