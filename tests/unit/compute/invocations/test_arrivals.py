"""Waiting for what the log will say."""

from __future__ import annotations

import asyncio

import pytest

from compute.invocations.arrivals import Arrivals
from compute.invocations.records import Ended
from indilog.errors import OverloadedError

pytestmark = pytest.mark.asyncio
OVER = Ended("node#1", "i", 0, b"1")


async def waiting(arrivals: Arrivals, id_: str = "i") -> asyncio.Task[Ended | None]:
    task = asyncio.ensure_future(arrivals.outcome(id_))
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
        await arrivals.outcome("k")
    one.cancel()
    await asyncio.wait([one])
    assert not (await waiting(arrivals, "k")).done()
