"""Schedules of workflows: the platform starts a run at each due time (`Flow.workflow(schedule=)`).

The platform calls a function of the application at each due time, as for `App.schedule`. The
function starts a run whose id contains the due time. So each due time starts one run, however often
the function is called. All runs of a schedule are in one partition. The limit of the schedule
decides which of these runs may begin. `Flow` makes a `Schedule`, which starts runs through
`Runner`.
"""

from __future__ import annotations

import inspect
from datetime import UTC, datetime
from typing import Final, Literal, Protocol, TypeAlias

import msgspec
import structlog

from bokiflow.definition import Definition
from bokiflow.errors_for_people import errors_for_people
from bokiflow.runner import Runner
from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.public_call import public_call
from bokiflow.runs.records import (
    LimitSettings,
    RunLimit,
    ScheduleSet,
    encode,
    partition_of,
    schedule_record,
    schedule_tag,
)
from bokiflow.runs.run_log import append_with_retry, is_transient
from indilog import (
    App,
    Context,
    Entry,
    IndilogError,
    InvalidArgumentsError,
    Log,
    NotFoundError,
    TrimmedError,
)
from indilog.sdk import (
    MAX_SEQNUM,
    CatchUp,
    Logs,
    ScheduleSpec,
    arguments_text,
    due_between,
    next_due,
)

Overlap: TypeAlias = Literal["skip", "queue", "concurrent"]
"""The treatment of a due time while an earlier run of the schedule is open."""
OVERLAPS: Final = ("skip", "queue", "concurrent")
BACKFILL_MAX: Final = 1000
"""Largest number of runs that one backfill starts."""
_DUE: Final = "due"
"""Name of the workflow's parameter that gets the due time."""
_SCHEDULES: Final = "bokiflow schedules"
"""Key of these operations in `App.of_libraries`."""
_TRIES: Final = 60
_PAUSE_S: Final = 1.0


class ScheduledFlow(Protocol):
    """The part of a `bokiflow.Flow` that a schedule uses."""

    @property
    def log_name(self) -> str:
        """The name of the log of its runs."""

    def logs(self) -> Logs:
        """Return the source of logs."""

    def runner_of(self, logs: Logs) -> Runner:
        """Return the executor of runs in this process."""


class ScheduleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a schedule of a workflow.

    `next_due`: the next due time, seconds since 1970; None: there is none. `open_runs`: the ids of
    the schedule's runs that have not ended, 1,000 at most.
    """

    workflow: str
    expression: str
    timezone: str
    overlap: Overlap
    catch_up: CatchUp
    is_paused: bool
    next_due: float | None
    open_runs: tuple[str, ...] = ()


class Schedule:
    """The schedule of one workflow.

    Args:
        flow: the flow of the workflow.
        definition: the workflow. It has no parameters without a default, except perhaps `due`,
            which gets the due time.
        spec: when runs start.
        overlap: the treatment of a due time while an earlier run is open.

    Attributes:
        workflow: name of the workflow.
        module: name of the workflow's module.
        spec: when runs start.
        overlap: the treatment of a due time while an earlier run is open.

    Raises:
        FlowSettingsError: the workflow has other parameters, or `overlap` is unknown.
    """

    def __init__(
        self, flow: ScheduledFlow, definition: Definition, spec: ScheduleSpec, overlap: Overlap
    ) -> None:
        if overlap not in OVERLAPS:
            raise FlowSettingsError(f"overlap is skip, queue or concurrent, not {overlap!r}.")
        if definition.limit is not None and overlap != "concurrent":
            raise FlowSettingsError(
                f"Workflow {definition.name!r} has a limit, which decides whether its runs "
                "overlap; write overlap='concurrent'."
            )
        parameters = list(inspect.signature(definition.body).parameters.values())[1:]
        for one in parameters:
            is_needed = one.default is one.empty and one.kind not in {
                one.VAR_POSITIONAL,
                one.VAR_KEYWORD,
            }
            if is_needed and one.name != _DUE:
                raise FlowSettingsError(
                    f"Workflow {definition.name!r} is started by a schedule, which gives it only "
                    f"`due`; give {one.name!r} a default."
                )
        self.workflow = definition.name
        self.module = definition.body.__module__
        self.spec = spec
        self.overlap = overlap
        self._takes_due = any(one.name == _DUE for one in parameters)
        self._flow = flow
        self._definition = definition

    def run_id(self, due: datetime) -> str:
        """Return the id of the run of a due time, such as `nightly@2026-11-27T00:05:00Z`."""
        return f"{self.workflow}@{due.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"

    async def start_due(self, ctx: Context) -> str | None:
        """Start the run of the due time for which `ctx` was made; return its id. None: the schedule
        is paused. After a transient error, the start is retried for up to a minute.

        Raises:
            InvalidArgumentsError: no schedule called the function.
        """
        if ctx.due is None:
            raise InvalidArgumentsError(
                f"Nothing was started: this function is called by the schedule of "
                f"{self.workflow}; start a run with {self.workflow}.start(...)."
            )
        due = datetime.fromtimestamp(ctx.due, UTC)
        for left in reversed(range(_TRIES)):
            try:
                if await self._is_paused(ctx):
                    structlog.get_logger().info(
                        "schedule is paused", workflow=self.workflow, due=due.isoformat()
                    )
                    return None
                return await self._start(ctx, due, skips=self.overlap == "skip")
            except IndilogError as error:
                # The id contains the due time, so a start may be repeated.
                if not (is_transient(error) and left):
                    raise
            await waiting.pause(_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    async def pause(self) -> None:
        """Start no further runs at due times, until `resume`. Open runs continue. Due times that
        pass meanwhile start no runs later, unless `backfill` starts them.
        """
        await self._set(is_paused=True)

    async def resume(self) -> None:
        """Start runs at due times again."""
        await self._set(is_paused=False)

    async def backfill(self, start: datetime, end: datetime) -> list[str]:
        """Start the runs of the due times from `start` to before `end`; return their ids.

        A due time that has a run gets no further run. If runs must not overlap, these runs wait for
        each other, in the order of their due times. A paused schedule can also be backfilled. If
        the call fails, repeat it.

        Raises:
            FlowSettingsError: a time has no time zone or has not passed, or there are more than
                1,000 due times; nothing was started.
        """
        logs = self._flow.logs()
        if start.tzinfo is None or end.tzinfo is None:
            raise FlowSettingsError("Give both times with a time zone, such as tzinfo=UTC.")
        if end.timestamp() > await logs.log(self._flow.log_name).now() + 1:
            raise FlowSettingsError("A backfill starts runs of due times that have passed.")
        times = due_between(
            self.spec, start.timestamp() - 0.001, end.timestamp() - 0.001, most=BACKFILL_MAX + 1
        )
        if len(times) > BACKFILL_MAX:
            raise FlowSettingsError(
                f"There are more than {BACKFILL_MAX:,} due times between {start} and {end}; "
                "nothing was started. Backfill a shorter time."
            )
        dues = [datetime.fromtimestamp(time, UTC) for time in times]
        return [await self._start(logs, due, skips=False) for due in dues]

    async def status(self) -> ScheduleStatus:
        """Return the status of the schedule."""
        logs = self._flow.logs()
        log = logs.log(self._flow.log_name)
        is_paused, now = await self._is_paused(logs), await log.now()
        open_runs = await self._open_runs(logs, log)
        return ScheduleStatus(
            workflow=self.workflow,
            expression=self.spec.expression,
            timezone=self.spec.timezone,
            overlap=self.overlap,
            catch_up=self.spec.catch_up,
            is_paused=is_paused,
            next_due=next_due(self.spec, now),
            open_runs=open_runs,
        )

    # --- internal

    async def _start(self, logs: Logs, due: datetime, *, skips: bool) -> str:
        id_ = self.run_id(due)
        arguments = arguments_text({_DUE: due} if self._takes_due else {})
        limit: RunLimit | None = None
        if self.overlap != "concurrent":
            limit = RunLimit(f"{self.workflow}@", LimitSettings(concurrency=1), skips=skips)
        with public_call():
            runner = self._flow.runner_of(logs)
            await runner.start(logs, self._definition, arguments, id_, limit=limit)
        return id_

    async def _is_paused(self, logs: Logs) -> bool:
        try:
            last = await logs.log(self._flow.log_name).read_prev(
                schedule_tag(self.workflow), MAX_SEQNUM
            )
        except TrimmedError:
            return False
        known = None if last is None else schedule_record(last.data)
        return known is not None and known.is_paused

    async def _set(self, *, is_paused: bool) -> None:
        log, tag = self._flow.logs().log(self._flow.log_name), schedule_tag(self.workflow)
        with public_call():
            entry = Entry(encode(ScheduleSet(self.workflow, is_paused)), (tag,))
            seqnum = await append_with_retry(log, [entry])
        try:
            await log.trim(seqnum, tag=tag)
        except IndilogError as error:  # the next record's trim frees these records
            structlog.get_logger().warning(
                "old records of a schedule are not trimmed",
                workflow=self.workflow,
                reason=str(error),
            )

    async def _open_runs(self, logs: Logs, log: Log) -> tuple[str, ...]:
        runner = self._flow.runner_of(logs)
        await runner.member.look_once(log)
        number = partition_of(self.workflow, runner.member.count)
        state = await runner.read_partition(log, number)
        prefix = f"{self.workflow}@"
        runs = state.runs.items()
        ids = [id_ for id_, run in runs if run.workflow == self.workflow and id_.startswith(prefix)]
        return tuple(ids[:BACKFILL_MAX])


class StartedRuns(msgspec.Struct, frozen=True):
    """The ids of started runs."""

    ids: tuple[str, ...]


class ScheduleOperations:
    """The operations `schedules.*` of an application, for people.

    Attributes:
        schedules: the schedules of its workflows, by name of the workflow.
    """

    def __init__(self, app: App) -> None:
        self.schedules: dict[str, Schedule] = {}
        self._app = app.name
        for name, operation in (
            ("schedules.list", self.list),
            ("schedules.pause", self.pause),
            ("schedules.resume", self.resume),
            ("schedules.backfill", self.backfill),
        ):
            app.add_operation(name, operation)

    async def list(self, ctx: Context) -> tuple[ScheduleStatus, ...]:  # noqa: ARG002
        """Return the schedules of the application's workflows."""
        return tuple([await schedule.status() for schedule in self.schedules.values()])

    async def pause(self, ctx: Context, workflow: str) -> None:  # noqa: ARG002
        """Start no further runs of a workflow at its due times."""
        await self._of(workflow).pause()

    async def resume(self, ctx: Context, workflow: str) -> None:  # noqa: ARG002
        """Start runs of a workflow at its due times again."""
        await self._of(workflow).resume()

    async def backfill(
        self,
        ctx: Context,  # noqa: ARG002
        workflow: str,
        start: datetime,
        end: datetime,
    ) -> StartedRuns:
        """Start the runs of the due times from `start` to before `end`."""
        schedule = self._of(workflow)
        with errors_for_people():
            return StartedRuns(tuple(await schedule.backfill(start, end)))

    def _of(self, workflow: str) -> Schedule:
        if (schedule := self.schedules.get(workflow)) is None:
            there = ", ".join(sorted(self.schedules))
            raise NotFoundError(
                f"App {self._app} has no schedule of a workflow {workflow!r}; it has {there}."
            )
        return schedule


def add_schedule(app: App, schedule: Schedule) -> None:
    """Register a schedule with the application, so that the platform starts runs of its workflow.

    Raises:
        FlowSettingsError: the schedule is invalid, there are too many, or the application has
            another schedule of a workflow with this name.
    """
    name, spec = schedule.workflow, schedule.spec
    operations: ScheduleOperations | None = app.of_libraries.get(_SCHEDULES)
    if operations is not None and name in operations.schedules:
        raise FlowSettingsError(f"There are two scheduled workflows {name!r}; rename one.")

    async def start_due(ctx: Context) -> str | None:
        return await schedule.start_due(ctx)

    # The function counts as code of the application, which may have no other functions.
    start_due.__module__ = schedule.module
    start_due.__name__ = spec.function
    start_due.__doc__ = f"Start the run of workflow {name} at a due time."
    try:
        app.schedule(spec.expression, timezone=spec.timezone, catch_up=spec.catch_up)(start_due)
    except ValueError as error:
        raise FlowSettingsError(f"Workflow {name!r} has no schedule: {error}") from error
    if operations is None:
        operations = app.of_libraries[_SCHEDULES] = ScheduleOperations(app)
    operations.schedules[name] = schedule
