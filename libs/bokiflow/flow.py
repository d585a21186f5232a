"""Flows: workflows of an application, and handles on their runs (API.md, "BokiFlow").

flow = bokiflow.Flow(app)

@flow.workflow
async def reserve(wf: bokiflow.Workflow, order: Order) -> Receipt: ...

handle = await reserve.start(order, id="order-42")
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, Generic, Never, TypeVar

from bokiflow.definition import Definition
from bokiflow.driver import Driver
from bokiflow.handle import Handle, Status, status_of, unknown
from bokiflow.history import decided_before, listed
from bokiflow.runner import EXECUTIONS_MAX, Runner
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.fold import Run
from bokiflow.runs.public_call import public_call
from bokiflow.runs.records import LEASE_S_MAX, Origin, run_tag
from bokiflow.runs.run_log import Logs, read_run
from bokiflow.runs.states import State
from bokiflow.workflow import Workflow
from indilog import App
from indilog.sdk import SeqNum, check_bound, current_context

_ResultT = TypeVar("_ResultT")
_ResultT_co = TypeVar("_ResultT_co", covariant=True)
LEASE_S: Final = 5.0
RETENTION_S: Final = 7 * 86_400.0
_LEASE_S_MIN: Final = 0.05


class Startable(Generic[_ResultT_co]):
    """A decorated workflow.

    Attributes:
        name: unique in its flow.
    """

    def __init__(self, flow: Flow, definition: Definition) -> None:
        self.name = definition.name
        self.definition = definition
        self._flow = flow

    async def start(
        self,
        *arguments: Any,  # noqa: ANN401 - checked by the workflow's type hints
        id: str | None = None,  # noqa: A002 - API.md
        **named: Any,  # noqa: ANN401
    ) -> Handle[_ResultT_co]:
        """Begin a run with these arguments, and execute it in this process.

        When this returns, the run is durable: it goes on to its end whatever dies. With an `id`
        that there is a run of already, nothing begins, and the handle is that run's: so a start is
        harmless to repeat; that a repetition has other arguments is logged as a warning, and those
        of the run hold. Without, each start begins a run of its own.

        Raises:
            InvalidArgumentsError: they do not fit the workflow's type hints; nothing was started.
            RunIdInUseError: the id is that of a run of another workflow.
            OverloadedError: too much runs here; nothing was started.
            DiskFullError: at once, if the log has no room; nothing was started.
            NotReadyError: the platform was away for half a minute or more; nothing was started.
            OutcomeUnknownError: it may have begun. With an `id`, repeating is harmless.
            FlowSettingsError: outside of a function the flow does not know where its log is
                (`Flow.attach`).
        """
        if id is not None:
            run_tag(id)
        definition, logs = self.definition, self._flow.logs()
        text = self.arguments_text(arguments, named)
        with public_call():
            run, _ = await self._flow.runner.start(logs, definition, text, id)
        return Handle(self._flow.runner, definition, run, logs)

    def __call__(self, *_: object, **__: object) -> Never:
        """A workflow is started, not called.

        Raises:
            FlowSettingsError: always; it says how.
        """
        raise FlowSettingsError(
            f"Workflow {self.name!r} is started, not called: {self.name}.start(...), or in a "
            f"workflow wf.run({self.name}, ...)."
        )

    def handle(self, id: str) -> Handle[_ResultT_co]:  # noqa: A002
        """Return a handle on the run `id`, which may be there or not."""
        run_tag(id)
        return Handle(self._flow.runner, self.definition, id, self._flow.logs())

    # --- for runs that start others

    @property
    def log_name(self) -> str:
        """The log of its runs."""
        return self._flow.log_name

    def arguments_text(self, given: tuple[object, ...], named: dict[str, object]) -> bytes:
        """Return what a run is started with as a JSON object.

        Raises:
            InvalidArgumentsError: it does not fit the workflow's type hints.
        """
        text = self.definition.arguments_text(given, named)
        self.definition.signature.arguments(text)
        return text

    async def start_child(self, arguments: bytes, id: str, parent: Origin) -> None:  # noqa: A002
        """Begin a run as a step of another run, unless there is one of this id."""
        flow = self._flow
        await flow.runner.start(flow.logs(), self.definition, arguments, id, parent=parent)

    def result_of(self, text: bytes) -> _ResultT_co:
        """Return the value that a result's JSON text stands for."""
        value: Any = self.definition.signature.result(text)
        result: _ResultT_co = value
        return result

    def __repr__(self) -> str:
        return f"Startable({self.name!r})"


