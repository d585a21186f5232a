"""Workflows of BokiFlow that book the parts of orders: each part is booked exactly once."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

import httpx

from tests.cluster.faults.test_kill_workflows import APP, PARTS, insist
from tests.nemesis.recording import Recorder

PAUSE_S: Final = 0.5


class Orders:
    """What the callers of workflows saw.

    Attributes:
        ended: the numbers of orders whose workflow has ended.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.wrong: list[str] = []
        self._recorder = recorder
        self._numbers = count()

    async def prepare(self, http: httpx.AsyncClient) -> None:
        """Deploy the workflow."""
        answer = await http.post("/apps", json={"sources": {"orders.py": APP}})
        assert answer.status_code == httpx.codes.OK, answer.text

    async def live(self, http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        """Run workflows one after the other until `stop` is set and the last one has ended."""
        while not stop.is_set():
            number = next(self._numbers)
            await insist(http, "start", number)
            self.started.append(number)
            self._recorder.count("workflow", "started")
            result = await insist(http, "result", number)
            if result != [part * number for part in range(PARTS)]:
                self.wrong.append(f"workflow: order {number} ended with {result}")
            self.ended.append(number)
            self._recorder.count("workflow", "ended")
            await asyncio.sleep(PAUSE_S)

    async def judged(self, http: httpx.AsyncClient) -> list[str]:
        """Return all violations, after the load has ended."""
        booked = {number: await insist(http, "booked", number) for number in self.started}
        return self.contradictions(booked)

    def contradictions(self, booked: dict[int, object]) -> list[str]:
        """Return all violations; `booked` has the parts of each order."""
        wanted = {f"part{part}": 1 for part in range(PARTS)}
        unequal = {number: parts for number, parts in booked.items() if parts != wanted}
        return self.wrong + [f"booked: order {n} has {parts}" for n, parts in unequal.items()] + [
            f"workflow: order {number} has not ended" for number in self.started
            if number not in self.ended
        ]  # fmt: skip
