"""Lets people see and steer the runs of an application: the operations `runs.*` of its flows.

The gateway, the command line and clients call these operations in a worker of the application
(`indilog.App.add_operation`, `indilog.sdk.runs`). The operations read everything from the log. So
any worker can answer, even while the executor of a run hangs or is dead. `Flow` registers them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from bokiflow.errors_for_people import errors_for_people
from bokiflow.found_run import FoundEvents, FoundRun, read_found, result_of
from bokiflow.handle import Handle
from bokiflow.limits.waits_text import turn_wait
from bokiflow.operations.progress import status_value_in
from bokiflow.replay_check import find_mismatch
from bokiflow.run_lists import SCAN_S_MAX, RunFilter, all_states, find_run, list_runs
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.records import (
    CODE,
    RunFinished,
    run_record,
    run_tag,
)
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
                text = result_of(step)
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
    ) -> FoundRun:
        """Return a run with its last steps, and its events after a seqnum. If a round is given,
        return the steps and events of this round.

        Raises:
            NotFoundError: no flow has a run with this id.
            InvalidArgumentsError: several flows have a run with this id.
        """
        with errors_for_people():
            run_tag(id)
            all_found: list[FoundRun] = []
            for one in self._logs(ctx):
                events = None if events_after is None else FoundEvents(events_after)
                found = FoundRun(id, self._app.name, one.name, steps, events, round)
                if log in {"", one.name} and await read_found(one, found):
                    found.now = await one.now()
                    all_found.append(found)
        self._check_only(id, [found.log for found in all_found])
        return all_found[0]

    def flow_of(self, found: FoundRun) -> InspectedFlow:
        """Return the flow of a run; see `_flow_with`."""
        return self._flow_with(found.log, found.workflow)

    def _flow_with(self, log: str, workflow: str) -> InspectedFlow:
        """Return the flow with the code of a workflow; without such a flow, one of the log."""
        of_log = [flow for flow in self.flows if flow.log_name == log]
        return next((flow for flow in of_log if workflow in flow.definitions), of_log[0])

    async def _mismatch(self, ctx: Context, info: runs.RunInfo) -> str | None:
        """Return why the code of this process does not continue a run; None: it does."""
        found = FoundRun(info.id, info.app, info.log)
        log = ctx.log(info.log)
        if not await read_found(log, found) or found.run.finished is not None:
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

    async def _waits(self, ctx: Context, found: FoundRun) -> tuple[runs.RunWait, ...]:
        """Return the operations of a run that have begun and not ended. If this process executes
        the run, all such operations are returned. Otherwise only those in the log are returned:
        waits with a time limit, operations that take long, and the waits of a run that has left
        memory.
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
            return (runs.RunWait(what=waits.what, since=found.progressed, until=waits.until),)
        if running is None:
            notes = found.notes()
            named = {number: what_is_done(note) for number, note in notes.items()}
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
            found.wait_of(number, what, timers.get(number), notes.get(number))
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
