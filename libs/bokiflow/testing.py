"""Tools for tests of workflows: time that passes at once, forced replay, crashes
(docs/guides/testing.md).

The code that executes the runs is the code that the platform uses. A test stops the executor of a
run and starts it again, as a deployment does. Tests of applications use these functions with
`indilog.testing`.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - a test runs on an event loop
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from bokiflow.flow import Flow, Startable
from bokiflow.handle import Handle
from bokiflow.runs.errors import FlowError, FlowSettingsError, UnknownRunError
from bokiflow.runs.records import run_tag
from bokiflow.runs.states import State
from indilog import After, Context, Entry
from indilog.sdk import SeqNum, UserTag
from indilog.sdk.runs import RUNS_MAX, RunInfo
from indilog.testing import MemoryLog, MemoryLogs, context

_ResultT = TypeVar("_ResultT")
Fakes: TypeAlias = Mapping[str | Callable[..., Any], Any]
"""As in `indilog.testing.context`."""

SKIPPED: Final = "$skipped"
"""Name of the signals by which `skip` wakes waiting runs. No workflow waits for it."""
_LOOK_S: Final = 0.01
_LOOKS_AT_REST: Final = 5
"""Number of successive looks without a newly decided operation after which runs count as waiting.
"""
_LOOKS_MAX: Final = 3000
_DAYS_MAX: Final = 20_000
"""If a run still waits after this many skipped days, it does not wait for a timer."""
_ID: Final = "tested"


class Skipping(Protocol):
    """A platform whose time a test can move: `indilog.testing.cluster()`, or `MemoryLogs`."""

    async def skip(self, *, days: float, hours: float, minutes: float, seconds: float) -> None:
        """Let time pass at once."""


class RunParkedError(FlowError):
    """A run was parked, because an execution does not match the decisions of earlier executions.
    The message names the first operation that differs.
    """


async def skip(
    platform: Skipping,
    *flows: Flow,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
) -> None:
    """Let time pass at once: timers, timeouts of signals and leases of the flows' runs end.

    First, this call waits until no run has decided an operation for 50 ms. So a run that was just
    started reaches its timer. A timer that ends after the skipped time continues to wait.

    Raises:
        ValueError: the duration is negative or no number.
        FlowSettingsError: the runs do not come to rest within 30 s.
    """
    await _rested(flows)
    await platform.skip(days=days, hours=hours, minutes=minutes, seconds=seconds)
    for flow in flows:
        for run in await _all_runs(flow, State.RUNNING):
            with suppress(FlowError):  # it has ended meanwhile
                await flow.handle(run.workflow, run.id).signal(SKIPPED, None)


async def replayed(
    flow: Flow,
    workflow: Startable[_ResultT],
    *arguments: Any,  # noqa: ANN401 - the workflow's own
    fakes: Fakes | None = None,
    logs: MemoryLogs | None = None,
    **named: Any,  # noqa: ANN401
) -> _ResultT:
    """Return the result of a run that begins again at its first line after each decided operation.
    Timers end at once.

    Args:
        flow: the flow of the workflow.
        workflow: the workflow.
        arguments: its arguments.
        fakes: the functions that the workflow calls, as in `indilog.testing.context`.
        logs: logs for the records; None: new `MemoryLogs`.
        named: its arguments by name.

    Raises:
        RunParkedError: an execution differs from an earlier execution.
        RunFailedError: the workflow raised.
        FlowSettingsError: the workflow waits for a signal that the test does not send.
    """
    tested = _Tested(flow, workflow, logs or MemoryLogs(), is_stopped_again=True)
    result: _ResultT = await tested.run(fakes or {}, arguments, named)
    return result


async def crashed(
    flow: Flow,
    workflow: Startable[_ResultT],
    *arguments: Any,  # noqa: ANN401 - the workflow's own
    after: int,
    fakes: Fakes | None = None,
    logs: MemoryLogs | None = None,
    **named: Any,  # noqa: ANN401
) -> _ResultT:
    """Return the result of a run whose executor crashes when `after` operations are decided. The
    run is then continued. Timers end at once.

    Args:
        flow: the flow of the workflow.
        workflow: the workflow.
        arguments: its arguments.
        after: number of operations. If one append decides several operations, the crash comes after
            that append.
        fakes: the functions that the workflow calls, as in `indilog.testing.context`.
        logs: logs for the records; None: new `MemoryLogs`.
        named: its arguments by name.

    Raises:
        FlowSettingsError: the run ends before so many operations are decided, or it waits for a
            signal that the test does not send.
        RunParkedError, RunFailedError: as `replayed`.
    """
    if after < 1:
        raise FlowSettingsError("after is a number of operations, 1 or more.")
    tested = _Tested(flow, workflow, logs or MemoryLogs(), stops_at=after)
    result: _ResultT = await tested.run(fakes or {}, arguments, named)
    if not tested.stops:
        raise FlowSettingsError(f"The run ended before {after} operations were decided.")
    return result


async def changed(
    old: tuple[Flow, Startable[Any]],
    new: tuple[Flow, Startable[_ResultT]],
    *arguments: Any,  # noqa: ANN401 - the workflow's own
    after: int,
    fakes: Fakes | None = None,
    logs: MemoryLogs | None = None,
    **named: Any,  # noqa: ANN401
) -> _ResultT:
    """Return the result of a run that begins with old code. When `after` operations are decided, it
    continues with new code, as after a deployment. Timers end at once.

    Args:
        old: the flow and the workflow with which the run begins.
        new: the flow and the workflow with which it continues. Both workflows have the same name,
            and both flows the same name of their log.
        arguments: the arguments of the old workflow.
        after: the number of operations.
        fakes: the functions that the workflow calls, as in `indilog.testing.context`.
        logs: logs for the records; None: new `MemoryLogs`.
        named: its arguments by name.

    Raises:
        RunParkedError: the new code does not continue the run.
        FlowSettingsError: as for `crashed`; or the names differ.
    """
    if (old[0].log_name, old[1].name) != (new[0].log_name, new[1].name):
        raise FlowSettingsError(
            f"The new code has workflow {new[1].name!r} in {new[0].log_name!r}, the old one "
            f"{old[1].name!r} in {old[0].log_name!r}; they must have the same names."
        )
    if after < 1:
        raise FlowSettingsError("after is a number of operations, 1 or more.")
    tested = _Tested(*old, logs or MemoryLogs(), stops_at=after, then=new[0])
    result: _ResultT = await tested.run(fakes or {}, arguments, named)
    if not tested.stops:
        raise FlowSettingsError(f"The run ended before {after} operations were decided.")
    return result


class _Tested:
    """A run whose executor is stopped right after it has appended a decision.

    Args:
        stops_at: number of decided operations at which the executor is stopped.
        is_stopped_again: whether the executor is also stopped after each further operation.
        then: the flow with which the run continues after the stop; None: the same flow.

    Attributes:
        logs: the logs. Appends to the log of the runs stop the executor.
        stops: number of times that the executor was stopped.
    """

    def __init__(
        self,
        flow: Flow,
        workflow: Startable[Any],
        logs: MemoryLogs,
        *,
        stops_at: int = 1,
        is_stopped_again: bool = False,
        then: Flow | None = None,
    ) -> None:
        self.logs = logs
        self.stops = 0
        self._flow = flow
        self._workflow = workflow
        self._then = then
        self._stops_at: int | None = stops_at
        self._is_stopped_again = is_stopped_again
        self._is_stopped = asyncio.Event()

    def log(self, name: str, session: Any = None) -> MemoryLog:  # noqa: ANN401 - not public
        """Return the log `name`."""
        if name != self._flow.log_name:
            return self.logs.log(name, session)
        return _StoppingLog(name, self, session)

    async def run(
        self, fakes: Fakes, arguments: tuple[object, ...], named: Mapping[str, object]
    ) -> Any:  # noqa: ANN401 - what the workflow returns
        """Run the workflow in a task of its own, whose context has the fakes; return its result."""

        async def run() -> object:
            ctx = context(fakes, logs=self)
            handle = await self._workflow.start(*arguments, id=_ID, **named)
            return await self._executed(handle, ctx)

        flows = [self._flow, *([self._then] if self._then is not None else [])]
        before = [dict(vars(flow)) for flow in flows]
        try:
            return await asyncio.create_task(run())
        finally:
            for flow, attributes in zip(flows, before, strict=True):
                vars(flow).clear()
                vars(flow).update(attributes)

    async def _executed(self, handle: Handle[Any], ctx: Context) -> object:
        """Execute the run until it has ended. Stop its executor as often as the test wants."""
        ending = asyncio.create_task(handle.result())
        try:
            while True:
                driving = asyncio.create_task(self._flow.drive(ctx))
                try:
                    if await self._ended_before_stop(handle, ending):
                        return ending.result()
                finally:
                    driving.cancel()
                    await asyncio.wait({driving})
                self._is_stopped.clear()
                self._flow = self._then or self._flow
        finally:
            ending.cancel()

    async def _ended_before_stop(self, handle: Handle[Any], ending: asyncio.Task[object]) -> bool:
        """Wait until the run has ended, or its executor must be stopped. While the run waits, let
        time pass. Return whether the run has ended.
        """
        stopped = asyncio.create_task(self._is_stopped.wait())
        days = 1
        try:
            while not (ending.done() or stopped.done()):
                steps = (await handle.status()).steps
                await asyncio.wait(
                    {ending, stopped},
                    timeout=_LOOK_S * _LOOKS_AT_REST,
                    return_when="FIRST_COMPLETED",
                )
                status = await handle.status()
                if status.state is State.PARKED:
                    is_new = self._then is not None and self.stops > 0
                    cause = "" if is_new else "The workflow is not deterministic: "
                    raise RunParkedError(f"{cause}{status.problem}")
                if status.steps != steps or ending.done() or stopped.done():
                    continue
                if days > _DAYS_MAX:
                    raise FlowSettingsError(
                        f"The run waits after {steps} operations, and not for a timer; does it "
                        "wait for a signal or a lock?"
                    )
                await skip(self.logs, self._flow, days=days)
                days *= 2
            return ending.done()
        finally:
            stopped.cancel()

    async def appended(self) -> None:
        """Called after each append to the log of the runs. If the executor must be stopped, this
        call never returns, and the executor is cancelled. This stands for a crash of the process.
        """
        if self._stops_at is None:
            return
        try:
            status = await self._workflow.handle(_ID).status()
        except UnknownRunError:
            return
        if status.steps < self._stops_at:
            return
        self._stops_at = status.steps + 1 if self._is_stopped_again else None
        self.stops += 1
        self._is_stopped.set()
        await asyncio.Event().wait()


class _StoppingLog(MemoryLog):
    """The log of the runs. Its appends do not return if the executor must be stopped."""

    def __init__(self, name: str, tested: _Tested, session: Any) -> None:  # noqa: ANN401 - not public
        super().__init__(name, logs=tested.logs, session=session)
        self._tested = tested

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """See `Log.append`."""
        seqnum = await super().append(data, tags=tags)
        await self._tested.appended()
        return seqnum

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        seqnums = await super().append_batch(entries, after=after)
        await self._tested.appended()
        return seqnums


async def _all_runs(flow: Flow, state: State | None = None) -> list[RunInfo]:
    page = await flow.runs(state=state, limit=RUNS_MAX)
    found = [*page]
    while page.next is not None:
        page = await flow.runs(state=state, limit=RUNS_MAX, before=page.next)
        found += page
    return found


async def _rested(flows: Sequence[Flow]) -> None:
    """Wait until no run of the flows decides an operation for a while."""
    before: list[tuple[str, str, SeqNum]] = []
    looks = 0
    for _ in range(_LOOKS_MAX):
        now: list[tuple[str, str, SeqNum]] = []
        for flow in flows:
            log = flow.logs().log(flow.log_name)
            for run in await _all_runs(flow):
                last = await log.read_prev(run_tag(run.id)) if run.end is None else None
                now.append((run.id, run.state, -1 if last is None else last.seqnum))
        looks = looks + 1 if now == before else 0
        if looks >= _LOOKS_AT_REST:
            return
        before = now
        await asyncio.sleep(_LOOK_S)
    raise FlowSettingsError("The runs decide operations without rest; time cannot be skipped.")
