"""Replicas of locks in a process: their states after the records read so far.

All callers of a lock in one process share a replica. Every few hundred records, a caller writes a
checkpoint and trims superseded commands (`indilog.replayed`). `lock` and `operations.run_lock` get
replicas here.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from bokiflow.locks.lock_records import FORMAT, decode_snapshot, lock_tags
from bokiflow.locks.lock_state import CommandOutcome, LockState
from indilog import Log
from indilog.replayed import Replica, ReplicaCache, SubStream

CHECKPOINT_EVERY: Final = 256
"""Smallest number of records of a lock between two checkpoints."""
_LOCKS_MAX: Final = 4096
"""Largest number of replicas in memory for one platform. The least recently used replicas are
evicted first.
"""

LockReplica: TypeAlias = Replica[LockState, CommandOutcome]
_REPLICAS: Final = ReplicaCache[LockReplica](_LOCKS_MAX)


def new_replica(name: str) -> LockReplica:
    """Return the replica of a lock before its first record.

    Raises:
        LockSettingsError: the name is invalid.
    """
    tags = lock_tags(name)
    stream = SubStream(tags.commands, tags.checkpoints, FORMAT, f"Lock {name!r}")
    return Replica(
        stream,
        LockState,
        lambda content: LockState(decode_snapshot(content)),
        checkpoint_every=CHECKPOINT_EVERY,
    )


def replica_of(log: Log, name: str) -> LockReplica:
    """Return the replica that all callers of this lock share in this process (`Log.scope`)."""
    return _REPLICAS.get(log, name, lambda: new_replica(name))
