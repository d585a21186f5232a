"""Start, see and steer workflow runs from a program: `client.start_run(...)`, `client.runs(...)`,
`client.run(app, id)`.

    for run in await client.runs(state="parked"):
        details = await run.show()
        await run.fork(details.steps[-1].number)

The clients of `indilog.connect` and `indilog.open` have these methods. The methods call operations
of the application (`indilog.sdk.runs`), so they do not depend on the library of the workflows.
"""

from __future__ import annotations

import abc
import asyncio  # noqa: TID251 - waits for the end of a run
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, TypeAlias, TypeVar, overload

import msgspec

from indilog.base.errors import TrimmedError
from indilog.base.log import Log
from indilog.sdk.runs import (
    MOVE_RUNS,
    RUN_EVENTS,
    RUN_RESULT,
    RUNS_MAX,
    SHOW_RUN,
    START_RUN,
    STEPS_SHOWN,
    FoundResult,
    MovedRun,
    MovedRuns,
    RunDetails,
    RunEvent,
    RunEvents,
    RunInfo,
    RunResult,
    StartedRun,
)

_AppT = TypeVar("_AppT")
_WAIT_S: Final = 30.0
"""Seconds after which a client that watches a run asks again although no change was announced."""
_PAUSE_S: Final = 0.1
"""Shortest time between two questions about the end of a run, in seconds: a run with many steps
would cause one question for each of them.
"""
Operate: TypeAlias = Callable[[str, Mapping[str, object]], Awaitable[bytes]]


