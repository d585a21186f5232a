"""The function host: what the gateway, clients and workers ask to run functions (ARCHITECTURE 1, 8;
the compute node's side).

It keeps worker processes up (`WorkerPool`), has every deployed application loaded in each of them,
and gives calls to them (`CallRouter`). New code is imported in a process of its own first; then it
is loaded everywhere and recorded in the log before calls go to it. Calls that run then finish on
the version that they started with. A worker that dies is replaced, and its calls fail: they may
have had effects, so nobody runs them again unasked.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

import structlog

from compute.deployments import Deployment, DeploymentLog
from compute.workers.call import Call, Deployed
from compute.workers.invocations import Invocation, Invocations, State
from compute.workers.loading import Trials, load_into
from compute.workers.pool import WorkerPool
from compute.workers.process import WorkerProcess
from compute.workers.router import CallRouter
from compute.workers.serving import LinkServer
from indilog.app import check_app_name, check_delay
from indilog.calls import (
    CheckArguments,
    Failed,
    Greeting,
    Limits,
    Load,
    Loaded,
    Question,
    Returned,
    Unload,
    failed,
)
from indilog.config import Config
from indilog.deployed import AppInfo, FunctionSpec
from indilog.errors import (
    AppNameTakenError,
    DeployError,
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    NotReadyError,
    OverloadedError,
    UnknownFunctionError,
)
from indilog.ids import MetalogPosition
from indilog.log import LogSource

CALL_DEPTH_MAX: Final = 64
"""Calls that may stand above a call."""
_WORKERS_LOST_MAX: Final = 2
"""An application whose import has ended this many workers is not imported any more."""


def limits_of(config: Config) -> Limits:
    """Return what the other end of a link must know."""
    return Limits(
        record_bytes_max=config.cluster.record_bytes_max,
        record_tags_max=config.cluster.record_tags_max,
        aux_bytes_max=config.cluster.aux_bytes_max,
        result_bytes_max=config.node.result_bytes_max,
        message_bytes_max=config.cluster.message_bytes_max,
    )


class FunctionHost:
    """Runs functions on this compute node.

    Attributes:
        generation: grows with every change of what is deployed.
        limits: what the other end of a link must know.
    """

    def __init__(self, config: Config, logs: LogSource) -> None:
        node = config.node
        self.limits = limits_of(config)
        self.generation = 0
        self._node = node
        self._logs = logs
        self._deployment_log = DeploymentLog(logs)
        self._apps: dict[str, Deployed] = {}
        self._numbers = itertools.count(1)
        self._deploying = asyncio.Lock()
        self._invocations = Invocations(node.results_kept_max)
        self._checking = 0
        self._invocation_prefix = secrets.token_hex(6)
        self._invocation_numbers = itertools.count(1)
        self._servers: dict[WorkerProcess, LinkServer] = {}
        self._router = CallRouter(node, on_idle=self._unload)
        directory = node.data_dir / "workers"
        self._trials = Trials(self.limits, directory, import_timeout_s=node.import_timeout_s)
        self._pool = WorkerPool(
            node,
            directory=directory,
            limits=self.limits,
            serve=self._serve_worker,
            on_up=self._worker_up,
            on_lost=self._worker_lost,
            drained=self._router.drained,
        )

    async def start(self) -> None:
        """Read what is deployed, start the workers, load it into them.

        An application that does not load any more is logged, and its calls say why.

        Raises:
            NotReadyError: the log cannot be read, or the workers do not start.
        """
        for record in (await self._deployment_log.newest()).values():
            self._apps[record.name] = Deployed(next(self._numbers), record)
        self.generation += 1
        await self._pool.start()

    async def stop(self) -> None:
        """End the workers; calls that still run fail."""
        await self._pool.stop()

    # --- applications

    def apps(self) -> list[AppInfo]:
        """Return what is deployed, by name."""
        return [self._apps[name].info for name in sorted(self._apps)]

    async def deploy(
        self, sources: Mapping[str, str], *, name: str | None = None, owner: str = "local"
    ) -> AppInfo:
        """Deploy sources (relative path → text); `name` None takes the name in the code.

        When this returns, every new call goes to them, and they survive a restart.

        Raises:
            DeployError: they do not import, or are no application; what was deployed goes on.
            AppNameTakenError: another owner has deployed an application of that name.
            NotReadyError: no worker is up.
        """
        if name is not None:
            self._check_owner(_checked_name(name), owner)
        if not self._pool.workers:
            raise NotReadyError("No function worker is up to take the application; try again.")
        number = next(self._numbers)
        load = Load(number, name, dict(sources))
        self._check_owner((await self._trials.imported(load)).name, owner)
        async with self._deploying:
            try:
                loaded = await self._load_everywhere(load)
                self._check_owner(loaded.name, owner)
                record = Deployment(
                    name=loaded.name,
                    version=self._version(loaded.name) + 1,
                    owner=owner,
                    sources=dict(sources),
                    functions=loaded.functions,
                )
                await self._deployment_log.append(record)
            except BaseException:
                self._unload_number(number)
                raise
            self._replace(Deployed(number, record))
        structlog.get_logger().info("deployed", app=record.name, version=record.version)
        return self._apps[record.name].info

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
        """Start `app.function` with a JSON object of arguments; `Call.outcome` is its outcome.

        Raises:
            UnknownFunctionError: there is none.
            OverloadedError, NotReadyError: nothing was done; try again later.
            FunctionFailedError: it is called by functions that call each other without end.
        """
        deployed, spec = self._function(name)
        if depth > CALL_DEPTH_MAX:
            raise FunctionFailedError(
                f"{name} has {depth} calls above it, the limit is {CALL_DEPTH_MAX}; do functions "
                "call each other without end?",
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

    def cancel(self, call: Call) -> None:
        """Nobody waits for `call` any more: stop it, if it can be stopped."""
        self._router.cancel(call)

    async def send(
        self,
        name: str,
        arguments: bytes,
        *,
        position: MetalogPosition = 0,
        delay_s: float = 0.0,
    ) -> str:
        """Start `app.function` after `delay_s`; return the id to ask for its outcome with.

        Held in memory: a restart of the node forgets it.

        Raises:
            UnknownFunctionError, InvalidArgumentsError: there is none, or the arguments or the
                delay do not fit; it is not started.
            OverloadedError: too many wait or run already.
            NotReadyError: no worker could check the arguments; it is not started.
        """
        _check_delay(name, delay_s)
        held = self._invocations.open + self._checking
        if held >= self._node.calls_pending_max:
            raise OverloadedError(
                f"{held:,} asynchronous calls wait or run, which is the limit; try again later."
            )
        deployed, spec = self._function(name)
        self._checking += 1
        try:
            question = CheckArguments(deployed.number, spec.name, arguments)
            await self._router.check_arguments(name, question)
        finally:
            self._checking -= 1
        invocation = Invocation(self._invocation_id(), name)
        start = partial(self._start_sent, invocation, arguments, position)
        self._invocations.add(invocation)
        if delay_s > 0:
            asyncio.get_running_loop().call_later(delay_s, start)
        else:
            start()
        return invocation.id

    async def invocation(self, id: str, *, wait_s: float = 0.0) -> Invocation | None:  # noqa: A002
        """Return an asynchronous invocation, waiting up to `wait_s` for its outcome; None: it is
        not known, or was forgotten.
        """
        invocation = self._invocations.get(id)
        if invocation is None or invocation.is_over or wait_s <= 0:
            return invocation
        over = asyncio.Event()
        invocation.waiting.append(over.set)
        try:
            await asyncio.wait_for(over.wait(), wait_s)
        except TimeoutError:
            invocation.waiting.remove(over.set)
        return invocation

    def client_server(self) -> LinkServer:
        """Return what serves the link of a client."""
        return LinkServer(
            self, self._logs, questions_max=self._node.calls_pending_max, is_client=True
        )

    def status(self) -> dict[str, Any]:
        """Return numbers for people and metrics."""
        return {
            "workers": [
                {"index": w.index, "pid": w.pid, "calls": w.link.calls_open}
                for w in self._pool.workers
            ],
            "worker_restarts": self._pool.restarts,
            "calls_moved": self._router.moved,
            "calls_running": self._router.running,
            "calls_waiting": self._router.waiting,
            "calls": dict(self._router.calls),
            "invocations_open": self._invocations.open,
            "apps": {name: app.record.version for name, app in sorted(self._apps.items())},
            "problems": {n: app.problem for n, app in self._apps.items() if app.problem},
        }

    # --- inside: applications

    def _check_owner(self, name: str, owner: str) -> None:
        there = self._apps.get(name)
        if there is not None and there.record.owner != owner:
            raise AppNameTakenError(
                f"The app name {name} is taken by {there.record.owner}; deploy under another name, "
                "or as that owner."
            )

    def _version(self, name: str) -> int:
        return self._apps[name].record.version if name in self._apps else 0

    def _replace(self, deployed: Deployed) -> None:
        """Send new calls to `deployed`; unload the version before when its last call is over."""
        before = self._apps.get(deployed.record.name)
        self._apps[deployed.record.name] = deployed
        self.generation += 1
        if before is not None:
            before.successor = deployed
            if before.running == 0:
                self._unload(before)

    async def _load_everywhere(self, load: Load) -> Loaded:
        """Load into every worker; one that dies meanwhile is replaced by one that loads it too."""
        workers = self._pool.workers
        answers = await asyncio.gather(
            *(self._load(worker, load) for worker in workers), return_exceptions=True
        )
        loaded = None
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, Loaded):
                loaded = answer
            elif not worker.link.is_lost:
                raise answer
        if loaded is None:
            raise NotReadyError("No function worker is up to take the application; try again.")
        return loaded

    async def _load(self, worker: WorkerProcess, load: Load) -> Loaded:
        return await load_into(worker, load, timeout_s=self._node.import_timeout_s)

    def _unload(self, deployed: Deployed) -> None:
        self._unload_number(deployed.number)

    def _unload_number(self, number: int) -> None:
        for worker in self._pool.workers:
            worker.deployments.discard(number)
            worker.link.tell(Unload(number))

    def _unknown(self, name: str) -> UnknownFunctionError:
        app, dot, function = name.partition(".")
        if not dot or not function:
            return UnknownFunctionError(f"A function is named app.function, not {name!r}.")
        if app not in self._apps:
            near = get_close_matches(app, self._apps, n=1)
            return UnknownFunctionError(f"No app {app!r} is deployed{_did_you_mean(near)}")
        near = get_close_matches(function, self._apps[app].functions, n=1)
        return UnknownFunctionError(f"App {app} has no function {function!r}{_did_you_mean(near)}")

    # --- inside: calls

    def _function(self, name: str) -> tuple[Deployed, FunctionSpec]:
        app, _, function = name.partition(".")
        deployed = self._apps.get(app)
        spec = deployed.functions.get(function) if deployed is not None else None
        if deployed is None or spec is None:
            raise self._unknown(name)
        return deployed, spec

    def _invocation_id(self) -> str:
        return f"{self._invocation_prefix}-{next(self._invocation_numbers):x}"

    def _start_sent(
        self, invocation: Invocation, arguments: bytes, position: MetalogPosition
    ) -> None:
        invocation.state = State.RUNNING
        try:
            call = self.call(
                invocation.function, arguments, position=position, invocation=invocation.id
            )
        except IndilogError as error:
            self._invocations.ended(invocation, failed(error))
            return
        call.outcome.add_done_callback(partial(self._sent_ended, invocation))

    def _sent_ended(
        self, invocation: Invocation, outcome: asyncio.Future[Returned | Failed]
    ) -> None:
        self._invocations.ended(invocation, outcome.result())

    # --- inside: workers

    def _serve_worker(self, worker: WorkerProcess, call: int, message: Question | Greeting) -> None:
        server = self._servers.get(worker)
        if server is None:
            server = self._servers[worker] = LinkServer(
                self, self._logs, questions_max=self._node.calls_pending_max, is_client=False
            )
        server.serve(worker.link, call, message)

    async def _worker_up(self, worker: WorkerProcess) -> None:
        """Load every application into a new worker, then let it take calls."""
        async with self._deploying:
            for deployed in self._apps.values():
                if deployed.workers_lost < _WORKERS_LOST_MAX:
                    await self._load_again(worker, deployed)
                if worker.link.is_lost:
                    return
            self._router.add(worker)

    async def _load_again(self, worker: WorkerProcess, deployed: Deployed) -> None:
        """Load into a new worker, which runs no calls yet, what may not import any more."""
        record = deployed.record
        try:
            await self._load(worker, Load(deployed.number, record.name, record.sources))
            deployed.problem, deployed.workers_lost = None, 0
        except IndilogError as error:
            deployed.workers_lost += worker.link.is_lost
            deployed.problem = f"App {record.name} does not load: {error}"
            structlog.get_logger().error(
                "app not loaded", app=record.name, version=record.version, reason=str(error)
            )

    def _worker_lost(self, worker: WorkerProcess) -> None:
        self._router.remove(worker)
        if (server := self._servers.pop(worker, None)) is not None:
            server.close()


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else "; `indilog apps` lists what is."


def _check_delay(name: str, delay_s: float) -> None:
    try:
        check_delay(delay_s)
    except ValueError as error:
        fault = {"field": "delay", "problem": str(error)}
        raise InvalidArgumentsError(f"{name} was not started: {error}", [fault]) from None


def _checked_name(name: str) -> str:
    try:
        return check_app_name(name)
    except ValueError as error:
        raise DeployError(str(error)) from error
