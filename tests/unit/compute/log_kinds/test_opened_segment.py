"""Concurrent callers of a segment that cannot be opened (`OpenedSegment`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from indilog.base.errors import NotReadyError
from indilog.base.ids import NodeId
from indilog_compute.log_kinds.catalog_records import CreatedLog
from indilog_compute.log_kinds.opened_segment import OpenedSegment, OtherLogs

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]

CREATED = CreatedLog(
    log="events", kind="owned", place="", folder="f", creator=NodeId("engine-0"), seqnum=0,
    created_at=0.0,
)  # fmt: skip
ATTEMPT_S = 40.0


class Place:
    """Each attempt to open fails after `ATTEMPT_S` seconds, until `is_back`."""

    def __init__(self) -> None:
        self.is_back = False
        self.attempts = 0

    @asynccontextmanager
    async def open(self, created: CreatedLog, *, is_new: bool) -> AsyncIterator[OtherLogs]:
        assert (created, is_new) == (CREATED, False)
        self.attempts += 1
        if not self.is_back:
            await asyncio.sleep(ATTEMPT_S)
            raise NotReadyError("The storage nodes do not answer.")
        yield cast("OtherLogs", self)


async def test_callers_share_an_attempt_that_fails() -> None:
    place = Place()
    segment = OpenedSegment(CREATED, place.open)
    began = asyncio.get_running_loop().time()
    callers = [asyncio.create_task(segment.logs()) for _ in range(20)]
    found = await asyncio.gather(*callers, return_exceptions=True)
    assert {type(each) for each in found} == {NotReadyError}
    assert place.attempts == 2
    assert asyncio.get_running_loop().time() - began <= 2 * ATTEMPT_S + 1


async def test_a_call_during_a_failing_attempt_succeeds_if_the_next_one_does() -> None:
    place = Place()
    segment = OpenedSegment(CREATED, place.open)
    first = asyncio.create_task(segment.logs())
    await asyncio.sleep(1.0)
    place.is_back = True
    second = asyncio.create_task(segment.logs())
    with pytest.raises(NotReadyError):
        await first
    assert cast("object", await second) is place
    assert cast("object", await segment.logs()) is place
    assert place.attempts == 2
    await segment.close()


async def test_a_caller_of_a_segment_that_is_closed_meanwhile_fails() -> None:
    segment = OpenedSegment(CREATED, Place().open)
    caller = asyncio.create_task(segment.logs())
    await asyncio.sleep(1.0)
    await segment.close()
    with pytest.raises(NotReadyError, match="is not kept any more"):
        await caller
    with pytest.raises(NotReadyError, match="is not kept any more"):
        await segment.logs()
