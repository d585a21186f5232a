"""Waiting for what the log will say."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from indilog.base.errors import OverloadedError
from indilog_compute.invocations.outcome_waiters import Arrivals
from indilog_compute.invocations.records import Ended

pytestmark = pytest.mark.asyncio
OVER = Ended("node#1", "i", 0, b"1")


async def asked(arrivals: Arrivals, id_: str) -> Ended | None:
    with arrivals.room_for_outcome("app"):
        return await arrivals.outcome(id_)


async def waiting(arrivals: Arrivals, id_: str = "i") -> asyncio.Task[Ended | None]:
    task = asyncio.ensure_future(asked(arrivals, id_))
    await asyncio.sleep(0)
    return task


async def test_all_who_wait_for_an_outcome_are_told() -> None:
    """Also when somebody waits again before those who were told have gone on."""
    arrivals = Arrivals(10)
    first = [await waiting(arrivals) for _ in range(2)]
    again = [asyncio.ensure_future(arrivals.outcome("i")) for _ in range(2)]
    arrivals.all_ended()
    assert await asyncio.gather(*first) == [None, None]
    arrivals.ended(OVER)
    assert await asyncio.gather(*again) == [OVER, OVER]


async def test_a_caller_too_many_is_refused_until_another_one_has_gone() -> None:
    arrivals = Arrivals(2)
    one, _ = [await waiting(arrivals, id_) for id_ in ("i", "j")]
    with pytest.raises(OverloadedError, match="2 callers wait"):
        await asked(arrivals, "k")
    one.cancel()
    await asyncio.wait([one])
    assert not (await waiting(arrivals, "k")).done()


async def test_callers_who_wait_for_records_are_bounded_and_the_node_itself_is_not() -> None:
    """Also those who have left, as long as nothing is read."""
    arrivals = Arrivals(2)
    callers = [asyncio.ensure_future(arrivals.seqnum_for_caller(7, 5)) for _ in range(2)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.wait(callers[:1])
    with pytest.raises(OverloadedError, match="2 callers wait for records"):
        await arrivals.seqnum_for_caller(7, 5)
    await arrivals.seqnum_for_caller(4, 5)
    itself = asyncio.ensure_future(arrivals.seqnum(7, 5))
    await asyncio.sleep(0)
    arrivals.read(8)
    await asyncio.gather(callers[1], itself)
    again = asyncio.ensure_future(arrivals.seqnum_for_caller(9, 8))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()


async def test_who_appends_first_has_room_to_wait_for_the_record() -> None:
    arrivals = Arrivals(1)
    with arrivals.room_for_record():
        with pytest.raises(OverloadedError, match="1 callers wait"), arrivals.room_for_record():
            raise AssertionError("it would append")
        with pytest.raises(OverloadedError, match="1 callers wait"):
            await arrivals.seqnum_for_caller(7, 5)
    with arrivals.room_for_record():
        pass


async def test_an_application_waits_for_a_share_of_the_outcomes_unless_it_is_alone() -> None:
    is_shared = True
    arrivals = Arrivals(4, share_max=0.5, is_shared=lambda: is_shared)
    with ExitStack() as kept:
        for _ in range(2):
            kept.enter_context(arrivals.room_for_outcome("greedy"))
        with pytest.raises(OverloadedError, match="2 callers wait for outcomes of app greedy"):
            kept.enter_context(arrivals.room_for_outcome("greedy"))
        kept.enter_context(arrivals.room_for_outcome("other"))
        is_shared = False
        kept.enter_context(arrivals.room_for_outcome("greedy"))
        with pytest.raises(OverloadedError, match="4 callers wait for outcomes on this node"):
            kept.enter_context(arrivals.room_for_outcome("greedy"))