class Flow:
    """The workflows of an application, and the log that their runs are in.

    Args:
        app: whose workflows they are; or a name, for a program that is no application.
        log: name of the log of the runs, which holds nothing else; else `<app>/flow`.
        lease: seconds after which others take over the runs of a process that was not heard of.
        executions: runs that a process executes at once; a further start is refused. Of runs that
            only wait (for a time, a signal, a child) it may have 16 times as many.
        retention: seconds for which a run is known after it has ended.

    Attributes:
        log_name: of the log of the runs.
        runner: what executes runs in this process.
    """

    def __init__(
        self,
        app: App | str,
        *,
        log: str | None = None,
        lease: float = LEASE_S,
        executions: int = EXECUTIONS_MAX,
        retention: float = RETENTION_S,
    ) -> None:
        if not _LEASE_S_MIN <= lease <= LEASE_S_MAX:
            raise FlowSettingsError(f"A lease is {_LEASE_S_MIN} to {LEASE_S_MAX:,.0f} seconds.")
        if executions < 1:
            raise FlowSettingsError("executions is at least 1.")
        if not retention >= 0:
            raise FlowSettingsError("retention is a number of seconds, 0 or greater.")
        self._retention_s = retention
        self._app = app
        self._log_name = log
        self._definitions: dict[str, Definition] = {}
        self._lease_s = lease
        self._executions_max = executions
        self._runner: Runner | None = None
        self._attached: Logs | None = None
        if isinstance(app, App):
            app.add_service(self.drive, name=f"flow-{len(app.services) + 1}")

    @property
    def log_name(self) -> str:
        """The log of the runs; by the name that the application is deployed under."""
        name = self._app.name if isinstance(self._app, App) else self._app
        return self._log_name or f"{name}/flow"

    @property
    def runner(self) -> Runner:
        """What executes runs in this process."""
        if self._runner is None:
            self._runner = Runner(
                self.log_name,
                self._definitions,
                lease_s=self._lease_s,
                executions_max=self._executions_max,
            )
        return self._runner

    def workflow(
        self, body: Callable[Concatenate[Workflow, ...], Coroutine[Any, Any, _ResultT]], /
    ) -> Startable[_ResultT]:
        """Make an async function a workflow of this flow.

        Raises:
            FlowSettingsError: it is not async, does not take the workflow first, or there is one of
                its name.
        """
        definition = Definition(body.__name__, body)
        if definition.name in self._definitions:
            raise FlowSettingsError(f"There are two workflows {definition.name!r}; rename one.")
        self._definitions[definition.name] = definition
        return Startable(self, definition)

    async def drive(self, logs: Logs) -> None:
        """Go on with the runs of processes that are gone, until cancelled.

        A deployed application does so in each worker by itself. A program of one's own that starts
        workflows runs it in a task.
        """
        await Driver(self.runner, retention_s=self._retention_s).drive(logs)

    def attach(self, logs: Logs) -> None:
        """Say where logs are, outside of functions: a client, or `MemoryLogs`."""
        self._attached = logs

    def logs(self) -> Logs:
        """Return where logs are: the context of the function that runs, else what was attached.

        Raises:
            FlowSettingsError: neither is there.
        """
        if (context := current_context()) is not None:
            return context
        if self._attached is not None:
            return self._attached
        raise FlowSettingsError("Outside of a function, say where logs are: flow.attach(client).")

    def handle(self, workflow: str, id: str) -> Handle[Any]:  # noqa: A002
        """Return a handle on a run of a workflow known by its name.

        Raises:
            FlowSettingsError: this flow has no such workflow.
        """
        definition = self._definition(workflow)
        run_tag(id)
        return Handle(self.runner, definition, id, self.logs())

    async def runs(
        self,
        *,
        workflow: str | None = None,
        state: State | None = None,
        bound: SeqNum = 0,
        limit: int = 100,
    ) -> list[Status]:
        """Return how runs are, those first that began first.

        A run that cannot be read, by damage or because a later version wrote to it, is left out,
        and logged.

        Args:
            workflow: only its runs.
            state: only runs in this state.
            bound: only runs that began at this seqnum or later: after `limit` of them, go on at the
                last one's `place + 1`.
            limit: how many at most.

        Raises:
            FlowSettingsError: `limit` is less than 1.
        """
        if limit < 1:
            raise FlowSettingsError("limit is at least 1.")
        found: list[Status] = []
        log = self.logs().log(self.log_name)
        async for run_id, run in listed(log, check_bound(bound)):
            status = status_of(run_id, run)
            if workflow in {None, status.workflow} and state in {None, status.state}:
                found.append(status)
                if len(found) >= limit:
                    break
        return found

    async def fork(self, id: str, step: str) -> Handle[Any]:  # noqa: A002
        """Begin a new run that goes on from a step of another one, with the code of now.

        It has the other's arguments, and of its steps those that were decided before `step`: they
        are not done again. The other run stays as it is. Idempotency keys of further steps are the
        new run's own.

        Args:
            id: of the other run.
            step: its number, or its name; of several steps of that name the first.

        Raises:
            UnknownRunError: there is no such run. FlowSettingsError: it has no such step, or this
                flow has no such workflow. OverloadedError: too much runs here.
        """
        logs = self.logs()
        run = await read_run(logs.log(self.log_name), id, Run(), is_reused=True)
        if run.started is None:
            raise unknown(id, self.log_name)
        number, decided = decided_before(run, step)
        definition = self._definition(run.started.workflow)
        origin = Origin(id, number)
        with public_call():
            new = await self.runner.fork(logs, definition, run.started.arguments, origin, decided)
        return Handle(self.runner, definition, new, logs)

    def _definition(self, workflow: str) -> Definition:
        definition = self._definitions.get(workflow)
        if definition is None:
            raise FlowSettingsError(f"There is no workflow {workflow!r} here.")
        return definition

    def __repr__(self) -> str:
        return f"Flow({self.log_name!r}, workflows={sorted(self._definitions)})"