class Run:
    """A handle on one run. Each call reads the run anew.

    Args:
        operate: runs an operation of the application with these arguments; returns the JSON text
            of its result.
        log: returns a log in the client's session.
        app: as the attribute.
        id: as the attribute.
        info: as the attribute.

    Attributes:
        app: name of its application.
        id: id of the run.
        info: what a list showed of the run; None: this handle is from no list.
    """

    def __init__(
        self,
        operate: Operate,
        log: Callable[[str], Log],
        app: str,
        id: str,  # noqa: A002
        info: RunInfo | None = None,
    ) -> None:
        self.app = app
        self.id = id
        self.info = info
        self._operate = operate
        self._log = log

    async def show(
        self,
        *,
        steps: int = STEPS_SHOWN,
        round: int | None = None,  # noqa: A002 - a run's round
    ) -> RunDetails:
        """Return the run's state, its last decided operations, what it waits for, the signals that
        no operation has consumed, and what to do if it does not continue.

        Args:
            steps: largest number of decided operations (0 to 1,000).
            round: the round of a run that continues as new; None: the current one.

        Raises:
            NotFoundError: there is no such run, or its history has no such round.
            UnknownFunctionError: the application is not deployed.
        """
        wanted = {} if round is None else {"round": round}
        text = await self._operate(SHOW_RUN, {"id": self.id, "steps": steps, **wanted})
        return msgspec.json.decode(text, type=RunDetails)

    async def result(self, *, wait: float = math.inf) -> RunResult:
        """Return how the run ended, after waiting up to `wait` seconds for its end. If the run has
        not ended by then, the returned state is that of an open run.

        Raises:
            NotFoundError: there is no such run, or it was trimmed.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + wait
        while True:
            text = await self._operate(RUN_RESULT, {"id": self.id})
            found = msgspec.json.decode(text, type=FoundResult)
            if found.has_ended or clock() >= ends:
                return found.shown()
            await asyncio.sleep(min(_PAUSE_S, max(ends - clock(), 0)))
            left = min(_WAIT_S, max(ends - clock(), 0))
            with suppress(TrimmedError):  # the next answer says that the run was trimmed
                await self._log(found.log).read_next(found.tag, found.next, wait=left)

    async def cancel(self) -> None:
        """Cancel the run: its next operation raises `Cancelled`. Repeating the call is harmless.

        Raises:
            NotFoundError: there is no such run.
            WrongStateError: the run has ended.
        """
        await self._act("cancel")

    async def retry(self) -> None:
        """Execute the run again now, if it is parked.

        Raises:
            NotFoundError: there is no such run.
            WrongStateError: the run is not parked.
        """
        await self._act("retry")

    async def fork(self, step: str) -> Run:
        """Start a new run that continues from a step of this one, with the deployed code.

        Args:
            step: number or name of the step; a name means the first step with that name.

        Raises:
            NotFoundError: there is no such run.
            InvalidArgumentsError: the run has decided no such step.
            OutcomeUnknownError: the new run may have started; `runs` shows it.
        """
        new = msgspec.json.decode(await self._act("fork", step=step), type=dict[str, str])
        return Run(self._operate, self._log, self.app, new["id"])

    async def move(self, version: int | None = None) -> int:
        """Continue the run with the code of another deployment; return the number of that
        deployment. The request is durable when this returns; the run moves when its bodies in
        progress have ended.

        Args:
            version: number of a deployment whose code is kept; None: the newest one.

        Raises:
            NotFoundError: there is no such run.
            WrongStateError: the run has ended, or the code does not continue its history.
            InvalidArgumentsError: there is no such code, or the run would not stay with it.
        """
        given = {} if version is None else {"version": version}
        return msgspec.json.decode(await self._act("move", **given), type=MovedRun).version

    async def signal(self, name: str, value: object = True, *, key: str | None = None) -> None:  # noqa: FBT002 - a value
        """Send the run a signal; it is durable when this returns.

        Args:
            name: name of the signal.
            value: any value that has a JSON form.
            key: if several signals to the run have the same key, only the first takes effect.

        Raises:
            NotFoundError: there is no such run.
            WrongStateError: the run has ended.
        """
        more = {"key": key} if key is not None else {}
        await self._act("signal", name=name, value=value, **more)

    async def query(self, name: str = "", /, **arguments: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return a value of the run: the answer of a query of its application with this name, or
        the result of the run's last step with this name or number. Without a name, return the
        status that its workflow set last.

        Args:
            name: a query, or a step.
            arguments: arguments of the query.

        Raises:
            NotFoundError: there is no such run, or neither a query nor a value with this name.
            InvalidArgumentsError: the arguments do not fit the query.
            WrongStateError: the query raised, its time was up, or the deployed code does not match
                the run.
        """
        more = {"arguments": arguments} if arguments else {}
        return msgspec.json.decode(await self._act("query", name=name, **more))

    async def events(self, *, after: int = -1) -> AsyncIterator[RunEvent]:
        """Yield what the workflow publishes, and each change of the run's state: those that exist,
        then new ones, until the run has ended.

        Args:
            after: only events with a greater seqnum, such as that of the last one seen.

        Raises:
            NotFoundError: there is no such run, or it was trimmed.
        """
        while True:
            text = await self._operate(RUN_EVENTS, {"id": self.id, "after": after})
            found = msgspec.json.decode(text, type=RunEvents)
            for event in found.events:
                yield event
            after = found.next - 1
            if found.has_ended:
                return
            if not found.has_more:
                await self._log(found.log).read_next(found.tag, found.next, wait=_WAIT_S)

    async def _act(self, action: str, **arguments: object) -> bytes:
        return await self._operate(f"runs.{action}", {"id": self.id, **arguments})

    def __repr__(self) -> str:
        return f"Run({self.app!r}, {self.id!r})"


class RunList(Sequence[Run]):
    """A page of the list of runs, newest first.

    Args:
        runs: the runs of the page.
        following: becomes `next`.
        not_answered: as the attribute.

    Attributes:
        next: `page` of the next call; None: there are no further runs. A page may be short even if
            there are further runs.
        not_answered: the applications whose runs are missing, and why.
    """

    def __init__(
        self, runs: Sequence[Run], following: str | None, not_answered: Mapping[str, str]
    ) -> None:
        self._runs = runs
        self.next = following
        self.not_answered = not_answered

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...

    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        """Return one run, or several."""
        return self._runs[index]

    def __len__(self) -> int:
        """Return the number of runs of this page."""
        return len(self._runs)

    def __repr__(self) -> str:
        return f"RunList({list(self._runs)}, next={self.next!r})"


