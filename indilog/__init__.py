"""IndiLog: stateful serverless functions on a shared log. The public interface.

A program starts an embedded platform in its own process (`open`) or connects to a running one
(`connect`, and `reach` finds its address and token). Both return a `Client`. A function of an `App`
gets a `Context`.

`indilog.scalog` offers the calls of the Scalog paper. `indilog.testing` offers an in-memory log for
tests. `indilog.sdk` offers names for authors of libraries. All other packages are internal.
"""

from typing import TYPE_CHECKING

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    AppNameTakenError,
    CallOutcomeUnknownError,
    ClientClosedError,
    ConditionFailedError,
    ConfigError,
    ConflictError,
    DataDirectoryError,
    DataLossError,
    DeployError,
    DiskFullError,
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    InvalidTagError,
    InvocationCancelledError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    OverloadedError,
    QuorumUnavailableError,
    SealedError,
    TooLargeError,
    TrimmedError,
    UnauthorizedError,
    UnknownFunctionError,
    WorkerCrashedError,
    WrongStateError,
)
from indilog.base.lazy_names import lazy_names
from indilog.base.release import __version__ as __version__

if TYPE_CHECKING:
    from indilog.apps.app import App, Context
    from indilog.base.ids import MAX_SEQNUM
    from indilog.base.log import After, Entry, Log, Record
    from indilog.base.log_kinds import LogInfo
    from indilog.client import Client, open  # noqa: A004 callers write `indilog.open`
    from indilog.link.access import Endpoint, reach
    from indilog.remote_client import connect


__all__ = [
    "MAX_SEQNUM",
    "After",
    "App",
    "AppNameTakenError",
    "AppendOutcomeUnknownError",
    "CallOutcomeUnknownError",
    "Client",
    "ClientClosedError",
    "ConditionFailedError",
    "ConfigError",
    "ConflictError",
    "Context",
    "DataDirectoryError",
    "DataLossError",
    "DeployError",
    "DiskFullError",
    "Endpoint",
    "Entry",
    "FunctionFailedError",
    "IndilogError",
    "InvalidArgumentsError",
    "InvalidTagError",
    "InvocationCancelledError",
    "Log",
    "LogInfo",
    "NotFoundError",
    "NotReadyError",
    "OutcomeUnknownError",
    "OverloadedError",
    "QuorumUnavailableError",
    "Record",
    "SealedError",
    "TooLargeError",
    "TrimmedError",
    "UnauthorizedError",
    "UnknownFunctionError",
    "WorkerCrashedError",
    "WrongStateError",
    "connect",
    "open",
    "reach",
]

__getattr__ = lazy_names(
    __name__,
    {
        "indilog.apps.app": ["App", "Context"],
        "indilog.base.ids": ["MAX_SEQNUM"],
        "indilog.base.log": ["After", "Entry", "Log", "Record"],
        "indilog.base.log_kinds": ["LogInfo"],
        "indilog.client": ["Client", "open"],
        "indilog.link.access": ["Endpoint", "reach"],
        "indilog.remote_client": ["connect"],
    },
)
