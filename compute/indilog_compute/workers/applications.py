"""Deploys applications, applies the deployments of other compute nodes, and loads applications into
the workers.

The log of deployments (`DeploymentLog`) decides which version of an application runs: every compute
node runs the newest record of a name. A deployment that this node makes is imported in a trial
process, loaded into all workers and recorded before it gets calls. A deployment of another node is
imported and loaded after its record is read. After the record of an undeployment is read, the
application gets no further calls.

At most `versions_kept_max` earlier deployments of each application stay loaded while open runs need
their code. An application that does not load is imported again in a trial process, after growing
pauses, until it loads. `FunctionHost` calls `Applications`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from indilog.base.deployed import (
    AppInfo,
    FunctionSpec,
    LoadedVersion,
    MissingVersion,
    code_digest,
)
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    DeployError,
    DiskFullError,
    IndilogError,
    NotReadyError,
)
from indilog.base.ids import SeqNum
from indilog.base.log import LogSource
from indilog.config import NodeConfig
from indilog.link.link_messages import Limits, LinkLostError
from indilog.link.worker_messages import Load, Loaded, RunServices, Unload
from indilog.sdk.runs import RUN_CODES
from indilog_compute.deployments import Deployment, DeploymentLog, PlacedDeployment
from indilog_compute.invocations.fault_log import FaultLog
from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.loading import Trials, load_into
from indilog_compute.workers.process import StartWorker, Worker
from indilog_compute.workers.refusals import (
    checked_name,
    name_taken,
    owner_differs,
    problem_of,
    undeployed_already,
    unknown_app,
    unknown_function,
)
from indilog_compute.workers.retries import Retries

_WORKERS_LOST_MAX: Final = 2
"""After this number of workers has crashed during the import of an application, no worker imports
the application until a trial process has imported it.
"""
_FOLLOW_WAIT_S: Final = 30.0
_FOLLOW_AGAIN_S: Final = 1.0
"""Seconds after an error until the log is read again."""
_GIVE_UP_S: Final = 30.0
"""Seconds between two checks whether open runs still need the kept deployments."""


async def _unknown(_: DeployedApp) -> None:
    """The default of `codes_in_use`: it is unknown which code open runs need."""


class Applications:
    """The applications of one compute node.

    Args:
        directory: contains the directories of trial processes.
        start: starts a trial process.
        workers: returns the workers that take calls.
        on_change: called when the deployed applications, or the problem of one of them, have
            changed.
        codes_in_use: returns the digests of the code that open runs of a deployment's application
            need; None: they are unknown.

    Attributes:
        change_count: number of changes of the deployed applications.
    """

    def __init__(
        self,
        node: NodeConfig,
        logs: LogSource,
        limits: Limits,
        *,
        directory: Path,
        start: StartWorker,
        workers: Callable[[], tuple[Worker, ...]],
        on_change: Callable[[], None] = lambda: None,
        codes_in_use: Callable[[DeployedApp], Awaitable[frozenset[str] | None]] = _unknown,
    ) -> None:
        self._on_change = on_change
        self._codes_in_use = codes_in_use
        self.change_count = 0
        self._node = node
        self._workers = workers
        self._log = DeploymentLog(logs)
        self._trials = Trials(limits, directory, node, start)
        self._apps: dict[str, DeployedApp] = {}
        self._kept: dict[str, list[DeployedApp]] = {}
        """By application: the earlier deployments that are kept, newest first."""
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._behind = asyncio.Event()
        self._retries = Retries(
            pause_s_min=node.functions.import_retry_s_min,
            pause_s_max=node.functions.import_retry_s_max,
        )
        self._retrying: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._follow_faults = FaultLog(_FOLLOW_AGAIN_S)
        self._collect_faults = FaultLog(_FOLLOW_AGAIN_S)
        self._give_up_faults = FaultLog(_GIVE_UP_S)

    async def read(self) -> None:
        """Read the deployments from the log. A worker that starts later loads them.

        Raises:
            NotReadyError: the log cannot be read.
        """
        await self._log.catch_up()
        for placed in filter(self._is_behind, self._log.newest.values()):
            number = next(self._numbers)
            deployed = DeployedApp(number, placed.deployment, placed.seqnum, placed.since)
            self._apps[deployed.record.name] = deployed
            self._keep(deployed, placed)
        self.change_count += 1
        self._on_change()

    def follow(self) -> None:
        """Start the background tasks.

        The tasks apply deployments of other compute nodes, retry applications that do not load, and
        unload earlier deployments that no open run needs.
        """
        self._following = asyncio.ensure_future(self._follow())
        self._retrying = asyncio.ensure_future(self._retry())
        self._giving_up = asyncio.ensure_future(self._give_up())

    async def stop(self) -> None:
        """Stop the background tasks and all trial processes."""
        all_tasks = (self._following, self._retrying, self._giving_up)
        tasks = [task for task in all_tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trials.stop()

    # --- questions

    @property
    def count(self) -> int:
        """Number of deployed applications."""
        return len(self._apps)

    def all(self) -> list[DeployedApp]:
        """Return the deployed applications, sorted by name."""
        return [self._apps[name] for name in sorted(self._apps)]

    def app(self, name: str) -> DeployedApp:
        """Return a deployed application.

        Raises:
            UnknownFunctionError: the application is not deployed; the message has the time of its
                undeployment, or a similar name.
            DataLossError: the application's newest deployment is lost.
        """
        if (deployed := self._apps.get(name)) is None:
            raise self._log.lost.get(name) or unknown_app(name, self._apps, self._log)
        return deployed

    def function(self, name: str) -> tuple[DeployedApp, FunctionSpec]:
        """Return the application and spec of a function (`app.function`) or operation.

        An operation has a name such as `app.runs.list`.

        Raises:
            UnknownFunctionError: there is no such function; the message suggests a similar name.
            DataLossError: the newest deployment of the application is lost.
        """
        app, _, function = name.partition(".")
        deployed = self._apps.get(app)
        spec = deployed.functions.get(function) if deployed is not None else None
        if deployed is None or spec is None:
            lost = self._log.lost.get(app) if deployed is None else None
            raise lost or unknown_function(name, self._apps, self._log)
        return deployed, spec

    # --- changes

    async def deploy(self, sources: Mapping[str, str], *, name: str | None, owner: str) -> AppInfo:
        """Deploy sources; see `FunctionHost.deploy`."""
        if name is not None:
            self._check_owner(checked_name(name), owner)
        if not self._workers():
            raise NotReadyError("No function worker is up to take the application; try again.")
        number = next(self._numbers)
        load = Load(number, name, dict(sources))
        tried = await self._trials.try_import(load)
        self._check_owner(tried.name, owner)
        in_use = await self._needed(tried.name)
        async with self._loading:
            try:
                loaded = await self._load_everywhere(load)
                self._check_owner(loaded.name, owner)
                keeps = self._to_keep(loaded.name, code_digest(load.sources), in_use)
                info = await self._record(number, loaded, load.sources, owner, keeps)
            except BaseException:
                self._unload_number(number)
                raise
        structlog.get_logger().info("deployed", app=info.name, version=info.version)
        return info

    async def undeploy(self, name: str, *, owner: str) -> AppInfo:
        """Undeploy an application; see `FunctionHost.undeploy`."""
        await self._log.catch_up(fresh=True)
        placed = self._log.newest.get(name)
        if placed is None:
            raise self._log.lost.get(name) or unknown_app(name, self._apps, self._log)
        if placed.deployment.is_undeployed:
            raise undeployed_already(placed)
        if placed.deployment.owner != owner:
            raise owner_differs(placed.deployment)
        async with self._loading:
            await self._log.append(placed.deployment.undeployed())
            await self._read_recorded(f"The undeployment of app {name}")
            self._stop_application(self._log.placed(name))
            self._take_missed()
        structlog.get_logger().info("undeployed", app=name)
        return placed.deployment.info

    async def load_into_new(self, worker: Worker) -> bool:
        """Load all applications into a worker that runs no calls yet; False: the worker crashed.

        If an application does not load, the error is logged, and calls of the application fail with
        this error.
        """
        async with self._loading:
            for deployed in (*self._apps.values(), *self._all_kept()):
                if deployed.workers_lost < _WORKERS_LOST_MAX:
                    await self._load_again(worker, deployed)
                if worker.link.is_lost:
                    return False
            return True

    def unload(self, deployed: DeployedApp) -> None:
        """Unload a version at once.

        Before the call, the caller checks that the version was replaced or undeployed, is not kept,
        and has no calls left.
        """
        self._unload_number(deployed.number)

    def run_services(self, worker: Worker) -> None:
        """Let `worker` run the services of all deployed applications that are loaded there."""
        loaded, versions = list[int](), list[LoadedVersion]()
        missing = list[MissingVersion]()
        for name, newest in self._apps.items():
            if newest.number not in worker.deployments:
                continue
            loaded.append(newest.number)
            versions += [
                LoadedVersion(one.number, one.record.version, newest.number)
                for one in (newest, *self._kept.get(name, ()))
                if one.number in worker.deployments
            ]
            missing += [
                MissingVersion(newest.number, one.record.version, one.code, _why_missing(one))
                for one in self._kept.get(name, ())
                if one.number not in worker.deployments
            ]
        worker.link.tell(RunServices(tuple(loaded), tuple(versions), tuple(missing)))

    def end_services(self) -> None:
        """Stop all services in all workers, because the platform stops."""
        for worker in self._workers():
            worker.link.tell(RunServices(()))

    # --- internal: deploying

    def _run_services(self) -> None:
        for worker in self._workers():
            self.run_services(worker)

    async def _record(
        self,
        number: int,
        loaded: Loaded,
        sources: dict[str, str],
        owner: str,
        keeps: tuple[SeqNum, ...] = (),
    ) -> AppInfo:
        """Record a loaded deployment. If its record is then the newest record of its name, send new
        calls to it.

        Another compute node may record a deployment of the same name at the same time.
        """
        before = self._apps.get(loaded.name)
        record = Deployment(
            name=loaded.name,
            version=before.record.version + 1 if before is not None else 1,
            owner=owner,
            sources=sources,
            functions=loaded.functions,
            services=loaded.services,
            schedules=loaded.schedules,
            operations=loaded.operations,
            keeps=keeps,
        )
        seqnum = await self._log.append(record)
        await self._read_recorded(f"The deployment of app {record.name}")
        placed = self._log.placed(record.name)
        if placed.seqnum == seqnum:
            deployed = DeployedApp(number, placed.deployment, seqnum, placed.since)
            await self._load_kept(self._replace(deployed, placed))
        self._take_missed()
        if placed.deployment.is_undeployed:
            raise DeployError(
                f"App {record.name} was undeployed by another request at the same time; deploy it "
                "again."
            )
        if placed.deployment.owner != owner:
            raise name_taken(record.name, placed.deployment.owner)
        if placed.seqnum != seqnum:
            self._unload_number(number)
        return placed.deployment.info

    async def _read_recorded(self, what: str) -> None:
        """Read the log, after a record of this node was appended.

        Raises:
            AppendOutcomeUnknownError: the log cannot be read now. The record takes effect when this
                node has read it, unless another node's record came first.
        """
        try:
            await self._log.catch_up()
        except IndilogError as error:
            if not error.retryable:
                raise
            self._behind.set()
            raise AppendOutcomeUnknownError(
                f"{what} is recorded, but it is not known whether it has taken effect; repeat it: "
                f"{error}"
            ) from error

    def _take_missed(self) -> None:
        """If deployments or undeployments were read but not applied, wake the task that follows the
        log.
        """
        if any(map(self._is_behind, self._log.newest.values())):
            self._behind.set()

    def _check_owner(self, name: str, owner: str) -> None:
        there = self._apps.get(name)
        if there is not None and there.record.owner != owner:
            raise name_taken(name, there.record.owner)

    def _replace(
        self, deployed: DeployedApp, placed: PlacedDeployment | None = None
    ) -> list[DeployedApp]:
        """Send new calls to `deployed`. Each earlier version that `placed` does not keep is
        unloaded after its last call. Return the kept versions that must still be loaded.
        """
        before = self._apps.get(deployed.record.name)
        self._apps[deployed.record.name] = deployed
        unkept = self._keep(deployed, placed, before)
        if deployed.problem is not None:
            self._try_later(deployed)
        self._changed()
        for one in unkept:
            self._retire(one)
        return [d for d in self._kept.get(deployed.record.name, ()) if not self._is_loaded(d)]

    def _stop_application(self, placed: PlacedDeployment) -> None:
        """If `placed` is an undeployment that is not applied, stop new calls and services of the
        application, and unload it after its last call.
        """
        if placed.deployment.is_undeployed and self._is_behind(placed):
            name = placed.deployment.name
            before = (self._apps.pop(name), *self._kept.pop(name, ()))
            self._changed()
            for one in before:
                one.is_undeployed, one.is_kept = True, False
                self._retire(one)

    def _changed(self) -> None:
        self.change_count += 1
        self._run_services()
        self._on_change()

    def _retire(self, before: DeployedApp) -> None:
        self._retries.withdraw(before)
        if before.running == 0:
            self.unload(before)

    # --- internal: earlier deployments

    def _all_kept(self) -> list[DeployedApp]:
        return [one for kept in self._kept.values() for one in kept]

    def _keep(
        self,
        deployed: DeployedApp,
        placed: PlacedDeployment | None,
        before: DeployedApp | None = None,
    ) -> list[DeployedApp]:
        """Keep the earlier versions that the record of a new deployment names; return the other
        earlier versions.

        Args:
            deployed: the new deployment.
            placed: the record of the new deployment, which names the earlier deployments to keep;
                None: keep no earlier deployment.
            before: the version that took calls until now; None: there was no such version.
        """
        name = deployed.record.name
        earlier = [*([] if before is None else [before]), *self._kept.pop(name, ())]
        known = {one.seqnum: one for one in earlier}
        for one in () if placed is None else placed.kept[: self._node.functions.versions_kept_max]:
            kept = known.pop(one.seqnum, None)
            if kept is None:
                kept = DeployedApp(next(self._numbers), one.deployment, one.seqnum)
            kept.is_kept = True
            self._kept.setdefault(name, []).append(kept)
        for unkept in known.values():
            unkept.is_kept = False
        for one in (*known.values(), *self._kept.get(name, ())):
            one.successor = deployed
            if not one.is_kept:
                self._retries.withdraw(one)
        return list(known.values())

    def _is_loaded(self, deployed: DeployedApp) -> bool:
        return all(deployed.number in worker.deployments for worker in self._workers())

    async def _load_kept(self, missing: list[DeployedApp]) -> None:
        """Load kept versions into the workers that have not loaded them."""
        if not missing or self._node.functions.workers == 0:
            return
        for one in missing:
            for worker in self._workers():
                if one.number not in worker.deployments and one.workers_lost < _WORKERS_LOST_MAX:
                    await self._load_again(worker, one)
            if not self._is_loaded(one):
                self._try_later(one)
        self._run_services()

    async def _needed(self, name: str) -> frozenset[str] | None:
        """Return the digests of the code that open runs of an application need; None: they are
        unknown.
        """
        for one in (*filter(None, [self._apps.get(name)]), *self._kept.get(name, ())):
            if RUN_CODES in one.functions:
                return await self._codes_in_use(one)
        return frozenset()

    def _to_keep(self, name: str, code: str, in_use: frozenset[str] | None) -> tuple[SeqNum, ...]:
        """Return the earlier deployments that a new deployment of `name` with this code keeps.

        These are the kept deployments whose code open runs need, and the current deployment if it
        has workflows: runs may begin with its code until the new deployment is recorded.
        """
        newest = self._apps.get(name)
        has_runs = newest is not None and RUN_CODES in newest.functions
        kept = [newest] if newest is not None and has_runs else []
        kept += [o for o in self._kept.get(name, ()) if in_use is None or o.code in in_use]
        kept = [one for one in kept if one.code != code]
        return tuple(one.seqnum for one in kept[: self._node.functions.versions_kept_max])

    async def _give_up(self) -> None:
        """Periodically unload the kept versions whose code no open run needs any more."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_GIVE_UP_S)
            for name in list(self._kept):
                try:
                    await self._give_up_unneeded(name)
                except Exception as error:  # noqa: BLE001 - outermost: the loop must continue
                    self._give_up_faults.log_if_due("old code not unloaded", error, loop.time())

    async def _give_up_unneeded(self, name: str) -> None:
        newest, in_use = self._apps.get(name), await self._needed(name)
        async with self._loading:
            if newest is None or in_use is None or not self._is_newest(newest):
                return
            kept = self._kept.get(name, [])
            unneeded = [one for one in kept if one.code not in in_use and one.running == 0]
            if not unneeded:
                return
            self._kept[name] = [one for one in kept if one not in unneeded]
            self._run_services()
            for one in unneeded:
                one.is_kept = False
                self._retire(one)
                structlog.get_logger().info(
                    "old code unloaded", app=name, version=one.record.version
                )

    # --- internal: deployments of other nodes

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._collect()
                await self._wait_for_deployments()
                self._behind.clear()
                await self._log.catch_up()
                for placed in list(self._log.newest.values()):
                    if self._is_behind(placed):
                        await self._take(placed)
            except Exception as error:  # noqa: BLE001 - outermost: the loop must continue
                self._follow_faults.log_if_due("deployments not followed", error, loop.time())
                self._behind.set()
                await asyncio.sleep(_FOLLOW_AGAIN_S)
            else:
                self._follow_faults.end()

    async def _collect(self) -> None:
        """Trim the records that no starting node needs; the next call repeats a failed trim."""
        try:
            await self._log.collect()
        except IndilogError as error:
            now = asyncio.get_running_loop().time()
            self._collect_faults.log_if_due("deployments not trimmed", error, now)
        else:
            self._collect_faults.end()

    async def _wait_for_deployments(self) -> None:
        """Wait until there is a deployment that this node has not read or not applied, or until
        `_FOLLOW_WAIT_S` have passed.
        """
        waits = [
            asyncio.ensure_future(self._behind.wait()),
            asyncio.ensure_future(self._log.wait_for_more(_FOLLOW_WAIT_S)),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _take(self, placed: PlacedDeployment) -> None:
        """Apply a deployment or undeployment of another compute node.

        If the code of a deployment does not import on this node, the deployment is applied anyway,
        and calls of the application fail with the import error.

        Raises:
            NotReadyError: no trial process ran, so it is unknown whether the code imports.
        """
        record = placed.deployment
        if record.is_undeployed:
            async with self._loading:
                self._stop_application(placed)
            structlog.get_logger().info("undeployment followed", app=record.name)
            return
        number = next(self._numbers)
        deployed = DeployedApp(number, record, placed.seqnum, placed.since)
        load = Load(number, record.name, record.sources)
        try:
            if self._node.functions.workers > 0:
                await self._trials.try_import(load)
        except (DeployError, DiskFullError) as error:  # applied all the same, and retried later
            deployed.workers_lost = _WORKERS_LOST_MAX
            deployed.problem = problem_of(record, error)
        async with self._loading:
            if self._log.newest.get(record.name) is not placed or not self._is_behind(placed):
                self._take_missed()  # a newer record may exist, such as an undeployment
                return
            if deployed.problem is None and self._node.functions.workers > 0:
                await self._load_followed(load, deployed)
            await self._load_kept(self._replace(deployed, placed))
        structlog.get_logger().info(
            "deployment followed", app=record.name, version=record.version, problem=deployed.problem
        )

    async def _load_followed(self, load: Load, deployed: DeployedApp) -> None:
        """Load a deployment of another node into every worker; note why it does not import."""
        try:
            await self._load_everywhere(load)
        except BaseException as error:
            self._unload_number(deployed.number)
            if not isinstance(error, DeployError):
                raise
            deployed.workers_lost = _WORKERS_LOST_MAX
            deployed.problem = problem_of(deployed.record, error)

    def _is_behind(self, placed: PlacedDeployment) -> bool:
        running = self._apps.get(placed.deployment.name)
        if running is None:
            return not placed.deployment.is_undeployed
        return running.seqnum < placed.seqnum

    # --- internal: loading

    async def _load_everywhere(self, load: Load) -> Loaded:
        """Load a deployment into every worker. If a worker crashes, its replacement will load the
        deployment.
        """
        workers = self._workers()
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

    async def _load(self, worker: Worker, load: Load) -> Loaded:
        return await load_into(worker, load, timeout_s=self._node.functions.import_timeout_s)

    async def _load_again(self, worker: Worker, deployed: DeployedApp) -> None:
        """Load a version into a worker, and note the outcome.

        If a signal from outside ended the worker, the code may not be the cause. Then no problem of
        the version is noted, but the worker counts in `workers_lost`.
        """
        record = deployed.record
        try:
            await self._load(worker, Load(deployed.number, record.name, record.sources))
        except LinkLostError:
            return  # the worker crashed before it imported the code
        except IndilogError as error:
            deployed.workers_lost += worker.link.is_lost
            if not worker.was_ended_by_others:
                self._note_load_failure(deployed, error)
            elif deployed.workers_lost >= _WORKERS_LOST_MAX:
                self._try_later(deployed)
        else:
            healed, deployed.problem, deployed.workers_lost = deployed.problem, None, 0
            self._retries.withdraw(deployed)
            if healed is not None:
                self._on_change()

    def _note_load_failure(self, deployed: DeployedApp, error: IndilogError) -> None:
        record = deployed.record
        deployed.problem = problem_of(record, error)
        structlog.get_logger().error(
            "app not loaded", app=record.name, version=record.version, reason=str(error)
        )
        self._on_change()
        self._try_later(deployed)

    # --- internal: retries

    def _try_later(self, deployed: DeployedApp) -> None:
        """Schedule the next import of a version that is the newest one or is kept."""
        if not self._is_needed(deployed):
            return
        self._retries.schedule(deployed, asyncio.get_running_loop().time())
        self._failed.set()

    async def _retry(self) -> None:
        """Retry imports that failed, one after the other, when they are due."""
        loop = asyncio.get_running_loop()
        while True:
            self._failed.clear()
            if (deployed := self._retries.pop_due(loop.time())) is not None:
                try:
                    await self._try_again(deployed)
                except Exception:  # noqa: BLE001 - outermost: the others must be retried
                    structlog.get_logger().exception("app not tried", app=deployed.record.name)
                    self._try_later(deployed)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._retries.next_at):
                    await self._failed.wait()

    async def _try_again(self, deployed: DeployedApp) -> None:
        """Import a version in a trial process, then in the workers that have not loaded it."""
        record = deployed.record
        try:
            await self._trials.try_import(Load(deployed.number, record.name, record.sources))
        except DeployError as error:
            if self._is_needed(deployed):
                self._note_load_failure(deployed, error)
            return
        except IndilogError:  # the trial process did not start
            self._try_later(deployed)
            return
        async with self._loading:
            if self._is_needed(deployed):
                await self._load_into_others(deployed)

    async def _load_into_others(self, deployed: DeployedApp) -> None:
        """Load a version into one worker after the other; stop at the first worker that does not
        load it.
        """
        deployed.workers_lost = (
            _WORKERS_LOST_MAX - 1
        )  # so new workers import the version until one more worker has crashed
        for worker in self._workers():
            if deployed.number not in worker.deployments:
                await self._load_again(worker, deployed)
                if deployed.number not in worker.deployments:
                    self._try_later(deployed)
                    return
                self.run_services(worker)
        record = deployed.record
        structlog.get_logger().info("app imports again", app=record.name, version=record.version)

    def _is_newest(self, deployed: DeployedApp) -> bool:
        return self._apps.get(deployed.record.name) is deployed

    def _is_needed(self, deployed: DeployedApp) -> bool:
        return deployed.is_kept or self._is_newest(deployed)

    def _unload_number(self, number: int) -> None:
        for worker in self._workers():
            worker.deployments.discard(number)
            worker.link.tell(Unload(number))


def _why_missing(kept: DeployedApp) -> str:
    return kept.problem or "It is being loaded."
