"""Processes that share only a log of objects."""

from __future__ import annotations

from bokistore import Store, ViewCache
from indilog.base.log import Log


class Clock:
    """Seconds, set by hand; each reading advances by a millisecond."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def newcomer(log: Log) -> Store:
    """Return the store of a process with empty caches."""
    return Store(log, cache=ViewCache())
