"""What the function host keeps of a deployed application and of one call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from indilog.base.deployed import AppInfo, FunctionSpec, ScheduleSpec
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.link.link_messages import (
    Failed,
    Returned,
)
from indilog_compute.deployments import Deployment
from indilog_compute.workers.claims import NO_SLOT

if TYPE_CHECKING:
    from indilog_compute.workers.process import WorkerProcess


class Deployed:
    """An application as it runs here.

    Attributes:
        number: of this deployment in this host; workers know it by that.
        seqnum: of its record in the log of deployments; `since`: as in `Placed`.
        functions: by name.
        running: its calls that wait or run.
        successor: the newer version that took its place.
        is_undeployed: it was taken away, and none took its place.
        problem: why it could not be loaded, if it could not.
        workers_lost: workers that ended while they imported it, since it was last imported.
    """

    __slots__ = (
        "functions", "is_undeployed", "number", "problem", "record", "running", "seqnum", "since",
        "successor", "workers_lost",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        record: Deployment,
        seqnum: SeqNum,
        since: Mapping[ScheduleSpec, float] | None = None,
    ) -> None:
        self.number = number
        self.since = since or {}
        self.record = record
        self.seqnum = seqnum
        self.functions: dict[str, FunctionSpec] = {f.name: f for f in record.functions}
        self.running = 0
        self.successor: Deployed | None = None
        self.is_undeployed = False
        self.problem: str | None = None
        self.workers_lost = 0

    @property
    def is_retired(self) -> bool:
        """Whether no new calls go to it; then it is unloaded when `running` is 0."""
        return self.successor is not None or self.is_undeployed

    @property
    def info(self) -> AppInfo:
        """What callers may know of it."""
        return self.record.info


class Call:
    """One invocation that waits or runs here.

    Attributes:
        depth: how many calls are above it; 0: no function waits for it.
        outcome: resolved once, with what the caller gets.
        worker: the worker that runs it; None: it waits, or it has ended.
        number: of the question to that worker.
        slot: of the call in that worker's claims.
    """

    __slots__ = (
        "arguments", "deployed", "depth", "function", "invocation", "number", "outcome",
        "position", "slot", "timer", "worker",
    )  # fmt: skip

    def __init__(
        self,
        invocation: str,
        deployed: Deployed,
        function: FunctionSpec,
        arguments: bytes,
        *,
        position: MetalogPosition,
        depth: int,
    ) -> None:
        self.invocation = invocation
        self.deployed = deployed
        self.function = function
        self.arguments = arguments
        self.position = position
        self.depth = depth
        self.outcome: asyncio.Future[Returned | Failed] = asyncio.get_running_loop().create_future()
        self.worker: WorkerProcess | None = None
        self.number = 0
        self.slot = NO_SLOT
        self.timer: asyncio.TimerHandle | None = None

    @property
    def application(self) -> str:
        """The name of its application, whatever version it runs on."""
        return self.deployed.record.name

    @property
    def is_nested(self) -> bool:
        """Whether a running call made it."""
        return self.depth > 0

    @property
    def name(self) -> str:
        """`app.function`."""
        return f"{self.deployed.record.name}.{self.function.name}"
