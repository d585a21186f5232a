"""Lets people see and steer the runs of an application: the operations `runs.*` of its flows.

The gateway, the command line and clients call these operations in a worker of the application
(`indilog.App.add_operation`, `indilog.sdk.runs`). The operations read everything from the log. So
any worker can answer, even while the executor of a run hangs or is dead. `Flow` registers them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from bokiflow.advice import advice_for
from bokiflow.errors_for_people import errors_for_people
from bokiflow.handle import Handle
from bokiflow.limits.waits_text import turn_wait
from bokiflow.operations.progress import EVENT, status_value_in
from bokiflow.operations.signals import value_of
from bokiflow.operations.timers import TIMER
from bokiflow.replay_check import find_mismatch
from bokiflow.run_lists import SCAN_S_MAX, RunFilter, all_states, find_run, list_runs
from bokiflow.run_status import status_of
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    CODE,
    OperationNoted,
    Origin,
    RecordedFailure,
    RunContinued,
    RunFinished,
    RunRecord,
    RunStarted,
    RunWaits,
    StepDecided,
    run_record,
    run_tag,
)
from bokiflow.runs.rounds import SIGNAL
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from bokiflow.runs.unawaited_operations import GATHER, what_is_done
from bokiflow.versions import VersionedFlow, flows_of
from indilog import (
    App,
    Context,
    InvalidArgumentsError,
    Log,
    NotFoundError,
    Record,
    TrimmedError,
    WrongStateError,
)
from indilog.sdk import Logs, SeqNum, plain_value, runs

_VALUE_BYTES_MAX: Final = 2_000
"""Larger results are shown by the first characters of their JSON text."""
_EVENTS_BYTES_MAX: Final = 256 * 1024
"""Bytes of the records of events in one answer. A larger first record is answered alone."""
_PAGE: Final = 1_000


class InspectedFlow(VersionedFlow, Protocol):
    """The part of a `bokiflow.Flow` that the operations use."""

    def runner_of(self, logs: Logs) -> Runner:
        """Return the executor of runs in this process."""

    async def start(
        self,
        workflow: str,
        arguments: Mapping[str, object],
        *,
        id: str | None = None,  # noqa: A002
    ) -> Handle[Any]:
        """Start a run by the name of its workflow."""

    async def fork(self, id: str, step: str) -> Handle[Any]:  # noqa: A002
        """Start a new run from a step of another run."""


class RunOperations:
    """The operations of an application with flows.

    Attributes:
        flows: the application's flows.
    """

    def __init__(self, app: App) -> None:
        self.flows: list[InspectedFlow] = flows_of(app)
        self._app = app
        for name, operation in (
            (runs.LIST_RUNS, self.list),
            (runs.SHOW_RUN, self.show),
            (runs.RUN_EVENTS, self.events),
            (runs.CHECK_RUNS, self.check),
            (runs.START_RUN, self.start),
            (runs.RUN_RESULT, self.result),
            (runs.RUN_CODES, self.codes),
            ("runs.cancel", self.cancel),
            ("runs.retry", self.retry),
            ("runs.fork", self.fork),
            ("runs.signal", self.signal),
            ("runs.query", self.query),
        ):
            app.add_operation(name, operation)

    async def list(
        self,
        ctx: Context,
        *,
        workflow: str | None = None,
        state: State | None = None,
        id: str | None = None,  # noqa: A002
        id_prefix: str = "",
        older_s: float | None = None,
        newer_s: float | None = None,
        version: int | None = None,
        limit: int = 100,
        before: runs.RunPlace | None = None,
    ) -> runs.RunPage:
        """List runs of this application, newest first. Runs are ordered by their starts; with an
        ended state, by their ends.

        Args:
            ctx: context of the call.
            workflow: only runs of this workflow.
            state: only runs in this state.
            id: only the run with this id.
            id_prefix: only runs whose id begins with this.
            older_s: only runs that began at least this many seconds ago. With an ended state, the
                time of the end counts.
            newer_s: only runs that began (in an ended state: ended) at most this many seconds ago.
            version: only runs that continue, or have ended, with the code of this deployment.
            limit: largest number of runs (1 to 1,000).
            before: `next` of the page before.
        """
        limit = min(max(limit, 1), runs.RUNS_MAX)
        pages = []
        for flow in {flow.log_name: flow for flow in reversed(self.flows)}.values():
            log, runner = ctx.log(flow.log_name), flow.runner_of(ctx)
            wanted = RunFilter(
                app=self._app.name,
                log=log.name,
                workflow=workflow,
                state=state,
                id_prefix=id_prefix,
                version=version,
            )
            wanted = await wanted.narrowed(log, older_s=older_s, newer_s=newer_s, before=before)
            with errors_for_people():
                if id is None:
                    pages.append(await list_runs(log, runner, wanted, limit))
                    continue
                run_tag(id)
                found = await find_run(log, runner, id, self._app.name)
            if found is not None and wanted.has(found):
                pages.append(runs.RunPage((found,), by_end=wanted.by_end))
        return runs.merged(pages, limit)

    async def show(
        self,
        ctx: Context,
        id: str,  # noqa: A002
        log: str = "",
        steps: int = runs.STEPS_SHOWN,
        round: int | None = None,  # noqa: A002
    ) -> runs.RunDetails:
        """Show one run: its state, its last steps, what it waits for, and what to do about it.

        Args:
            ctx: context of the call.
            id: id of the run.
            log: name of the log of its flow, if several flows have a run with this id.
            steps: largest number of decided operations (0 to 1,000).
            round: the round of the run (`Workflow.continue_as_new`); None: the current one.
        """
        steps = min(max(steps, 0), runs.STEPS_SHOWN_MAX)
        found = await self.find(ctx, id, log, steps=steps, round=round)
        if round not in {None, found.run.round}:
            raise NotFoundError(
                f"Run {id!r} has no round {round} in its history; it is in round "
                f"{found.run.round}, and at least the round before it is kept."
            )
        return found.details(await self._waits(ctx, found))

    async def events(
        self,
        ctx: Context,
        id: str,  # noqa: A002
        after: int = -1,
        log: str = "",
    ) -> runs.RunEvents:
        """Return the values that a run published, and the changes of its state, oldest first.

        Args:
            ctx: context of the call.
            id: id of the run.
            after: only events with a greater seqnum.
            log: name of the log of its flow, if several flows have a run with this id.
        """
        found = await self.find(ctx, id, log, events_after=after)
        assert found.events is not None, "they were asked for"
        return found.events.page(found)

    async def check(self, ctx: Context, limit: int = 100) -> runs.RunsCheck:
        """Check whether the deployed code continues the open runs, without executing them.

        The newest runs are checked first. The check ends after some seconds, even if there are
        further runs.

        Args:
            ctx: context of the call.
            limit: largest number of runs in each state to check (1 to 1,000).
        """
        limit = min(max(limit, 1), runs.RUNS_MAX)
        is_whole = True
        checked: dict[tuple[str, str], str | None] = {}
        end_s = waiting.monotonic_now() + SCAN_S_MAX
        for state in (State.RUNNING, State.PARKED):  # in this order: a run may be parked meanwhile
            page = await self.list(ctx, state=state, limit=limit)
            is_whole = is_whole and page.next is None
            for run in page.runs:
                if waiting.monotonic_now() > end_s:
                    is_whole = False
                    break
                checked[run.workflow, run.id] = await self._mismatch(ctx, run)
        mismatches = [
            runs.RunMismatch(run_id, workflow, reason)
            for (workflow, run_id), reason in checked.items()
            if reason is not None
        ]
        return runs.RunsCheck(len(checked), is_whole, tuple(mismatches))

    async def codes(self, ctx: Context) -> tuple[str, ...]:
        """Return the digests of the deployments with whose code open runs continue."""
        found = dict[str, None]()
        for flow in {flow.log_name: flow for flow in reversed(self.flows)}.values():
            log, runner = ctx.log(flow.log_name), flow.runner_of(ctx)
            with errors_for_people():
                await runner.member.look_once(log)
                for state in await all_states(log, runner):
                    found |= {code.digest: None for code in state.codes}
        return tuple(found)

    async def start(
        self,
        ctx: Context,  # noqa: ARG002 - the flow starts the run with it
        workflow: str,
        arguments: dict[str, Any] | None = None,
        id: str | None = None,  # noqa: A002
        log: str = "",
    ) -> runs.StartedRun:
        """Start a run of a workflow. If there is a run with this id, return that run.

        Args:
            ctx: context of the call.
            workflow: name of the workflow.
            arguments: arguments of the workflow, by name.
            id: id of the run; None: a new id.
            log: name of the log of its flow, if several flows have such a workflow.
        """
        flows = [flow for flow in self.flows if workflow in flow.definitions]
        if not flows:
            there = ", ".join(sorted(name for flow in self.flows for name in flow.definitions))
            raise NotFoundError(
                f"App {self._app.name} has no workflow {workflow!r}; there are: {there or 'none'}."
            )
        flows = [flow for flow in flows if log in {"", flow.log_name}]
        if len(flows) != 1:
            problem = f"is needed to say which flow with a workflow {workflow!r} is meant"
            raise InvalidArgumentsError(
                f"Nothing was started: field 'log' {problem}.",
                [{"field": "log", "problem": problem}],
            )
        with errors_for_people():
            return runs.StartedRun((await flows[0].start(workflow, arguments or {}, id=id)).id)

    async def result(self, ctx: Context, id: str, log: str = "") -> runs.FoundResult:  # noqa: A002
        """Return how a run ended, or that it has not ended. The run's history is not read.

        Args:
            ctx: context of the call.
            id: id of the run.
            log: name of the log of its flow, if several flows have a run with this id.
        """
        info, tail = await self._info(ctx, id, log), 0
        if info.end is None:
            tail = await ctx.log(info.log).tail()
            info = await self._info(ctx, id, info.log)  # reflects all records below the tail
        result = b""
        if info.end is not None and info.state == State.DONE:
            result = await _result_at(ctx.log(info.log), id, info.end)
        return runs.FoundResult(
            log=info.log,
            tag=run_tag(id),
            next=tail,
            state=info.state,
            has_ended=info.end is not None,
            result=plain_value(result) if result else None,
            problem=info.problem,
        )

    async def cancel(self, ctx: Context, id: str, log: str = "") -> None:  # noqa: A002
        """Cancel a run. The run's next operation then raises `Cancelled` in the workflow."""
        handle = await self._handle(ctx, id, log)
        with errors_for_people():
            await handle.cancel()

    async def retry(self, ctx: Context, id: str, log: str = "") -> None:  # noqa: A002
        """Execute a parked run again soon, with the deployed code."""
        handle = await self._handle(ctx, id, log)
        with errors_for_people():
            await handle.retry()

    async def fork(self, ctx: Context, id: str, step: str, log: str = "") -> runs.StartedRun:  # noqa: A002
        """Start a new run that continues from a step of this run, with the deployed code.

        Args:
            ctx: context of the call.
            id: id of the run.
            step: number or name of the step. A name means the first step with this name.
            log: name of the log of its flow, if several flows have a run with this id.
        """
        flow = self.flow_of(await self.find(ctx, id, log))
        with errors_for_people():
            return runs.StartedRun((await flow.fork(id, step)).id)

    async def signal(
        self,
        ctx: Context,
        id: str,  # noqa: A002
        name: str,
        value: Any = True,  # noqa: ANN401, FBT002 - any JSON value
        key: str | None = None,
        log: str = "",
    ) -> None:
        """Send a run a signal, durably. Of several signals with one key, the first takes effect."""
        handle = await self._handle(ctx, id, log)
        with errors_for_people():
            await handle.signal(name, value, key=key)

    async def query(
        self,
        ctx: Context,
        id: str,  # noqa: A002
        name: str = "",
        arguments: dict[str, Any] | None = None,
        log: str = "",
    ) -> Any:  # noqa: ANN401 - any JSON value
        """Return a value of a run: the answer of a query (`Flow.query`) with this name, or the
        result of the run's last step with this name or number. Without a name, return the status
        that the workflow set last.
        """
        found = await self.find(ctx, id, log)
        queries = self.flow_of(found).runner_of(ctx).versions.queries_of(found.run)
        if name in queries:
            with errors_for_people():
                handle = self.handle_on(ctx, id, found.log, found.workflow)
                return await handle.answer(found.run, name, arguments or {})
        if arguments:
            there = ", ".join(sorted(queries)) or "none"
            raise NotFoundError(
                f"The app has no query {name!r}, and only queries have arguments; there are: "
                f"{there}."
            )
        if not name:
            return status_value_in(found.run)
        for step in reversed(found.run.steps.values()):
            if name in {step.number, step.name} and step.failure is None:
                text = _result(step)
                return plain_value(text) if text else None
        raise NotFoundError(f"Run {id!r} has no query {name!r}, and has decided no such value.")

    # --- internal

    def _logs(self, ctx: Context) -> Iterator[Log]:
        """Yield the logs of the flows, each once."""
        for name in dict.fromkeys(flow.log_name for flow in self.flows):
            yield ctx.log(name)

    async def find(
        self,
        ctx: Context,
        id: str,  # noqa: A002
        log: str,
        *,
        steps: int = 0,
        events_after: int | None = None,
        round: int | None = None,  # noqa: A002
    ) -> _Found:
        """Return a run with its last steps, and its events after a seqnum. If a round is given,
        return the steps and events of this round.

        Raises:
            NotFoundError: no flow has a run with this id.
            InvalidArgumentsError: several flows have a run with this id.
        """
        with errors_for_people():
            run_tag(id)
            all_found: list[_Found] = []
            for one in self._logs(ctx):
                events = None if events_after is None else _Events(events_after)
                found = _Found(id, self._app.name, one.name, steps, events, round)
                if log in {"", one.name} and await _read(one, found):
                    found.now = await one.now()
                    all_found.append(found)
        self._check_only(id, [found.log for found in all_found])
        return all_found[0]

    def flow_of(self, found: _Found) -> InspectedFlow:
        """Return the flow of a run; see `_flow_with`."""
        return self._flow_with(found.log, found.workflow)

    def _flow_with(self, log: str, workflow: str) -> InspectedFlow:
        """Return the flow with the code of a workflow; without such a flow, one of the log."""
        of_log = [flow for flow in self.flows if flow.log_name == log]
        return next((flow for flow in of_log if workflow in flow.definitions), of_log[0])

    async def _mismatch(self, ctx: Context, info: runs.RunInfo) -> str | None:
        """Return why the code of this process does not continue a run; None: it does."""
        found = _Found(info.id, info.app, info.log)
        log = ctx.log(info.log)
        if not await _read(log, found) or found.run.finished is not None:
            return None
        versions = self.flow_of(found).runner_of(ctx).versions
        if versions.missing(found.run) is not None:
            return None  # the run waits for its code
        definition = versions.choose(found.run)
        if definition is None:
            return f"The code has no workflow {info.workflow!r}."
        mismatch = await find_mismatch(definition, log, ctx, info.id, found.run)
        return None if mismatch is None else mismatch.reason

    async def _info(self, ctx: Context, id: str, log: str) -> runs.RunInfo:  # noqa: A002
        """Return a run as lists show it. The history of the run is not read.

        Raises:
            NotFoundError, InvalidArgumentsError: as `find`.
        """
        found: list[runs.RunInfo] = []
        with errors_for_people():
            run_tag(id)
            for flow in {flow.log_name: flow for flow in reversed(self.flows)}.values():
                if log not in {"", flow.log_name}:
                    continue
                one = ctx.log(flow.log_name)
                info = await find_run(one, flow.runner_of(ctx), id, self._app.name)
                found += [info] if info is not None else []
        self._check_only(id, [info.log for info in found])
        return found[0]

    async def _handle(self, ctx: Context, id: str, log: str) -> Handle[Any]:  # noqa: A002
        """Return a handle on a run. The history of the run is not read.

        Raises:
            NotFoundError, InvalidArgumentsError: as `find`.
        """
        info = await self._info(ctx, id, log)
        return self.handle_on(ctx, id, info.log, info.workflow)

    def handle_on(self, ctx: Context, id: str, log: str, workflow: str) -> Handle[Any]:  # noqa: A002
        """Return a handle on a run that exists."""
        flow = self._flow_with(log, workflow)
        runner = flow.runner_of(ctx)
        definition = runner.definitions.get(workflow)
        if definition is None:  # the workflow has no code any more; a handle accepts any other code
            definition = next(iter(runner.definitions.values()), None)
        if definition is None:
            raise WrongStateError(f"App {self._app.name} has no code of workflow {workflow}.")
        return Handle(runner, definition, id, ctx, flow.queries)

    def _check_only(self, id: str, logs: Sequence[str]) -> None:  # noqa: A002
        """Check that exactly one log has a run.

        Raises:
            NotFoundError: no log has the run.
            InvalidArgumentsError: several logs have the run.
        """
        if not logs:
            raise NotFoundError(
                f"App {self._app.name} has no run {id!r}, or it was trimmed after its retention."
            )
        if len(logs) > 1:
            problem = f"is needed: {' and '.join(logs)} have a run {id!r}"
            raise InvalidArgumentsError(
                f"Nothing was done: field 'log' {problem}.", [{"field": "log", "problem": problem}]
            )

    async def _waits(self, ctx: Context, found: _Found) -> tuple[runs.RunWait, ...]:
        """Return the operations of a run that have begun and not ended. If this process executes
        the run, all such operations are returned. Otherwise only those in the log are returned:
        timers, operations that take long, and the waits of a run that has left memory.
        """
        if found.run.state is not State.RUNNING or found.has_successor:
            return ()
        timers, runner = found.timers(), self.flow_of(found).runner_of(ctx)
        running = runner.running.get(found.id)
        if running is None and (limit := found.started.limit) is not None:
            state = await runner.taking.turns.read(ctx.log(found.log), limit.name)
            if (wait := turn_wait(limit.name, state, found.id)) is not None:
                return (msgspec.structs.replace(wait, since=found.changed),)
        if running is None and (note := found.run.noted.get(CODE)) is not None:
            return (runs.RunWait(what="its code", since=note.since, error=note.error),)
        if running is None and (waits := found.run.waits) is not None:
            return (runs.RunWait(what=waits.what, since=found.waits_since, until=waits.until),)
        if running is None:
            noted = {number: what_is_done(note) for number, note in found.run.noted.items()}
            named = {number: f"operation {number}" for number in timers} | noted
            notes: Mapping[str, OperationNoted] = found.run.noted
        else:
            named = {
                operation.number: str(operation)
                for operation in running.execution.asked.left()
                if operation.kind != GATHER
            }
            begun = running.execution.in_progress
            notes = {number: one.note for number, one in begun.items()}
            named |= {n: what_is_done(note) for n, note in notes.items() if n not in named}
        return tuple(
            _wait(what, timers.get(number), notes.get(number), found.now)
            for number, what in named.items()
            if number not in found.run.steps
        )


