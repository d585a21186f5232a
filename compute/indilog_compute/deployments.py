"""Deployments as records of the reserved log `$apps`: they survive a restart and reach all nodes.

Each deployment is one record, tagged with the application's name. On every compute node, the newest
record of a name is in force. The record contains the sources, so a node needs only the log. An
undeployment is also a record, without sources and functions. It keeps the version of the previous
record, and frees the name for any owner. `Applications` (`workers.applications`) appends and
replays the records.

A record summarises the earlier records of its application. So `collect` trims these earlier records
after the newest one was read. `collect` also forgets all undeployed applications except those that
were undeployed last (`UNDEPLOYED_KEPT`, 1,000). If two nodes deploy an application at once, the
later record does not summarise the earlier one. Then no record of this application is trimmed
before its next deployment.

Open runs of workflows may need the code of earlier deployments. So a record names the earlier
deployments that are kept (`Deployment.keeps`). The record of a deployment has a second tag, made
of the name and the digest of the sources. An earlier deployment that a later record does not keep
is trimmed by this second tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Final, NamedTuple

import msgspec
import structlog

from indilog.base.deployed import AppInfo, FunctionSpec, ScheduleSpec, code_digest
from indilog.base.errors import DataLossError, DeployError, NotReadyError, TooLargeError
from indilog.base.ids import SeqNum
from indilog.base.log import Log, LogSource, Record, Session
from indilog.sdk.losses import Losses

APPS_LOG: Final = "$apps"
UNDEPLOYED_KEPT: Final = 1_000
"""How many undeployed applications keep their names and versions: those undeployed last."""


_CODE: Final = ":"
"""Separates name and digest in the tag of a record's code; no name contains a colon."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A record of `$apps`: one deployment of an application, or its undeployment.

    Attributes:
        follows: the seqnum of the application's newest record that the writer knew; None: none.
            `version` and `since` are computed from that record.
        read_below: the writer had read all records below this seqnum. If `follows` is None, the
            writer found no record of the application below this seqnum. All nodes then ignore
            records of the application below `read_below`, even records that they have read.
        since: for each of `schedules`, its time in `PlacedDeployment.since`; None: the time at
            which this record was ordered.
        keeps: seqnums of the earlier deployments whose code is kept.
    """

    name: str
    version: int
    owner: str
    sources: dict[str, str]
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()
    operations: tuple[FunctionSpec, ...] = ()
    is_undeployed: bool = False
    follows: SeqNum | None = None
    read_below: SeqNum = 0
    since: tuple[float | None, ...] = ()
    keeps: tuple[SeqNum, ...] = ()

    def undeployed(self) -> Deployment:
        """Return the undeployment of this deployment."""
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
        """The public description of this deployment."""
        return AppInfo(
            self.name,
            self.version,
            self.owner,
            self.functions,
            self.services,
            self.schedules,
            self.operations,
        )


class KeptDeployment(NamedTuple):
    """An earlier deployment whose code is kept; `code` is the digest of its sources."""

    seqnum: SeqNum
    deployment: Deployment
    code: str


class PlacedDeployment(NamedTuple):
    """A deployment and its place in the log.

    Attributes:
        kept: the earlier deployments whose code is kept, newest first. All have the owner of this
            deployment, and no two have the same sources.
        since: for each schedule, the time from which on every deployment has had that schedule
            without interruption (log's time, seconds since 1970). Schedules that differ only in
            `catch_up` count as the same.
        time: when the deployment was made, by the wall clock of its writer, seconds since 1970.
        is_whole: whether a node that reads this record alone gets the same version and `since` as
            a node that also reads the earlier records.
    """

    seqnum: SeqNum
    deployment: Deployment
    since: Mapping[ScheduleSpec, float]
    time: float
    is_whole: bool
    kept: tuple[KeptDeployment, ...] = ()

    def earlier(self) -> tuple[KeptDeployment, ...]:
        """Return the deployments whose code a following deployment may keep, newest first."""
        if self.deployment.is_undeployed:
            return ()
        code = code_digest(self.deployment.sources)
        return (KeptDeployment(self.seqnum, self.deployment, code), *self.kept)


class DeploymentLog:
    """Appends and replays the deployments of one platform.

    Attributes:
        newest: by name, the newest deployment or undeployment among the records read so far
            (`catch_up`).
        lost: by name, the error of an application whose newest deployment is lost by damage. A new
            deployment of the application removes the error.
        losses: the lost seqnums at which deployments of any application may have been.
    """

    def __init__(self, logs: LogSource) -> None:
        self._log: Log = logs.log(APPS_LOG, Session())
        self._bound: SeqNum = 0
        self.newest: dict[str, PlacedDeployment] = {}
        self.lost: dict[str, DataLossError] = {}
        self.losses = Losses(
            "deployments", "Applications deployed there are missing or old: deploy them again."
        )
        self._superseded: set[str] = set()
        """Applications that have untrimmed records before their newest record."""
        self._dropped: dict[str, dict[str, SeqNum]] = {}
        """By application and tag: the seqnum below which to trim the tag. The tags are of code that
        is not kept.
        """

    def placed(self, name: str) -> PlacedDeployment:
        """Return the newest deployment of an application that was deployed or undeployed here.

        Raises:
            DataLossError: the newest record of the name is lost.
            NotReadyError: the application was undeployed, and its name was forgotten after
                `UNDEPLOYED_KEPT` later undeployments.
        """
        if (placed := self.newest.get(name)) is not None:
            return placed
        raise self.lost.get(name) or NotReadyError(
            f"App {name} was undeployed and forgotten meanwhile; ask again."
        )

    async def append(self, deployment: Deployment) -> SeqNum:
        """Append a deployment durably, and return its seqnum.

        The record summarises the application's newest record that was read here.

        Raises:
            DeployError: the sources of the deployment exceed the limit of a record.
        """
        before = self.newest.get(deployment.name)
        said = msgspec.structs.replace(_following(before, deployment), read_below=self._bound)
        data = msgspec.json.encode(said)
        try:
            return await self._log.append(data, tags=_tags(deployment))
        except TooLargeError as error:
            raise DeployError(
                f"The sources of {deployment.name} are {error.size:,} bytes, the limit is "
                f"{error.limit:,}; leave data files out."
            ) from error

    async def wait_for_more(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for a record that `catch_up` has not read."""
        try:
            await self._log.read_next(bound=self._bound, wait=wait_s)
        except DataLossError:
            return  # `catch_up` reports it

    async def catch_up(self, *, fresh: bool = False) -> None:
        """Read new records into `newest`; a `fresh` call reads all records that any node appended
        before the call.

        All nodes that read the same records reach the same result, even if several compute nodes
        deploy at once. The first owner of a name keeps the name until an undeployment, and versions
        count up. Records that `collect` trimmed make no difference, because each record summarises
        the records before it.
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
        """Note that the newest deployment of an application is lost, if its name is known."""
        for name in filter(_is_name, map(str, error.tags)):
            self.newest.pop(name, None)
            self.lost[name] = DataLossError(
                f"The newest deployment of app {name} is lost by damage at seqnum {error.seqnum}; "
                "deploy it again.",
                seqnum=error.seqnum,
                next_seqnum=error.next_seqnum,
                tags=error.tags,
            )

    def _take(self, record: Record, deployment: Deployment) -> None:
        name, follows = deployment.name, deployment.follows
        before = self.newest.get(name)
        if before is not None and before.seqnum >= record.seqnum:
            return
        if before is not None:
            self._superseded.add(name)
        first = deployment.read_below if follows is None else follows
        if before is not None and before.seqnum >= first:
            taken = _placed_after(before, record, deployment)
        elif deployment.is_undeployed and follows is None:
            return  # an undeployment that follows no deployment
        else:
            taken = _placed_alone(record, deployment)
        if taken is not None:
            self.lost.pop(name, None)
            self.newest[name] = self._keep(before, taken)

    def _keep(self, before: PlacedDeployment | None, taken: PlacedDeployment) -> PlacedDeployment:
        """Return a new deployment with the earlier deployments that it keeps.

        The other earlier deployments are noted for `_trim_dropped`.
        """
        new, kept = taken.deployment, list[KeptDeployment]()
        codes = {code_digest(new.sources)}
        for one in () if before is None else before.earlier():
            is_its = one.deployment.owner == new.owner and not new.is_undeployed
            is_kept = one.seqnum in new.keeps or one.seqnum > _last_known(new)
            if is_its and is_kept and one.code not in codes:
                codes.add(one.code)
                kept.append(one)
            else:
                dropped, tag = self._dropped.setdefault(new.name, {}), _code_tag(new.name, one.code)
                dropped[tag] = max(dropped.get(tag, 0), one.seqnum + 1)
        return taken._replace(kept=tuple(kept))

    async def _trim_dropped(self, name: str) -> None:
        """Trim the earlier deployments that are not kept."""
        dropped = self._dropped.get(name, {})
        for tag, until in list(dropped.items()):
            await self._log.trim(until, tag=tag)
            if dropped.get(tag) == until:
                del dropped[tag]
        if not dropped:
            self._dropped.pop(name, None)

    async def collect(self) -> None:
        """Trim the read records that a node does not need when it starts; callable at any time.

        While a trim of an application is awaited, a newer record of the application may be read.
        Then the next call collects the application again.

        Raises:
            QuorumUnavailableError: a trim was not confirmed; the next call repeats the trim.
        """
        for name in sorted(self._superseded):
            if (placed := self.newest.get(name)) is not None and placed.is_whole:
                await self._trim_dropped(name)
                await self._log.trim(placed.seqnum, tag=name)
                if self.newest.get(name) is placed:
                    self._superseded.discard(name)
        gone = [p for p in self.newest.values() if p.deployment.is_undeployed]
        for placed in sorted(gone, key=_seqnum)[: max(0, len(gone) - UNDEPLOYED_KEPT)]:
            name = placed.deployment.name
            await self._log.trim(placed.seqnum + 1, tag=name)
            if self.newest.get(name) is placed:
                del self.newest[name]
                self._superseded.discard(name)


def _tags(deployment: Deployment) -> list[str]:
    """Return the tags of a record. The tag of the code keeps the record when the tag of the name is
    trimmed.
    """
    name = deployment.name
    return (
        [name]
        if deployment.is_undeployed
        else [name, _code_tag(name, code_digest(deployment.sources))]
    )


def _code_tag(name: str, code: str) -> str:
    return f"{name}{_CODE}{code}"


def _is_name(tag: str) -> bool:
    return _CODE not in tag


def _last_known(deployment: Deployment) -> SeqNum:
    """Return the seqnum of the last record of the application that the writer can have read."""
    return deployment.read_below - 1 if deployment.follows is None else deployment.follows


def _following(before: PlacedDeployment | None, deployment: Deployment) -> Deployment:
    """Return `deployment` as a record that also summarises `before`."""
    if before is None:
        return deployment
    return msgspec.structs.replace(
        deployment,
        version=_version_after(before, deployment),
        follows=before.seqnum,
        since=tuple(_earlier(before).get(_times(spec)) for spec in deployment.schedules),
    )


def _placed_alone(record: Record, deployment: Deployment) -> PlacedDeployment:
    """Place a deployment that has no valid earlier record of its application."""
    since = {
        spec: record.ordered_at if at is None else at
        for spec, at in zip_longest(deployment.schedules, deployment.since)
        if spec is not None
    }
    return PlacedDeployment(record.seqnum, deployment, since, record.time, is_whole=True)


def _placed_after(
    before: PlacedDeployment, record: Record, deployment: Deployment
) -> PlacedDeployment | None:
    """Place a deployment that follows `before`; None: the deployment has no effect.

    A deployment has no effect if another owner has the name. An undeployment has no effect if the
    application is undeployed already.
    """
    is_there = not before.deployment.is_undeployed
    if (deployment.is_undeployed and not is_there) or (
        is_there and before.deployment.owner != deployment.owner
    ):
        return None
    alone = _placed_alone(record, deployment)
    version, earlier = _version_after(before, deployment), _earlier(before)
    since = {spec: earlier.get(_times(spec), record.ordered_at) for spec in deployment.schedules}
    return alone._replace(
        deployment=msgspec.structs.replace(deployment, version=version),
        since=since,
        is_whole=(version, since) == (deployment.version, alone.since)
        and deployment.follows is not None,
    )


def _version_after(before: PlacedDeployment, deployment: Deployment) -> int:
    if deployment.is_undeployed:
        return before.deployment.version
    return max(deployment.version, before.deployment.version + 1)


def _earlier(before: PlacedDeployment) -> dict[ScheduleSpec, float]:
    return {_times(spec): at for spec, at in before.since.items()}


def _seqnum(placed: PlacedDeployment) -> SeqNum:
    return placed.seqnum


def _times(spec: ScheduleSpec) -> ScheduleSpec:
    """Return a schedule with the default `catch_up`; schedules that differ only in `catch_up` count
    as the same.
    """
    return msgspec.structs.replace(spec, catch_up="last")
