"""The function host: runs functions for the gateway, clients and workers (ARCHITECTURE 1, 8).

`WorkerPool` keeps worker processes running. `Applications` loads every deployed application into
each worker. `CallRouter` dispatches calls to the workers, and `InvocationService` runs recorded
invocations. A running call finishes on the version with which it started. A worker that crashes is
replaced. The calls that it had begun fail; they may have had effects, so they are never retried
automatically.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import msgspec
import structlog

from indilog.apps.app import check_delay, is_operation_name
from indilog.base.deployed import AppInfo, FunctionSpec
from indilog.base.errors import (
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    OverloadedError,
    UnknownFunctionError,
)
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.base.log import LogSource
from indilog.config import Config
from indilog.link.link_messages import Failed, Greeting, Limits, Question, Returned
from indilog.link.worker_messages import CheckArguments, RunServices
from indilog.sdk.runs import RUN_CODES
from indilog_compute.invocations.held_invocations import HeldFor
from indilog_compute.invocations.invocation_list import InvocationFilter, InvocationInfo
from indilog_compute.invocations.invocation_status import InvocationStatus
from indilog_compute.invocations.keys import kept_with_key
from indilog_compute.invocations.scheduling import DeployedSchedule
from indilog_compute.invocations.service import InvocationService
from indilog_compute.positions import Positions
from indilog_compute.workers import process
from indilog_compute.workers.applications import Applications
from indilog_compute.workers.call import Call, DeployedApp
from indilog_compute.workers.pool import WorkerPool
from indilog_compute.workers.process import StartWorker, Worker
from indilog_compute.workers.refusals import no_function
from indilog_compute.workers.router import CallRouter
from indilog_compute.workers.scale import Demand, WorkerScale
from indilog_compute.workers.service_states import service_states, until_services_end
from indilog_compute.workers.serving import LinkServer

_RUN_CODES_S: Final = 5.0
"""Seconds within which an application must answer which code its open runs need."""
_SERVICES_END_S: Final = 2.0
"""Longest time in seconds for which a stopping node waits until its services have ended."""
_RESIZE_S: Final = 0.1
"""Seconds between two decisions on the number of workers."""
CALL_DEPTH_MAX: Final = 64
"""Largest number of callers above a call in a chain of nested calls."""


def limits_of(config: Config) -> Limits:
    """Return the limits that the other end of a link must know."""
    return Limits(
        record_bytes_max=config.cluster.record_bytes_max,
        record_tags_max=config.cluster.record_tags_max,
        aux_bytes_max=config.cluster.aux_bytes_max,
        result_bytes_max=config.node.functions.result_bytes_max,
        message_bytes_max=config.cluster.message_bytes_max,
    )


class FunctionHost:
    """Runs functions on this compute node.

    Args:
        node_name: the compute node's name in the view. The node takes over the invocations of its
            earlier incarnations at once.
        rank: returns the index of this node among all compute nodes, from 0. The node with index 0
            runs the schedules first.
        start_worker: starts workers and trial processes.

    Attributes:
        limits: the limits that the other end of a link must know.
        positions: knows whether a session's position exists.
    """

    def __init__(
        self,
        config: Config,
        logs: LogSource,
        *,
        node_name: str | None = None,
        rank: Callable[[], int] = lambda: 0,
        start_worker: StartWorker = process.start,
    ) -> None:
        node = config.node
        self.limits = limits_of(config)
        self._node = node
        self._logs = logs
        self.positions = Positions(logs)
        self._checking = self._accepting = 0
        self._invocation_prefix = secrets.token_hex(6)
        self._invocation_numbers = itertools.count(1)
        self._servers: dict[Worker, LinkServer] = {}
        directory = node.data_dir / "workers"
        self._applications = Applications(
            node,
            logs,
            self.limits,
            directory=directory,
            start=start_worker,
            workers=lambda: self._pool.workers,
            on_change=self._apps_changed,
            codes_in_use=self._codes_in_use,
        )
        self._router = CallRouter(node, on_idle=self._applications.unload)
        self._pool = WorkerPool(
            node,
            directory=directory,
            limits=self.limits,
            start=start_worker,
            serve=self._serve_worker,
            on_up=self._on_worker_up,
            on_lost=self._on_worker_lost,
            drained=self._drained,
        )
        functions = node.functions
        self._scale: WorkerScale | None = None
        if functions.most_workers > functions.workers:
            self._scale = WorkerScale(
                workers_min=functions.workers,
                workers_max=functions.most_workers,
                slots=functions.worker_calls_max,
                idle_s=functions.workers_idle_s,
            )
        self._scaling: asyncio.Task[None] | None = None
        self._invocations = InvocationService(
            logs,
            node,
            node=node_name,
            rank=rank,
            record_bytes_max=config.cluster.record_bytes_max,
            start=self.call,
            stop=self.cancel,
            is_shared=self._is_shared,
        )

    async def start(self) -> None:
        """Read the deployments, start the workers, and load the applications into them.

        If an application does not load, the error is logged, and calls of the application fail with
        this error.

        Raises:
            NotReadyError: the log cannot be read, or the workers do not start.
        """
        await self._applications.read()
        await self._pool.start()
        self._applications.follow()
        await self._invocations.start()
        if self._scale is not None:
            self._scaling = asyncio.get_running_loop().create_task(self._resize(self._scale))

    async def stop(self) -> None:
        """End the services, then the workers. Running calls fail, and waiting calls do not begin.
        Open recorded invocations run again when a compute node runs.
        """
        if self._scaling is not None:
            self._scaling.cancel()
        self._applications.end_services()
        await self._invocations.stop()
        self._router.stop()
        await until_services_end(self._pool.workers, within_s=_SERVICES_END_S)
        await self._applications.stop()
        await self._pool.stop()

    # --- applications

    @property
    def change_count(self) -> int:
        """Number of changes of the deployed applications on this node so far."""
        return self._applications.change_count

    def apps(self) -> list[AppInfo]:
        """Return the deployed applications, sorted by name."""
        return [deployed.info for deployed in self._applications.all()]

    async def deploy(
        self, sources: Mapping[str, str], *, name: str | None = None, owner: str = "local"
    ) -> AppInfo:
        """Deploy sources (relative path → text) under `name`; None: under the name in the code.

        When this method returns, the deployment is durable, and every new call on this node runs
        it.

        Raises:
            DeployError: the sources do not import, or define no application; the previous version
                continues.
            AppNameTakenError: another owner has deployed an application of that name.
            NotReadyError: no worker is up, or the log cannot be written; nothing was deployed.
            AppendOutcomeUnknownError: the application may be deployed; a repeated call is harmless.
        """
        return await self._applications.deploy(sources, name=name, owner=owner)

    def app(self, name: str) -> AppInfo:
        """Return the application that is deployed under a name.

        Raises:
            UnknownFunctionError: there is no such application. If it was undeployed, the message
                has the time of its undeployment.
            DataLossError: the application's newest deployment is lost.
        """
        return self._applications.app(name).info

    def is_public(self, name: str) -> bool:
        """Whether `app.function` is deployed and may be called without a token."""
        try:
            _, spec = self._applications.function(name)
        except UnknownFunctionError:
            return False
        return spec.public

    async def undeploy(self, name: str, *, owner: str = "local") -> AppInfo:
        """Undeploy an application; return its last deployment.

        When this method returns, the undeployment is durable, the application gets no new calls on
        this node, and its services and schedules on this node end. Other compute nodes apply the
        undeployment when they read its record. Running calls finish. A recorded invocation that has
        not begun fails when it is due, unless the application is deployed again by then. The logs
        of the application stay.

        Raises:
            UnknownFunctionError: the application is not deployed.
            AppNameTakenError: another owner has deployed the application.
            NotReadyError: the log cannot be read or written; the application stays deployed.
            AppendOutcomeUnknownError: the application may be undeployed; a repeated call is
                harmless.
        """
        return await self._applications.undeploy(name, owner=owner)

    # --- calls

    def call(
        self,
        name: str,
        arguments: bytes,
        *,
        position: MetalogPosition = 0,
        depth: int = 0,
        invocation: str | None = None,
    ) -> Call:
        """Start a call of the function `name` (`app.function`); `arguments` is a JSON object.
        `Call.outcome` gets the outcome.

        Raises:
            UnknownFunctionError: there is no such function.
            OverloadedError, NotReadyError: nothing was done; try again later.
            FunctionFailedError: the call has more than `CALL_DEPTH_MAX` calls above it.
        """
        deployed, spec = self._function(name)
        if depth > CALL_DEPTH_MAX:
            raise FunctionFailedError(
                f"{name} has {depth} calls above it, the limit is {CALL_DEPTH_MAX}; do functions "
                "call each other endlessly?",
                kind="RecursionError",
            )
        call = Call(
            invocation or self._invocation_id(),
            deployed,
            spec,
            arguments,
            position=position,
            depth=depth,
        )
        self._router.submit(call)
        return call

    def operate(self, name: str, arguments: bytes, *, position: MetalogPosition = 0) -> Call:
        """Start an operation of an application, such as `app.runs.list`, as `call` starts a
        function.

        Raises:
            UnknownFunctionError: there is no such operation.
            OverloadedError, NotReadyError: nothing was done; try again later.
        """
        deployed, spec = self._applications.function(name)
        if not is_operation_name(spec.name):
            raise UnknownFunctionError(f"{name} is a function, not an operation; call it.")
        call = Call(self._invocation_id(), deployed, spec, arguments, position=position, depth=0)
        self._router.submit(call)
        return call

    @property
    def load(self) -> tuple[int, int]:
        """The number of calls that hold a slot or wait for a slot, and the number of slots of all
        workers that take calls.
        """
        return self._router.load

    def free_slots(self, name: str) -> int:
        """Return how many calls of `app.function` would start at once."""
        return self._router.free_slots(name.partition(".")[0])

    @property
    def recorded_not_started(self) -> int:
        """Number of recorded calls that this node owns or is about to record, without those whose
        function runs or waits for a slot.
        """
        return self._accepting + self._invocations.not_started

    def deployed_at(self, name: str) -> SeqNum | None:
        """Return the seqnum of the deployment that a call of `app.function` runs now; None: the
        function is not deployed here, or its application does not load.
        """
        try:
            deployed, _ = self._applications.function(name)
        except UnknownFunctionError:
            return None
        return deployed.seqnum if deployed.problem is None else None

    def longest_s(self, name: str) -> float:
        """Return the seconds that a plain call of `app.function` may take on a node, including its
        time in the queue.

        Raises:
            UnknownFunctionError: the function is not deployed.
        """
        _, spec = self._applications.function(name)
        functions = self._node.functions
        runs_s = spec.timeout_s or functions.call_timeout_s
        return functions.call_wait_s_max + runs_s + functions.worker_stop_s

    def has_key(self, name: str, arguments: bytes, key: str) -> bool:
        """Whether this node knows an invocation of `app.function` with this key.

        Raises:
            InvalidArgumentsError: the key was used with other arguments.
        """
        return self._invocations.known(name, arguments, key) is not None

    def withdraw(self, call: Call) -> bool:
        """Forget a call that waits for a slot, because another compute node runs it. The outcome of
        the call is never resolved. False: the call has begun or ended here, and is not forgotten.
        """
        return self._router.withdraw(call)

    def cancel(self, call: Call) -> None:
        """Cancel a call whose outcome is not needed. If the call has ended, nothing happens."""
        self._router.cancel(call)

    async def call_once(
        self,
        name: str,
        arguments: bytes,
        *,
        key: str,
        position: MetalogPosition = 0,
        depth: int = 0,
    ) -> tuple[str, Returned | Failed]:
        """Run `app.function` once for an idempotency key; return the invocation's id and outcome.

        A repeated call with the same key gets the recorded outcome, even if the function was
        undeployed or now takes other arguments.

        Raises:
            InvalidArgumentsError: the key was used with other arguments, or the arguments do not
                fit the function.
            UnknownFunctionError, OverloadedError: nothing was done.
            NotReadyError, QuorumUnavailableError: the call may be recorded and run; retry with the
                same key.
            CallOutcomeUnknownError: the function may or may not run.
        """
        with self.reserve_outcome_wait(name):
            invocation = await self.accept_once(
                name, arguments, key=key, position=position, depth=depth
            )
            return invocation, await self.outcome(invocation)

    def reserve_outcome_wait(self, name: str) -> AbstractContextManager[None]:
        """Reserve room for a caller that starts `app.function` and waits for its outcome.

        Raises:
            OverloadedError: too many callers wait already.
        """
        return self._invocations.reserve_outcome_wait(name)

    async def accept_once(
        self,
        name: str,
        arguments: bytes,
        *,
        key: str,
        position: MetalogPosition = 0,
        depth: int = 0,
        holder: str = "",
    ) -> str:
        """Start `app.function` once for an idempotency key; return the invocation's id. If `holder`
        is not empty, the outcome is held for it. This method raises the errors of `call_once`.
        """
        return await self._accept(
            name, arguments, key=key, position=position, depth=depth, holder=holder
        )

    def release(self, holder: str, keys: Iterable[str]) -> None:
        """Release held outcomes; see `InvocationService.release`."""
        self._invocations.release(holder, keys)

    async def holders(self, prefix: str, after: str) -> tuple[list[str], MetalogPosition]:
        """Return holders of outcomes; see `InvocationService.holders`."""
        return await self._invocations.holders(prefix, after)

    async def held(self, prefix: str, after: str = "") -> list[HeldFor]:
        """Return holders with the number and size of their held outcomes; see
        `InvocationService.held`.
        """
        return await self._invocations.held(prefix, after)

    async def release_held(self, prefix: str) -> int:
        """Release all outcomes of some holders; see `InvocationService.release_held`."""
        return await self._invocations.release_held(prefix)

    async def outcome(self, invocation: str) -> Returned | Failed:
        """Wait for the outcome of an invocation with a key, and return the outcome. The caller must
        be inside `reserve_outcome_wait`. Raises the errors of `InvocationService.outcome`.
        """
        return kept_with_key(await self._invocations.outcome(invocation))

    async def send(
        self,
        name: str,
        arguments: bytes,
        *,
        position: MetalogPosition = 0,
        delay_s: float = 0.0,
        key: str = "",
    ) -> str:
        """Record an invocation of `app.function` that is due in `delay_s` seconds; return its id.

        When this method returns, the invocation is durable.

        Raises:
            UnknownFunctionError, InvalidArgumentsError: there is no such function, or the
                arguments, the delay or the key are invalid; nothing was recorded.
            OverloadedError: the limit of open invocations is reached.
            NotReadyError, QuorumUnavailableError: no worker could check the arguments, or the log
                cannot be written. A call with a key may be recorded; retry with the same key.
            CallOutcomeUnknownError: the function may or may not run.
        """
        _check_delay(name, delay_s, self._node.invocations.invocation_delay_s_max)
        return await self._accept(name, arguments, key=key, position=position, delay_s=delay_s)

    @property
    def results_kept_s(self) -> float:
        """Longest time for which outcomes are kept, in seconds."""
        return self._node.invocations.results_kept_s

    async def invocation(self, id: str, *, wait_s: float = 0.0) -> InvocationStatus | None:  # noqa: A002
        """Wait up to `wait_s` seconds for the outcome of a recorded invocation; then return its
        status. None: the id is unknown, or the outcome was deleted.
        """
        return await self._invocations.status_of(id, wait_s=wait_s)

    async def newest_invocations(
        self, wanted: InvocationFilter, limit: int
    ) -> list[InvocationInfo]:
        """Return the newest recorded invocations that `wanted` selects; see
        `InvocationService.newest`.
        """
        return await self._invocations.newest(wanted, limit)

    async def cancel_invocation(self, id: str) -> InvocationStatus | None:  # noqa: A002
        """Cancel a recorded invocation. Return its status afterwards; None: the id is unknown.
        Raises the errors of `InvocationService.cancel`.
        """
        return await self._invocations.cancel(id)

    def open_invocations(self, application: str) -> int:
        """Return the number of open recorded invocations of an application."""
        return self._invocations.open_of(application)

    async def ask_time(self) -> None:
        """Ask the log for its time, and begin the invocations that are due by this time. Raises the
        errors of `InvocationService.ask_time`.
        """
        await self._invocations.ask_time()

    def client_server(self) -> LinkServer:
        """Return a server for the link of a client."""
        return LinkServer(
            self, self._logs, questions_max=self._node.functions.calls_pending_max, is_client=True
        )

    def status(self) -> dict[str, Any]:
        """Return state and counters for `/status` and `/metrics`."""
        apps = self._applications.all()
        return {
            "workers": [
                {
                    "index": w.index,
                    "pid": w.pid,
                    "calls": self._router.calls_of(w),
                    "blocked": self._router.is_suspended(w),
                }
                for w in self._pool.workers
            ],
            "worker_restarts": self._pool.restarts,
            "calls_moved": self._router.moved,
            "calls_running": self._router.running,
            "calls_waiting": self._router.waiting,
            "calls": dict(self._router.calls),
            "invocations": self._invocations.status(),
            "schedules": self._invocations.schedules(),
            "apps": {app.record.name: app.record.version for app in apps},
            "services": service_states(self._pool.workers, apps),
            "problems": {app.record.name: app.problem for app in apps if app.problem},
        }

    # --- internal

    def _function(self, name: str) -> tuple[DeployedApp, FunctionSpec]:
        """Return the application and the spec of the function `name` (`app.function`).

        Raises:
            UnknownFunctionError: there is no such function, or it is an operation.
        """
        deployed, spec = self._applications.function(name)
        if is_operation_name(spec.name):
            raise no_function(name)
        return deployed, spec

    def _invocation_id(self) -> str:
        return f"{self._invocation_prefix}-{next(self._invocation_numbers):x}"

    async def _accept(
        self,
        name: str,
        arguments: bytes,
        *,
        key: str,
        position: MetalogPosition,
        depth: int = 0,
        delay_s: float = 0.0,
        holder: str = "",
    ) -> str:
        """Record a call, unless an invocation with its key is known; return the invocation's id.

        A call with a known key is accepted even if the function is not deployed now. So before this
        node refuses a call with a key, it reads all records of other nodes.
        """
        if (known := self._invocations.known(name, arguments, key)) is not None:
            return known
        self._accepting += delay_s == 0
        try:
            try:
                await self._check_arguments(name, arguments)
            except (UnknownFunctionError, InvalidArgumentsError):
                if key and (known := await self._invocations.known_by_now(name, arguments, key)):
                    return known
                raise
            return await self._invocations.accept(
                name,
                arguments,
                position=position,
                depth=depth,
                delay_s=delay_s,
                key=key,
                holder=holder,
            )
        finally:
            self._accepting -= delay_s == 0

    async def _check_arguments(self, name: str, arguments: bytes) -> None:
        """Let a worker check the arguments of a call before it is recorded."""
        if self._checking >= self._node.functions.calls_pending_max:
            raise OverloadedError(
                f"{self._checking:,} calls are being checked, which is the limit; try again later."
            )
        deployed, spec = self._function(name)
        self._checking += 1
        try:
            question = CheckArguments(deployed.number, spec.name, arguments)
            await self._router.check_arguments(name, question)
        finally:
            self._checking -= 1

    # --- internal: workers

    async def _resize(self, scale: WorkerScale) -> NoReturn:
        """Periodically set the number of workers to the number that the load needs."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_RESIZE_S)
            size = self._pool.size
            starting = size - len(self._pool.workers)
            demand = Demand(self._router.load[0], self._router.waiting, size, starting)
            if (wanted := scale.wanted(demand, clock())) != size:
                self._pool.resize(wanted)
                structlog.get_logger().info(
                    "workers resized", workers=wanted, before=size, calls=round(scale.average, 1)
                )

    def _serve_worker(self, worker: Worker, call: int, message: Question | Greeting) -> None:
        server = self._servers.get(worker)
        if server is None:
            server = self._servers[worker] = LinkServer(
                self,
                self._logs,
                questions_max=self._node.functions.calls_pending_max,
                is_client=False,
            )
        server.serve(worker.link, call, message)

    async def _on_worker_up(self, worker: Worker) -> None:
        """Load every application into a new worker, then let it take calls."""
        if await self._applications.load_into_new(worker):
            self._applications.run_services(worker)
            self._router.add(worker)

    async def _codes_in_use(self, deployed: DeployedApp) -> frozenset[str] | None:
        """Return the digests of the code that open runs of the application need; None: the
        application did not answer in time, or with an error.
        """
        spec = deployed.functions[RUN_CODES]
        call = Call(self._invocation_id(), deployed, spec, b"{}", position=0, depth=0)
        try:
            self._router.submit(call)
            async with asyncio.timeout(_RUN_CODES_S):
                outcome = await asyncio.shield(call.outcome)
        except (IndilogError, TimeoutError):
            self._router.cancel(call)
            return None
        if not isinstance(outcome, Returned):
            return None
        return msgspec.json.decode(outcome.result, type=frozenset[str])

    def _is_shared(self) -> bool:
        """Whether several applications are deployed, so that each is limited to its share."""
        return self._applications.count > 1

    def _apps_changed(self) -> None:
        self._router.set_shared(is_shared=self._is_shared())
        self._invocations.schedule(
            DeployedSchedule(f"{app.record.name}.{spec.function}", spec, app.since[spec])
            for app in self._applications.all()
            if app.problem is None
            for spec in app.record.schedules
        )

    async def _drained(self, worker: Worker) -> None:
        worker.link.tell(RunServices(()))  # its replacement runs the services now
        await self._router.drain(worker)
        await until_services_end([worker], within_s=process.STOP_S)

    def _on_worker_lost(self, worker: Worker) -> None:
        self._router.remove(worker)
        if (server := self._servers.pop(worker, None)) is not None:
            server.close()


def _check_delay(name: str, delay_s: float, delay_s_max: float) -> None:
    try:
        check_delay(delay_s, delay_s_max)
    except ValueError as error:
        fault = {"field": "delay", "problem": str(error)}
        raise InvalidArgumentsError(f"{name} was not started: {error}", [fault]) from None