def add_run_operations(app: App, flow: InspectedFlow) -> RunOperations | None:
    """Add a flow to the operations of its application. If the flow is the application's first flow,
    return the operations.
    """
    flows = flows_of(app)
    operations = None if flows else RunOperations(app)
    flows.append(flow)
    return operations


# --- one run


class _Events:
    """Collects a page of the events of a run: the oldest events after a seqnum."""

    def __init__(self, after: SeqNum) -> None:
        self._after = after
        self._events: list[runs.RunEvent] = []
        self._bytes = 0
        self._has_more = False

    def add(self, record: Record, run: RunState, known: RunRecord, before: State | None) -> None:
        """Take a record of the run that took effect; `before` is the run's state before it."""
        if record.seqnum <= self._after:
            return
        if isinstance(known, StepDecided) and known.kind == EVENT and known.failure is None:
            event = runs.RunEvent(record.seqnum, run.clock, "published", plain_value(known.result))
        elif isinstance(known, RunContinued):
            said = {"state": "continued", "problem": None, "round": run.round}
            event = runs.RunEvent(record.seqnum, run.clock, "state", said)
        elif run.state is not before and run.state is not None:
            said = {"state": run.state.value, "problem": status_of("", run).problem}
            event = runs.RunEvent(record.seqnum, run.clock, "state", said)
        else:
            return
        self._bytes += len(record.data)
        self._has_more = self._has_more or (self._bytes > _EVENTS_BYTES_MAX and bool(self._events))
        if not self._has_more:
            self._events.append(event)

    def page(self, found: _Found) -> runs.RunEvents:
        """Return the collected events."""
        end = self._events[-1].seqnum + 1 if self._has_more else found.run.end
        return runs.RunEvents(
            log=found.log,
            tag=run_tag(found.id),
            next=max(end, self._after + 1),
            events=tuple(self._events),
            has_more=self._has_more,
            has_ended=found.run.finished is not None and not self._has_more,
        )


