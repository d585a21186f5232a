"""Work that begins ahead of its result, with and without an event loop."""

from __future__ import annotations

import inspect

import pytest

from bokistream.waiting import Ahead


async def give(found: list[int]) -> int:
    found.append(1)
    return 7


def test_without_an_event_loop_cancelled_work_never_begins() -> None:
    found: list[int] = []
    work = give(found)
    with pytest.raises(StopIteration):
        Ahead(work).cancel().send(None)
    assert (found, inspect.getcoroutinestate(work)) == ([], inspect.CORO_CLOSED)


@pytest.mark.asyncio
async def test_work_begins_before_its_result_is_awaited_and_ends_when_it_is_cancelled() -> None:
    found: list[int] = []
    assert await Ahead(give(found)).result() == 7
    cancelled = Ahead(give(found))
    await cancelled.cancel()
    assert found == [1]
