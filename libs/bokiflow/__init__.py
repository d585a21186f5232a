"""BokiFlow: durable workflows and fenced locks on a shared log (thesis 2.3.3).

Start with `Flow` and `Lock`; `docs/libs/bokiflow.md` is the guide. The library awaits only the
public `indilog.Log` interface. Only the modules that use clocks, pauses and tasks need an event
loop.
"""

from bokiflow.flow import Flow, Startable
from bokiflow.handle import Handle
from bokiflow.locks.lock import HeldLock, Lock
from bokiflow.operations.attempts import Retry
from bokiflow.operations.progress import PublishedEvent
from bokiflow.queries import RunView
from bokiflow.replay_check import ReplayMismatch
from bokiflow.run_status import Status
from bokiflow.runs.errors import (
    Cancelled,
    ChangedWorkflowError,
    CompensationFailedError,
    FlowError,
    FlowSettingsError,
    FlowVersionError,
    LockLostError,
    LockQueueFullError,
    LockSettingsError,
    LockTimeoutError,
    NestedLockError,
    QueryFailedError,
    RunCancelledError,
    RunEndedError,
    RunFailedError,
    RunIdInUseError,
    RunNotMovedError,
    RunNotParkedError,
    StepFailedError,
    UnfinishedOperationError,
    UnknownRunError,
)
from bokiflow.runs.states import State
from bokiflow.schedules import Schedule, ScheduleStatus
from bokiflow.workflow import Workflow

__all__ = [
    "Cancelled",
    "ChangedWorkflowError",
    "CompensationFailedError",
    "Flow",
    "FlowError",
    "FlowSettingsError",
    "FlowVersionError",
    "Handle",
    "HeldLock",
    "Lock",
    "LockLostError",
    "LockQueueFullError",
    "LockSettingsError",
    "LockTimeoutError",
    "NestedLockError",
    "PublishedEvent",
    "QueryFailedError",
    "ReplayMismatch",
    "Retry",
    "RunCancelledError",
    "RunEndedError",
    "RunFailedError",
    "RunIdInUseError",
    "RunNotMovedError",
    "RunNotParkedError",
    "RunView",
    "Schedule",
    "ScheduleStatus",
    "Startable",
    "State",
    "Status",
    "StepFailedError",
    "UnfinishedOperationError",
    "UnknownRunError",
    "Workflow",
]
