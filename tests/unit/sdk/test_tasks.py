"""Work that outlives a cancelled caller."""

from __future__ import annotations

import asyncio

import pytest

from indilog.sdk import run_in_background, run_to_end
from indilog.testing.stepper import run_stepped


@pytest.mark.asyncio
async def test_work_continues_if_its_caller_is_cancelled() -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        ended.set()

    caller = asyncio.create_task(run_to_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    async with asyncio.timeout(10):
        await ended.wait()


def test_without_an_event_loop_the_caller_does_the_work_and_none_is_in_the_background() -> None:
    done: list[str] = []

    async def work(name: str) -> None:
        done.append(name)

    async def caller() -> None:
        await run_to_end(work("awaited"))
        assert run_in_background(work("background")) is None

    run_stepped([caller()], lambda ready: ready[0])
    assert done == ["awaited"]
