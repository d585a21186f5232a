"""BokiFlow: workflows whose steps are decided once, and fenced locks, on a shared log (thesis
2.3.3).

The library awaits nothing but the public `indilog.log.Log` interface.
"""

from bokiflow.errors import (
    FlowError,
    FlowVersionError,
    LockLostError,
    LockQueueFullError,
    LockSettingsError,
    LockTimeoutError,
)
from bokiflow.lock import Held, Lock

__all__ = [
    "FlowError",
    "FlowVersionError",
    "Held",
    "Lock",
    "LockLostError",
    "LockQueueFullError",
    "LockSettingsError",
    "LockTimeoutError",
]
