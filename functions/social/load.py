"""The load: clients in a closed loop that log in, look around and post (WORKLOADS 3, "retwis").

Each client is one person at a browser: one request after the other over one connection, the next
as soon as the answer is there, in a session of their own. All choices come from a seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from functions.social.graph import Graph
from functions.social.http_connection import Answer, HttpConnection

MIX: Final = {"login": 15, "profile": 30, "timeline": 50, "post": 5}
"""Percent of the requests (Boki's benchmark)."""
PEOPLE_PER_LOAD: Final = 20
_LOADS_AT_ONCE: Final = 4
_LOAD_RETRIES: Final = 20
_FAILURES_IN_A_ROW_MAX: Final = 20
_EVERYBODY_PROBABILITY: Final = 0.25


class LoadError(Exception):
    """The platform does not do what the demo needs; one sentence."""


@dataclass
class Tally:
    """What became of the requests to one function."""

    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter)

    def percentile_s(self, percent: float) -> float:
        """Return the latency that `percent` of the answered requests stayed within."""
        if not self.latencies_s:
            return 0.0
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass
class Run:
    """What a run of the load did.

    Attributes:
        tallies: by function.
        acknowledged: text of each post that was acknowledged, by its id.
        unknown: texts of posts whose request failed; each may have been published or not.
        seconds: how long it took.
    """

    tallies: dict[str, Tally] = field(default_factory=lambda: {name: Tally() for name in MIX})
    acknowledged: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """Requests that were answered."""
        return sum(len(tally.latencies_s) for tally in self.tallies.values())


async def load_graph(url: str, graph: Graph, progress: Callable[[int], None]) -> int:
    """Load people and friendships through the `load` function; return how many people are new.

    Args:
        url: of the gateway.
        graph: all people.
        progress: told how many people were loaded, each time.

    Raises:
        LoadError: the platform refuses, or does not answer.
    """
    people = list(graph)
    batches = [people[n : n + PEOPLE_PER_LOAD] for n in range(0, len(people), PEOPLE_PER_LOAD)]
    new = 0

    async def loader() -> None:
        nonlocal new
        connection = HttpConnection(url)
        try:
            while batches:
                batch = batches.pop(0)
                arguments = {"people": {person: graph[person] for person in batch}}
                added = await call(connection, "load", arguments)
                new += added  # not in one line: `new` would be read before the call
                progress(len(batch))
        finally:
            connection.close()

    await asyncio.gather(*[loader() for _ in range(_LOADS_AT_ONCE)])
    return new


async def call(
    connection: HttpConnection, function: str, arguments: dict[str, Any], *, position: int = 0
) -> Any:  # noqa: ANN401
    """Call a function of the app, again while the platform says that this can help.

    It sees at least what a session at `position` has seen.

    Raises:
        LoadError: it failed.
    """
    answer = Answer(0, b"", 0)
    for _ in range(_LOAD_RETRIES):
        try:
            body = json.dumps(arguments).encode()
            answer = await connection.post(_path(function), body, position=position)
        except ConnectionError as error:
            raise LoadError(f"{error} Is the platform up? Start it with ./start.") from error
        if answer.status == 200:
            return json.loads(answer.body)
        if not _problem(answer).get("retryable"):
            break
    raise LoadError(f"{function} failed: {_problem(answer).get('detail', answer.body[:200])}")


async def run_load(
    url: str, people: Sequence[str], *, clients: int, seconds: float, seed: int
) -> Run:
    """Run the mix for a while.

    Args:
        url: of the gateway.
        people: who is there; a client is another person at each request.
        clients: how many at once.
        seconds: for how long requests are begun.
        seed: of all choices.

    Raises:
        LoadError: a client got nothing but failures.
    """
    run = Run()
    began = time.perf_counter()
    browsers = [
        _Browser(url, people, run, f"{seed}.{int(time.time())}.{number}", seed + number)
        for number in range(clients)
    ]
    await asyncio.gather(*[browser.browse(until=began + seconds) for browser in browsers])
    run.seconds = time.perf_counter() - began
    return run


class _Browser:
    """One client."""

    def __init__(self, url: str, people: Sequence[str], run: Run, name: str, seed: int) -> None:
        self._people = people
        self._run = run
        self._name = name
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._connection = HttpConnection(url)
        self._position = 0
        self._posts = 0
        self._failures = 0

    async def browse(self, *, until: float) -> None:
        names, weights = list(MIX), list(MIX.values())
        try:
            while time.perf_counter() < until:
                (function,) = self._choose.choices(names, weights)
                await self._request(function, self._arguments(function))
        finally:
            self._connection.close()

    def _arguments(self, function: str) -> dict[str, Any]:
        user = self._choose.choice(self._people)
        match function:
            case "login":
                return {"user": user, "password": user}
            case "timeline" if self._choose.random() < _EVERYBODY_PROBABILITY:
                return {}
            case "post":
                self._posts += 1
                # No other post has this text, in this run or any other: so the check can tell
                # that none is lost and none is doubled.
                return {"user": user, "text": f"Post {self._posts} of client {self._name}"}
            case _:
                return {"user": user}

    async def _request(self, function: str, arguments: dict[str, Any]) -> None:
        tally = self._run.tallies[function]
        body = json.dumps(arguments).encode()
        began = time.perf_counter()
        try:
            answer = await self._connection.post(_path(function), body, position=self._position)
        except ConnectionError as error:
            self._failed(tally, function, arguments, str(error))
            return
        if answer.status != 200:
            problem = _problem(answer)
            self._failed(tally, function, arguments, str(problem.get("detail", answer.status)))
            return
        tally.latencies_s.append(time.perf_counter() - began)
        self._position = max(self._position, answer.position)
        self._failures = 0
        if function == "post":
            self._run.acknowledged[json.loads(answer.body)] = arguments["text"]

    def _failed(self, tally: Tally, function: str, arguments: dict[str, Any], reason: str) -> None:
        tally.failures[reason] += 1
        if function == "post":
            self._run.unknown.add(arguments["text"])
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW_MAX:
            raise LoadError(f"{function} failed {self._failures} times in a row: {reason}")


def _path(function: str) -> str:
    return f"/functions/social/{function}"


def _problem(answer: Answer) -> dict[str, Any]:
    """Return the problem details of an answer that is no success (RFC 9457)."""
    try:
        problem = json.loads(answer.body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