class _Found:
    """A run, as its history shows it.

    Attributes:
        steps: its last decided operations, each with the time of its decision.
        events: collects its events; None: they are not needed.
        now: log time when the run was read, seconds since 1970.
        changed: when the last record that took effect, except a note, was ordered.
        waits_since: when the record `RunState.waits` was ordered; 0: there is none.
        has_successor: whether the shown round has ended and the next round has begun.
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        app: str,
        log: str,
        steps: int = 0,
        events: _Events | None = None,
        round: int | None = None,  # noqa: A002
    ) -> None:
        self.id = id
        self.app = app
        self.log = log
        self.run = RunState()
        self.steps: deque[tuple[float, StepDecided]] = deque(maxlen=steps)
        self.events = events
        self.now = self.changed = self.waits_since = 0.0
        self.has_successor = False
        self._round = round

    @property
    def started(self) -> RunStarted:
        """The record of its start."""
        assert self.run.started is not None, "only a run that has begun is found"
        return self.run.started

    @property
    def workflow(self) -> str:
        """The name of its workflow."""
        return self.started.workflow

    def timers(self) -> dict[str, float]:
        """Return the end of each timer that an operation waits for, by the operation's number."""
        steps = self.run.steps
        return {
            after: float(step.result)
            for step in steps.values()
            if step.kind == TIMER and (after := _number_after(step.number)) not in steps
        }

    def apply(self, record: Record) -> None:
        """Apply the next record of the run."""
        known, before = run_record(record.data), self.run.state
        if isinstance(known, RunContinued) and self._round == self.run.round:
            self.has_successor = self.has_successor or known.epoch == self.run.epoch
        if self.has_successor:
            return
        if not self.run.apply(record.seqnum, record.ordered_at, known) or known is None:
            return
        if not isinstance(known, OperationNoted):
            self.changed = self.run.clock
        if isinstance(known, RunWaits):
            self.waits_since = self.run.clock
        if self.events is not None:
            self.events.add(record, self.run, known, before)
        if isinstance(known, StepDecided):
            self.steps.append((self.run.clock, known))
        elif isinstance(known, RunContinued):
            self.steps.clear()

    def details(self, waits: tuple[runs.RunWait, ...]) -> runs.RunDetails:
        """Return the description of the run for people."""
        run, started = self.run, self.started
        result = run.finished.result if run.finished is not None else b""
        info = _info(self.id, run, self.app, self.log)
        return runs.RunDetails(
            run=msgspec.structs.replace(info, state="continued") if self.has_successor else info,
            owner=run.executor,
            epoch=run.epoch,
            arguments=_shown(started.arguments),
            steps=tuple(_step(at, step) for at, step in self.steps),
            steps_before=len(run.steps) - len(self.steps),
            waits=waits,
            advice=advice_for(self.id, run),
            cancel_asked=run.cancel_asked,
            changed=self.changed,
            result=_shown(result),
            parent=_origin(started.parent),
            forked=_origin(started.forked),
            round=run.round,
            moved=run.moved,
            moves_to=None if run.move_asked is None else run.move_asked.version,
            predecessor=run.round - 1 or None,
            successor=run.round + 1 if self.has_successor else None,
        )


