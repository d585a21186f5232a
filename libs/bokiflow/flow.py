"""Flows: the workflows of an application, and handles on their runs (API.md, "BokiFlow").

flow = bokiflow.Flow(app)

@flow.workflow
async def reserve(wf: bokiflow.Workflow, order: Order) -> Receipt: ...

handle = await reserve.start(order, id="order-42")

A `Flow` has one `Runner` per process and platform, which executes the runs. `Flow` adds operations
(`inspection`, `moving`) and schedules to its application.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Final, Generic, Never, Protocol, TypeVar, overload

from bokiflow.definition import Definition
from bokiflow.driver import Driver
from bokiflow.handle import Handle, unknown
from bokiflow.history import decided_before
from bokiflow.inspection import add_run_operations
from bokiflow.limits.limit import Chosen, WorkflowLimits
from bokiflow.moving import add_move_operations
from bokiflow.queries import Query
from bokiflow.replay_check import ReplayMismatch, find_mismatch
from bokiflow.run_lists import RunFilter, list_runs
from bokiflow.runner import EXECUTIONS_MAX, Runner, RunnerSettings
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.public_call import public_call
from bokiflow.runs.records import (
    LEASE_S_MAX,
    PARTITIONS,
    PARTITIONS_MAX,
    Origin,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from bokiflow.schedules import Overlap, Schedule, add_schedule
from bokiflow.versions import Versions
from bokiflow.workflow import Workflow
from indilog import App
from indilog.sdk import CatchUp, Logs, ScheduleSpec, current_context
from indilog.sdk.runs import RUNS_MAX, RunInfo, RunPage, RunPlace

_ResultT = TypeVar("_ResultT")
_QueryT = TypeVar("_QueryT", bound=Callable[..., Any])
_ResultT_co = TypeVar("_ResultT_co", covariant=True)
LEASE_S: Final = 5.0
PASSIVE_AFTER_S: Final = 10.0
CANCEL_GRACE_S: Final = 30.0
QUERY_TIMEOUT_S: Final = 10.0
RETENTION_S: Final = 7 * 86_400.0
_LEASE_S_MIN: Final = 0.05


class _Decorator(Protocol):
    """Makes an async function a workflow."""

    def __call__(
        self, body: Callable[Concatenate[Workflow, ...], Coroutine[Any, Any, _ResultT]], /
    ) -> Startable[_ResultT]: ...


class Startable(Generic[_ResultT_co]):
    """A decorated workflow.

    Attributes:
        name: name of the workflow, unique in its flow.
    """

    def __init__(
        self, flow: Flow, definition: Definition, schedule: Schedule | None = None
    ) -> None:
        self._schedule = schedule
        self.name = definition.name
        self.definition = definition
        self._flow = flow

    async def start(
        self,
        *arguments: Any,  # noqa: ANN401 - checked by the workflow's type hints
        id: str | None = None,  # noqa: A002 - API.md
        **named: Any,  # noqa: ANN401
    ) -> Handle[_ResultT_co]:
        """Start a run with these arguments, and execute it in this process.

        When this returns, the run is durable: it reaches its end despite crashes. If a run with
        this `id` exists, no run is started, and the handle is on the existing run. So a start can
        be repeated. A repetition with other arguments logs a warning and does not change the run's
        arguments. Without an `id`, each call starts a new run.

        Raises:
            InvalidArgumentsError: the arguments do not fit the type hints; nothing was started.
            RunIdInUseError: the id belongs to a run of another workflow.
            OverloadedError: this process executes too many runs, or too many runs wait for their
                turn; nothing was started.
            DiskFullError: the log has no disk space; nothing was started, and nothing was retried.
            NotReadyError: the platform was unavailable for half a minute or more; nothing was
                started.
            OutcomeUnknownError: the run may have started. With an `id`, repeat the call.
            FlowSettingsError: no function is running, and `Flow.attach` was not called.
        """
        return await self._flow.start_run(self.definition, arguments, named, id)

    def __call__(self, *_: object, **__: object) -> Never:
        """Refuse a direct call of the workflow.

        Raises:
            FlowSettingsError: always. The message says how to start the workflow.
        """
        raise FlowSettingsError(
            f"Workflow {self.name!r} must be started, not called: {self.name}.start(...), or in a "
            f"workflow wf.run({self.name}, ...)."
        )

    def handle(self, id: str) -> Handle[_ResultT_co]:  # noqa: A002
        """Return a handle on the run `id`. The run need not exist."""
        run_tag(id)
        flow = self._flow
        return Handle(flow.runner, self.definition, id, flow.logs(), flow.queries)

    @property
    def schedule(self) -> Schedule:
        """The schedule by which the platform starts runs of the workflow. Its methods pause,
        resume and backfill the schedule.

        Raises:
            FlowSettingsError: the workflow has no schedule.
        """
        if self._schedule is None:
            raise FlowSettingsError(
                f"Workflow {self.name!r} has no schedule; write @flow.workflow(schedule=...)."
            )
        return self._schedule

    # --- for runs that start child runs

    @property
    def log_name(self) -> str:
        """The name of the log of the workflow's runs."""
        return self._flow.log_name

    def arguments_text(self, given: tuple[object, ...], named: dict[str, object]) -> bytes:
        """Return the arguments of a run as a JSON object.

        Raises:
            InvalidArgumentsError: the arguments do not fit the workflow's type hints.
        """
        return self.definition.checked_text(given, named)

    async def start_child(self, arguments: bytes, id: str, parent: Origin) -> None:  # noqa: A002
        """Start a run as a step of another run, unless a run with this id exists."""
        flow = self._flow
        await flow.runner.start(flow.logs(), self.definition, arguments, id, parent=parent)

    def result_of(self, text: bytes) -> _ResultT_co:
        """Return the value of a result, given as JSON text."""
        value: Any = self.definition.signature.result(text)
        result: _ResultT_co = value
        return result

    def __repr__(self) -> str:
        return f"Startable({self.name!r})"


