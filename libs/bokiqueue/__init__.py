"""BokiQueue: sharded queues with leases and acknowledgements on a shared log (thesis 2.3.3).

Start with `Queue`; `docs/libs/bokiqueue.md` is the guide. The library awaits only the public
`indilog.Log` interface. Only `bokiqueue.waiting` needs an event loop.
"""

from bokiqueue.delivery import Delivery
from bokiqueue.errors import (
    LeaseLostError,
    QueueError,
    QueueSettingsError,
    QueueTrimmedError,
    QueueVersionError,
)
from bokiqueue.queue import PeekedMessage, Queue, ShardStats, Stats
from bokiqueue.replica import QueueReplica

__all__ = [
    "Delivery",
    "LeaseLostError",
    "PeekedMessage",
    "Queue",
    "QueueError",
    "QueueReplica",
    "QueueSettingsError",
    "QueueTrimmedError",
    "QueueVersionError",
    "ShardStats",
    "Stats",
]
