"""Workflows of BokiFlow whose steps return random values: each step has one result, which a body of
it returned and which the next step got.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import count
from typing import Final

import httpx

from tests.cluster.faults.test_kill_workflows import APP, check, insist
from tests.nemesis.recording import Recorder

PAUSE_S: Final = 0.5
ANSWER_S_MAX: Final = 900.0
"""How long a caller repeats a call: faults of several groups may keep its gateway away."""


class Orders:
    """What the callers of workflows saw.

    Attributes:
        results: the results of the workflows that have ended, by number of the order.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.started: list[int] = []
        self.results: dict[int, object] = {}
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
            await insist(http, "start", number, within_s=ANSWER_S_MAX)
            self.started.append(number)
            self._recorder.count("workflow", "started")
            self.results[number] = await insist(http, "result", number, within_s=ANSWER_S_MAX)
            self._recorder.count("workflow", "ended")
            await asyncio.sleep(PAUSE_S)

    async def judged(self, http: httpx.AsyncClient) -> list[str]:
        """Return all violations, after the load has ended."""
        bodies = {number: await insist(http, "bodies", number) for number in self.started}
        return self.contradictions(bodies)

    def contradictions(self, bodies: Mapping[int, object]) -> list[str]:
        """Return all violations; `bodies` has a line for each body that ran, by order."""
        found: list[str] = []
        for number in self.started:
            if number not in self.results:
                found.append(f"workflow: order {number} has not ended")
                continue
            try:
                check(number, self.results[number], bodies[number])
            except AssertionError as error:
                found.append(f"workflow: {error} of {self.results[number]}")
        return found