class Runs(abc.ABC, Generic[_AppT]):
    """The part of a client that sees and steers runs.

    `_AppT` is the type by which the client names an application: its name, or the `App` if the
    program itself runs the workflows.
    """

    async def runs(
        self,
        app: _AppT | None = None,
        *,
        workflow: str | None = None,
        state: str | None = None,
        id_prefix: str | None = None,
        older_s: float | None = None,
        newer_s: float | None = None,
        version: int | None = None,
        limit: int = 100,
        page: str | None = None,
    ) -> RunList:
        """Return workflow runs, newest first. They are ordered by their starts, or by their ends if
        `state` is an ended one.

        Args:
            app: only runs of this application; None: of all, at a running platform.
            workflow: only runs of this workflow.
            state: only runs in this state: `running`, `parked`, `done`, `failed`, `cancelled`.
            id_prefix: only runs whose id begins with this.
            older_s: only runs that began at least so many seconds ago; if `state` is an ended one,
                runs that ended so long ago.
            newer_s: only runs that began (or ended, as for `older_s`) at most so many seconds ago.
            version: only runs that continue with the code of this deployment, or ended with it.
            limit: largest number of runs (1 to 1,000).
            page: `next` of the page before.

        Raises:
            UnknownFunctionError: the application is not deployed.
            NotFoundError: it has no workflows.
            InvalidArgumentsError: a filter is invalid.
            ValueError: `limit` is invalid.
        """
        if not 1 <= limit <= RUNS_MAX:
            raise ValueError(f"limit must be 1 to {RUNS_MAX:,}, not {limit!r}.")
        filters: dict[str, object] = {
            "workflow": workflow,
            "state": state,
            "id_prefix": id_prefix,
            "older_s": older_s,
            "newer_s": newer_s,
            "version": version,
            "limit": limit,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        return await self._list(app, given, page)

    async def start_run(
        self,
        app: _AppT,
        workflow: str,
        arguments: Mapping[str, object] | None = None,
        *,
        id: str | None = None,  # noqa: A002
    ) -> Run:
        """Start a run of a workflow, by name. When this returns, the run is durable.

        If there is a run with this `id`, nothing is started, and the handle is on that run. So a
        start with an `id` can be repeated.

        Args:
            app: application of the workflow.
            workflow: name of the workflow.
            arguments: its arguments, by name.
            id: id of the run; None: a new one.

        Raises:
            UnknownFunctionError: the application is not deployed.
            NotFoundError: it has no such workflow.
            InvalidArgumentsError: the arguments do not fit the workflow.
            WrongStateError: the id belongs to a run of another workflow.
            OutcomeUnknownError: the run may have started. With an `id`, repeat the call.
        """
        given = {"workflow": workflow, "arguments": dict(arguments or {}), "id": id}
        started = msgspec.json.decode(await self._operate(app, START_RUN, given), type=StartedRun)
        return self.run(app, started.id)

    async def move_runs(
        self,
        app: _AppT,
        *,
        version: int | None = None,
        workflow: str | None = None,
        state: str = "running",
        id_prefix: str = "",
        older_s: float | None = None,
        newer_s: float | None = None,
        from_version: int | None = None,
        limit: int = 100,
        page: str | None = None,
    ) -> MovedRuns:
        """Continue open runs with the code of another deployment, as `Run.move` does.

        Args:
            app: application of the runs.
            version: number of a deployment whose code is kept; None: the newest one.
            workflow: only runs of this workflow.
            state: only runs in this state: `running` or `parked`.
            id_prefix: only runs whose id begins with this.
            older_s: only runs that began so many seconds ago, or earlier.
            newer_s: only runs that began at most so many seconds ago.
            from_version: only runs that continue with the code of this deployment.
            limit: largest number of runs that are looked at (1 to 1,000).
            page: `next` of the page before.

        Raises:
            UnknownFunctionError: the application is not deployed.
            InvalidArgumentsError: a filter is invalid, or there is no such code.
        """
        filters: dict[str, object] = {
            "version": version,
            "workflow": workflow,
            "state": state,
            "id_prefix": id_prefix,
            "older_s": older_s,
            "newer_s": newer_s,
            "from_version": from_version,
            "limit": limit,
            "page": page,
        }
        given = {name: value for name, value in filters.items() if value is not None}
        text = await self._operate(app, MOVE_RUNS, given)
        return msgspec.json.decode(text, type=MovedRuns)

    @abc.abstractmethod
    async def _operate(self, app: _AppT, operation: str, arguments: Mapping[str, object]) -> bytes:
        """Run an operation of an application; return the JSON text of its result."""

    @abc.abstractmethod
    def run(self, app: _AppT, id: str) -> Run:  # noqa: A002
        """Return a handle on a run. The run need not exist."""

    @abc.abstractmethod
    async def _list(
        self, app: _AppT | None, filters: dict[str, object], page: str | None
    ) -> RunList:
        """Return a page of runs."""