class Flow:
    """The workflows of an application, and the log of their runs.

    Args:
        app: the application, or a name if the program is not an application.
        log: name of the log of the runs, which must hold no other records; default: `<app>/flow`.
        lease: seconds without a heartbeat after which other processes take over the runs of a
            process (0.05 to 3,600).
        executions: largest number of runs that one process executes concurrently (1 or more).
            Further starts are refused. A run that only waits (for a time, a signal, a child) counts
            as a sixteenth.
        retention: seconds for which an ended run is kept (0 or greater).
        passive_after: seconds after which a run that only waits (for a time, a signal, a child) is
            removed from memory (0 or greater). The run is replayed when its wait may be over.
        cancel_grace: seconds from the cancellation of a run until bodies of its steps that still
            run are ended (0 or greater; infinite: never). Default: 30.
        query_timeout: seconds after which a query fails (greater than 0). Default: 10.
        partitions: number of partitions of the runs (1 to 1,024). The first process that uses the
            log fixes the number; a later value is ignored.

    Attributes:
        log_name: name of the log of the runs.
        definitions: the workflows, by name.
        queries: the queries, by name.
        runner: executes runs in this process.
    """

    def __init__(
        self,
        app: App | str,
        *,
        log: str | None = None,
        lease: float = LEASE_S,
        executions: int = EXECUTIONS_MAX,
        retention: float = RETENTION_S,
        partitions: int = PARTITIONS,
        passive_after: float = PASSIVE_AFTER_S,
        cancel_grace: float = CANCEL_GRACE_S,
        query_timeout: float = QUERY_TIMEOUT_S,
    ) -> None:
        if not _LEASE_S_MIN <= lease <= LEASE_S_MAX:
            raise FlowSettingsError(f"lease must be {_LEASE_S_MIN} to {LEASE_S_MAX:,.0f} seconds.")
        if executions < 1:
            raise FlowSettingsError("executions must be at least 1.")
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise FlowSettingsError(f"partitions must be 1 to {PARTITIONS_MAX:,}.")
        durations = {
            "retention": retention, "passive_after": passive_after, "cancel_grace": cancel_grace,
        }  # fmt: skip
        for name, seconds in durations.items():
            if not seconds >= 0:
                raise FlowSettingsError(f"{name} must be a number of seconds, 0 or greater.")
        if not query_timeout > 0:
            raise FlowSettingsError("query_timeout must be a number of seconds, greater than 0.")
        self._settings = RunnerSettings(
            lease_s=lease,
            executions_max=executions,
            partitions=partitions,
            retention_s=retention,
            passive_after_s=passive_after,
            cancel_grace_s=cancel_grace,
            query_timeout_s=query_timeout,
        )
        self._app = app
        self._log_name = log
        self.definitions: dict[str, Definition] = {}
        self.queries: dict[str, Query] = {}
        self._runner: Runner | None = None
        self._versions = Versions(self, app if isinstance(app, App) else None)
        self._attached: Logs | None = None
        if isinstance(app, App):
            app.add_service(self.drive, name=f"flow-{len(app.services) + 1}")
            if (operations := add_run_operations(app, self)) is not None:
                add_move_operations(app, operations)

    @property
    def log_name(self) -> str:
        """The name of the log of the runs. It depends on the name under which the application is
        deployed.
        """
        name = self._app.name if isinstance(self._app, App) else self._app
        return self._log_name or f"{name}/flow"

    @property
    def runner(self) -> Runner:
        """The executor of runs in this process, for the platform of `logs()`."""
        return self.runner_of(self.logs())

    def runner_of(self, logs: Logs) -> Runner:
        """Return the executor of runs in this process for a platform.

        The flow keeps one executor, whose leases, partitions and cancellations belong to one
        platform. For another platform, such as new logs in a test, the flow makes a new executor.
        An attached source of logs counts as one platform, even if it uses several connections. The
        flow of an earlier deployment returns the executor of the newest deployment's flow.
        """
        if isinstance(newest := self._versions.newest, Flow) and newest is not self:
            return newest.runner_of(logs)
        scope = logs if logs is self._attached else logs.log(self.log_name).scope
        if self._runner is None or self._runner.scope is not scope:
            self._runner = Runner(self.log_name, self._versions, scope, self._settings)
        return self._runner

    @overload
    def workflow(
        self, body: Callable[Concatenate[Workflow, ...], Coroutine[Any, Any, _ResultT]], /
    ) -> Startable[_ResultT]: ...

    @overload
    def workflow(
        self,
        /,
        *,
        schedule: str | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "last",
        overlap: Overlap = "skip",
        concurrency: int | None = None,
        total: int | None = None,
        rate: str | None = None,
        key: Chosen | None = None,
        priority: Chosen | None = None,
        pinned: bool | None = None,
    ) -> _Decorator: ...

    def workflow(
        self,
        body: Callable[Concatenate[Workflow, ...], Coroutine[Any, Any, Any]] | None = None,
        /,
        *,
        schedule: str | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "last",
        overlap: Overlap = "skip",
        concurrency: int | None = None,
        total: int | None = None,
        rate: str | None = None,
        key: Chosen | None = None,
        priority: Chosen | None = None,
        pinned: bool | None = None,
    ) -> Any:
        """Make an async function a workflow of this flow.

        With a `schedule`, the platform starts one run at each due time, across nodes and restarts.
        The run's id is `<workflow>@<due time>`. The parameter `due` gets the due time (a datetime
        in UTC); all other parameters need defaults. The flow must be that of an application.

        With `concurrency` or `rate`, runs above the limit are durable, and wait for their *turn* in
        the order of their starts. The limits hold for all processes together. A run keeps its turn
        from its first line until it ends or is parked, even while it waits.

        Args:
            body: the function, if the decorator has no arguments.
            schedule: a cron expression with five fields, as in `App.schedule`.
            timezone: time zone of the expression, such as `Europe/Berlin`.
            catch_up: which missed due times run, as in `App.schedule`.
            overlap: while an earlier run of the schedule is open, `skip` cancels a new run at once,
                `queue` lets it wait for the earlier runs, and `concurrent` lets it execute.
            concurrency: largest number of runs (with `key`: of one key) that execute at a time (1
                to 10,000).
            total: with `key`, the largest number for all keys together, served round robin.
            rate: largest number of runs (with `key`: of one key) that begin in an interval, such as
                `10/s`, `100/min` or `5/2h`.
            key: the key of a run: the name of an argument, or a function whose parameters are
                arguments. Its value as text has 1 to 256 characters.
            priority: a whole number up to 1,000,000: the name of an argument, or a function of
                arguments. Of the waiting runs with one key, a larger number begins first.
            pinned: whether runs of earlier deployments keep their code, while the platform has it,
                or continue with this code. None: they keep it, unless this code calls `wf.patched`.

        Raises:
            FlowSettingsError: the function is not async, its first parameter is not the workflow,
                the flow has a workflow of this name, or the schedule or a limit is invalid.
        """
        given = (concurrency, total, rate, key, priority)
        limits = None if given == (None,) * len(given) else WorkflowLimits(*given)
        cron = None if schedule is None else (schedule, timezone, catch_up)

        def registered(
            body: Callable[Concatenate[Workflow, ...], Coroutine[Any, Any, Any]],
        ) -> Startable[Any]:
            made = Definition(body.__name__, body, limits, pinned=pinned, flow=self._versions)
            return self._register(made, cron, overlap)

        return registered if body is None else registered(body)

    def _register(
        self, definition: Definition, cron: tuple[str, str, CatchUp] | None, overlap: Overlap
    ) -> Startable[Any]:
        if definition.name in self.definitions:
            raise FlowSettingsError(f"There are two workflows {definition.name!r}; rename one.")
        scheduled: Schedule | None = None
        if cron is not None:
            spec = ScheduleSpec(f"start-{definition.name}", *cron)
            scheduled = self._scheduled(Schedule(self, definition, spec, overlap))
        self.definitions[definition.name] = definition
        return Startable(self, definition, scheduled)

    def _scheduled(self, schedule: Schedule) -> Schedule:
        if not isinstance(self._app, App):
            raise FlowSettingsError(
                f"Workflow {schedule.workflow!r} has a schedule, so its flow needs an application: "
                "Flow(app)."
            )
        add_schedule(self._app, schedule)
        return schedule

    def query(self, body: _QueryT, /) -> _QueryT:
        """Make a function a query of this flow's runs, and return it unchanged.

        `Handle.query` and `indilog runs query` answer the query for a run of any workflow, in any
        state. The first parameter of the function is a `RunView`. Its `vars` are the values that
        the workflow has put into `wf.vars` up to the last durable outcome. The run is replayed to
        find these values; nothing is executed or appended. The function runs in a thread, and fails
        after `Flow(query_timeout=)`. Its other parameters and its result have JSON forms.

        Raises:
            FlowSettingsError: the function is async, takes no `RunView`, or the flow has a query of
                this name.
        """
        query = Query(body)
        if query.name in self.queries:
            raise FlowSettingsError(f"There are two queries {query.name!r}; rename one.")
        self.queries[query.name] = query
        return body

    async def drive(self, logs: Logs) -> None:
        """Take over the runs of crashed processes, until cancelled.

        Each worker of a deployed application does this without a call. Any other program that
        starts workflows must run this method in a task.
        """
        await Driver(self.runner_of(logs), retention_s=self._settings.retention_s).drive(logs)

    def attach(self, logs: Logs) -> None:
        """Set the source of logs for calls outside of functions: a client, or `MemoryLogs`."""
        self._attached = logs

    def logs(self) -> Logs:
        """Return the source of logs: the context of the running function; without one, the attached
        source.

        Raises:
            FlowSettingsError: no function is running, and no source is attached.
        """
        if (context := current_context()) is not None:
            return context
        if self._attached is not None:
            return self._attached
        raise FlowSettingsError(
            "Outside of a function, attach a source of logs first: flow.attach(client)."
        )

    async def start(
        self,
        workflow: str,
        arguments: Mapping[str, object],
        *,
        id: str | None = None,  # noqa: A002
    ) -> Handle[Any]:
        """Start a run by the name of its workflow, as `Startable.start` does.

        Raises:
            FlowSettingsError: this flow has no such workflow.
        """
        return await self.start_run(self._definition(workflow), (), arguments, id)

    async def start_run(
        self,
        definition: Definition,
        arguments: tuple[object, ...],
        named: Mapping[str, object],
        id: str | None,  # noqa: A002
    ) -> Handle[Any]:
        """Start a run of a workflow of this flow; see `Startable.start`."""
        if id is not None:
            run_tag(id)
        logs = self.logs()
        text = definition.checked_text(arguments, named)
        with public_call():
            runner = self.runner_of(logs)
            run, _ = await runner.start(logs, definition, text, id)
        return Handle(runner, definition, run, logs, self.queries)

    def handle(self, workflow: str, id: str) -> Handle[Any]:  # noqa: A002
        """Return a handle on a run, by the name of its workflow.

        Raises:
            FlowSettingsError: this flow has no such workflow.
        """
        definition = self._definition(workflow)
        run_tag(id)
        return Handle(self.runner, definition, id, self.logs(), self.queries)

    async def runs(
        self,
        *,
        workflow: str | None = None,
        state: State | None = None,
        id_prefix: str = "",
        older_s: float | None = None,
        newer_s: float | None = None,
        version: int | None = None,
        limit: int = 100,
        before: RunPlace | None = None,
    ) -> RunPage:
        """Return runs, newest first. Runs are ordered by their starts; with an ended `state`, by
        their ends.

        The histories of runs are not read, so the time of a call does not depend on the number of
        runs. The next page continues at the same place, even if runs begin and end meanwhile.

        Args:
            workflow: only runs of this workflow.
            state: only runs in this state.
            id_prefix: only runs whose id begins with this.
            older_s: only runs that began at least this many seconds ago. With an ended `state`, the
                time of the end counts.
            newer_s: only runs that began at most this many seconds ago. With an ended `state`, the
                time of the end counts.
            version: only runs that continue, or have ended, with the code of this deployment.
            limit: largest number of runs (1 to 1,000).
            before: `next` of the page before.

        Raises:
            FlowSettingsError: `limit` is out of range, or there is no such state.
        """
        if not 1 <= limit <= RUNS_MAX:
            raise FlowSettingsError(f"limit must be 1 to {RUNS_MAX:,}.")
        if state is not None and state not in set(State):
            raise FlowSettingsError(f"A run's state is {', '.join(State)}, not {state!r:.64}.")
        log = self.logs().log(self.log_name)
        wanted = RunFilter(
            app=self._app.name if isinstance(self._app, App) else self._app,
            log=self.log_name,
            workflow=workflow,
            state=None if state is None else State(state),
            id_prefix=id_prefix,
            version=version,
        )
        wanted = await wanted.narrowed(log, older_s=older_s, newer_s=newer_s, before=before)
        return await list_runs(log, self.runner, wanted, limit)

    async def check_replay(self, *, limit: int = 1000) -> list[ReplayMismatch]:
        """Check whether the code of this flow continues the open runs. Return the runs that it does
        not continue.

        Nothing is executed or written: each workflow is replayed against the decided outcomes of
        its runs. Use this before a deployment, in a program that imports the new code and is
        attached to the platform. A run that cannot be read is left out and logged.

        Args:
            limit: largest number of runs to check in each of the states running and parked (1 or
                more).

        Raises:
            FlowSettingsError: `limit` is less than 1.
        """
        if limit < 1:
            raise FlowSettingsError("limit must be at least 1.")
        found: list[ReplayMismatch] = []
        logs = self.logs()
        log = logs.log(self.log_name)
        for state in (State.RUNNING, State.PARKED):
            for status in await self._newest(state, limit):
                definition = self.definitions.get(status.workflow)
                if definition is None:
                    reason = f"The code has no workflow {status.workflow!r}."
                    found.append(ReplayMismatch(status.id, status.workflow, reason))
                    continue
                run = await read_run(log, status.id, RunState(), is_reused=True)
                mismatch = await find_mismatch(definition, log, logs, status.id, run)
                if mismatch is not None:
                    found.append(mismatch)
        return found

    async def _newest(self, state: State, count: int) -> list[RunInfo]:
        found: list[RunInfo] = []
        before: RunPlace | None = None
        while count > len(found):
            size = min(count - len(found), RUNS_MAX)
            page = await self.runs(state=state, limit=size, before=before)
            found += page
            before = page.next
            if before is None:
                break
        return found

    async def fork(self, id: str, step: str) -> Handle[Any]:  # noqa: A002
        """Start a new run that continues from a step of another run, with the current code.

        The new run has the arguments of the other run, and the outcomes that were decided before
        `step`. Operations with these outcomes do not run again. The other run does not change. The
        steps of the new run have their own idempotency keys.

        Args:
            id: id of the other run.
            step: number or name of the step. A name means the first step with this name.

        Raises:
            UnknownRunError: there is no such run.
            FlowSettingsError: the run has no such step, or this flow has no such workflow.
            OverloadedError: this process executes too many runs.
        """
        logs = self.logs()
        runner = self.runner_of(logs)
        run = await read_run(logs.log(self.log_name), id, RunState(), is_reused=True)
        if run.started is None:
            raise unknown(id, self.log_name)
        number, decided = decided_before(run, step)
        definition = self._definition(run.started.workflow)
        origin = Origin(id, number)
        with public_call():
            new = await runner.fork(logs, definition, run.started.arguments, origin, decided)
        return Handle(runner, definition, new, logs, self.queries)

    def _definition(self, workflow: str) -> Definition:
        definition = self.definitions.get(workflow)
        if definition is None:
            raise FlowSettingsError(f"There is no workflow {workflow!r} here.")
        return definition

    def __repr__(self) -> str:
        return f"Flow({self.log_name!r}, workflows={sorted(self.definitions)})"
