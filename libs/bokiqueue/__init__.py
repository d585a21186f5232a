"""BokiQueue: sharded queues with leases and acknowledgements on a shared log (thesis 2.3.3).

`Queue` is the way in; `docs/libs/bokiqueue.md` tells how it works. The library awaits nothing but
the public `indilog.Log` interface; `bokiqueue.waiting` alone needs an event loop.
"""

from bokiqueue.errors import (
    LeaseLostError,
    QueueError,
    QueueSettingsError,
    QueueTrimmedError,
    QueueVersionError,
)
from bokiqueue.queue import Delivery, Queue, ShardStats, Stats
from bokiqueue.replica import QueueReplica

__all__ = [
    "Delivery",
    "LeaseLostError",
    "Queue",
    "QueueError",
    "QueueReplica",
    "QueueSettingsError",
    "QueueTrimmedError",
    "QueueVersionError",
    "ShardStats",
    "Stats",
]
