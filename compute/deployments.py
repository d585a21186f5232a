"""What is deployed, as records of the reserved log `$apps`: so it survives a restart, and reaches
other nodes.

Each deployment is one record tagged with the application's name; the newest record of a name wins,
on every compute node that reads the log.
The sources are in the record, so a node needs nothing but the log. That an application is
undeployed is such a record, too, without sources and functions: it keeps the version of the one
before, and frees the name for any owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from indilog.deployed import AppInfo, FunctionSpec, ScheduleSpec
from indilog.errors import DataLossError, DeployError, TooLargeError
from indilog.ids import SeqNum
from indilog.log import Log, LogSource, Record, Session
from indilog.losses import Losses

APPS_LOG: Final = "$apps"


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment of an application, or the end of it, as it stands in the log."""

    name: str
    version: int
    owner: str
    sources: dict[str, str]
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()
    is_undeployed: bool = False

    def undeployed(self) -> Deployment:
        """Return what says that it is deployed no more."""
        return Deployment(
            name=self.name,
            version=self.version,
            owner=self.owner,
            sources={},
            functions=(),
            is_undeployed=True,
        )

    @property
    def info(self) -> AppInfo:
        """What callers may know of it."""
        return AppInfo(
            self.name, self.version, self.owner, self.functions, self.services, self.schedules
        )


class Placed(NamedTuple):
    """A deployment, its place in the log, and when it was recorded (seconds since 1970).

    `since`: of each of its schedules, whatever its `catch_up`, when the first deployment was
    ordered of those up to this one that all have it; seconds since 1970 by the log's time. `time`:
    when it was made, by the wall clock of the process that made it, for people.
    """

    seqnum: SeqNum
    deployment: Deployment
    since: Mapping[ScheduleSpec, float]
    time: float


class DeploymentLog:
    """The deployments in a log source.

    Attributes:
        newest: of each application, by name, among the records read so far (`catch_up`); it may say
            that the application is undeployed.
        lost: of applications whose newest deployment is lost by damage, what reading it raised;
            deploying one again mends it.
        losses: where deployments may be lost of which not even the name is known.
    """

    def __init__(self, logs: LogSource) -> None:
        self._log: Log = logs.log(APPS_LOG, Session())
        self._bound: SeqNum = 0
        self.newest: dict[str, Placed] = {}
        self.lost: dict[str, DataLossError] = {}
        self.losses = Losses(
            "deployments", "Applications deployed there are missing or old: deploy them again."
        )

    async def append(self, deployment: Deployment) -> SeqNum:
        """Record a deployment and return its place; it survives a crash then.

        Raises:
            DeployError: its sources exceed the limit of a record.
        """
        data = msgspec.json.encode(deployment)
        try:
            return await self._log.append(data, tags=[deployment.name])
        except TooLargeError as error:
            raise DeployError(
                f"The sources of {deployment.name} are {error.size:,} bytes, the limit is "
                f"{error.limit:,}; leave data files out."
            ) from error

    async def until_more(self, wait_s: float) -> None:
        """Wait up to `wait_s` for a record that `catch_up` has not read."""
        try:
            await self._log.read_next(bound=self._bound, wait=wait_s)
        except DataLossError:
            return  # `catch_up` names it

    async def catch_up(self, *, fresh: bool = False) -> None:
        """Read what was recorded since, into `newest`; `fresh`: by anybody, up to now.

        Whoever reads the same records comes to the same result, whatever was deployed at the same
        time on several compute nodes: the first owner of a name keeps it, versions count up.
        """
        while True:
            try:
                page = await self._log.read_range(bound=self._bound, fresh=fresh)
            except DataLossError as error:
                self._bound = self.losses.read_on_after(error, self._bound)
                self._lose(error)
                continue
            if not page:
                return
            fresh = False
            for record in page:
                try:
                    deployment = msgspec.json.decode(record.data, type=Deployment)
                except msgspec.DecodeError as error:
                    structlog.get_logger().error(
                        "deployment not understood", seqnum=record.seqnum, reason=str(error)
                    )
                    continue
                self._take(record, deployment)
            self._bound = max(self._bound, page[-1].seqnum + 1)

    def _lose(self, error: DataLossError) -> None:
        """Take note that the newest deployment of an application is lost, if its name is known."""
        for name in map(str, error.tags):
            self.newest.pop(name, None)
            self.lost[name] = DataLossError(
                f"The newest deployment of app {name} is lost by damage at seqnum {error.seqnum}; "
                "deploy it again.",
                seqnum=error.seqnum,
                next_seqnum=error.next_seqnum,
                tags=error.tags,
            )

    def _take(self, record: Record, deployment: Deployment) -> None:
        seqnum = record.seqnum
        before = self.newest.get(deployment.name)
        if before is not None and before.seqnum >= seqnum:
            return
        is_there = before is not None and not before.deployment.is_undeployed
        if deployment.is_undeployed and not is_there:
            return
        if before is not None:
            if is_there and before.deployment.owner != deployment.owner:
                return
            version = before.deployment.version
            if not deployment.is_undeployed:
                version = max(deployment.version, version + 1)
            deployment = msgspec.structs.replace(deployment, version=version)
        earlier = {_times(s): t for s, t in before.since.items()} if before is not None else {}
        since = {
            spec: earlier.get(_times(spec), record.ordered_at) for spec in deployment.schedules
        }
        self.lost.pop(deployment.name, None)
        self.newest[deployment.name] = Placed(seqnum, deployment, since, record.time)


def _times(spec: ScheduleSpec) -> ScheduleSpec:
    """Return what two schedules have in common that are the same but for what is caught up."""
    return msgspec.structs.replace(spec, catch_up="last")