async def _read(log: Log, found: _Found) -> bool:
    """Read the history of a run; False: there is no such run, or it was trimmed."""
    tag, run = run_tag(found.id), found.run
    while True:
        bound = run.end
        try:
            page = await log.read_range(tag, bound, limit=_PAGE)
        except TrimmedError as error:
            found.run = run = RunState()  # old rounds of the run, or the whole run, were trimmed
            found.steps.clear()
            run.end = max(bound, error.first_seqnum)
            continue
        for record in page:
            found.apply(record)
        if not page or found.has_successor:
            return run.started is not None


async def _result_at(log: Log, id: str, end: SeqNum) -> bytes:  # noqa: A002
    """Return the JSON text with which a run ended at seqnum `end`.

    Raises:
        NotFoundError: the run was trimmed meanwhile.
    """
    record: Record | None = None
    with suppress(TrimmedError):
        record = await log.read(end)
    finished = None if record is None else run_record(record.data)
    if not isinstance(finished, RunFinished):
        raise NotFoundError(f"Run {id!r} was trimmed after its retention.")
    return finished.result


def _info(id: str, run: RunState, app: str, log: str) -> runs.RunInfo:  # noqa: A002
    status = status_of(id, run)
    return runs.RunInfo(
        id=id,
        workflow=status.workflow,
        state=status.state.value,
        began=status.began,
        app=app,
        steps=status.steps,
        problem=status.problem,
        value=status.value,
        log=log,
        seqnum=status.place,
        ended=None if run.finished is None else run.ended,
        end=None if run.finished is None else run.ended_at,
        version=status.version,
    )


