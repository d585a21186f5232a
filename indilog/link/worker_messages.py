"""Link messages between a compute node and one of its workers about running deployed code.

Modules of `indilog_compute.workers` send and receive them. `indilog.link.link_messages` has all
other messages.
"""

from __future__ import annotations

from indilog.base.deployed import (
    FunctionSpec,
    LoadedVersion,
    MissingVersion,
    ScheduleSpec,
    ServiceState,
)
from indilog.base.ids import MetalogPosition
from indilog.link.link_message import LinkStruct


class Ready(LinkStruct, frozen=True):
    """worker → compute node: this process can run functions now.

    Lost: the worker has crashed; the node starts another one.
    Repeated: never.
    """

    version: int


class ThreadsLeft(LinkStruct, frozen=True):
    """worker → compute node: number of threads that still run although their calls have ended.

    Lost: the worker has crashed, and its threads have ended.
    Repeated: never.
    """

    count: int


class MemoryUsedUp(LinkStruct, frozen=True):
    """worker → compute node: code of the worker failed for lack of memory, and most of the memory
    that the worker may have, and that imports have left, stays in use. The node replaces it.

    Lost: the worker has crashed.
    Repeated: harmless.
    """


class Invoke(LinkStruct, frozen=True):
    """compute node → worker: run a function or operation of a loaded deployment; answered by
    `Returned`.

    `slot` is the call's index in the shared memory that shows which calls have begun and which are
    revoked (`compute/indilog_compute/workers/claims`). A revoked call is answered by a `Failed` of
    kind `RevokedError`.
    Lost: the worker crashed. If the call had begun, the caller gets a `WorkerCrashedError`;
    otherwise another worker runs the call.
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
    """compute node → worker: import these sources under this deployment number; answered by
    `Loaded`.

    Lost: the worker crashed; the deployment fails, and the previous deployment continues.
    Repeated: never.
    """

    deployment: int
    name: str | None
    sources: dict[str, str]


class Unload(LinkStruct, frozen=True):
    """compute node → worker: unload a deployment, because no call of it runs. Not answered.

    Lost: the worker crashed, and its memory is freed.
    Repeated: never.
    """

    deployment: int


class CheckArguments(LinkStruct, frozen=True):
    """compute node → worker: check whether these arguments fit the function. Answered by `Done`, or
    by a `Failed` that names the invalid arguments.

    Lost: the worker crashed; nothing was run, and another worker is asked.
    Repeated: never.
    """

    deployment: int
    function: str
    arguments: bytes


class Ping(LinkStruct, frozen=True):
    """compute node → worker: check whether the worker's event loop is blocked. A loop that is not
    blocked answers with `Done` at once.

    Lost: the worker crashed.
    Repeated: never.
    """


class Loaded(LinkStruct, frozen=True):
    """worker → compute node: the sources are imported; the fields describe their application.

    Lost: the worker crashed; the deployment fails.
    Repeated: never.
    """

    name: str
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()
    operations: tuple[FunctionSpec, ...] = ()


class RunServices(LinkStruct, frozen=True):
    """compute node → worker: run the services of these deployments, by number, and no others. Not
    answered.

    `versions`: the deployments that this worker has loaded and should keep. These are the running
    deployments, and earlier deployments whose code open runs need. `missing`: the earlier
    deployments that open runs need and that this worker has not loaded.

    Lost: the worker crashed, and its services have ended.
    Repeated: harmless.
    """

    deployments: tuple[int, ...]
    versions: tuple[LoadedVersion, ...] = ()
    missing: tuple[MissingVersion, ...] = ()


class ServicesChanged(LinkStruct, frozen=True):
    """worker → compute node: the state of all services of this worker; sent when a state changes.

    Lost: the worker crashed, and its services have ended.
    Repeated: harmless.
    """

    services: tuple[ServiceState, ...]
