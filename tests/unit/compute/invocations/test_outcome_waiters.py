"""Waiting for what the log will say."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from indilog.base.errors import OverloadedError
from indilog_compute.invocations.outcome_waiters import OutcomeWaiters
from indilog_compute.invocations.records import InvocationEnded

pytestmark = pytest.mark.asyncio
OVER = InvocationEnded("node#1", "i", 0, b"1")


async def asked(waiters: OutcomeWaiters, id_: str) -> InvocationEnded | None:
    with waiters.reserve_outcome_wait("app"):
        return await waiters.wait_for_outcome(id_)


async def waiting(waiters: OutcomeWaiters, id_: str = "i") -> asyncio.Task[InvocationEnded | None]:
    task = asyncio.ensure_future(asked(waiters, id_))
    await asyncio.sleep(0)
    return task


async def test_all_callers_that_wait_for_an_outcome_are_notified() -> None:
    """A caller may wait again before the notified callers have continued."""
    waiters = OutcomeWaiters(10)
    first = [await waiting(waiters) for _ in range(2)]
    again = [asyncio.ensure_future(waiters.wait_for_outcome("i")) for _ in range(2)]
    waiters.notify_all()
    assert await asyncio.gather(*first) == [None, None]
    waiters.notify_outcome(OVER)
    assert await asyncio.gather(*again) == [OVER, OVER]


async def test_a_caller_over_the_limit_is_refused_until_another_one_leaves() -> None:
    waiters = OutcomeWaiters(2)
    one, _ = [await waiting(waiters, id_) for id_ in ("i", "j")]
    with pytest.raises(OverloadedError, match="2 callers wait"):
        await asked(waiters, "k")
    one.cancel()
    await asyncio.wait([one])
    assert not (await waiting(waiters, "k")).done()


async def test_callers_waiting_for_records_are_bounded_but_not_the_node_itself() -> None:
    """Cancelled callers count, too, until further records are read."""
    waiters = OutcomeWaiters(2)
    callers = [asyncio.ensure_future(waiters.wait_for_record_bounded(7, 5)) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    with pytest.raises(OverloadedError, match="2 callers wait for records"):
        await waiters.wait_for_record_bounded(7, 5)
    await waiters.wait_for_record_bounded(4, 5)
    itself = asyncio.ensure_future(waiters.wait_for_record(7, 5))
    await asyncio.sleep(0)
    waiters.notify_read(8)
    await asyncio.gather(callers[1], itself)
    again = asyncio.ensure_future(waiters.wait_for_record_bounded(9, 8))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_a_caller_that_appends_first_has_room_to_wait_for_the_record() -> None:
    waiters = OutcomeWaiters(1)
    with waiters.reserve_record_wait():
        with pytest.raises(OverloadedError, match="1 callers wait"), waiters.reserve_record_wait():
            raise AssertionError("it would append")
        with pytest.raises(OverloadedError, match="1 callers wait"):
            await waiters.wait_for_record_bounded(7, 5)
    with waiters.reserve_record_wait():
        pass


async def test_an_application_waits_for_a_share_of_the_outcomes_unless_it_is_alone() -> None:
    is_shared = True
    waiters = OutcomeWaiters(4, share_max=0.5, is_shared=lambda: is_shared)
    with ExitStack() as kept:
        for _ in range(2):
            kept.enter_context(waiters.reserve_outcome_wait("greedy"))
        with pytest.raises(OverloadedError, match="2 callers wait for outcomes of app greedy"):
            kept.enter_context(waiters.reserve_outcome_wait("greedy"))
        kept.enter_context(waiters.reserve_outcome_wait("other"))
        is_shared = False
        kept.enter_context(waiters.reserve_outcome_wait("greedy"))
        with pytest.raises(OverloadedError, match="4 callers wait for outcomes on this node"):
            kept.enter_context(waiters.reserve_outcome_wait("greedy"))
