"""Shares the replicas of a process among its callers.

Libraries keep their replicas in a `ReplicaCache`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from indilog.base.log import Log

_ReplicaT = TypeVar("_ReplicaT")


def scope_of(log: Log) -> object:
    """Return the object that stands for the log's platform in this process (`Log.scope`).

    Raises:
        TypeError: `log` is no log.
    """
    if not isinstance(log, Log):
        raise TypeError(f'Give a log, such as client.log("orders"), not {type(log).__name__}.')
    return log.scope


class ReplicaCache(Generic[_ReplicaT]):
    """The replicas that all callers of a platform share in this process (`Log.scope`).

    Args:
        kept_max: largest number of replicas of one platform; the least recently used is dropped
            first. Callers that hold a dropped replica can still use it.
    """

    def __init__(self, kept_max: int) -> None:
        assert kept_max > 0, "at least the replica in use is kept"
        self._kept_max = kept_max
        self._kept: WeakKeyDictionary[object, OrderedDict[Hashable, _ReplicaT]] = (
            WeakKeyDictionary()
        )

    def get(self, log: Log, key: Hashable, make: Callable[[], _ReplicaT]) -> _ReplicaT:
        """Return the replica `key` of this log; `make` makes it if there is none.

        Args:
            log: a log; replicas of logs with other names, or of other platforms, are separate.
            key: identifies the replica within the log.
            make: makes a new replica.
        """
        kept = self._kept.setdefault(scope_of(log), OrderedDict())
        place = (log.name, key)
        replica = kept.get(place)
        if replica is None:
            replica = kept[place] = make()
            if len(kept) > self._kept_max:
                kept.popitem(last=False)
        kept.move_to_end(place)
        return replica
