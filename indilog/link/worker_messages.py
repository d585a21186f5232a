"""What a compute node and one of its workers say to each other about running deployed code
(`indilog.link.link_messages` has the rest).
"""

from __future__ import annotations

from indilog.base.deployed import FunctionSpec, ScheduleSpec, ServiceState
from indilog.base.ids import MetalogPosition
from indilog.link.link_message import LinkStruct


class Ready(LinkStruct, frozen=True):
    """worker → compute node: this process can run functions now.

    Lost: the worker is gone; the node starts another one.
    Repeated: never.
    """

    version: int


class ThreadsLeft(LinkStruct, frozen=True):
    """worker → compute node: so many threads run on although their calls are over.

    Lost: the worker is gone, and its threads with it.
    Repeated: never.
    """

    count: int


class Invoke(LinkStruct, frozen=True):
    """compute node → worker: run a function of a deployment loaded there; answered by `Returned`.

    `slot` is the call's place in the memory that says which calls are begun and which revoked
    (`compute/indilog_compute/workers/claims`); a revoked one is answered by a `Failed` of kind
    `RevokedError`.
    Lost: the worker died; the caller gets a `WorkerCrashedError` if the call was begun, else it
    runs elsewhere.
    Repeated: never.
    """

    deployment: int
    function: str
    arguments: bytes
    invocation: str
    position: MetalogPosition
    depth: int
    slot: int = 0


class Load(LinkStruct, frozen=True):
    """compute node → worker: import these sources as deployment number so-and-so; answered by
    `Loaded`.

    Lost: the worker died; the deployment fails, and the one before goes on.
    Repeated: never.
    """

    deployment: int
    name: str | None
    sources: dict[str, str]


class Unload(LinkStruct, frozen=True):
    """compute node → worker: forget a deployment; no call of it runs any more. Not answered.

    Lost: the worker died, and its memory with it.
    Repeated: never.
    """

    deployment: int


class CheckArguments(LinkStruct, frozen=True):
    """compute node → worker: do these arguments fit the function? Answered by `Done`, or a `Failed`
    that says which do not.

    Lost: the worker died; nothing was run, and another one is asked.
    Repeated: never.
    """

    deployment: int
    function: str
    arguments: bytes


class Ping(LinkStruct, frozen=True):
    """compute node → worker: does your event loop turn? Answered by `Done`, at once if it does.

    Lost: the worker died.
    Repeated: never.
    """


class Loaded(LinkStruct, frozen=True):
    """worker → compute node: the sources are imported; this is the application they define.

    Lost: the worker died; the deployment fails.
    Repeated: never.
    """

    name: str
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()


class RunServices(LinkStruct, frozen=True):
    """compute node → worker: run the services of these deployments, by number, and of no others.
    Not answered.

    Lost: the worker died, and its services with it.
    Repeated: harmless.
    """

    deployments: tuple[int, ...]


class ServicesTold(LinkStruct, frozen=True):
    """worker → compute node: so my services are now, all of them; said when one has changed.

    Lost: the worker is gone, and its services with it.
    Repeated: harmless.
    """

    services: tuple[ServiceState, ...]
