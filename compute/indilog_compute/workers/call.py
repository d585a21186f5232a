"""The function host's state of a deployed application (`DeployedApp`) and of a call (`Call`).

`Applications` makes and changes `DeployedApp`; `CallRouter` changes `Call`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from indilog.base.deployed import AppInfo, FunctionSpec, ScheduleSpec, code_digest
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.link.link_messages import (
    Failed,
    Returned,
)
from indilog_compute.deployments import Deployment
from indilog_compute.workers.claims import NO_SLOT

if TYPE_CHECKING:
    from indilog_compute.workers.process import Worker


class DeployedApp:
    """A version of an application that runs on this compute node.

    Attributes:
        number: identifies this version to the workers of this host.
        record: the record of the deployment.
        seqnum: seqnum of the record in the log of deployments.
        since: for each schedule, its time in `PlacedDeployment.since`.
        functions: the functions and operations by name; only the names of operations have dots.
        running: number of calls of this version that wait or run.
        successor: the newer version that replaced this version; None: it was not replaced.
        is_undeployed: whether the application was undeployed while this version was the newest one
            or was kept.
        problem: why the version could not be loaded; None: no problem is known.
        workers_lost: number of workers that crashed during the import of this version, since its
            last successful import.
        code: digest of the sources.
        is_kept: whether the version stays loaded although it is retired, because open runs need its
            code.
    """

    __slots__ = (
        "code", "functions", "is_kept", "is_undeployed", "number", "problem", "record", "running",
        "seqnum", "since", "successor", "workers_lost",
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
        self.functions: dict[str, FunctionSpec] = {
            f.name: f for f in (*record.functions, *record.operations)
        }
        self.running = 0
        self.successor: DeployedApp | None = None
        self.is_undeployed = False
        self.problem: str | None = None
        self.workers_lost = 0
        self.code = code_digest(record.sources)
        self.is_kept = False

    @property
    def is_retired(self) -> bool:
        """Whether the version gets no new calls. A retired version is unloaded when `running` is 0,
        unless it is kept.
        """
        return self.successor is not None or self.is_undeployed

    @property
    def info(self) -> AppInfo:
        """The public description of the application."""
        return self.record.info


class Call:
    """One call that waits or runs on this compute node.

    Attributes:
        depth: number of calls above this call in the chain of calls; 0: a client made this call.
        outcome: resolved once, with the result or error for the caller.
        worker: the worker that runs the call; None: the call waits, or has ended.
        number: the number of the call on the worker's link.
        slot: the index of the call in the worker's claims.
    """

    __slots__ = (
        "arguments", "deployed", "depth", "function", "invocation", "number", "outcome",
        "position", "slot", "timer", "worker",
    )  # fmt: skip

    def __init__(
        self,
        invocation: str,
        deployed: DeployedApp,
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
        self.worker: Worker | None = None
        self.number = 0
        self.slot = NO_SLOT
        self.timer: asyncio.TimerHandle | None = None

    @property
    def application(self) -> str:
        """The name of the call's application."""
        return self.deployed.record.name

    @property
    def is_nested(self) -> bool:
        """Whether a running call made this call."""
        return self.depth > 0

    @property
    def name(self) -> str:
        """`app.function`."""
        return f"{self.deployed.record.name}.{self.function.name}"
