"""Workflows on every kind of log: two processes execute runs, and one of them crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from bokiflow import Flow, Startable, Workflow
from indilog.base.log import Log
from tests.unit.bokiflow.processes import kill

pytestmark = pytest.mark.asyncio

RUNS = 10


class Sessions:
    """Access to one log, with a new session for each request."""

    def __init__(self, session_of: Callable[[], Log]) -> None:
        self._session_of = session_of

    def log(self, name: str) -> Log:
        log = self._session_of()
        assert log.name == name
        return log


async def test_every_run_ends_although_a_process_crashes(session_of: Callable[[], Log]) -> None:
    begun = asyncio.Event()
    done: list[str] = []

    def process(name: str) -> tuple[Flow, Startable[list[str]]]:
        flow = Flow("shop", log=session_of().name, lease=3.0)
        flow.attach(Sessions(session_of))

        async def first() -> str:
            return f"{name} 1"

        async def second(run: str) -> str:
            if name == "vanishing":
                begun.set()
                await asyncio.Event().wait()
            done.append(run)
            return f"{name} 2"

        @flow.workflow
        async def order(wf: Workflow) -> list[str]:
            return [await wf.step(first), await wf.step(second, wf.id)]

        return flow, order

    vanishing, order = process("vanishing")
    staying, _ = process("staying")
    for number in range(RUNS):
        await order.start(id=f"run-{number}")
    await begun.wait()
    kill(vanishing)
    driving = asyncio.create_task(staying.drive(Sessions(session_of)))
    for number in range(RUNS):
        handle = staying.handle("order", f"run-{number}")
        result = await handle.result(60)
        assert result[1] == "staying 2"
        assert (await handle.status()).epoch == 2
    driving.cancel()
    with suppress(asyncio.CancelledError):
        await driving
    assert sorted(done) == sorted(f"run-{number}" for number in range(RUNS))
