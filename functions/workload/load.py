"""Runs clients over HTTP, in a closed loop or at a fixed rate.

Each client sends one request after the other over its own connection, in its own session, like a
person at a browser. In a closed loop, a client sends the next request when it has the answer. At a
fixed rate, requests are due at even intervals, and any free client sends the next request. A
request's latency counts from its due time, so waiting for a slow platform is measured, too.
`demonstration` calls `run_load`.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from functions.workload.http_connection import HttpConnection, HttpResponse

_RETRIES: Final = 20
_FAILURES_IN_A_ROW_MAX: Final = 20
_LOADERS: Final = 4


class LoadError(Exception):
    """The platform refused or failed a necessary request; the message says why."""


class LoadRequest(NamedTuple):
    """A request: a function of the application, and its arguments."""

    function: str
    arguments: Mapping[str, Any]


class Visitor(Protocol):
    """Chooses the requests of one client, and stores their outcomes."""

    def request(self) -> LoadRequest:
        """Choose the next request."""

    def answered(self, request: LoadRequest, result: bytes) -> None:
        """Store an answer; `result` is JSON."""

    def failed(self, request: LoadRequest) -> None:
        """Store a failed request, which may have had effects."""


@dataclass
class Tally:
    """The outcomes and latencies of the requests to one function."""

    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    failures: Counter[str] = field(default_factory=Counter)

    def percentile_s(self, percent: float) -> float:
        """Return the percentile `percent` of the latencies of answered requests."""
        if not self.latencies_s:
            return 0.0
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass
class LoadRun:
    """The measurements of one run of the load.

    Attributes:
        tallies: outcomes and latencies by function.
        seconds: duration of the run.
    """

    tallies: dict[str, Tally]
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        """Number of answered requests."""
        return sum(len(tally.latencies_s) for tally in self.tallies.values())

    @property
    def all(self) -> Tally:
        """Outcomes and latencies of all functions together."""
        together = Tally()
        for tally in self.tallies.values():
            together.latencies_s.extend(tally.latencies_s)
            together.failures.update(tally.failures)
        return together


async def call(
    connection: HttpConnection,
    app: str,
    function: str,
    arguments: Mapping[str, Any],
    *,
    position: int = 0,
) -> Any:  # noqa: ANN401
    """Call a function of an app. Repeat the call after retryable errors.

    The call sees at least the records below the metalog position `position`.

    Raises:
        LoadError: the request failed.
    """
    answer = HttpResponse(0, b"", 0)
    for _ in range(_RETRIES):
        try:
            body = json.dumps(arguments).encode()
            answer = await connection.post(_path(app, function), body, position=position)
        except ConnectionError as error:
            raise LoadError(f"{error} Is the platform up? Start it with ./start.") from error
        if answer.status == 200:
            return json.loads(answer.body)
        if not _problem(answer).get("retryable"):
            break
    raise LoadError(f"{function} failed: {_problem(answer).get('detail', answer.body[:200])}")


async def load_batches(
    url: str,
    app: str,
    batches: Sequence[Mapping[str, Any]],
    progress: Callable[[int], None],
) -> list[Any]:
    """Call the app's function `load` once for each batch of arguments, several calls concurrently.

    Args:
        url: URL of the gateway.
        app: name of the app.
        batches: the arguments of each call.
        progress: called with the number of further loaded batches.

    Returns:
        The results, in the order in which they arrived.

    Raises:
        LoadError: the platform refuses a call, or does not answer.
    """
    waiting, results = iter(batches), []

    async def loader() -> None:
        connection = HttpConnection(url)
        try:
            for arguments in waiting:
                results.append(await call(connection, app, "load", arguments))
                progress(1)
        finally:
            connection.close()

    await asyncio.gather(*[loader() for _ in range(_LOADERS)])
    return results


async def run_load(
    url: str,
    app: str,
    visitors: Sequence[Visitor],
    *,
    functions: Sequence[str],
    seconds: float,
    rate: float | None = None,
    requests_min: int = 0,
) -> LoadRun:
    """Run the visitors for some seconds.

    Args:
        url: URL of the gateway.
        app: name of the app whose functions the visitors call.
        visitors: one for each client.
        functions: names of the functions that the visitors may call.
        seconds: seconds in which requests are begun.
        rate: requests per second of all clients together; None: a closed loop.
        requests_min: least number of requests that a closed loop begins, even after `seconds`.

    Raises:
        LoadError: all requests of a client failed.
    """
    run = LoadRun({name: Tally() for name in functions})
    began = time.perf_counter()
    dues = _dues(began, seconds, rate, requests_min)
    clients = [_Client(url, app, visitor, run) for visitor in visitors]
    await asyncio.gather(*[client.browse(dues) for client in clients])
    run.seconds = time.perf_counter() - began
    return run


def _dues(began: float, seconds: float, rate: float | None, requests_min: int) -> Iterator[float]:
    """Yield when each request is due; in a closed loop, a request is due when a client is free."""
    if rate is not None:
        yield from (began + n / rate for n in range(max(1, int(seconds * rate))))
        return
    begun = 0
    while (now := time.perf_counter()) < began + seconds or begun < requests_min:
        begun += 1
        yield now


class _Client:
    """One client: a connection, a session, and the visitor that chooses its requests."""

    def __init__(self, url: str, app: str, visitor: Visitor, run: LoadRun) -> None:
        self._app = app
        self._visitor = visitor
        self._run = run
        self._connection = HttpConnection(url)
        self._position = 0
        self._failures = 0

    async def browse(self, dues: Iterator[float]) -> None:
        try:
            for due in dues:
                if (early := due - time.perf_counter()) > 0:
                    await asyncio.sleep(early)
                await self._ask(self._visitor.request(), due)
        finally:
            self._connection.close()

    async def _ask(self, request: LoadRequest, due: float) -> None:
        tally = self._run.tallies[request.function]
        body = json.dumps(request.arguments).encode()
        path = _path(self._app, request.function)
        try:
            answer = await self._connection.post(path, body, position=self._position)
        except ConnectionError as error:
            self._failed(tally, request, str(error))
            return
        if answer.status != 200:
            self._failed(tally, request, str(_problem(answer).get("detail", answer.status)))
            return
        tally.latencies_s.append(time.perf_counter() - due)
        self._position = max(self._position, answer.position)
        self._failures = 0
        self._visitor.answered(request, answer.body)

    def _failed(self, tally: Tally, request: LoadRequest, reason: str) -> None:
        tally.failures[reason] += 1
        self._visitor.failed(request)
        self._failures += 1
        if self._failures >= _FAILURES_IN_A_ROW_MAX:
            raise LoadError(f"{request.function} failed {self._failures} times in a row: {reason}")


def _path(app: str, function: str) -> str:
    return f"/functions/{app}/{function}"


def _problem(answer: HttpResponse) -> dict[str, Any]:
    """Return the problem details (RFC 9457) of an answer that is not a success."""
    try:
        problem = json.loads(answer.body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}