def _step(at: float, step: StepDecided) -> runs.RunStep:
    return runs.RunStep(
        number=step.number,
        name=step.name,
        kind=step.kind,
        decided=at,
        attempts=step.attempts or None,
        duration_s=None if step.duration_ms is None else step.duration_ms / 1000,
        result=_shown(_result(step)),
        error=_error(step.failure),
    )


def _wait(what: str, until: float | None, note: OperationNoted | None, now: float) -> runs.RunWait:
    """Return an operation that has not ended, with the content of its note."""
    if note is None:
        return runs.RunWait(what=what, until=until)
    is_due = note.next_at is not None and note.next_at > now
    return runs.RunWait(
        what=what,
        since=note.since,
        until=until,
        attempts=note.failed,
        error=note.error,
        next_attempt=note.next_at if is_due else None,
    )


def _result(step: StepDecided) -> bytes:
    """Return the value, as JSON text, that an operation returned to the workflow."""
    return value_of(step) if step.kind == SIGNAL else step.result


def _number_after(number: str) -> str:
    """Return the number of the operation that follows the operation `number` in its branch."""
    branch, dot, last = number.rpartition(".")
    return f"{branch}{dot}{int(last) + 1}"


def _error(failure: RecordedFailure | None) -> str | None:
    return f"{failure.kind}: {failure.message}" if failure is not None else None


def _origin(origin: Origin | None) -> str | None:
    return f"{origin.run}, step {origin.step}" if origin is not None else None


def _shown(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text. For a large text, return its first characters."""
    if len(text) <= _VALUE_BYTES_MAX:
        return plain_value(text) if text else None
    start = text[:_VALUE_BYTES_MAX].decode(errors="ignore")
    return f"{start}… ({len(text):,} bytes)"
